"""The state of one of vLLM's drafters between start-up and propose: captured, captured again, or left to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from specgraph_models.parallel import Ranks

from specgraph_plugin.counts import ProposeCounts
from specgraph_plugin.fast_path import FastPath
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import VllmHead
from specgraph_plugin.vllm.refusals import LOG, refusals


class CapturedDrafter:
    """The graphs over one of vLLM's drafters, or else the reason why vLLM's own code drafts.

    A step that is not supported ends the start-up or leaves drafting to vLLM (`Settings.when_unsupported`).
    """

    def __init__(
        self,
        settings: Settings,
        read_head: Callable[[], VllmHead],
        capture: Callable[[VllmHead], FastPath],
        ranks: Ranks | None = None,
    ) -> None:
        """Nothing is read or captured yet.

        Args:
            read_head: reads the head from vLLM's loaded module.
            capture: captures the graphs of a head over vLLM's KV cache.
            ranks: the ranks that split the model. None for one rank.
        """
        self.settings, self.ranks = settings, ranks
        self.fast_path: FastPath | None = None
        """None before the capture, or if something is not supported and vLLM drafts."""
        self.head: VllmHead | None = None
        """None before `load`, or if something is not supported and vLLM drafts."""
        self.counts = ProposeCounts(LOG, settings.log_every)
        self._read_head, self._capture, self._left_to_vllm = read_head, capture, "no captured graphs"

    def refusals(self) -> AbstractContextManager[None]:
        """Return the context of a step of the start-up. A SpecgraphError in it is answered as the settings say."""
        return refusals(self.settings, self.ranks, self._leave_to_vllm)

    def _leave_to_vllm(self) -> None:
        self.head, self._left_to_vllm = None, "not supported"

    def load(self) -> None:
        """Read the head. Call it when vLLM has loaded its module."""
        with self.refusals():
            self.head = self._read_head()

    def drop_graphs(self) -> None:
        """Close the graphs, if there are any."""
        if self.fast_path is not None:
            self.fast_path.drafter.close()  # a dropped drafter keeps its graphs until a garbage collection
            self.fast_path = None

    def capture(self) -> None:
        """Capture the graphs, unless vLLM drafts. Call it when vLLM has captured its own."""
        self.drop_graphs()
        if self.head is None:
            return
        with self.refusals():
            # Sleep mode frees memory that was allocated while vLLM loaded weights. Tensors that the head copies must
            # outlive it, so the head is made again here.
            self.head = self._read_head()
            self.fast_path = fast = self._capture(self.head)
            graphs = len(fast.config.sizes) + len(fast.prompts.sizes)
            LOG.info("specgraph drafts for up to %d requests (%d graphs)", fast.config.sizes[-1], graphs)

    def follow_weights(self) -> None:
        """Capture again over the new weights if vLLM has replaced their tensors."""
        if self.fast_path is not None and self.fast_path.weights_moved():
            LOG.warning("the drafter's weights lie elsewhere now: specgraph captures its graphs again")
            self.capture()

    def reason(self, use_vllm: bool, of_pass: Callable[[FastPath], str | None]) -> str | None:
        """Return why vLLM's own code drafts after this pass, and count it. None if specgraph drafts.

        Args:
            use_vllm: True leaves the propose to vLLM.
            of_pass: returns the reason that lies in this pass, for the captured graphs.
        """
        if (fast := self.fast_path) is None:
            reason = self._left_to_vllm
        else:
            reason = "switched off" if use_vllm else of_pass(fast)
        self.counts.add(reason)
        return reason
