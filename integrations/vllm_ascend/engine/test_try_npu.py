"""The script for a person with an NPU, on the simulated runtime."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAND_INS = """
from specgraph_plugin.when_imported import when_imported

def install(module):
    import stand_ins
    stand_ins.install()

when_imported("vllm.v1.worker.block_table", install)
"""
"""On a machine with CANN nothing stands in."""


def test_one_file_has_every_part(lab, tmp_path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_INS)
    out, models = tmp_path / "npu.json", lab.models
    off = dict.fromkeys(("enable_npugraph_ex", "fuse_norm_quant", "fuse_qknorm_rope"), False)
    engine = {
        "max_model_len": 384, "max_num_batched_tokens": 64, "block_size": 128, "num_gpu_blocks_override": 24,
        "gpu_memory_utilization": 0.5, "additional_config": {"specgraph": {}, "ascend_compilation_config": off},
    }  # fmt: skip
    done = lab.run(
        str(HERE / "try_npu.py"), str(out), "--target", str(models / "target"), "--draft", str(models / "eagle3"),
        "--engine", json.dumps(engine), "--quick", PYTHONPATH=f"{tmp_path}:{lab.environment['PYTHONPATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert [path.name for path in tmp_path.glob("*.json")] == ["npu.json"]
    assert found.keys() == {"versions", "signatures", "device", "served", "suite quick"}
    assert {name: part["error"] for name, part in found.items() if "error" in part} == {}
    assert found["versions"]["torch_npu"] == "2.10.0.post4"
    assert "method, vllm_config" in found["signatures"]["get_spec_decode_method"]
    assert "'yes'" in found["device"]["graphs"]
    assert "'yes'" in found["device"]["merged_loop"]
    assert found["served"]["equal"]
    assert found["served"]["counts"].keys() == {"specgraph", "switched off"}
    assert found["suite quick"]["exit code"] == 0
