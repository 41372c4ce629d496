"""Files of a folder beside its tensors and its configuration: shards, links, tokenizer, generation defaults."""

import json
import os
import shutil

import pytest
from changed_folders import change_config, refused
from safetensors.torch import load_file

from specgraph.checkpoints import load_target
from specgraph.checkpoints.tokens import read_tokenizer, sampling_defaults, stop_token_ids
from specgraph.engine.load import shipped_pair

TOKENIZER = shipped_pair()[0] / "tokenizer.json"


class TestFolders:
    @pytest.mark.parametrize("shard", ["../other/evil.safetensors", "{tmp}/other/evil.safetensors", "..", ""])
    def test_an_index_that_leads_outside(self, shard, copied, tmp_path):
        folder, shard = copied("target"), shard.format(tmp=tmp_path)
        (tmp_path / "other").mkdir()
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(tmp_path / "other" / "evil.safetensors")
        index = {"weight_map": dict.fromkeys(names, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with refused("index.json", "not a file of this folder"):
            load_target(folder)

    def test_a_tensor_that_the_index_does_not_name(self, copied):
        folder = copied("target")
        names = sorted(load_file(folder / "model.safetensors"))
        index = {"weight_map": dict.fromkeys(names[1:], "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with refused(names[0], "does not name"):
            load_target(folder)

    def test_the_links_of_a_hub_cache(self, copied, tmp_path):
        folder, blobs = copied("target"), tmp_path / "blobs"
        blobs.mkdir()
        for path in list(folder.iterdir()):
            path.rename(blobs / path.name)
            path.symlink_to(os.path.relpath(blobs / path.name, folder))
        load_target(folder)

    def test_positions_that_no_table_is_made_of(self, copied):
        folder = copied("target")
        change_config(folder, max_position_embeddings=100_000_000)
        with refused("max_position_embeddings", "100000000", "give max_model_len"):
            load_target(folder)
        assert load_target(folder, max_model_len=48).attention_layers[0].rotary.shape[0] == 48


class TestText:
    @pytest.fixture
    def folder(self, tmp_path):
        shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
        return tmp_path

    @pytest.mark.parametrize(
        "setting",
        [
            {"truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}},
            {
                "padding": {
                    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<|endoftext|>",
                }
            },
        ],
        ids=["truncation", "padding"],
    )  # fmt: skip
    def test_truncation_and_padding_are_ignored_as_in_transformers(self, setting, folder):
        transformers = pytest.importorskip("transformers")
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | setting))
        prompt = "def read_chunk(self, size):\n    return self.stream.read(size) if size else b''\n"
        want = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))(prompt)["input_ids"]
        assert len(want) > 8
        assert read_tokenizer(folder).encode(prompt).ids == want

    @pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 9999])
    def test_a_tokenizer_that_cannot_be_read(self, content, folder):
        (folder / "tokenizer.json").write_bytes(content)
        with refused("tokenizer.json cannot be read"):
            read_tokenizer(folder)

    def test_merges_that_would_abort_the_process(self, folder):
        """tokenizers 0.23.3 cuts a merge inside a character and aborts; this must come before it."""
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        values["model"]["continuing_subword_prefix"] = "x"
        path.write_text(json.dumps(values))
        with refused("tokenizer.json", "does not continue with the prefix 'x'"):
            read_tokenizer(folder)

    @pytest.mark.parametrize("value", [True, -1, 64, 1.0, "end", [3, True], [[3]]])
    def test_eos_token_ids_that_are_none(self, value, copied):
        folder = copied("target")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with refused("generation_config.json", "eos_token_id"):
            stop_token_ids(folder, 64)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, "do_sample=True, temperature=0.6, top_p=0.9"),
            ({"repetition_penalty": 1.05, "eos_token_id": 1}, "repetition_penalty=1.05"),
            ({"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": None}, ""),
        ],
    )
    def test_defaults_that_are_not_applied_are_said(self, values, said, tmp_path):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        assert sampling_defaults(tmp_path) == said
