"""The commands as a user runs them: output, JSON keys, and one clear message for each kind of bad input."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from command import in_a_process, specgraph
from specgraph_run import GeneratorOptions, load_generator, shipped_pair
from specgraph_run.cli import app
from specgraph_run.cli.explain import explain
from specgraph_run.cli.generate import generate
from specgraph_run.cli.options import RANKS
from specgraph_run.options import DRAFT_OPTIONS, DrafterShape, RandomTarget
from specgraph_run.tools.rounds import TARGETS
from specgraph_run.tools.shapes import SHAPES

from specgraph import __version__, open_platform
from specgraph.config import DraftOptions
from specgraph.errors import ConfigError, PlatformError


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")


@pytest.mark.parametrize("lowering", ["auto", "eager", "step"])
def test_generate(lowering):
    quick, imports = (), {"PYTHONPROFILEIMPORTTIME": "1"}
    if lowering != "auto":
        quick, imports = ("--no-compare",), {}
    run = (in_a_process if lowering == "auto" else specgraph)(
        "generate",
        "--prompt",
        "def main():\n",
        "--decode",
        lowering,
        "-k",
        3,
        "--max-tokens",
        24,
        "--json",
        "-",
        *quick,
        **imports,
    )
    assert run.returncode == 0, run.stderr
    assert "torch._dynamo" not in run.stderr, "a capture imports torch's compiler, which takes 3 s"
    assert not imports or "torch.utils" in run.stderr
    report = json.loads(run.stdout)
    keys = (
        "text tokens mean_acceptance_length acceptance_per_position rounds graph_launches_per_propose lowering platform"
    )
    assert set(keys.split()) <= report.keys()
    assert len(report["tokens"]) == 24
    assert len(report["acceptance_per_position"]) == 3
    assert report["graph_launches_per_propose"] == {"auto": 1, "step": 3, "eager": 0}[lowering]
    assert report["lowering"] == ("merged" if lowering == "auto" else lowering)
    assert "mean acceptance length" in run.stderr


def test_launches_per_round_are_those_of_the_text():
    """`-k auto` has run rounds before, to time them. A round is two launches, and a prompt has a propose too."""
    run = specgraph(
        "generate", "-k", "auto", "--k-candidates", "1,2", "--max-tokens", 16, "--no-compare", "--json", "-"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["graph_launches_per_round"] < 3


def test_host_attention_and_sampling_repeat_by_seed():
    command = ("generate", "--attention", "host", "--temperature", 0.8, "--seed", 7, "--max-tokens", 16, "--json", "-")
    command += ("--no-compare", "--prefill", "eager")
    one, two = specgraph(*command), specgraph(*command)
    assert json.loads(one.stdout)["tokens"] == json.loads(two.stdout)["tokens"]
    other = specgraph(*command, "--seed", 8)
    assert json.loads(one.stdout)["tokens"] != json.loads(other.stdout)["tokens"]


def test_platforms(tmp_path):
    run = specgraph("platforms", "--json", tmp_path / "platforms.json")
    assert run.returncode == 0, run.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "platforms.json").read_text())}
    assert rows["cpu"]["available"]
    for row in rows.values():
        assert set(row) >= {"name", "distribution", "version", "available", "reason", "capabilities"}
        assert row["available"] or row["reason"]


def test_platforms_says_which_one_is_selected_and_why(monkeypatch):
    def selected():
        run = specgraph("platforms", "--json", "-")
        return {row["name"]: row["selected"] for row in json.loads(run.stdout) if row["selected"]}

    assert selected() == {"cpu": "SPECGRAPH_PLATFORM=cpu"}
    assert "* cpu" in specgraph("platforms").stdout
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "abacus")
    assert selected() == {}
    assert "no platform of this name is installed" in " ".join(specgraph("platforms").stdout.split())
    monkeypatch.delenv("SPECGRAPH_PLATFORM")
    assert open_platform().info.name in selected()
    monkeypatch.setattr("specgraph.device.select_platform", Mock(side_effect=PlatformError("several are available")))
    assert "none is selected: several are available" in specgraph("platforms").stdout


@pytest.mark.parametrize(
    ("shell", "words", "wanted"),
    [
        ("bash", "specgraph expl", "explain"),
        ("zsh", "specgraph generate --speculative-num-st", "-num-steps"),
        ("fish", "specgraph generate --speculative-num-st", "-num-steps"),
    ],
)
def test_shells_complete_commands_and_options(shell, words, wanted):
    complete = {"_SPECGRAPH_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words}
    complete |= {"COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "import sys; sys.argv = ['specgraph']; from specgraph_run.cli import app; app(prog_name='specgraph')"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **complete}, check=False
    )
    assert wanted in run.stdout, (run.stdout, run.stderr)


def test_bench():
    options = ("--requests", 2, "-k", 2, "--repeats", 2, "--sampled", "--json", "-")
    run = specgraph("bench", *options)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert {"platform", "device", "versions", "rows"} <= report.keys()
    assert [row["lowering"] for row in report["rows"]] == ["eager", "step", "merged"]
    for row in report["rows"]:
        assert {"shape", "requests", "k", "context", "device_us", "host_us", "launches"} <= row.keys()
    assert [row["launches"] for row in report["rows"]] == [0, 2, 1]


@pytest.fixture
def pair(tmp_path):
    folders = {}
    for name, folder in zip(("target", "draft"), shipped_pair(), strict=True):
        folders[name] = Path(shutil.copytree(folder, tmp_path / name))
    return folders


def refused(run, *words):
    """One message, no traceback, status 1 or, for an option that is wrong, 2."""
    assert run.returncode in (1, 2), (run.stdout, run.stderr)
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith("specgraph: ")
    for word in words:
        assert word in run.stderr, run.stderr


def test_conformance_from_a_checkout_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", Mock(side_effect=PackageNotFoundError))
    run = specgraph("conformance", "cpu")
    assert run.returncode == 1
    message = "specgraph: the conformance suite is here but not installed: pip install --no-deps -e ./conformance"
    assert run.stderr.strip() == message


def test_unknown_and_unavailable_platforms():
    refused(specgraph("generate", "--platform", "abacus"), "abacus", "cpu")
    refused(specgraph("generate", SPECGRAPH_PLATFORM="cpu:7"), "1 device", "7")


def test_bad_numbers():
    refused(specgraph("generate", "-k", 0), "num_speculative_tokens", "0")
    refused(specgraph("generate", "--max-tokens", 0), "max_tokens")
    refused(specgraph("bench", "--requests", "many"), "--requests", "many")


def test_prompt_that_does_not_fit():
    refused(specgraph("generate", "--max-model-len", 16, "--prompt", "x = 1\n" * 40), "prompt", "max_model_len 16")


def test_truncated_weights(pair):
    weights = pair["draft"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    refused(specgraph("generate", "--target", pair["target"], "--draft", pair["draft"]), "model.safetensors")


def test_missing_weights(pair):
    (pair["target"] / "model.safetensors").unlink()
    refused(specgraph("generate", "--target", pair["target"], "--draft", pair["draft"]), "target")


def test_draft_that_does_not_fit(pair):
    config = pair["draft"] / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"target_hidden_size": 64}))
    refused(specgraph("generate", "--target", pair["target"], "--draft", pair["draft"]), "64", "192")


def test_one_folder_without_the_other(pair):
    """A target alone decodes without drafts; a drafter alone is refused, but n-grams draft for the shipped target."""
    by_ngrams = specgraph("generate", "--draft", "ngram", "--max-tokens", 5, "--no-compare", "--decode", "eager")
    assert by_ngrams.returncode == 0, by_ngrams.stderr
    alone = specgraph("generate", "--target", pair["target"], "--max-tokens", 5, "--decode", "eager")
    assert alone.returncode == 0, alone.stderr
    assert "decoding without drafts" in " ".join((alone.stdout + alone.stderr).split())
    refused(specgraph("generate", "--draft", pair["draft"]), "--target")


def test_options_of_the_engine_are_declared_once():
    """`generate` and `explain` offer the fields of GeneratorOptions, `load_generator` takes them by name."""
    assert DRAFT_OPTIONS.keys() == {field.name for field in fields(DraftOptions)}
    names = {field.name for field in fields(GeneratorOptions)}
    of_prompts = {"sampled", "sampling_parameters", "logprobs", "max_num_requests"}
    for command, without in ((generate, of_prompts), (explain, {"check_inputs", "debug", *RANKS})):
        assert names - without - {"synthetic_acceptance"} <= set(inspect.signature(command).parameters)
    with pytest.raises(ConfigError, match="num_speculative_token'"):
        load_generator(num_speculative_token=3)


def test_choices_in_any_case_and_values_that_do_not_parse():
    run = specgraph("explain", "--decode", "EAGER", "--json", "-")
    assert json.loads(run.stdout)["prefill"] == "eager"
    refused(specgraph("explain", "--prefill-sizes", "8,x"), "--prefill-sizes 8,x", "whole numbers")
    refused(specgraph("generate", "--synthetic-acceptance", "often"), "--synthetic-acceptance often", "0.8,0.6,0.5")
    refused(specgraph("generate", "--dtype", "int8"), "int8", "float32, float16, bfloat16")


def test_version_and_help_do_not_import_torch():
    asked = [["--version"], ["--help"], ["generate", "--help"], ["bench", "--help"]]
    code = f"import sys; from specgraph_run.cli import app; [app(each, standalone_mode=False) for each in {asked}]"
    for command in (["-c", f"{code}; print('torch' in sys.modules)"], ["-m", "specgraph_run", "--version"]):
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        assert run.stdout.startswith(f"specgraph {__version__}\n")
        assert not run.stdout.endswith("True\n")


def test_env_names_what_a_bug_report_needs():
    report = json.loads(specgraph("env", "--json", "-").stdout)
    assert report["specgraph"]["specgraph-core"] == __version__
    assert report["packages"]["torch"] == torch.__version__
    assert report["backends"]["cpu"] == "available"
    assert report["variables"]["SPECGRAPH_PLATFORM"] == "cpu"
    assert report["caches"]["compiled kernels"].endswith("cache")
    shown = specgraph("env").stdout
    assert f"torch: {torch.__version__}" in shown
    assert report["cpu"]["name"] in shown


@pytest.mark.parametrize("command", ["generate", "explain", "bench", "platforms", "env"])
@pytest.mark.parametrize(("to", "reason"), [("/no/such/folder/x", "no folder"), ("", "name of a file"), (".", "file")])
def test_where_to_write_is_checked_before_the_work(command, to, reason, monkeypatch):
    monkeypatch.setattr("specgraph.device.open_platform", lambda name: pytest.fail("the work has begun"))
    refused(specgraph(command, "--json", to), "--json", reason)


def test_what_can_not_be_measured_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("specgraph.device.open_platform", lambda name: pytest.fail("the work has begun"))
    for arguments in (("--repeats", 0), ("--context", 0)):
        assert specgraph("bench", *arguments).returncode == 2
    refused(specgraph("bench", "--requests", 0), "--requests 0")


TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "4")
REFUSED_AT_ONCE = """
import sys
from specgraph_run.cli import main
for arguments in %r:
    sys.argv = ["specgraph", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code, "torch" in sys.modules)
