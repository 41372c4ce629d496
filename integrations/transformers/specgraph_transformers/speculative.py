"""The object for `generate(custom_generate=...)`: it loads a drafter and captures its graphs in the first call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from specgraph_models import load_drafter
from specgraph_models.checkpoints import target_shape
from specgraph_run.decoder import AcceptanceMetrics
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specgraph import DraftConfig, Drafter, Platform, allocate_caches, open_platform
from specgraph.attention import choose_attention
from specgraph.config import DraftCount
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.validation import Count, ModelLen, Requests, checked, suggestion
from specgraph_transformers.acceptance import Acceptance
from specgraph_transformers.output import Output
from specgraph_transformers.rounds import Rounds
from specgraph_transformers.supported import check_supported, prompt_lengths
from specgraph_transformers.target import TransformersTarget


@checked
def speculative(
    draft: Path | str,
    num_speculative_tokens: DraftCount = 5,
    *,
    platform: Platform | str | None = None,
    max_num_requests: Requests = 1,
    max_model_len: ModelLen | None = None,
    num_modules: Count | None = None,
    **config: Any,
) -> Speculative:
    """Return an object for speculative decoding: `model.generate(..., custom_generate=speculative(draft="DIR"))`.

    The target is the model itself. The first call loads the drafter and captures its graphs. A later call captures
    again only for another model, a larger batch, a longer text or the first sampled one. So keep the object, and pass
    it to every call.

    Args:
        draft: a drafter's folder: EAGLE-3, EAGLE, MTP (the target's own folder), DFlash or a small language model.
        num_speculative_tokens: draft tokens per propose, K.
        platform: the platform that the drafter runs on; by default the platform of the model's device.
        max_num_requests: the prompts per call that the first graphs are captured for.
        max_model_len: the tokens of the longest text, prompt and output, that the first graphs are captured for. By
            default it follows from the first call.
        num_modules: the number of MTP modules to use; all by default.
        config: further fields of `specgraph.DraftConfig`, such as capture_sizes, prefill_sizes, decode, prefill.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    return Speculative(draft, num_speculative_tokens, platform, max_num_requests, max_model_len, num_modules, config)


@dataclass(slots=True)
class _Captured:
    """A captured drafter, and the model that it was made for."""

    model: Any
    weights: int
    """The address of the model's embedding. It changes if the model is moved or loaded again."""
    drafter: Drafter

    def serves(self, model: Any, requests: int, length: int, sampled: bool) -> bool:
        """Return True if the captured graphs suffice for a call."""
        config = self.drafter.config
        limits = requests <= config.max_num_requests and length <= config.max_model_len
        return self.model is model and self.weights == _weights(model) and limits and config.sampled >= sampled


