"""Finds the format of a drafter's folder from its config.json and the names of its tensors.

The `speculators` package has a layout of its own: one config.json with these keys.

speculators_model_type      eagle, eagle3, mtp, dflash, ...
transformer_layer_config    the draft decoder's own configuration, with its `model_type`
speculators_config          algorithm, proposal methods (with the number of draft tokens), the verifier's name
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from specgraph_models.checkpoints.architectures import ARCHITECTURES
from specgraph_models.checkpoints.config_source import ConfigSource, holder_of
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.mtp import COUNTS, mtp_family
from specgraph_models.errors import CheckpointError

LAYOUTS = {
    "dspark": ("speculators", "authors"),
    "domino": ("authors",),
    "dflash2": ("speculators", "authors"),
    "dflash": ("speculators", "authors"),
    "peagle": ("speculators", "authors"),
    "eagle3": ("speculators", "authors"),
    "eagle": ("speculators", "authors"),
    "mtp": ("speculators", "DeepSeek and GLM", "MiMo", "Qwen3-Next and Qwen3.5"),
    "draft_model": ("transformers",),
}
"""Algorithm -> the layouts that its folders may have."""


_AUTHORS_KEYS = ("eagle_config", "dflash_config", "dspark_config")

_DRAFTERS_KEYS = (*_AUTHORS_KEYS, "draft_vocab_size", "medusa_num_heads")
_DRAFTERS_NAMES = re.compile(r"eagle|medusa|mtp|nextn|dflash|dspark|domino|speculator", re.IGNORECASE)
"""Keys, and parts of architecture names, that show a drafter which is not a whole model."""

_MISSING = {
    "xpress": "the repeated passes of its refiner over a block",
    "lilicorr": "its attention over a lattice of candidates",
}
"""Algorithm -> the computation that specgraph does not have."""


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """The format of a drafter's folder."""

    algorithm: str
    """One of LAYOUTS."""
    layout: str
    """The naming that the folder follows: the algorithm's authors', speculators', transformers' or an MTP family's."""
    evidence: str
    """The key of config.json or the tensors that showed the format."""
    num_speculative_tokens: int | None = None
    """Draft tokens per propose that the folder suggests. None if it suggests no number."""

    def __str__(self) -> str:
        return f"{self.algorithm}, {self.layout} layout ({self.evidence})"


def detect_format(source: ConfigSource, folder: CheckpointFolder) -> DrafterFormat:
    """Return the format of a folder. Raises CheckpointError if it has no known one."""
    if source.has("speculators_model_type") or source.has("speculators_config"):
        return _speculators_format(source)
    found = next(_recognised(source, folder), None)
    if found is None or found.algorithm == "draft_model":
        _refuse_lost_drafter(source)
    if found is None:
        raise CheckpointError(
            f"{source.name}: no known drafter (model_type {shown(source.values.get('model_type'))}, "
            f"architectures {shown(list(source.strings('architectures')))}, {len(folder.tensors)} tensors, such as "
            f"{shown(folder.names()[0])}); known are {', '.join(LAYOUTS)}"
        )
    return found


def _recognised(source: ConfigSource, folder: CheckpointFolder) -> Iterator[DrafterFormat]:
    """Yield the formats that a folder without speculators' keys may have. The first one decides: it is the surest."""
    if any(section.has("markov_rank") for section in _sections(source)):
        yield DrafterFormat("dspark", "authors", "config.json has markov_rank", _block_tokens(source, True))
    if source.has("dflash_config"):
        section = source.section("dflash_config")
        if "domino" in (section.values.get("projector_type"), source.values.get("projector_type")):
            tokens = _block_tokens(source, False, "shift_label")
            yield DrafterFormat("domino", "authors", "config.json has projector_type domino", tokens)
        tokens = _block_tokens(source, False)
        if section.has("selector_rank"):
            yield DrafterFormat("dflash2", "authors", "config.json has selector_rank", tokens)
        yield DrafterFormat("dflash", "authors", "config.json has dflash_config", tokens)
    if "ptd_token_id" in source.values and source.values.get("parallel_drafting"):
        yield DrafterFormat("peagle", "authors", "config.json has parallel_drafting and ptd_token_id")
    for name in ("mask_hidden", "model.mask_hidden"):  # for masked rows; a head without it is EAGLE-3
        if name in folder:
            yield DrafterFormat("peagle", "authors", f"tensor {name}")
    for name in source.strings("architectures"):
        if "eagle3" in name.lower():
            yield DrafterFormat("eagle3", "authors", f"architecture {name}")
    for name in ("midlayer.mlp.down_proj.weight", "model.midlayer.mlp.down_proj.weight"):
        if name in folder:
            yield DrafterFormat("eagle3", "authors", f"tensor {name}")
    if "fc.weight" in folder and "layers.0.mlp.down_proj.weight" in folder and "norm.weight" not in folder:
        yield DrafterFormat("eagle", "authors", "tensors fc and layers.0, no final norm")
    if (names := mtp_family(folder)) is not None:
        yield DrafterFormat("mtp", names.family, f"tensors named as {names.parts}.{names.projection}")
    model_type = source.string("model_type", "")  # last: a whole model may carry MTP modules
    parts = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")  # a model saved without lm_head
    exported = "fc.weight" not in folder and all(name in folder for name in parts)
    if model_type in ARCHITECTURES and ("model.embed_tokens.weight" in folder or exported):
        yield DrafterFormat("draft_model", "transformers", f"a whole {model_type} model")


