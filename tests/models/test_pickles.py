"""pytorch_model.bin: read as torch reads it, and nothing is run or allocated that the file does not hold."""

import pickle
import zipfile

import pytest
import torch
from changed_folders import refused
from specgraph_models.checkpoints.stored import stored_tensors

BASE = torch.arange(60, dtype=torch.float32).view(10, 6) / 7
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MODULE = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(5))
GOOD = {
    "a state dict with the versions of its modules": MODULE.state_dict(),
    "parameters": dict(MODULE.named_parameters()),
    "views of one storage": {"whole": BASE, "transposed": BASE.t(), "part": BASE[2:5, 1:3], "row": BASE[3]},
    "dtypes": {str(each): BASE.to(each) for each in DTYPES} | {"bool": BASE > 2, "e4m3": BASE.to(torch.float8_e4m3fn)},
    "no dimension, or no element": {"number": torch.tensor(3.0), "empty": torch.empty(0, 3)},
    "many": {f"layer.{i}.weight": torch.full((1,), float(i)) for i in range(1500)},
}


@pytest.mark.parametrize("tensors", GOOD.values(), ids=GOOD)
def test_tensors_are_those_of_torch(tensors, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path)
    stored, wanted = stored_tensors(tmp_path), torch.load(path, weights_only=True)
    assert list(stored) == list(wanted)
    for name, tensor in wanted.items():
        read = stored[name].read(None)
        assert (stored[name].shape, stored[name].dtype) == (tuple(tensor.shape), str(tensor.dtype))
        assert read.dtype == tensor.dtype
        assert torch.equal(read.double(), tensor.detach().double())


class Allocates:
    def __reduce__(self):
        return (bytearray, (1 << 33,))


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
LONGER = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00J\x00\x00\x00\x7f\x85K\x01\x85\x89)tR"
HOSTILE = {
    "a bytearray of 8 GiB": (pickle.dumps({"a": Allocates()}, 2), "it calls __builtin__ bytearray"),
    "a place in the memo": (b"\x80\x02}r\xff\xff\xff\x7fh\x00.", "KeyError"),
    "a tensor longer than its storage": (b"\x80\x02}X\x01\x00\x00\x00a" + LONGER + b"s.", "shape [2130706432] over 16"),
    "a number of 2 GiB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "ValueError"),
    "many objects": (b"\x80\x02" + b"}" * (3 << 20) + b".", "3145731 bytes and not at most"),
    "a class": (pickle.dumps({"a": zipfile.ZipInfo}, 2), "'a' is zipfile ZipInfo"),
    "keys that are no names": (pickle.dumps({((1,),): 2}, 2), "no name of a tensor"),
    "no mapping": (pickle.dumps([1], 2), "it holds list"),
    "another protocol": (pickle.dumps({"a": 1}, 4), "opcode"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_nothing_else_is_run(content, words, tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("model/data.pkl", content)
        archive.writestr("model/data/0", bytes(16))
    with refused("pytorch_model.bin", words, "convert it to safetensors"):
        stored_tensors(tmp_path)


def test_a_tensor_that_repeats_its_storage(tmp_path):
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "pytorch_model.bin")
    with refused("shape [1000000, 1000000] over 4 bytes"):
        stored_tensors(tmp_path)


def test_a_compressed_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}, 2))
    with refused("model/data.pkl is compressed"):
        stored_tensors(tmp_path)
