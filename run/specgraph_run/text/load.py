"""Loading a pair of checkpoint folders, from models and KV cache to captured graphs and a generator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specgraph_models.checkpoints import (
    TargetShape,
    drafter_format,
    load_drafter,
    load_target,
    read_draft_vocab,
    target_shape,
)
from specgraph_models.checkpoints.config_source import read_config
from specgraph_models.checkpoints.folder import KV_SCALES
from specgraph_models.checkpoints.model_config import config_dtype
from specgraph_models.checkpoints.stored import stored_tensors
from specgraph_models.checkpoints.text_model import text_source
from specgraph_models.checkpoints.tokens import (
    compare_tokenizers,
    read_tokenizer,
    sampling_defaults,
    shown_stops,
    stop_token_ids,
)
from specgraph_models.draft_vocab import DraftVocabulary
from specgraph_models.errors import CheckpointError
from specgraph_models.names import dtype_named
from specgraph_models.parallel import WHOLE

from specgraph.attention import AttentionChoice, PagedAttention, choose_attention
from specgraph.attention.caches import bytes_per_token
from specgraph.capture import resolve
from specgraph.config import DraftConfig, DraftOptions
from specgraph.device import Platform, Progress, open_platform
from specgraph.draft.ngram import NgramHead
from specgraph.errors import ConfigError, UnsupportedError
from specgraph.validation import MOST_POSITIONS, checked
from specgraph_run.decoder.blocks import GIB, CacheSize, cache_dtype, size_cache
from specgraph_run.decoder.config import check_options, check_recurrent
from specgraph_run.decoder.decoder import SpeculativeDecoder
from specgraph_run.decoder.layout import ParallelLayout, join_layout, leave_on_error
from specgraph_run.decoder.states import bytes_per_request
from specgraph_run.options import NGRAM, DecoderOptions, GeneratorOptions
from specgraph_run.text.generator import TextGenerator

if TYPE_CHECKING:
    from specgraph_models.checkpoints.formats import LoadedHead
    from specgraph_models.llama import LlamaTarget

    from specgraph.draft.protocol import Head


def shipped_pair() -> tuple[Path, Path]:
    """Return the folders of the target and EAGLE-3 drafter that come with specgraph (Python source, 4M parameters)."""
    root = Path(str(resources.files("specgraph_run"))) / "pairs" / "tiny-python"
    return root / "target", root / "eagle3"


@checked
def load_generator(
    target: Path | str | None = None,
    draft: Path | str | None = None,
    *,
    platform: Platform | str | None = None,
    speculate: bool = True,
    progress: Progress | None = None,
    options: GeneratorOptions | None = None,
    **changes: Any,
) -> TextGenerator:
    """Load a target and its drafter from Hugging Face folders or GGUF files, and capture all graphs.

    Args:
        target: a checkpoint folder or GGUF file. By default the shipped one, with its drafter.
        draft: the drafter's folder or GGUF file. "ngram" drafts for any target by n-grams (`prompt_lookup_max`,
            `prompt_lookup_min`).
        platform: a platform or its name; by default chosen as in `open_platform`.
        speculate: False to decode with the target alone.
        progress: called with the name of the work, the number of its parts that are done, and the number of all parts.
        options: how to load, capture and run; by default `GeneratorOptions()`.
        **changes: fields of `GeneratorOptions` by name, instead of or on top of `options`.

    Raises:
        PlatformError, CheckpointError, ConfigError, UnsupportedError: raised before anything runs on the device.
    """
    chosen = replace(options or GeneratorOptions(), **changes)
    if speculate or target is None:
        target_folder, draft_folder = pair_folders(target, draft)
    else:
        target_folder = draft_folder = Path(target)
    opened = platform if isinstance(platform, Platform) else open_platform(platform)
    layout = join(opened, chosen, {"target": target_folder, "draft": draft_folder, "speculate": speculate})
    with leave_on_error(layout):
        tokenizer, defaults = read_tokenizer(target_folder), sampling_defaults(target_folder)
        if speculate and draft_folder not in (target_folder, NGRAM):
            compare_tokenizers(tokenizer, target_folder, draft_folder)
        loaded = load_models(target_folder, draft_folder if speculate else None, opened, chosen, layout)
        stops = stop_token_ids(target_folder, loaded.target.vocab_size)
        attention = loaded.attention
        with torch.inference_mode():
            decoder = SpeculativeDecoder(
                loaded.target,
                loaded.head,
                opened,
                loaded.config,
                loaded.options,
                attention=attention.backend,
                layout=layout,
            )
            start = time.perf_counter()
            decoder.capture(progress)
    took = time.perf_counter() - start
    resolution = decoder.drafter.resolution if decoder.drafter is not None else decoder.target.resolution
    drafter = f"; drafter {drafter_name(draft_folder, chosen)}" if speculate else ""
    how = ""
    if chosen.dtype is None and opened.device.type == "cpu":
        dtype, why = cpu_dtype(target_folder)
        how = f"{str(dtype).removeprefix('torch.')} ({why}); "
    how += f"lowering {resolution.explain()}, prefill {resolution.prefill}"
    how += f"; attention '{attention.backend.name}', because {attention.reason}" if attention.reason else ""
    where = f"{opened.info.name} (simulated)" if opened.info.simulated else opened.info.name
    ignored = f"; generation_config.json's {defaults} are not applied, each request says how it samples"
    description = f"{where}: {how}; captured in {took:.2f} s{drafter}; {loaded.cache}; "
    description += f"{shown_stops(tokenizer, stops)}{ignored if defaults else ''}"
    if layout is not None:
        description += f"; rank {layout.ranks.rank} of {layout.ranks.size} that run the models together"
    return TextGenerator(decoder, tokenizer, stops, opened, target_folder, description, layout)


def pair_folders(target: Path | str | None, draft: Path | str | None) -> tuple[Path, Path]:
    """Return the folders of a target and its drafter. By default they are the shipped pair.

    The drafter "ngram" has the folder `NGRAM`. Raises CheckpointError if only one of the two folders is given.
    """
    shipped = shipped_pair()
    if draft is not None and Path(draft) == NGRAM:
        return Path(target or shipped[0]), NGRAM
    if target is not None and draft is not None:
        return Path(target), Path(draft)
    if target is draft:
        return shipped
    raise CheckpointError(
        "give both the target's and the drafter's folder, or neither for the shipped pair; draft 'ngram' (--draft "
        "ngram) drafts for any target, without a folder"
    )


def drafter_name(draft: Path, options: GeneratorOptions) -> str:
    """Return the name of a drafter's format, to be read by a person."""
    if draft != NGRAM:
        return str(drafter_format(draft))
    return f"n-grams of {options.prompt_lookup_max} to {options.prompt_lookup_min} tokens"


