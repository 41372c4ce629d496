"""Updates are exact or refused before anything is rewritten."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from specgraph.attention import HostLengths, TaskKey
from specgraph.capture import UpdatePlan
from specgraph.errors import UpdateError


@dataclass
class Journal:
    """A platform's task update, writing down what happens."""

    entries: list[Any] = field(default_factory=list)

    @contextmanager
    def batch_task_updates(self):
        self.entries.append("begin")
        yield
        self.entries.append("end")

    @contextmanager
    def task_update(self, group):
        self.entries.append(("open", group))
        yield
        self.entries.append(("close", group))


KEYS = [TaskKey(step, layer) for step in (0, 1) for layer in (0, 1)]


def lengths(*seq_lens: int) -> HostLengths:
    return HostLengths([1] * len(seq_lens), list(seq_lens))


def plan_of(keys=KEYS, num_requests=2, room=1000):
    journal = Journal()
    plan = UpdatePlan(journal, num_requests)

    def prepare(now, key):
        if max(now.seq_lens) > room:
            raise UpdateError(f"{key} holds {room} tokens")
        return lambda: journal.entries.append((key, now))

    for key in keys:
        plan.add(key, f"group of {key}", partial(prepare, key=key))
    return plan, journal


def test_every_task_is_rewritten_once_in_its_own_group_all_in_one_batch():
    plan, journal = plan_of()
    values = {1: lengths(11, 0), 0: lengths(10, 0)}
    plan.apply(values)
    wanted = ["begin"]
    for key in KEYS:
        wanted += [("open", f"group of {key}"), (key, values[key.step]), ("close", f"group of {key}")]
    assert journal.entries == [*wanted, "end"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.pop(1), r"given for steps \[0\], and the graph holds steps \[0, 1\]"),
        (lambda v: v.clear(), r"given for steps \[\]"),
        (lambda v: v.update({2: lengths(1, 1)}), r"given for steps \[0, 1, 2\]"),
        (lambda v: v.update({"1": v.pop(1)}), "steps .0, '1'."),
        (lambda v: v.update({1: lengths(1, 1, 1)}), "seq_lens|query_lens has 3 entries, .* 2 requests"),
        (lambda v: v.update({1: lengths(1)}), "has 1 entries"),
        (lambda v: v.update({1: HostLengths([1, 1], [4])}), "seq_lens has 1 entries"),
        (lambda v: v.update({1: HostLengths([1], [4, 4])}), "query_lens has 1 entries"),
        (lambda v: v.update({1: lengths(4, -5)}), "negative"),
        (lambda v: v.update({1: HostLengths([-5, 1], [4, 4])}), "query_lens has a negative"),
    ],
)
def test_anything_but_an_exact_match_rewrites_nothing(change, says):
    plan, journal = plan_of()
    values = {0: lengths(4, 5), 1: lengths(4, 5)}
    change(values)
    with pytest.raises(UpdateError, match=says):
        plan.apply(values)
    assert journal.entries == []


def test_capturing_a_key_twice_is_an_error():
    plan, _ = plan_of()
    with pytest.raises(UpdateError, match=r"\(step 1, layer 1, attention\) was captured twice"):
        plan.add(TaskKey(1, 1), "another group", lambda now: lambda: None)


def test_lengths_that_an_op_refuses_begin_no_update():
    plan, journal = plan_of(room=10)
    values = {0: lengths(4, 5), 1: lengths(4, 11)}
    with pytest.raises(UpdateError, match="holds 10 tokens"):
        plan.apply(values)
    assert journal.entries == []
    with pytest.raises(UpdateError, match="holds 10 tokens"):
        plan.apply_in_order(values)
    assert {entry[1] for entry in journal.entries if entry[0] == "open"} == {f"group of {key}" for key in KEYS[:2]}


@pytest.mark.parametrize("steps", [(0,), (0, 1, 2), (), (1, 2)])
def test_a_missing_or_unknown_step_is_refused(steps):
    plan, journal = plan_of()
    given_lengths = {step: lengths(1, 1) for step in steps}
    for use in (
        lambda: plan.apply(given_lengths),
        lambda: plan.check_steps(given_lengths),
        lambda: plan.apply_in_order(given_lengths),
    ):
        with pytest.raises(UpdateError):
            use()
    assert journal.entries == []


def test_lengths_in_order_are_asked_for_when_their_step_comes():
    plan, journal = plan_of(sorted(KEYS, key=lambda key: key.layer))  # captured layer by layer

    class Late(dict):
        def __getitem__(self, step):
            journal.entries.append(f"asked for step {step}")
            return super().__getitem__(step)

    plan.apply_in_order(Late({0: lengths(1, 2), 1: lengths(3, 4)}))
    seen = [e if isinstance(e, str) else e[0] for e in journal.entries if isinstance(e, str) or e[0] in KEYS]
    assert seen == ["asked for step 0", KEYS[0], KEYS[1], "asked for step 1", KEYS[2], KEYS[3]]