def _refuse_lost_drafter(source: ConfigSource) -> None:
    """Raise CheckpointError if config.json promises a drafter, and the folder has no tensor of it.

    Tools that fine-tune or quantise a model often drop its MTP modules. The rest is a whole model. As a drafter for
    itself it would cost a forward pass of the target per draft token.
    """
    text = source.values.get("text_config")
    for section in (source, ConfigSource(text if isinstance(text, dict) else {}, f"{source.name}[text_config]")):
        for key in COUNTS:
            if section.has(key) and section.integer(key):
                problem = f"is {section.values[key]}, and the folder has no tensor of an MTP module"
                raise section.fail(
                    key,
                    f"{problem}: export or fetch them again (an index must name their shard), set the key to 0 to "
                    "draft with the whole model, or give another drafter",
                )
    named = [name for name in source.strings("architectures") if _DRAFTERS_NAMES.search(name)]
    for key in ("architectures",) if named else tuple(key for key in _DRAFTERS_KEYS if source.has(key)):
        problem = f"is {shown(source.values[key])}, and no tensor of such a drafter is in the folder"
        raise source.fail(key, f"{problem}: fetch it again, or take the key out if this is a whole model")


def _sections(source: ConfigSource) -> list[ConfigSource]:
    """Return the sections that may have a block's settings, in the order in which they are read."""
    return [source.section("dflash_config"), source.section("dspark_config"), source]


def block_setting(source: ConfigSource, key: str) -> ConfigSource:
    """Return the section that has `key`: the authors' `dflash_config` or `dspark_config`, or the top level."""
    return holder_of(key, *_sections(source))


def anchor_predicts(source: ConfigSource, default: bool, key: str = "sample_from_anchor") -> bool:
    """Return True if a block's first row, the anchor, predicts a token too. Domino's key for it is `shift_label`."""
    return block_setting(source, key).boolean(key, default)


def _block_tokens(source: ConfigSource, default: bool, key: str = "sample_from_anchor") -> int | None:
    """Return the number of tokens that a block drafts: its rows, less one if the anchor predicts nothing.

    None if no key has the number of rows."""
    holder, predicts = block_setting(source, "block_size"), anchor_predicts(source, default, key)
    return holder.integer("block_size") - (not predicts) if holder.has("block_size") else None


def _speculators_format(source: ConfigSource) -> DrafterFormat:
    section = source.section("speculators_config")
    algorithm = source.string("speculators_model_type", "") or section.string("algorithm")
    if not source.has("transformer_layer_config"):
        raise source.fail("transformer_layer_config", "is missing; it should hold the draft decoder's configuration")
    section.taken.update(section.values)  # the rest is advice: the verifier's name, the number of draft tokens
    for key in _AUTHORS_KEYS:
        if source.has(key):
            raise source.fail(key, "is a key of the authors' layout, which nothing reads in the format of speculators")
    tokens = _speculative_tokens(section)
    known = sorted(name for name, layouts in LAYOUTS.items() if "speculators" in layouts)
    if algorithm not in known:
        missing = f" (no program here does {_MISSING[algorithm]})" if algorithm in _MISSING else ""
        problem = f"is {shown(algorithm)}{missing}; supported are {', '.join(known)}"
        raise source.fail("speculators_model_type", problem)
    return DrafterFormat(algorithm, "speculators", f"speculators_model_type is {algorithm}", tokens)


def _speculative_tokens(section: ConfigSource) -> int | None:
    """Return the draft tokens of the default proposal method. None if no method has a number."""
    methods = section.values.get("proposal_methods")
    if not isinstance(methods, list):
        return None
    default = section.string("default_proposal_method", "")
    mappings = [ConfigSource(m, f"{section.name}[proposal_methods]") for m in methods if isinstance(m, dict)]
    chosen = next((m for m in mappings if m.values.get("proposal_type") == default), mappings[0] if mappings else None)
    return chosen.integer("speculative_tokens") if chosen is not None and chosen.has("speculative_tokens") else None
