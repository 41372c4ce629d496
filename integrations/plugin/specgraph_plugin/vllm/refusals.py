"""The answer to what a plugin of vLLM does not serve: the start-up ends, or vLLM's own code drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from specgraph_models.parallel import Ranks
from specgraph_models.start_up import agreed

from specgraph.errors import RankError, SpecgraphError
from specgraph_plugin.vllm.config import Settings

LOG = logging.getLogger("vllm.specgraph")
"""The log of plugins of vLLM. It is below vLLM's own logger, so that its handlers show it."""


@contextmanager
def refusals(
    settings: Settings, ranks: Ranks | None = None, leave: Callable[[], None] | None = None
) -> Generator[None]:
    """If the block raises a SpecgraphError, end the start-up or leave drafting to vLLM (`when_unsupported`).

    Args:
        ranks: all ranks finish the block, or none.
        leave: called if vLLM drafts. The log has the reason.

    Raises:
        RankError: only some of the ranks raise an error.
    """
    try:
        with agreed(ranks):
            yield
    except RankError:
        raise
    except SpecgraphError as error:
        if settings.when_unsupported == "refuse":
            raise
        if leave is not None:
            leave()
        LOG.warning("vLLM drafts by itself: %s", error)
