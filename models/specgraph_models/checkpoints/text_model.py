"""The text model of a multimodal folder: its configuration, and the names of its tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder

_LOG = logging.getLogger("specgraph")

WRAPPERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "kimi_k25": "kimi_k2",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of a multimodal folder that is read as its text model -> the one of `text_config` if that has none."""

_ANYWHERE = ("dtype", "torch_dtype", "quantization_config", "compression_config", "tie_word_embeddings")
"""Keys of the text model that may be at the top level of a multimodal folder's config.json."""

_OTHER_KEYS = re.compile(
    r"(image|video|audio|vision|visual|boi|eoi|boa|eoa|mm|multimodal|projector|spatial|media|use_unified_vision)_.*"
    r"|ignore_index|language_model_only|(vision|audio)_config"
)
"""Keys at the top level about pictures and sound."""

_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
"""The prefixes that a whole model's tensors may have: in multimodal folders of transformers 4.52 and newer, in older
ones, in folders of text models, and in a text model saved without its lm_head."""

OTHER_TENSORS = (
    r"(model\.)?(visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|mm_projector"
    r"|multi_modal_projector)\..*"
)
"""The names of tensors of pictures and sound."""


def text_source(source: ConfigSource) -> ConfigSource:
    """Return the configuration of a folder's text model: `text_config` of a multimodal folder, otherwise `source`.

    Keys of the text model that only the top level has count for it too. If one level says that lm_head is tied, it is:
    a stored lm_head is used anyway.
    """
    if not source.has("text_config"):
        return source
    section = source.section("text_config")
    source.taken.update(key for key in source.values if key in _ANYWHERE or _OTHER_KEYS.fullmatch(key))
    outside = {key: source.values[key] for key in _ANYWHERE if source.has(key)}
    tied = {"tie_word_embeddings": True} if source.values.get("tie_word_embeddings") is True else {}
    default = {key: WRAPPERS[kind] for key, kind in source.values.items() if key == "model_type" and kind in WRAPPERS}
    return replace(section, values={**default, **outside, **section.values, **tied})


def check_wrapper(source: ConfigSource) -> None:
    """Raise CheckpointError if a folder has a `text_config`, and no row of `WRAPPERS` says how it is read."""
    kind = source.string("model_type", "") if source.has("text_config") else None
    if kind is not None and kind not in WRAPPERS:
        problem = f"is {shown(kind)}, and there is a text_config; folders of several modalities that are read"
        raise source.fail("model_type", f"{problem} are {', '.join(WRAPPERS)}")


def text_prefix(folder: CheckpointFolder) -> str:
    """Return the prefix of the names of a text model's tensors, lm_head apart."""
    return next((each for each in _PREFIXES if f"{each}embed_tokens.weight" in folder), "model.")


def lm_head_name(folder: CheckpointFolder) -> str:
    """Return the name of the output projection."""
    older = "language_model.lm_head.weight"
    return older if older in folder else "lm_head.weight"


def leave_other_modalities(folder: CheckpointFolder, source: ConfigSource) -> None:
    """Leave the tensors of pictures and sound unread, with one line that says so."""
    left = [name for name in folder.names() if re.fullmatch(OTHER_TENSORS, name)]
    if not source.has("text_config") or not left:
        return
    folder.ignore({OTHER_TENSORS: "of pictures and sound"})
    _LOG.warning("%s is read as its text model: %d tensors of pictures and sound, such as %s, are left unread",
                 folder.folder, len(left), shown(left[0]))  # fmt: skip
