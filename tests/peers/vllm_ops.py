"""vLLM's tests of acceptance and of the kernel between two draft steps, run against our ops: a pytest plugin.

It puts modules with vLLM's names in the place of vLLM. PEERS_PLATFORM names the platform: cpu (the default) or cuda.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peers import left_out
from peers.cuda_on_cpu import CudaOnCpu
from specgraph_run.decoder import ops as decoder_ops
from specgraph_run.decoder.ops.sampling_parameters import EXCLUDED
from torch import Tensor

from specgraph import ops
from specgraph.device import open_platform

platform = open_platform(os.environ.get("PEERS_PLATFORM", "cpu"))  # opening it registers its kernels
PLACEHOLDER = -1


def step(
    positions_1d: Tensor,
    block_table_tensor: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    input_batch_size: int | None = None,
) -> None:
    """Do vLLM's step by `advance`, which takes positions from lengths, with one row per request."""
    padding = (input_batch_size or len(positions_1d)) - len(positions_1d)
    lengths = torch.nn.functional.pad(positions_1d.int() + 1, (0, padding))
    table = torch.nn.functional.pad(block_table_tensor, (0, 0, 0, padding))
    positions = torch.zeros_like(lengths, dtype=torch.int64)
    draft_step = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    ops.advance(lengths, positions, out_slot_mapping, draft_step, table, max_model_len, block_size)
    seq_lens.add_(lengths[: len(seq_lens)] - positions_1d.int() - 1)
    out_clamped_positions.copy_(positions[: len(positions_1d)])


def verify(logits: Tensor, drafts: Tensor, start: Tensor, acceptance: decoder_ops.Acceptance) -> decoder_ops.Sampled:
    """`verify_drafts` of logits [R * (K + 1), vocab] and drafts [R, K]."""
    token_ids = drafts.new_empty(drafts.shape[0], drafts.shape[1] + 1)
    sampled = decoder_ops.Sampled(token_ids, token_ids.new_empty(len(drafts), dtype=torch.int32))
    decoder_ops.verify_drafts(logits, drafts, start, acceptance, sampled)
    return sampled