def join(platform: Platform, options: GeneratorOptions, also: Mapping[str, object]) -> ParallelLayout | None:
    """Meet the other processes of a run. Return None if there is one process alone.

    Args:
        also: values, besides the options, that must be the same on all ranks.

    Raises:
        ConfigError: torchrun started another number of processes.
        RankError: options differ, or a rank is late.
    """
    size = options.tensor_parallel
    if size * options.data_parallel * options.decode_context_parallel == 1:
        return None
    layout = join_layout(
        platform.device,
        tensor_parallel=size,
        data_parallel=options.data_parallel,
        expert_parallel=options.enable_expert_parallel,
        decode_context_parallel=options.decode_context_parallel,
        timeout=options.rank_timeout,
    )
    own = {"platform": platform.info.name, "device": platform.info.device_name, **platform.info.versions}
    asked = {f"option {f.name}": getattr(options, f.name) for f in fields(options)}
    with leave_on_error(layout):
        layout.ranks.same("the comparison of options", {**own, **also, **asked})
    return layout


def cpu_dtype(target: Path) -> tuple[torch.dtype, str]:
    """Return a target's default dtype on the CPU, and the reason for it.

    bfloat16 halves the bytes that a pass reads, but only some CPUs can multiply it. float16 is slower than float32 on
    most of them.
    """
    fast = [
        name
        for name, has in (
            ("AMX", torch.cpu._is_amx_tile_supported),  # pyright: ignore[reportPrivateUsage]
            ("AVX512_BF16", torch.cpu._is_avx512_bf16_supported),  # pyright: ignore[reportPrivateUsage]
        )
        if has()
    ]
    if not fast:
        return torch.float32, "no AMX or AVX512_BF16 here"
    if config_dtype(text_source(read_config(target))) != torch.bfloat16:
        return torch.float32, "the target is not bfloat16"
    return torch.bfloat16, f"{fast[0]} multiplies it"


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target and its drafter on their device, with the other arguments of a `SpeculativeDecoder`."""

    target: LlamaTarget
    head: Head | None
    """The drafter's model. None if the target decodes alone."""
    attention: AttentionChoice
    cache: CacheSize
    config: DraftConfig
    options: DecoderOptions
    """The caller's options, with the number of KV blocks of `cache`."""
    draft_vocab: DraftVocabulary | None = None
    """The tokens that the drafter may draft. None for all of its own."""