"""


def test_wrong_options_are_refused_before_torch_is_imported():
    """Each is one line that names the option, and exit status 2."""
    wrong = {
        "num_speculative_tokens": ("generate", "-k", "0"),
        "at most 63, got 99": ("generate", "-k", "99"),
        "temperature": ("generate", "--temperature", "-1"),
        "max_tokens": ("generate", "--max-tokens", "0"),
        "top_p": ("generate", "--top-p", "1.5"),
        "block_size": ("chat", "--block-size", "0"),
        "/no/such/target": ("generate", "--target", "/no/such/target"),
        "/no/such/draft": ("chat", "--draft", "/no/such/draft"),
        "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B": ("generate", "--target", "Qwen/Qwen3-8B"),
        "give --model smollm2": ("chat",),
        "/no/such/file": ("generate", "--prompts", "/no/such/file"),
        "n 2": ("generate", "-n", "2"),
        "--json": ("bench", "--json", "/no/such/folder/x"),
        "int8": ("generate", "--dtype", "int8"),
        "'fast'": ("bench", "--lowerings", "eager,fast"),
        "decode 'round' is gone": ("generate", "--decode", "round"),
        "no faster than a propose in one; give 'merged'": ("bench", "--lowerings", "eager,round"),
        "Bad": ("new-backend", "Bad"),
        "no group": ("conformance", "cpu", "--group", "none"),
        "no profile": ("conformance", "cpu", "--profile", "none"),
        "no case 'capture.noop'": ("conformance", "cpu", "--case", "capture.noop"),
        "against none; hazards are": ("conformance", "cpu", "--hazard", "none"),
        "-k 'a and'": ("conformance", "cpu", "-k", "a and"),
        "/no/such/xfails": ("conformance", "cpu", "--xfails", "/no/such/xfails"),
        "MODULE:FUNCTION": ("conformance", "cpu", "--attention", "mine"),
        "unknown platform 'typo'; installed are": ("conformance", "typo"),
        "must be a device index": ("bench", "--platform", "cpu:x"),
        "give -k 3": ("bench", *TREE, "-k", "5"),
        "--acceptance must be at most 1": ("bench", "--acceptance", "2"),
        "missing: speculative_eagle_topk": ("generate", "--speculative-num-steps", "3"),
        "one path": ("explain", *TREE[:-1], "2"),
        "choose a divisor": ("generate", "--decode-context-parallel", "2"),
        "1 process was started": ("chat", "--tensor-parallel", "2"),
        "verified_drafts 'auto' is gone": ("generate", "--verified-drafts", "auto"),
        "draft_tensor_parallel 2": ("generate", "--draft-tensor-parallel", "2"),
        "longest down to the shortest": ("generate", "--draft", "ngram", "--prompt-lookup-min", "9"),
        "stop string": ("chat", "--stop", ""),
        "config.json": ("audit", "cli", "--target", "."),
        "my_drafter:make_head": ("audit", "drafter:"),
        "installed already": ("new-backend", "cpu"),
    }
    script = REFUSED_AT_ONCE % [list(arguments) for arguments in wrong.values()]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2 False"] * len(wrong), done.stderr
    for name, line in zip(wrong, done.stderr.splitlines(), strict=True):
        assert line.startswith("specgraph: "), line
        assert name in line
    wrong_values = ("bench", "--shape", "typo"), ("bench", "--target", "typo"), ("audit", "--shape", "typo")
    script = REFUSED_AT_ONCE % [list(arguments) for arguments in wrong_values]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2 False"] * len(wrong_values), done.stderr
    assert done.stderr.count("'typo' is not one of") == len(wrong_values)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specgraph_run", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "specgraph: the output: No space left on device\n")


def test_no_help_imports_torch():
    """Help is shown in a fraction of the time that torch takes to import."""
    names = [each.name or each.callback.__name__.replace("_", "-") for each in app.registered_commands]
    assert {"generate", "conformance", "new-backend"} <= set(names)
    asked = [["--help"], ["--version"], *([name, "--help"] for name in names)]
    done = subprocess.run([sys.executable, "-c", REFUSED_AT_ONCE % asked], capture_output=True, text=True, check=True)
    ends = [line for line in done.stdout.splitlines() if line.startswith("0 ")]
    assert ends == ["0 False"] * len(asked), done.stderr


def install_part(folder: Path, name: str, source: str) -> None:
    """Install a distribution with one subcommand in a folder of PYTHONPATH."""
    described = folder / f"part_{name}-1.0.dist-info"
    described.mkdir()
    about = f"Metadata-Version: 2.1\nName: part-{name}\nVersion: 1.0\nSummary: Parts {name}.\n"
    (described / "METADATA").write_text(about)
    (described / "entry_points.txt").write_text(f"[specgraph.commands]\n{name} = part_{name}:command\n")
    (folder / f"part_{name}.py").write_text(source)


def with_parts(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    line = [sys.executable, "-m", "specgraph_run", *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment, check=False)


def test_a_broken_part_breaks_its_own_command_alone(tmp_path):
    broken = {
        "lacking": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        "empty": ("command = None", "Error: "),
        "untyped": ("def command(x: 'NoSuchName'): ...", "NameError: "),
    }
    for name, (source, _) in broken.items():
        install_part(tmp_path, name, source)
    listed = with_parts(tmp_path, "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert all(f"Parts {name}." in listed.stdout for name in broken)
    for name, (_, reason) in broken.items():
        asked = with_parts(tmp_path, name, "--help")
        refused(asked, f"the command '{name}' comes with part-{name}", reason, f"pip uninstall part-{name}")
        assert asked.stderr.count("\n") == 1


def test_a_part_is_imported_for_its_own_command_alone(tmp_path):
    source = "import sys\nsys.stderr.write('imported')\n\ndef command(times: int = 1):\n    print('word ' * times)\n"
    install_part(tmp_path, "word", source)
    assert "imported" not in with_parts(tmp_path, "--help").stderr
    said = with_parts(tmp_path, "word", "--times", "2")
    assert (said.returncode, said.stdout.split(), said.stderr) == (0, ["word", "word"], "imported")


def test_names_that_commands_offer_are_those_of_the_tools():
    assert get_args(DrafterShape) == tuple(SHAPES)
    assert get_args(RandomTarget) == tuple(TARGETS)


def test_a_flag_that_is_unknown_and_help():
    assert specgraph("generate", "--nope").returncode == 2
    assert specgraph("generate", "-h").stdout == specgraph("generate", "--help").stdout != ""


def test_a_full_disk_is_one_message_after_the_work():
    refused(specgraph("platforms", "--json", "/dev/full"), "/dev/full", "No space left")


def test_ctrl_c_in_bench_shows_the_figures_so_far(monkeypatch):
    def rounds(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specgraph_run.tools.rounds.bench_rounds", rounds)
    quick = ("--requests", 1, "-k", 2, "--repeats", 1, "--context", 20, "--lowerings", "merged")
    run = specgraph("bench", *quick, "--target", "tiny-python", "--json", "-")
    assert run.returncode == 130
    assert "Traceback" not in run.stderr
    assert "figures so far" in run.stderr
    report = json.loads(run.stdout)
    assert [row["lowering"] for row in report["rows"]] == ["merged"]
    assert report["interrupted"]