class RejectionSampler:
    """vLLM's sampler by `adjust_logits` and `verify_drafts`. A request with fewer drafts than others has -1 for the
    rest; the row after its last draft has all probability on the bonus token that the test gives."""

    def __init__(self, sampler: Any, spec_config: Any = None, device: Any = None) -> None:
        self.sampler, self.spec_config = sampler, spec_config

    def __call__(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        bonus, given = self.sampler().sampled_token_ids.flatten(), sampling_metadata
        requests, steps, vocab = len(metadata.drafts), max(map(len, metadata.drafts)), logits.shape[-1]
        drafts = bonus.new_full((requests, steps), PLACEHOLDER)
        rows = logits.new_full((requests, steps + 1, vocab), EXCLUDED)
        probs = logits.new_zeros(requests, steps, vocab)
        start = 0
        for request, ids in enumerate(metadata.drafts):
            end = start + len(ids)
            drafts[request, : len(ids)] = drafts.new_tensor(ids)
            rows[request, : len(ids)] = logits[start:end]
            if draft_probs is not None:
                probs[request, : len(ids)] = draft_probs[start:end]
            start = end
        temperature = logits.new_zeros(requests) if given.temperature is None else given.temperature
        adjusted = decoder_ops.adjust_logits(
            rows.flatten(0, 1), temperature, self._parameters(given, requests, rows), drafts
        )
        for request, ids in enumerate(metadata.drafts):
            adjusted.view_as(rows)[request, len(ids)] = EXCLUDED
            adjusted.view_as(rows)[request, len(ids), bonus[request]] = 0
        seeds = torch.randint(2**60, (requests,), device=rows.device)
        for request, generator in given.generators.items():
            seeds[request] = generator.initial_seed()
        if self.spec_config is not None:
            rates = self.spec_config.synthetic_acceptance_rates
            acceptance = decoder_ops.Acceptance(seeds=seeds, chances=logits.new_tensor(rates))
        else:
            acceptance = decoder_ops.Acceptance(given.temperature, seeds, None if draft_probs is None else probs)
        sampled = verify(adjusted, drafts, torch.zeros_like(bonus), acceptance)
        return SimpleNamespace(sampled_token_ids=sampled.token_ids.int())

    def _parameters(self, given: Any, requests: int, rows: Tensor) -> decoder_ops.SamplingParameters:
        vocab = rows.shape[-1]
        bias = rows.new_zeros(requests, vocab)
        if given.allowed_token_ids_mask is not None:
            bias.masked_fill_(given.allowed_token_ids_mask, EXCLUDED)
        for request, words in given.bad_words_token_ids.items():
            bias[request, [token for (token,) in words]] = EXCLUDED
        counts = rows.new_zeros(requests, vocab, dtype=torch.int32)
        for request, ids in enumerate(given.output_token_ids):
            counts[request, ids] = 1
        off = rows.new_zeros(requests)
        return decoder_ops.SamplingParameters(
            top_k=off.long() if given.top_k is None else given.top_k,
            top_p=off + 1 if given.top_p is None else given.top_p,
            min_p=off,
            repetition_penalty=off + 1 if given.no_penalties else given.repetition_penalties.float(),
            presence_penalty=off if given.no_penalties else given.presence_penalties.float(),
            frequency_penalty=off if given.no_penalties else given.frequency_penalties.float(),
            bias=bias,
            output_counts=counts,
            in_prompt=torch.zeros_like(counts, dtype=torch.bool),
        )


def not_allowed(batch_size: int, vocab_size: int, num_allowed_token_ids: int, device: Any) -> Tensor:
    """Return what vLLM's test helper of this name does: request i, if even, may not choose tokens from the i-th on."""
    column, first = torch.arange(vocab_size, device=device), torch.arange(batch_size, device=device)[:, None]
    return (first % 2 == 0) & (column >= first) & (column < first + num_allowed_token_ids)


def gumbel_sample(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *,
    output_processed_logits: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    """Draw a draft token per request as a drafter does."""
    output_processed_logits.copy_(logits)
    drafts = ops.Drafts(positions.new_empty(len(logits), 1))
    draws = ops.Draws(temperature, seeds, positions, None, logits.new_empty(len(logits), 1, logits.shape[-1]))
    ops.draft_from_logits(logits, drafts, draws)
    return drafts.draft_token_ids[:, 0]


def rejection_sample(
    target_logits: Tensor, draft_logits: Tensor, draft_sampled: Tensor, cu_num_logits: Tensor, positions: Tensor,
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor, seeds: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Verify one draft per request. vLLM numbers rows by the token that they decide, we by the one before it."""
    drafts, start = draft_sampled.view(-1, steps + 1)[:, 1:].contiguous(), positions[:: steps + 1] - 1
    acceptance = decoder_ops.Acceptance(temperature, seeds, draft_logits.softmax(dim=-1))
    return tuple(verify(target_logits, drafts, start, acceptance))


def pytest_configure() -> None:
    """Put the modules that the tests import in the place of vLLM's."""
    kind = SimpleNamespace(
        device_type=platform.device.type, is_cuda_alike=lambda: True, is_cuda=lambda: True, is_xpu=lambda: False
    )
    names: dict[str, dict[str, object]] = {
        "vllm.platforms": {"current_platform": kind},
        "vllm.v1.spec_decode.utils": {
            "PADDING_SLOT_ID": PLACEHOLDER,
            "eagle_step_update_slot_mapping_and_metadata": step,
        },
        "vllm.v1.spec_decode.metadata": {
            "SpecDecodeMetadata": SimpleNamespace(make_dummy=lambda drafts, device: SimpleNamespace(drafts=drafts))
        },
        "vllm.v1.sample.logits_processor": {"LogitsProcessors": lambda: None},
        "vllm.v1.sample.metadata": {"SamplingMetadata": SimpleNamespace},
        "vllm.v1.sample.sampler": {"Sampler": type(lambda: None), "SamplerOutput": SimpleNamespace},
        "vllm.v1.sample.rejection_sampler": {
            "PLACEHOLDER_TOKEN_ID": PLACEHOLDER,
            "RejectionSampler": RejectionSampler,
            "sample_recovered_tokens": None,
        },
        "vllm.v1.worker.gpu.sample.gumbel": {"gumbel_sample": gumbel_sample},
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": {"rejection_sample": rejection_sample},
        "vllm.v1.worker.gpu.spec_decode.speculator": {"draft_gumbel_pos": lambda positions: positions},
        "tests.v1.sample.utils": {"create_allowed_token_ids": not_allowed},
    }
    if platform.device.type == "cpu":
        names["triton"] = {"__version__": "0"}
        CudaOnCpu().__enter__()
    for name, contents in names.items():
        for end in [i for i, letter in enumerate(name) if letter == "." and name.startswith("vllm")]:
            sys.modules.setdefault(name[:end], ModuleType(name[:end]))
        vars(sys.modules.setdefault(name, ModuleType(name))).update(contents)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests out. On cpu the test of the distribution has fewer of the tokens that are next to never drawn."""
    left_out.pytest_collection_modifyitems(items)
    for item in items:
        module: Any = getattr(item, "module", None)
        if platform.device.type == "cpu" and hasattr(module, "VOCAB_SIZE"):
            module.VOCAB_SIZE = 1024
