"""The names of vllm-ascend that the plugin uses, against the sources in its wheels.

They are large and not downloaded here. SPECGRAPH_VLLM_ASCEND_WHEELS names a folder with vllm-ascend 0.30.0rc2 and its
vLLM 0.30.0 (FOLDER/0.30/vllm_ascend, FOLDER/0.30/vllm). PyPI has vllm-ascend 0.30.0rc2 as sources only. Without the
folder the tests are skipped.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from specgraph_plugin.vllm.v2_names import INPUT_BATCH, PROPOSE, SPECULATOR
from specgraph_vllm_ascend.names import CONFIG_MODULE, V2_INPUT_BATCH, V2_MAKE, V2_RUNNER_MODULE

WHEELS = Path(os.environ.get("SPECGRAPH_VLLM_ASCEND_WHEELS", "/nonexistent"))
V2, GPU = "vllm_ascend/worker/v2", "vllm/v1/worker/gpu"
AUTOREGRESSIVE = f"{V2}/spec_decode/autoregressive/speculator.py"


@pytest.fixture
def folder() -> Path:
    if not (WHEELS / "0.30/vllm_ascend").is_dir():
        pytest.skip("no sources of vllm-ascend 0.30.0rc2 and vLLM 0.30.0 (SPECGRAPH_VLLM_ASCEND_WHEELS)")
    return WHEELS / "0.30"


def found(root: ast.AST, kind: type, name: str) -> ast.AST:
    for node in ast.walk(root):
        if isinstance(node, kind) and node.name == name:
            return node
    raise AssertionError(f"no {kind.__name__} {name}")


def text(folder: Path, path: str, kind: type, *names: str) -> str:
    """The source of a class or function in a file, or of a function in a class there."""
    node: ast.AST = ast.parse((folder / path).read_text())
    for name, of in zip(names, [ast.ClassDef] * (len(names) - 1) + [kind], strict=True):
        node = found(node, of, name)
    return ast.unparse(node)


def parameters(source: str) -> tuple[str, ...]:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    return tuple(a.arg for a in function.args.args if a.arg != "self")


def fields(source: str) -> set[str]:
    """The annotated names of a class, and the attributes of self that it assigns."""
    made: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        made |= {target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "") for target in targets}
    return made


def test_the_runner_makes_its_speculator_by_a_name_of_its_module(folder) -> None:
    path = V2_RUNNER_MODULE.replace(".", "/") + ".py"
    imports = [
        (node.module, name.name)
        for node in ast.parse((folder / path).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    assert ("vllm_ascend.worker.v2.spec_decode", "init_speculator") in imports
    assert ("vllm_ascend.worker.v2.input_batch", "AscendInputBatch") in imports
    made = text(folder, path, ast.FunctionDef, "NPUModelRunner", "__init__")
    assert "self.speculator = init_speculator(self.vllm_config, self.device)" in made
    assert made.index("del self.speculator") < made.index("init_speculator(")
    make = text(folder, f"{V2}/spec_decode/__init__.py", ast.FunctionDef, "init_speculator")
    assert parameters(make) == V2_MAKE
    for name in ("AscendMTPSpeculator", "AscendEagleSpeculator"):
        assert f"return {name}(vllm_config, device)" in make
    callers = [
        str(file.relative_to(folder))
        for file in sorted((folder / "vllm_ascend").rglob("*.py"))
        if "init_speculator(" in file.read_text()
    ]
    assert [file for file in callers if "patch_spec_decode_310" not in file] == [path, f"{V2}/spec_decode/__init__.py"]


def test_the_configuration_refuses_keys_that_it_does_not_have(folder) -> None:
    """So `let_key_pass` takes the plugin's key out."""
    path = CONFIG_MODULE.replace(".", "/") + ".py"
    make = text(folder, path, ast.FunctionDef, "init_ascend_config")
    assert "new_config = AscendConfig(" in make
    assert "def __init__" not in text(folder, path, ast.ClassDef, "AscendConfig")
    assert "ConfigDict(extra='forbid')" in text(folder, "vllm_ascend/config_utils.py", ast.FunctionDef, "config")


