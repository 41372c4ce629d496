"""Objects shaped as those of vllm-ascend 0.23 that the plugin reads: its proposer and its V1 model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm_objects import StockSpeculator, batch_class, vllm_config


def config(**changes: Any) -> Any:
    """Return a `VllmConfig` that is served; `changes` are dotted names with `__` for the dot."""
    given = {"parallel_config__tensor_parallel_size": 1, "speculative_config__enforce_eager": False}
    return vllm_config(**given | changes)


class StockProposer:
    """As `AscendEagleProposer`: it drafts zeros."""

    uses_mrope = False

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        self.vllm_config, self.device, self.runner, self.model = vllm_config, device, runner, None
        self.num_speculative_tokens, self.kv_cache_gid, self.max_model_len = 3, 0, 96

    def load_model(self, model: Any) -> None:
        self.model = model

    def get_model(self) -> Any:
        return self.model

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_indices: Any,
        num_discarded_requests: int,
    ) -> Any:  # fmt: skip
        valid = sampled_token_ids != -1
        return sampled_token_ids.amax(1), valid.sum(1)

    def _propose(
        self, target_token_ids: Any, target_positions: Any, target_hidden_states: Any, next_token_ids: Any,
        token_indices_to_sample: Any, common_attn_metadata: Any, target_model_batch_desc: Any = None,
        sampling_metadata: Any = None, mm_embed_inputs: Any = None, scheduler_output: Any = None,
        num_rejected_tokens_gpu: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return torch.zeros(len(next_token_ids), self.num_speculative_tokens, dtype=torch.int64)


def runner(**changes: Any) -> Any:
    """Return a runner after a pass over two requests: one that decodes, and one whose prompt goes on."""
    ids = np.zeros((2, 96), dtype=np.int64)
    ids[1] = np.arange(96)
    given = {
        "capture_model": lambda: 7, "max_num_reqs": 4, "max_num_tokens": 64,
        "input_batch": SimpleNamespace(
            req_ids=["a", "b"], num_reqs=2, num_tokens_no_spec=np.array([22, 60]), token_ids_cpu=ids, block_table=[]
        ),
        "optimistic_seq_lens_cpu": torch.tensor([23, 30, 99]), "num_discarded_requests": 1,
        "discard_request_indices": SimpleNamespace(np=np.array([1, 0])), "use_async_scheduling": False,
        "valid_sampled_token_count_event": None, "valid_sampled_token_count_cpu": torch.tensor([2, 0]),
    }  # fmt: skip
    return SimpleNamespace(**given | changes)


def scheduled() -> Any:
    """Return the scheduler's output of that pass: 4 rows of a round, and 16 of a prompt."""
    return SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 16}, scheduled_spec_decode_tokens={"a": [5, 6, 7]})


def v2_runner_module() -> Any:
    """Return a module as that of the V2 model runner, whose runner makes its speculator by a name of the module."""

    class NPUModelRunner:
        def __init__(self, vllm_config: Any, device: torch.device) -> None:
            self.speculator = module.init_speculator(vllm_config, device)

    def init_speculator(vllm_config: Any, device: torch.device) -> Any:
        return StockSpeculator(vllm_config, device)

    module = SimpleNamespace(
        NPUModelRunner=NPUModelRunner, init_speculator=init_speculator, AscendInputBatch=batch_class()
    )
    return module