class Speculative:
    """A captured drafter and its acceptance counts. `speculative` returns it, and `generate` calls it.

    It is not thread-safe: use it for one `generate` at a time.
    """

    def __init__(
        self,
        draft: Path | str,
        num_speculative_tokens: int,
        platform: Platform | str | None,
        max_num_requests: int,
        max_model_len: int | None,
        num_modules: int | None,
        config: dict[str, Any],
    ) -> None:
        """See `speculative`."""
        self.draft, self.num_modules = Path(draft), num_modules
        self._platform, self._config = platform, {**config, "num_speculative_tokens": num_speculative_tokens}
        self._requests, self._length, self._sampled = max_num_requests, max_model_len or 2, False
        self._captured: _Captured | None = None
        self.metrics = AcceptanceMetrics(num_speculative_tokens)
        """The acceptance counts of all calls so far."""
        own = {"max_num_requests", "max_model_len", "num_speculative_tokens", "sampled", "tree", "draft_schedule"} | {
            "k_candidates"
        }
        options = {field.name for field in fields(DraftConfig)} - own
        if unknown := sorted(config.keys() - options):
            others = suggestion(unknown, {*options, "num_modules"}) or f"options: {', '.join(sorted(options))}"
            raise ConfigError(f"unknown option {unknown[0]}; {others}")
        if max_model_len is not None:
            self._draft_config()  # raises if a field is out of range

    @property
    def drafter(self) -> Drafter | None:
        """The captured drafter. None before the first call and after `close`."""
        return self._captured.drafter if self._captured else None

    def close(self) -> None:
        """Release the graphs and their memory. A later call captures them again."""
        if self._captured is not None:
            self._captured.drafter.close()
            self._captured = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **model_inputs: Any,
    ) -> Any:
        """Generate, with the arguments that `generate` has prepared, and return the result of `generate`.

        Raises:
            UnsupportedError, ConfigError: the output could not be the same as without drafts, or the drafter takes a
                state of the target that transformers does not return. Raised before any pass.
            CheckpointError: the drafter's folder cannot be read, or does not fit the model.
        """
        given = _arguments_of_generate()
        streamer = streamer or given.get("streamer")
        mask, positions = model_inputs.get("attention_mask"), model_inputs.get("position_ids")
        check_supported(model, input_ids, logits_processor, generation_config, model_inputs, given)
        lengths = prompt_lengths(input_ids, mask, positions)
        limit = stopping_criteria.max_length
        if limit is None:
            raise ConfigError("no maximum length: give generate max_new_tokens or max_length")
        cache, sampled = model_inputs["cache"], bool(generation_config.do_sample)
        longest = max(lengths) + limit - input_ids.shape[1]
        # A config has room for K tokens at least.
        room = max(longest, self._config["num_speculative_tokens"] + 1)
        drafter = self._drafter_for(model, len(lengths), room, sampled)
        positions_of_model = target_shape(model).max_model_len
        positions_used = max(longest, min(positions_of_model, drafter.config.max_model_len))
        rounds = Rounds(
            TransformersTarget(model, cache, lengths, positions_used, drafter.head.aux_layers),
            drafter,
            Acceptance(logits_processor, sampled, len(lengths)),
            Output(input_ids, stopping_criteria, generation_config._pad_token_tensor, limit, streamer),
            self.metrics,
        )
        rounds.run(mask, positions)
        rounds.output.end()
        sequences: Any = rounds.output.sequences
        if not generation_config.return_dict_in_generate:
            return sequences
        held = (
            cache if len(lengths) == 1 else None
        )  # requests of several lengths have no cache that `generate` can take
        return GenerateDecoderOnlyOutput(sequences=sequences, cache=held)

    def _drafter_for(self, model: Any, requests: int, length: int, sampled: bool) -> Drafter:
        """Return the captured drafter. If it does not suffice for this call, make and capture another one."""
        if self._captured is None or not self._captured.serves(model, requests, length, sampled):
            self.close()
            self._requests, self._sampled = max(self._requests, requests), self._sampled or sampled
            if length > self._length:  # room for longer texts, up to the model's positions
                most = target_shape(model).max_model_len
                self._length = max(length, min(1 << (length - 1).bit_length(), most))
            with torch.inference_mode(False), torch.no_grad():  # buffers outlive the caller's inference mode
                self._captured = _Captured(model, _weights(model), self._capture(model))
        return self._captured.drafter

    def _capture(self, model: Any) -> Drafter:
        shape = target_shape(model, max_model_len=self._length)
        head = load_drafter(self.draft, shape, num_modules=self.num_modules)
        if shape.num_layers in head.aux_layers:
            raise UnsupportedError(
                f"{self.draft} takes the last layer's output before the final norm (layer {shape.num_layers} of "
                f"{list(head.aux_layers)}), and transformers' hidden states have it behind that norm only"
            )
        platform = self._open(shape.embed_tokens.device)
        attention = choose_attention(
            "auto", platform, head.attention_layers, head.dtype, self._config.get("block_size")
        )
        config = self._draft_config(attention.block_size)
        blocks = 1 + config.max_num_requests * config.max_blocks
        caches = allocate_caches(head.attention_layers, blocks, config.block_size, head.dtype, platform.device)
        drafter = Drafter(head, caches, platform, config, attention=attention.backend)
        drafter.capture()
        return drafter

    def _draft_config(self, block_size: int = 16) -> DraftConfig:
        config: dict[str, Any] = {"block_size": block_size, **self._config}
        requests, length = self._requests, self._length
        return DraftConfig(max_num_requests=requests, max_model_len=length, sampled=self._sampled, **config)

    def _open(self, device: torch.device) -> Platform:
        """Return the platform that the caller named, or the platform of the model's device."""
        asked = self._platform or f"{device.type}:{device.index or 0}"
        platform = asked if isinstance(asked, Platform) else open_platform(asked)
        if platform.device.type != device.type or (platform.device.index or 0) != (device.index or 0):
            raise ConfigError(f"platform {platform.device}: the model's embedding is on {device}, draft there too")
        return platform


def _weights(model: Any) -> int:
    return model.get_input_embeddings().weight.data_ptr()


def _arguments_of_generate() -> Mapping[str, Any]:
    """Return the arguments of the calling `generate`, from its frame. Empty if another function called.

    transformers 5.23 passes a callable only its own keyword arguments. It drops `streamer` (which already has the
    prompt), `assistant_model` and `synced_gpus`.
    """
    here = inspect.currentframe()
    caller = here.f_back.f_back if here is not None and here.f_back is not None else None  # past `__call__`
    return caller.f_locals if caller is not None and caller.f_code.co_name == "generate" else {}
