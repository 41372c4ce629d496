"""Each public entry refuses a wrong argument with one line: which it is, what it may be, and what was given."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch
from specgraph_models import eagle_head_from_module, load_drafter, load_target
from specgraph_models.checkpoints import target_shape
from specgraph_models.checkpoints.tokenizer import Tokenizer
from specgraph_models.errors import CheckpointError
from specgraph_models.parallel import join_ranks
from specgraph_run import GeneratorOptions, load_generator, shipped_pair
from specgraph_run.cli.load import check_processes
from specgraph_run.decoder import Request, SamplingBuffers, SpeculativeDecoder, allocate_sampling
from specgraph_run.decoder.layout import join_layout
from torch import Tensor

from specgraph import (
    DraftConfig,
    Drafter,
    DraftTree,
    KVCache,
    ProposeBatch,
    SpecgraphError,
    allocate_caches,
    open_platform,
)
from specgraph.attention import choose_attention
from specgraph.errors import ConfigError, UnknownPlatformError
from specgraph.ops.tensor_forms import check_named
from specgraph.validation import RUNNING, OneCall, one_call

TARGET, DRAFTER = shipped_pair()

LIMITS = {"num_speculative_tokens": 2, "max_model_len": 32}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599", "WORLD_SIZE": "2", "RANK": "0"}
BAD_NUMBERS = [None, "5", [1], 1.5, True, float("nan"), 10**30, -(10**5000), torch.tensor(3)]


def request(**change: object) -> Request:
    return Request(**({"prompt_token_ids": [1, 2], "max_tokens": 2} | change))


def config(**change: object) -> DraftConfig:
    return DraftConfig(**(LIMITS | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: request(prompt_token_ids=[1, True]), r"prompt_token_ids\[1\] must be an integer, got True \(bool\)"),
        (lambda: request(prompt_token_ids=[1.5]), r"prompt_token_ids\[0\] must be an integer, got 1.5 \(float\)"),
        (lambda: request(prompt_token_ids=["a"]), r"must be an integer, got 'a' \(str\)"),
        (lambda: request(prompt_token_ids="ab"), r"must be a list \(each item an integer\), got 'ab' \(str\)"),
        (lambda: request(prompt_token_ids=iter([1])), "must be a list .*, got a list_iterator"),
        (lambda: request(prompt_token_ids=torch.tensor([1])), "must be a list .*, got a Tensor"),
        (lambda: request(prompt_token_ids=range(10**30)), "must have at most 16777216 items"),
        (lambda: request(stop_token_ids=[[1]]), r"stop_token_ids\[0\] must be an integer, got a list"),
        (lambda: request(logit_bias=[1]), r"logit_bias must be a dict \(an integer: a number\), got a list"),
        (lambda: request(logit_bias={"a": 1}), "a key of logit_bias must be an integer, got 'a'"),
        (lambda: request(temperature=10**30), "temperature must be at most 1000000.0"),
        (lambda: request(max_token=1), "Request: got an unexpected keyword argument 'max_token'"),
        (lambda: request(max_token=1), r"'max_token'; did you mean max_tokens by 'max_token'\?$"),
        (lambda: config(max_num_request=1), "did you mean max_num_requests by 'max_num_request'"),
        (lambda: load_generator(num_spec_tokens=1), "did you mean num_speculative_tokens by 'num_spec_tokens'"),
        (lambda: load_drafter(DRAFTER, taget=3), "load_drafter: missing .*; did you mean target by 'taget'"),
        (lambda: Drafter(None, [], attn=1), "'platform'; did you mean attention by 'attn'"),
        (lambda: Request(max_tokens=1), "Request: missing a required .*argument: 'prompt_token_ids'"),
        (lambda: config(fallback="eagre"), r"fallback must be one of 'error', 'eager', got 'eagre' \(str\)"),
        (lambda: config(draft_schedule=[1]), r"draft_schedule must be a dict .* or None, got a list"),
        (lambda: config(num_speculative_tokens=99), "num_speculative_tokens must be at most 63, got 99"),
        (lambda: config(debug=1), "debug must be True or False, got 1"),
        (lambda: DraftTree(num_steps=1.5, top_k=2, num_draft_tokens=3), "num_steps must be an integer, got 1.5"),
        (lambda: GeneratorOptions(block_size=0), "block_size must be at least 1, got 0"),
        (lambda: load_generator(num_blocks=10**30), "num_blocks must be at most 2147483647"),
        (lambda: load_generator(max_num_requests=10**30), "max_num_requests must be at most 65536"),
        (lambda: load_generator(speculate=1), "speculate must be True or False"),
        (lambda: load_generator(platform=3), "platform must be a Platform or a string or None, got 3"),
        (lambda: open_platform(3), "name must be a string or None, got 3"),
        (lambda: load_target(TARGET, device="nowhere"), "no device 'nowhere'"),
        (lambda: load_target(TARGET, dtype=torch.int8), "unknown dtype"),
        (lambda: load_target("\0"), "is not a folder"),
        (lambda: load_drafter(DRAFTER, None), "target must be a LlamaTarget or .*, got None"),
        (lambda: target_shape(3), "target must be a Path or .*, got 3"),
        (lambda: choose_attention("device", None), "platform must be a Platform, got None"),
        (lambda: allocate_sampling(2, -1, torch.device("cpu")), "vocab_size must be at least 1"),
        (lambda: join_layout(torch.device("cpu"), tensor_parallel=0), "tensor_parallel must be at least 1"),
        (lambda: join_ranks("cpu", 1), "device must be a device, got 'cpu'"),
        (lambda: Drafter(None, [], open_platform("cpu"), config()), "head must be a Head, got None"),
        (lambda: SpeculativeDecoder(None, None, open_platform("cpu"), None), "target must be a Target, got None"),
        (lambda: GeneratorOptions(dtype={"a": 1}), "unknown dtype a dict; there are float32, float16, bfloat16"),
        (lambda: load_generator(draft="nowhere", speculate=False), "give both the target's and the drafter's folder"),
        (lambda: load_generator(dtype=3), r"unknown dtype 3 \(int\); there are float32, float16, bfloat16"),
    ],
)
def test_refused(call, message):
    with pytest.raises(SpecgraphError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("value", ["x", "1.5", "-1", "9" * 5000, "²"])
@pytest.mark.parametrize(
    ("variable", "call"),
    [
        ("LOCAL_RANK", lambda: open_platform("cpu")),
        ("WORLD_SIZE", lambda: check_processes(GeneratorOptions())),
        ("WORLD_SIZE", lambda: join_ranks(torch.device("cpu"), 2)),
        ("RANK", lambda: join_ranks(torch.device("cpu"), 2)),
        ("MASTER_PORT", lambda: join_ranks(torch.device("cpu"), 2)),
    ],
)
def test_variables_of_the_environment_that_are_no_numbers(variable, call, value, monkeypatch):
    for name, right in MEETING.items():
        monkeypatch.setenv(name, right)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"the environment variable {variable} is .*: it must be a whole number"):
        call()


def test_an_index_of_a_platform_that_is_no_number(monkeypatch):
    monkeypatch.setenv("SPECGRAPH_PLATFORM", "cpu:" + "9" * 5000)
    with pytest.raises(UnknownPlatformError, match="the part after ':' must be a device index"):
        open_platform()


@pytest.mark.parametrize(
    ("changes", "rank", "message"),
    [
        ({"MASTER_PORT": ""}, -1, "the environment lacks MASTER_PORT, by which processes meet"),
        ({"RANK": ""}, -1, "the environment lacks RANK"),
        ({"RANK": "2"}, -1, "rank 2 of 2 processes; their ranks are 0 to 1"),
        ({}, 5, "rank 5 of 2 processes"),
        ({}, -2, "rank must be at least -1"),
    ],
)
def test_a_rank_that_no_other_one_can_meet(changes, rank, message, monkeypatch):
    """It would wait for the others until the timeout."""
    for name, value in (MEETING | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        join_ranks(torch.device("cpu"), 2, rank=rank)


@pytest.mark.parametrize("name", ["max_tokens", "seed", "temperature", "top_k", "top_p", "repetition_penalty"])
@pytest.mark.parametrize("value", BAD_NUMBERS, ids=lambda value: type(value).__name__)
def test_numbers_of_a_request(name, value):
    if (value is None and name == "seed") or (value == 1.5 and name in ("temperature", "repetition_penalty")):
        return
    with pytest.raises(ConfigError, match=f"{name} must be "):
        request(**{name: value})


def test_what_can_be_meant_is_taken():
    made = request(prompt_token_ids=(np.int64(3), 4), max_tokens=np.int32(4), temperature=np.float32(0.5), top_p=1)
    assert (list(made.prompt_token_ids), made.max_tokens, made.temperature, made.top_p) == ([3, 4], 4, 0.5, 1.0)
    assert {type(each) for each in (*made.prompt_token_ids, made.max_tokens)} == {int}
    assert list(request(prompt_token_ids=range(3)).prompt_token_ids) == [0, 1, 2]
    assert load_target(TARGET, dtype="float16").embed_tokens.dtype == torch.float16


@pytest.fixture(scope="module")
def generator():
    with load_generator(platform="cpu", max_model_len=64) as made:
        yield made


def join(generator, token_id, change=None):
    batch = generator.decoder.drafter.inputs(1)
    batch.join(0, token_id, batch.aux_hidden[0].clone() if change is None else change(batch.aux_hidden[0]))


def prefill(generator, change):
    aux = generator.decoder.drafter.prefill_buffers.aux_hidden[:2]
    generator.decoder.drafter.prefill([1, 2], range(2), [1], change(aux))


def propose(generator, token_id, columns=None):
    of = generator.decoder.drafter.inputs(1)
    tokens = torch.full_like(of.sampled_token_ids, token_id)
    changed = {"sampled_token_ids": tokens, "block_table": of.block_table[:, :columns]}
    generator.decoder.drafter.propose(replace(of, num_sampled=torch.ones_like(of.num_sampled), **changed))


def copy(generator):
    pickle.dumps(generator.decoder)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.text("a", n=10**12), "n must be at most 65536"),
        (lambda g: g.text(3), "prompts must be a string or a list .*, got 3"),
        (lambda g: g.text(["a", None]), r"prompts\[1\] must be a string, got None"),
        (lambda g: g.text("\ud800"), "must be text that UTF-8 can encode"),
        (lambda g: g.text("a", max_tokens="5"), "max_tokens must be an integer, got '5'"),
        (lambda g: g.text("a", seed="5"), "seed must be an integer or None, got '5'"),
        (lambda g: g.text("a", max_tokens=5, beams=2), "'beams' is not supported"),
        (lambda g: g.stream_text("a", stop=[1]), r"stop\[0\] must be a string, got 1"),
        (lambda g: g.stream_text(None), "prompt must be a string or a Request, got None"),
        (lambda g: g.generate([None]), r"requests\[0\] must be a Request, got None"),
        (lambda g: g.add("x"), "request must be a Request, got 'x'"),
        (lambda g: g.cancel("x"), "request_id must be an integer, got 'x'"),
        (lambda g: g.decoder.stream(request()), "requests must be a list .*, got a Request"),
        (lambda g: g.decoder.capture(3), "progress must be a function or None, got 3"),
        (lambda g: g.decoder.drafter.inputs("x"), "num_requests must be an integer, got 'x'"),
        (lambda g: g.decoder.drafter.inputs([1]), "num_requests must be an integer, got a list"),
        (lambda g: g.decoder.drafter.inputs(1, 6.5), "query_len must be an integer, got 6.5"),
        (lambda g: g.decoder.drafter.inputs(1, bound=3), "bound to another drafter"),
        (lambda g: g.decoder.drafter.dispatch(None), "num_requests must be an integer, got None"),
        (lambda g: g.decoder.drafter.propose(None), "propose takes a ProposeBatch, got a NoneType"),
        (lambda g: g.decoder.drafter.prefill([1], range(1), {1: 2}), r"blocks must be a list .*, got a dict"),
        (lambda g: g.decoder.drafter.prefill([1], range(1), [1], at_least="x"), "at_least must be an integer"),
        (lambda g: g.text("a", prompt_token_ids=[1]), "'prompt_token_ids' is not supported"),
        (lambda g: g.decoder.drafter.inputs(1).join(0, torch.zeros(2), None), "join"),
        (lambda g: eagle_head_from_module(g), "the module lacks a name of Llama-shaped drafters: .*'model'"),
        (
            lambda g: SpeculativeDecoder(3, None, g.platform, DraftConfig(**LIMITS)),
            "the target int lacks ",
        ),
        (
            lambda g: Drafter(g.decoder.drafter.head, g.decoder.drafter.caches, g.platform, None),
            "config must be a DraftConfig, got None",
        ),
        (
            lambda g: choose_attention("device", g.platform, g.decoder.drafter.head.attention_layers),
            "choose_attention: give the dtype of the layers too",
        ),
        (lambda g: choose_attention("a\nb", g.platform), r"no attention 'a\\nb' on platform 'cpu'"),
        (lambda g: g.decoder.drafter.inputs(1).join("a", None, None), "row must be an integer, got 'a'"),
        (lambda g: join(g, torch.tensor([3])), r"token_id is \[1\] torch.int64 on cpu: give one integer"),
        (lambda g: g.decoder.drafter.inputs(1).join(0, 1.5, None), "token_id must be an integer or a Tensor, got 1.5"),
        (lambda g: join(g, torch.tensor(3).to_sparse()), r"token_id is \[\] torch.int64 torch.sparse_coo on cpu"),
        (
            lambda g: join(g, torch.tensor(3), Tensor.to_sparse),
            "the hidden state is .* torch.sparse_coo on cpu, expected",
        ),
        (lambda g: prefill(g, Tensor.to_sparse), "aux_hidden of a prefill is .* torch.sparse_coo on cpu, expected"),
        (lambda g: prefill(g, lambda aux: aux.to("meta")), "aux_hidden of a prefill is .* on meta, expected"),
        (
            lambda g: prefill(g, Tensor.long),
            r"aux_hidden of a prefill is .* torch.int64 on cpu, expected \[.*\] floats",
        ),
        (lambda g: prefill(g, Tensor.clone), "prefill: some of the tensors were made inside torch.inference_mode"),
        (lambda g: propose(g, 1), "propose: some of the tensors were made inside torch.inference_mode"),
        (
            torch.inference_mode()(lambda g: propose(g, 10**6)),
            r"out of range \(.*\): DraftConfig\(debug=True\) names it",
        ),
        (torch.inference_mode()(lambda g: propose(g, 1, columns=0)), r"block_table is \[1, 0\], expected \[1, 1\]"),
        (lambda g: load_generator(draft="ngram", num_modules=2, platform="cpu"), "num_modules 2: ngram has none"),
        (copy, "a SpeculativeDecoder holds graphs"),
        (lambda g: g.decoder.drafter.prefill([1, 2], range(2), [1, 2**31]), "into block 2147483648"),
        (lambda g: g.decoder.drafter.prefill([1, 2], range(10**30), [1]), "give consecutive positions of its 2 tokens"),
    ],
)
def test_a_call_of_a_generator(generator, call, message):
    with pytest.raises(SpecgraphError, match=message) as raised:
        call(generator)
    assert "\n" not in str(raised.value)
    assert len(generator.text("import", max_tokens=2)) == 1, "the generator works on"


def test_four_threads_in_one_drafter(generator):
    """One propose runs, the others are refused; the drafts are those of one thread."""
    drafter = generator.decoder.drafter
    batch = drafter.inputs(1)
    with torch.inference_mode():
        batch.num_sampled.fill_(1)
        wanted = drafter.propose(batch).token_ids
    outcomes: list[object] = []

    def run() -> None:
        for _ in range(50):
            try:
                with torch.inference_mode():
                    outcomes.append(torch.equal(drafter.propose(batch).token_ids, wanted))
            except Exception as error:
                outcomes.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = "propose: another call runs, in another thread or further up in this one: make one call at a time"
    assert set(outcomes) <= {True, refused}
    assert True in outcomes
    with torch.inference_mode():
        assert torch.equal(drafter.propose(batch).token_ids, wanted)


def test_a_tokenizer_without_a_token_for_unknown_words(generator):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match="can't encode it: WordLevel error: Missing \\[UNK\\]"):
        replace(generator, tokenizer=Tokenizer(words, generator.folder)).text("b")


def test_a_text_generator_of_other_parts(generator):
    for part, wanted in {"decoder": "a SpeculativeDecoder", "tokenizer": "a Tokenizer", "folder": "a Path"}.items():
        with pytest.raises(ConfigError, match=f"{part} must be {wanted}, got 2.0"):
            replace(generator, **{part: 2.0})


class Alone(OneCall):
    """It runs one function at a time."""

    @one_call
    def run(self, inside: Callable[[], object]) -> object:
        return inside()


def in_a_thread(call: Callable[[], object]) -> list[object]:
    """Return what a call gives, or its error, in another thread."""
    given: list[object] = []

    def run() -> None:
        try:
            given.append(call())
        except SpecgraphError as error:
            given.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return given


def test_a_call_that_an_interrupt_ended_before_it_could_say_so_refuses_nobody():
    """Its mark is left, as by Ctrl-C in a `finally`. A call that runs has the mark too, and a frame on a stack."""
    alone, refused = Alone(), "run: another call runs"
    alone.refusal = RUNNING
    assert alone.run(lambda: 5) == 5
    for left in (False, True):
        alone.refusal = RUNNING if left else ""
        inner = alone.run(lambda: in_a_thread(lambda: alone.run(lambda: 6)))
        assert len(inner) == 1
        assert str(inner[0]).startswith(refused)
        with pytest.raises(ConfigError, match=refused):
            alone.run(lambda: alone.run(lambda: 7))
        assert in_a_thread(lambda: alone.run(lambda: 8)) == [8]
    alone.refusal = RUNNING
    alone.refuse_calls("it is closed")
    with pytest.raises(ConfigError, match="run: it is closed"):
        alone.run(lambda: 9)


def test_a_config_keeps_its_own_copy():
    sizes, times = [16], {1: {2: 5.0}}
    made, options = config(prefill_sizes=sizes), GeneratorOptions(round_times=times)
    sizes[:], times[1] = ["x"], {2: "x"}
    assert list(made.prefill_sizes) == [16]
    assert options.round_times == {1: {2: 5.0}}


def test_a_propose_refuses_another_type_of_copy():
    drafter = load_generator(max_model_len=64, num_speculative_tokens=2).decoder.drafter
    with pytest.raises(ConfigError, match="copy must be True or False, got a Tensor"):
        drafter.propose(drafter.inputs(1), copy=torch.ones(2))


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def round_with(name: str = "") -> ProposeBatch:
    tensors = {
        "sampled_token_ids": torch.ones(1, 3).long(), "num_sampled": torch.ones(1).int(),
        "start_positions": torch.ones(1).long(), "aux_hidden": torch.ones(3, HEAD.aux_size, dtype=HEAD.dtype),
        "block_table": torch.ones(1, 2).int(),
    }  # fmt: skip
    if name:
        freed(tensors[name])
    return ProposeBatch(**tensors)


HEAD = load_drafter(DRAFTER, load_target(TARGET))


@pytest.mark.parametrize("call", ["propose", "bind", "a bound propose", "prefill"])
@pytest.mark.parametrize("name", ["start_positions", "aux_hidden"])
def test_a_tensor_whose_storage_is_freed(call, name):
    platform = open_platform("cpu")
    caches = allocate_caches(HEAD.attention_layers, 4, 16, HEAD.dtype, platform.device)
    drafter = Drafter(HEAD, caches, platform, config(decode="eager", prefill_sizes=[8]))
    with pytest.raises(SpecgraphError, match=r"freed|moved|address"):  # noqa: PT012
        if call == "prefill":
            drafter.prefill([1, 2, 3], range(3), [1], round_with("aux_hidden").aux_hidden)
        elif call == "a bound propose":
            bound = drafter.bind(given := round_with())
            freed(getattr(given, name))
            drafter.inputs(1, bound=bound)
        else:
            getattr(drafter, call)(round_with(name))


def test_a_view_of_a_storage_that_is_freed():
    """Its own address is not 0: it begins behind the first element."""
    platform = open_platform("cpu")
    caches = allocate_caches(HEAD.attention_layers, 4, 16, HEAD.dtype, platform.device)
    drafter = Drafter(HEAD, caches, platform, config(decode="eager", prefill_sizes=[8]))
    view = freed(torch.ones(2, 2).int()[1:])
    with pytest.raises(ConfigError, match="the storage of block_table is freed"):
        drafter.propose(replace(round_with(), block_table=view))


def test_memory_that_is_freed():
    platform, buffers = open_platform("cpu"), allocate_sampling(1, 9, torch.device("cpu"))
    cache = allocate_caches(HEAD.attention_layers, 4, 16, HEAD.dtype, platform.device)[0]
    with pytest.raises(ConfigError, match=r"the drafter's key cache is .* with its storage freed"):
        Drafter(HEAD, [KVCache(freed(cache.key), cache.value)], platform, config())
    with pytest.raises(ConfigError, match=r"SamplingBuffers: top_p is .* with its storage freed"):
        SamplingBuffers(**buffers._asdict() | {"top_p": freed(buffers.top_p)})
    with pytest.raises(ConfigError, match=r"a\(\)\['b'\] is .* with its storage freed"):
        check_named("a()", {"b": freed(torch.ones(3))})
