"""Tokens that files beside tokenizer.json name, in random folders, against transformers' tokenizer of the same one."""

from __future__ import annotations

import json
import random

import pytest
from oracle_release import read_since_then
from specgraph_models.checkpoints.special_tokens import read_special_tokens
from specgraph_models.checkpoints.tokens import read_tokenizer
from specgraph_models.errors import CheckpointError
from specgraph_run.text.load import shipped_pair

transformers = pytest.importorskip("transformers")

SHIPPED = json.loads((shipped_pair()[0] / "tokenizer.json").read_text())
NEXT = 2048
"""Tokens of the shipped tokenizer."""
CONTENTS = ("<|a|>", "<|b|>", "<|c|>", "<|d|>", "<|e|>", "<|endoftext|>", "def", "self", "")
TEXTS = (
    "def f(self): <|a|> x", "<|b|><|c|> <|a|>", " <|d|>  <|e|> def <|endoftext|>", "a<|a|>b<|b|>c<|c|>d<|d|>e<|e|>",
)  # fmt: skip
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
FOLDERS = 150


def flags(rng, every=False):
    return {flag: rng.random() < 0.5 for flag in FLAGS if every or rng.random() < 0.5}


def forms(rng):
    """Return how a folder's files write each token: as its text, or as an object whose flags are the same each time."""
    return {content: None if rng.random() < 0.6 else flags(rng) for content in CONTENTS}


def of_config(rng, forms):
    content = rng.choice(CONTENTS)
    given = forms[content]
    return content if given is None else {"__type": "AddedToken", "content": content, **given}


def of_map(rng, forms):
    content = rng.choice(CONTENTS)
    given = forms[content]
    if given is None:
        return content
    return {"content": content, **{flag: value for flag, value in given.items() if flag != "special"}}


def named(rng, make, forms):
    found = {name: make(rng, forms) for name in NAMES if rng.random() < 0.2}
    if rng.random() < 0.1:
        found["pad_token"] = None
    if rng.random() < 0.2:
        found["image_token"] = make(rng, forms)
    return found


def write(rng, folder):
    """Write a folder in one of the many ways in which published ones name their tokens."""
    own, written = [*SHIPPED["added_tokens"]], forms(rng)
    for content in rng.sample(CONTENTS[:5], rng.choice([0, 0, 1, 2])):
        own.append({"id": NEXT + len(own) - len(SHIPPED["added_tokens"]), "content": content, **flags(rng, True)})
    (folder / "tokenizer.json").write_text(json.dumps(SHIPPED | {"added_tokens": own}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named(rng, of_config, written)}
    free = NEXT + len(own) - len(SHIPPED["added_tokens"])
    for key in ("extra_special_tokens", "additional_special_tokens"):
        if rng.random() < 0.25:
            config[key] = [of_config(rng, written) for _ in range(rng.choice([0, 1, 2]))]
        elif rng.random() < 0.1:
            config[key] = {f"own_{i}_token": of_config(rng, written) for i in range(2)} if key[0] == "e" else None
    if rng.random() < 0.35:
        config["added_tokens_decoder"] = {
            str(free + i): {"content": content, **flags(rng)}
            for i, content in enumerate(rng.sample(CONTENTS[:5], rng.choice([0, 1, 2])))
        }
        if own and rng.random() < 0.5:
            config["added_tokens_decoder"][str(own[-1]["id"])] = {"content": own[-1]["content"], **flags(rng)}
    if rng.random() < 0.1:
        config["split_special_tokens"] = True
    if rng.random() < 0.2:
        config |= {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if rng.random() < 0.4:
        more = named(rng, of_map, written)
        if rng.random() < 0.4:
            more["additional_special_tokens"] = rng.sample(CONTENTS, 2)
        if rng.random() < 0.3:
            more["extra_special_tokens"] = rng.choice([rng.sample(CONTENTS, 2), {"own_0_token": rng.choice(CONTENTS)}])
        (folder / "special_tokens_map.json").write_text(json.dumps(more))
    if rng.random() < 0.4:
        contents = rng.sample(CONTENTS[:5], rng.choice([1, 2]))
        (folder / "added_tokens.json").write_text(json.dumps({each: free + i for i, each in enumerate(contents)}))


@read_since_then("special_tokens_map.json is read")
def test_random_folders(tmp_path):
    compared = 0
    for seed in range(FOLDERS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write(random.Random(seed), folder)
        try:
            ours = read_tokenizer(folder)
        except CheckpointError:  # `test_tokens.py` has these: transformers gives such tokens other ids, without a word
            continue
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
        except (TypeError, AttributeError, RecursionError):
            continue
        names = {name: token.content for name, token in read_special_tokens(folder).named.items()}
        assert names == theirs.special_tokens_map, seed
        assert ours.get_vocab() == theirs.get_vocab(), seed
        for text in TEXTS:
            ids = theirs(text)["input_ids"]
            assert ours.encode(text).ids == ids, (seed, text)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (seed, text)
        compared += 1
    assert compared > FOLDERS // 2