def load_models(
    target: Path,
    draft: Path | None,
    platform: Platform,
    options: GeneratorOptions,
    layout: ParallelLayout | None = None,
) -> LoadedPair:
    """Load a target and its drafter, choose their attention, and size their KV caches by the memory that is left.

    Options are checked before weights are read. If they set no max_model_len, and not even one request of the target's
    maximum fits, the models are shortened to the length that fits. Attention is then chosen again: a shorter model may
    no longer have a window. Rotary tables are made last, with no more rows than there are positions.

    Raises:
        CheckpointError: a folder cannot be loaded.
        CapacityError: not even one request of max_model_len fits.
        ConfigError: an option is out of range.
        UnsupportedError: the attention that the options name does not support both models, or an option needs FP8 and
            the device has none.
    """
    k = draft_config(options, options.max_model_len or MOST_POSITIONS).num_speculative_tokens
    if draft == NGRAM and options.num_modules is not None:
        raise ConfigError(f"num_modules {options.num_modules}: ngram has none; it is for mtp alone")
    vocabulary = draft_vocabulary(options.draft_vocab, target, draft)
    dtype, length, tree = dtype_named(options.dtype), options.max_model_len, options.draft_tree
    requests = options.max_num_requests
    if dtype is None and platform.device.type == "cpu":
        dtype, _ = cpu_dtype(target)
    keep_fp8 = options.fp8_weights == "keep"
    if (keep_fp8 or options.kv_cache_dtype == "fp8") and not (support := platform.capabilities.float8):
        asked = "--fp8-weights keep" if keep_fp8 else "--kv-cache-dtype fp8"
        raise UnsupportedError(f"{asked}: '{platform.info.name}' has no FP8: {support.reason}")
    if options.kv_cache_dtype == "fp8":
        for folder in (target, *([] if draft in (None, NGRAM) else [draft])):
            scales = [name for name in stored_tensors(folder) if name.endswith(KV_SCALES)]
            if scales:
                raise CheckpointError(
                    f"--kv-cache-dtype fp8: {folder} has scales for such a cache ({scales[0]}), which are not read: it "
                    "has scales of 1; use --kv-cache-dtype auto"
                )
    split = WHOLE if layout is None else layout.tensor_parallel
    collectives = "anywhere" if split.has_collectives else "none"
    resolve(options.decode, platform.capabilities, (), options.prefill, collectives)  # refuses before weights are read
    model = load_target(target, platform.device, dtype, length, split, keep_fp8)
    if model.recurrent_layers:
        check_recurrent(draft_config(options, model.max_model_len), options)
    head: Head | None = None
    decoders: list[LlamaTarget | LoadedHead] = [model]
    text_bytes = 0  # per token, of a drafter that keeps the text
    if draft == NGRAM:
        head = NgramHead(model.vocab_size, options.prompt_lookup_max, options.prompt_lookup_min)
        text_bytes = bytes_per_token(head.attention_layers, head.dtype)
    elif draft is not None:
        drafted: LlamaTarget | TargetShape = model
        if layout is not None and options.draft_tensor_parallel == 1:
            where = platform.device
            drafted = target_shape(target, device=where, dtype=model.dtype, max_model_len=model.max_model_len)
        head = loaded = load_drafter(
            draft, drafted, num_modules=options.num_modules, keep_fp8=keep_fp8, draft_vocab=vocabulary
        )
        decoders = [model, loaded]
    free = platform.memory().free
    if layout is not None:  # all ranks must have the same blocks
        free = layout.ranks.smallest("the size of the KV cache", free)
    memory = int(free * options.memory_fraction)
    while True:
        shapes = [layer for m in decoders for layer in m.attention_shapes()]
        tables = {id(table): table.shape[1] * table.itemsize for layer in shapes if (table := layer.rotary) is not None}
        # A row of the tables is smaller than a token's keys and values. So if these fit in half the memory, both fit.
        left = max(min(memory, free - sum(tables.values()) * model.max_model_len), memory // 2)
        attention = choose_attention(
            options.attention,
            platform,
            shapes,
            model.dtype,
            options.block_size,
            tree is not None,
            cache_dtype(options.kv_cache_dtype, model.dtype),
        )
        kv_bytes = text_bytes + sum(
            bytes_per_token(m.attention_shapes(), cache_dtype(options.kv_cache_dtype, m.dtype)) for m in decoders
        )
        if head is not None:
            kv_bytes += -(-head.kind.bytes_per_block(head, k, attention.block_size) // attention.block_size)
        states = bytes_per_request(model.recurrent_layers, 1 if head is None else k + 1, model.dtype)
        kv_memory = None if options.kv_memory is None else int(options.kv_memory * GIB) + states * (requests + 1)
        cache = size_cache(
            kv_bytes,
            block_size=attention.block_size,
            max_model_len=model.max_model_len,
            max_num_requests=requests,
            memory=kv_memory or left or None,
            state_bytes=states,
            num_blocks=options.num_blocks,
            may_shorten=length is None,
            scratch_tokens=0 if tree is None else tree.scratch_tokens,
        )
        if cache.max_model_len == model.max_model_len:
            sized = replace(options, num_blocks=cache.num_blocks, block_size=cache.block_size)
            config = draft_config(sized, cache.max_model_len)
            return LoadedPair(model, head, attention, cache, config, sized, vocabulary)
        length = cache.max_model_len
        for m in decoders:
            m.shorten(length)


def draft_vocabulary(path: Path | str | None, target: Path, draft: Path | None) -> DraftVocabulary | None:
    """Read the draft vocabulary that the options name. None if they name none, or if nothing is drafted.

    Raises:
        CheckpointError: it can't be read, or it was made for another tokenizer than the target's.
        ConfigError: the drafter has no lm_head.
    """
    if path is None or draft is None:
        return None
    if draft == NGRAM:
        raise ConfigError(f"draft_vocab {path}: ngram reads no lm_head, and drafts tokens of the text; leave it out")
    return read_draft_vocab(path, target)


def draft_config(options: GeneratorOptions, max_model_len: int) -> DraftConfig:
    """Return the limits and choices of target and drafter, with `max_model_len` if the options set none.

    Raises ConfigError if options contradict each other."""
    values: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(DraftOptions)}
    k = options.num_speculative_tokens
    if k == "auto":
        values["k_candidates"] = candidates = tuple(options.k_candidates or (1, 2, 3, 5))
        k = candidates[-1]
    if (tree := options.draft_tree) is not None:
        k = max([tree.num_steps, *(k for k in (options.draft_schedule or {}).values() if k != "tree")])
    config = DraftConfig(
        num_speculative_tokens=k,
        tree=tree,
        max_model_len=options.max_model_len or max_model_len,
        block_size=options.block_size or PagedAttention().preferred_block_size,
        **values,
    )
    check_options(config, options)
    return config
