"""vLLM 0.23.0 with vllm-ascend 0.23.0, unmodified, drafts through the plugin on the simulated Ascend runtime."""

from __future__ import annotations

import pytest

K = 3


def differing(rounds: list[dict]) -> list[dict]:
    return [each for each in rounds if each["device"] != each["cpu"]]


def test_tokens_are_those_without_drafts_and_drafts_those_of_the_cpu_platform(served) -> None:
    found, plain = served("greedy"), served("plain")
    assert found["lowering"].startswith("merged")
    assert found["attention"] == "fia"
    assert found["tokens"] == plain["tokens"]
    assert len(found["rounds"]) > 40
    assert differing(found["rounds"]) == []
    counts = [count for each in found["rounds"] for count in each["sampled"]]
    assert {0, 1, 2, 3, 4} <= set(counts)  # prompts that go on, and every number of accepted drafts
    assert found["violations"] == plain["violations"] == []


@pytest.mark.parametrize(("way", "layers"), [("greedy", 1), ("eagle", 2), ("mtp", 1)])
def test_a_propose_is_one_launch_and_an_update_per_op_and_draft_step(served, way, layers) -> None:
    """The host waits for nothing and copies nothing. The runtime counts, with all limits on."""
    found = served(way)
    decode = [each for each in found["specgraph proposes"] if each["decode"]]
    assert decode
    for each in decode:
        assert each["by"] == "specgraph"
        assert (each["launches"], each["updates"]) == (1, K * layers)
        assert not {"device waits", "stream waits", "event waits", "copies to the host"} & each.keys()


@pytest.mark.parametrize("way", ["greedy", "eagle", "mtp"])
def test_stock_in_the_same_engine(served, way) -> None:
    """vllm-ascend's own drafts of the same requests: the same waits and copies per propose, and more operators.

    Proposes are as many, or differ by a few: at position 0 vLLM's MiMo embeds no token, and specgraph does.
    """
    found = served(way)
    ours, stock = found["specgraph whole"], found["stock whole"]
    assert found["specgraph tokens"] == found["stock tokens"]
    for name in ("device waits", "stream waits", "event waits", "copies to the host"):
        per_propose = ours.get(name, 0) / len(found["specgraph proposes"])
        assert per_propose <= stock.get(name, 0) / len(found["stock proposes"])
    assert ours["operators"] < stock["operators"]


def test_requests_that_arrive_at_random_times_under_random_schedules(served) -> None:
    found, plain = served("greedy"), served("plain")["tokens"]
    assert len(found["schedules"]) == 20
    for each in found["schedules"]:
        pairs = zip(each["prompts"], each["tokens"], strict=True)
        assert all(tokens == plain[i][: len(tokens)] for i, tokens in pairs)
        assert each["differing"] == 0
    by = [who for each in found["schedules"] for who in each["decode"]]
    assert by.count("specgraph") >= 0.95 * len(by)


def test_faults_change_drafts_or_are_errors_that_name_them(served) -> None:
    found = served("faults")
    for name in ("none", "none again", "sampled"):
        assert (found[name]["error"], found[name]["differing"]) == ("", 0)
    assert found["sampled"]["tokens"] != found["none"]["tokens"]
    for name in ("a length that is 3 too short", "swapped ops of draft steps 1 and 2"):
        assert found[name]["error"] == ""
        assert found[name]["differing"] > 0
    assert found["violations before"] == []
    assert "507046" in found["a skipped update"]["error"]  # a timeout of the wait for the stream
    assert "value wait'; its event or value is never recorded" in "".join(found["violations"])


@pytest.mark.parametrize("way", ["asynchronous", "eagle", "mtp", "vocabulary"])
def test_asynchronous_scheduling_and_other_drafters(served, way) -> None:
    """The target of the MTP module has the weights of the other target, in another class of vLLM."""
    found = served(way)
    assert found["tokens"] == served("plain")["tokens"]
    assert found["violations"] == []
    assert found["differing"] == 0
    assert found["counts"] == {"specgraph": found["proposes"]}


def test_swapped_layers_change_drafts(served) -> None:
    found = served("eagle")["swapped layers"]
    assert found["differing"] > 0
    assert found["tokens"] == served("plain")["tokens"][: len(found["tokens"])]  # drafts never change tokens


def test_an_mtp_module_drafts_tokens_that_are_accepted_and_that_are_not(served) -> None:
    assert served("mtp")["sampled"] == [0, 1, 2, 3, 4]
    assert set(served("vocabulary")["drafted"]) <= set(range(2, 66))  # those of the file alone


def test_larger_batches_than_the_captured_ones_are_vllm_ascends(served) -> None:
    """The mirror has no keys of these rounds, so its drafts are not compared."""
    found = served("few")
    assert found["tokens"] == served("plain")["tokens"]
    assert found["violations"] == []
    assert found["counts"].keys() == {"specgraph", "more requests than the largest captured size"}
