"""Write docs/models.md from the code: what is loaded, which configurations a test compares, and what is refused.

    python tests/models/write_models_page.py

tests/models/test_models_page.py fails when the page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import test_target_parity
from small_targets import TARGETS

from specgraph.checkpoints.architectures import ARCHITECTURES
from specgraph.checkpoints.folder import FLOATS
from specgraph.checkpoints.formats import LAYOUTS
from specgraph.checkpoints.gguf_file import ARCHITECTURES as GGUF
from specgraph.engine.request import UNSUPPORTED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


MODEL_TYPES = {architecture: name for name, (architecture, _) in TARGETS.items()}


def names(wanted: str) -> str:
    """Return the names of the configurations of one architecture that are compared."""
    cases = test_target_parity.CASES.items()
    return "; ".join(name for name, (architecture, _) in cases if MODEL_TYPES[architecture] == wanted)


def page() -> str:
    """Return the contents of docs/models.md."""
    stored = ", ".join(sorted(name.removeprefix("torch.") for name in FLOATS if name.startswith("torch.")))
    drafters = ", ".join(f"`{name}`" for name in LAYOUTS)
    lines = [
        "# Models, drafters and what is refused",
        "",
        "Written by `python tests/models/write_models_page.py`; a test compares it with the code.",
        "[checkpoints.md](checkpoints.md) says what is read of a folder, and why.",
        "",
        "## Targets",
        "",
        "Random weights saved by transformers: float32 logits and hidden states within 1e-4 of transformers' own",
        "(`tests/models/test_target_parity.py`), and the same greedy tokens through the decoder with a drafter, in",
        "whole rounds, of windows and sinks also merged with host lengths (`tests/models/test_targets_decode.py`).",
        "",
        "| `model_type` | configurations compared |",
        "|---|---|",
    ]
    for name in ARCHITECTURES:
        lines.append(f"| `{name}` | {names(name)} |")
    lines += [
        "",
        f"Stored dtypes: {stored}. Weights and activations run in float32, float16 or bfloat16 (`--dtype`);",
        "comparisons with transformers are made in float32. FP8 and MXFP4 weights are turned into floating point",
        "at load; FP8 matrices of dense layers may stay FP8",
        "(`tests/models/test_quantised.py`, `test_mxfp4.py`).",
        "",
        f"GGUF files (`--target FILE.gguf`): {', '.join(f'`{name}`' for name in GGUF)}; logits within 1e-4, and the",
        "token ids that transformers gives (`tests/models/test_gguf.py`).",
        "",
        "## Drafters",
        "",
        f"{drafters} draft for every target above,",
        "and for targets of any architecture that an engine runs itself (`load_drafter` with a folder, a transformers",
        "model or a `specgraph.checkpoints.TargetShape`), if the sizes fit. `mtp` needs modules in the target's folder",
        "and full attention.",
        "",
        "`ngram` in the place of a folder (`--draft ngram`) drafts for every target above without a model: what",
        "followed the longest n-gram that ends the request's text, where it stood last before",
        "(`tests/engine/test_ngram.py`).",
        "",
        "Each target decoded its own greedy tokens with EAGLE, EAGLE-3, MTP (one module and several), DFlash, P-EAGLE",
        "and a draft model, each target and each of these in float32, float16 and bfloat16, one dtype per pair",
        "(`tests/models/test_every_pair.py`; random weights).",
        "[checkpoints.md](checkpoints.md#drafters) lists the layouts of folders, and what is refused of them.",
        "",
        "## Refused: parameters of a request",
        "",
        "| parameter | why, or what to use |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in UNSUPPORTED.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
