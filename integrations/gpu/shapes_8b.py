"""Write folders of Llama 3 8B's shapes without weights, for a server that makes dummy ones.

    python integrations/gpu/shapes_8b.py FOLDER

FOLDER/target and FOLDER/drafter (EAGLE-3) have a config.json each, and the target a tokenizer with one word per token
id, so that prompts have the lengths that a client draws.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import EAGLE3, LLAMA3_8B
from tokenizers import Tokenizer, models, pre_tokenizers


def main(folder: Path) -> None:
    """Write them."""
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
    for name, changes in (("target", target), ("drafter", EAGLE3)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(LLAMA3_8B | changes))
    words = {f"w{token}": token for token in range(LLAMA3_8B["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
