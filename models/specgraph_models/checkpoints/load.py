"""Loads a checkpoint folder: a target of a known architecture, or a drafter of a known format."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from specgraph.errors import ConfigError
from specgraph.validation import MOST_POSITIONS, Count, Tokens, checked
from specgraph_models.checkpoints.config_source import ConfigSource, check_keys, read_config
from specgraph_models.checkpoints.draft_vocab import read_draft_vocab
from specgraph_models.checkpoints.drafter import IGNORED, DraftedTarget, DrafterFolder
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, LoadedHead
from specgraph_models.checkpoints.llama import load_llama
from specgraph_models.checkpoints.model_config import context_length, model_config
from specgraph_models.checkpoints.mtp import mtp_tensors
from specgraph_models.checkpoints.quantised import announce, quantisation
from specgraph_models.checkpoints.readers import READERS, detect_format
from specgraph_models.checkpoints.stored import stored_tensors
from specgraph_models.checkpoints.target_shape import target_shape
from specgraph_models.checkpoints.text_model import check_wrapper, leave_other_modalities, text_source
from specgraph_models.draft_vocab import DraftVocabulary, cut_vocabulary
from specgraph_models.llama import LlamaTarget
from specgraph_models.names import DType, device_named, dtype_named
from specgraph_models.parallel import WHOLE, TensorParallel

_LOG = logging.getLogger("specgraph")


@checked
def load_target(
    folder: Path | str,
    device: torch.device | str = "cpu",
    dtype: DType = None,
    max_model_len: Tokens | None = None,
    tensor_parallel: TensorParallel = WHOLE,
    keep_fp8: bool = False,
) -> LlamaTarget:
    """Read a target from a Hugging Face folder or a GGUF file.

    Args:
        folder: a folder with config.json and safetensors, single or sharded; or a GGUF file.
        device: the device of the weights.
        dtype: the dtype of weights and activations. None for the checkpoint's own.
        max_model_len: positions to prepare for. None for the checkpoint's maximum.
        tensor_parallel: the ranks that split the model, and this rank's place. Only this rank's share is read.
        keep_fp8: keep the FP8 matrices of dense layers in FP8, which takes half the memory. A device without FP8 ops
            dequantises each to `dtype` whenever it is used. False dequantises all of them at load.

    Raises:
        CheckpointError: the architecture or quantisation is unknown, or a part is missing, truncated or misshapen.
        ConfigError: max_model_len is below 1 or above the checkpoint's, or the ranks cannot split the model's sizes.
    """
    folder = Path(folder)
    source = read_config(folder)
    check_wrapper(source)
    text = text_source(source)
    stored = quantisation(text)
    config = model_config(text)
    if max_model_len is not None:
        most = min(context_length(config), MOST_POSITIONS)
        if max_model_len > most:
            raise ConfigError(
                f"max_model_len {max_model_len} is not in 1 to {most} ({source.name} has max_position_embeddings "
                f"{config.max_position_embeddings}; for more give it a yarn section, which allows factor times "
                "original_max_position_embeddings, or a larger max_position_embeddings if it was trained for that)"
            )
        config = config.with_max_position(max_model_len)
    elif config.max_position_embeddings > MOST_POSITIONS:
        problem = f"is {config.max_position_embeddings}; give max_model_len, at most {MOST_POSITIONS}"
        raise source.fail("max_position_embeddings", problem)
    if tensor_parallel.experts is not None and config.experts is None:
        raise ConfigError(
            f"expert parallel: {source.name} is a {config.architecture} model without experts; leave that option out"
        )
    config = config.split(tensor_parallel)
    checkpoint = CheckpointFolder(
        folder,
        stored_tensors(folder),
        device_named(device),
        dtype_named(dtype) or config.dtype,
        quantisation=stored,
        keep_fp8=keep_fp8,
    )
    target = load_llama(checkpoint, config)
    leave_other_modalities(checkpoint, source)
    checkpoint.ignore(mtp_tensors(checkpoint, config.num_layers))
    _account(checkpoint, source)
    return target


def _account(checkpoint: CheckpointFolder, source: ConfigSource) -> None:
    """Log how quantised weights were read, and refuse tensors and keys that no reader took."""
    announce(checkpoint.quantisation, str(checkpoint.folder), checkpoint.dtype, len(checkpoint.kept_fp8))
    checkpoint.refuse_unused()
    check_keys(source)


@checked
def drafter_format(folder: Path | str) -> DrafterFormat:
    """Return the format of a drafter's folder, found from its config.json and tensor names.

    Raises:
        CheckpointError: it is not a folder with weights, or its format is not known.
    """
    folder = Path(folder)
    source = read_config(folder)
    checkpoint = CheckpointFolder(folder, stored_tensors(folder), torch.device("cpu"), torch.float32)
    return detect_format(source, checkpoint)


@checked
def load_drafter(
    folder: Path | str,
    target: DraftedTarget | Path | str | torch.nn.Module,
    dtype: DType = None,
    num_modules: Count | None = None,
    keep_fp8: bool = False,
    draft_vocab: DraftVocabulary | Path | str | None = None,
) -> LoadedHead:
    """Read a drafter for `target`, onto the device of the target's embedding, or onto the CPU if `target` is a folder.

    Args:
        folder: the drafter's folder, or the target's own if that holds MTP modules. Its format is detected.
        target: the model to draft for, from `load_target`. Or a model of any other architecture: a folder, a
            transformers model or a `TargetShape` (`target_shape` makes one, also from a state dict). The drafter shares
            its embedding and lm_head, unless the drafter's folder has its own. If the target is split over ranks, so is
            the drafter.
        dtype: the dtype of weights and activations. None for the target's.
        num_modules: the number of MTP modules to use. None for all. With 1 every draft step runs the first module.
        keep_fp8: as in `load_target`.
        draft_vocab: the tokens that the head may draft, or a file of them (`read_draft_vocab`). The head then has a
            copy of their rows of lm_head, its own or the target's, and reads no others. None for all.

    Raises:
        CheckpointError: the format is unknown; a part is missing or misshapen, or no reader knows it; or the drafter,
            or `draft_vocab`, was made for another target.
        ConfigError: num_modules is given for a drafter without modules, or a shared tensor has another dtype.
    """
    folder = Path(folder)
    source = read_config(folder)
    if isinstance(draft_vocab, str | Path):
        draft_vocab = read_draft_vocab(draft_vocab)
    if isinstance(target, str | Path):
        target = target_shape(target, dtype=dtype)
    elif isinstance(target, torch.nn.Module):
        target = target_shape(target)
    checkpoint = CheckpointFolder(
        folder,
        stored_tensors(folder),
        target.embed_tokens.device,
        dtype_named(dtype) or target.dtype,
        quantisation=quantisation(source),
        keep_fp8=keep_fp8,
    )
    found = detect_format(source, checkpoint)
    _LOG.info("%s is read as %s", folder, found)
    if num_modules is not None and found.algorithm != "mtp":
        raise ConfigError(f"num_modules {num_modules}: {folder} holds {found}; it is for mtp alone")
    layers = source
    if found.algorithm in ("mtp", "draft_model"):
        layers = text_source(source)
        checkpoint = replace(checkpoint, quantisation=quantisation(layers))
    if found.layout == "speculators":
        layers = source.section("transformer_layer_config")
        checkpoint = replace(checkpoint, quantisation=quantisation(layers) or checkpoint.quantisation)
    opened = DrafterFolder(checkpoint, target, source, layers, found.layout == "speculators", num_modules)
    head = READERS[found.algorithm].load(opened)
    leave_other_modalities(checkpoint, source)
    checkpoint.ignore(IGNORED)
    _account(checkpoint, source)
    if draft_vocab is not None:
        cut_vocabulary(head, draft_vocab)
    return head
