"""Finds the format of a drafter's folder from its config.json and the names of its tensors.

The `speculators` package has a layout of its own: one config.json with these keys.

speculators_model_type      eagle, eagle3, mtp, dflash, ...
transformer_layer_config    the draft decoder's own configuration, with its `model_type`
speculators_config          algorithm, proposal methods (with the number of draft tokens), the verifier's name
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specgraph_models.checkpoints.config_source import ConfigSource
from specgraph_models.checkpoints.dflash import DFLASH
from specgraph_models.checkpoints.dflash2 import DFLASH2
from specgraph_models.checkpoints.domino import DOMINO
from specgraph_models.checkpoints.dspark import DSPARK
from specgraph_models.checkpoints.eagle import EAGLE
from specgraph_models.checkpoints.eagle3 import EAGLE3, PEAGLE
from specgraph_models.checkpoints.files import shown
from specgraph_models.checkpoints.folder import CheckpointFolder
from specgraph_models.checkpoints.formats import DrafterFormat, Reader
from specgraph_models.checkpoints.llama import DRAFT_MODEL
from specgraph_models.checkpoints.mtp import COUNTS, MTP
from specgraph_models.errors import CheckpointError

READERS: Mapping[str, Reader] = {
    reader.algorithm: reader for reader in (DSPARK, DOMINO, DFLASH2, DFLASH, PEAGLE, EAGLE3, EAGLE, MTP, DRAFT_MODEL)
}
"""The readers by algorithm. The first one that recognises a folder reads it. A whole model may carry MTP modules, so
its reader is the last one."""

_AUTHORS_KEYS = ("eagle_config", "dflash_config", "dspark_config")

_DRAFTERS_KEYS = (*_AUTHORS_KEYS, "draft_vocab_size", "medusa_num_heads")
_DRAFTERS_NAMES = re.compile("|".join((*READERS, "medusa", "nextn", "speculator")), re.IGNORECASE)
"""Keys, and parts of architecture names, that show a drafter which is not a whole model."""

_MISSING = {
    "xpress": "the repeated passes of its refiner over a block",
    "lilicorr": "its attention over a lattice of candidates",
}
"""Algorithm -> the computation that specgraph does not have."""


def detect_format(source: ConfigSource, folder: CheckpointFolder) -> DrafterFormat:
    """Return the format of a folder. Raises CheckpointError if it has no known one."""
    if source.has("speculators_model_type") or source.has("speculators_config"):
        return _speculators_format(source)
    found = next((found for reader in READERS.values() for found in reader.recognised(source, folder)), None)
    if found is None or found.algorithm == "draft_model":
        _refuse_lost_drafter(source)
    if found is None:
        raise CheckpointError(
            f"{source.name}: no known drafter (model_type {shown(source.values.get('model_type'))}, "
            f"architectures {shown(list(source.strings('architectures')))}, {len(folder.tensors)} tensors, such as "
            f"{shown(folder.names()[0])}); known are {', '.join(READERS)}"
        )
    return found


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
    known = sorted(reader.algorithm for reader in READERS.values() if "speculators" in reader.layouts)
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