def test_a_patch_binds_the_name_after_the_import(folder) -> None:
    """So `wrap_v2` acts when a runner is made."""
    patch = (folder / "vllm_ascend/patch/worker/patch_v2/patch_spec_decode_310.py").read_text()
    assert "ascend_spec_decode.init_speculator = _init_speculator_310p" in patch
    assert "_mr.init_speculator = _init_speculator_310p" in patch


def test_the_speculator_has_what_the_class_reads(folder) -> None:
    for module, name in (("eagle", "Eagle"), ("mtp", "MTP")):
        stock = text(folder, f"{V2}/spec_decode/{module}/speculator.py", ast.ClassDef, f"Ascend{name}Speculator")
        assert f"(AscendAutoRegressiveSpeculator, {name}Speculator)" in stock
        assert "def propose" not in stock
        assert "def capture" not in stock
    own = "AscendAutoRegressiveSpeculator"
    propose = text(folder, AUTOREGRESSIVE, ast.FunctionDef, own, "propose")
    assert parameters(propose)[: len(PROPOSE)] == PROPOSE
    assert {"dummy_run", "mm_inputs", "is_profile"} <= set(parameters(propose))
    assert parameters(text(folder, AUTOREGRESSIVE, ast.FunctionDef, own, "capture")) == ()
    assert parameters(text(folder, AUTOREGRESSIVE, ast.FunctionDef, own, "load_model")) == ("target_model",)
    base = text(folder, f"{GPU}/spec_decode/speculator.py", ast.ClassDef, "DraftModelSpeculator")
    assert {*SPECULATOR, "model", "block_tables", "kv_cache_config"} <= fields(base)
    assert "self.draft_logits: torch.Tensor | None = None" in base  # unless draft_sample_method is probabilistic


def test_the_batch_has_what_the_class_reads(folder) -> None:
    batch = fields(text(folder, f"{GPU}/input_batch.py", ast.ClassDef, "InputBatch"))
    assert {*INPUT_BATCH, *V2_INPUT_BATCH} <= batch
    assert "class AscendInputBatch(InputBatch)" in text(
        folder, f"{V2}/input_batch.py", ast.ClassDef, "AscendInputBatch"
    )


def test_the_hosts_lengths_are_corrected_before_the_pass(folder) -> None:
    """`start_positions` takes them as exact: the runner has waited for the counts of the last round."""
    path = f"{V2}/model_runner.py"
    correct = text(folder, path, ast.FunctionDef, "NPUModelRunner", "_update_seq_lens_cpu")
    waits = correct.index("self.num_computed_tokens_event.synchronize()")
    assert waits < correct.index("self.req_states.num_computed_tokens_cpu[req_index] = self.num_computed_tokens_cpu")
    states = text(folder, f"{V2}/states.py", ast.ClassDef, "AscendRequestState")
    assert "self.num_computed_tokens_cpu: torch.Tensor = torch.from_numpy(self.num_computed_tokens_np)" in states
    prepare = text(folder, path, ast.FunctionDef, "NPUModelRunner", "prepare_inputs")
    read = prepare.index("num_computed_tokens_np = self.req_states.num_computed_tokens_np[idx_mapping_np]")
    assert prepare.index("self._update_seq_lens_cpu(") < read


def test_keys_and_values_are_two_tensors(folder) -> None:
    reshape = text(folder, f"{V2}/attn_utils.py", ast.FunctionDef, "_reshape_kv_cache_v2")
    assert "kv_caches[layer_name] = (k_cache, v_cache)" in reshape
    bind = (folder / "vllm_ascend/patch/worker/patch_bind_kv_cache.py").read_text()
    assert "layer.kv_cache = kv_cache" in bind
