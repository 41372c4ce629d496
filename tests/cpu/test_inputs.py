"""A graph's inputs must stay where they were: a change is an error that names op and tensor."""

from __future__ import annotations

import pytest
import torch

from specgraph.errors import StaleInputError


@pytest.fixture
def captured(platform):
    box = {"x": torch.ones(4, 3), "unused": torch.ones(2)}
    graph = platform.graph()
    with graph.capture():
        box["y"] = box["x"][1:].mul(2)
    graph.replay()
    return graph, box


def freed(box):
    del box["x"]


def rebound_to_a_new_tensor(box):
    box["x"] = torch.ones(4, 3)


def rebound_data(box):
    box["x"].data = torch.zeros(4, 3)


def rebound_by_set(box):
    box["x"].set_(torch.zeros(4, 3))


def grown(box):
    box["x"].resize_(400, 3)


def shrunk(box):
    box["x"].resize_(2, 3)


def storage_dropped(box):
    box["x"].untyped_storage().resize_(0)


CHANGES = {
    freed: "freed",
    rebound_to_a_new_tensor: "freed",
    rebound_data: "freed|rebound",
    rebound_by_set: "freed|rebound",
    grown: "moved or resized",
    shrunk: "resized",
    storage_dropped: "moved or resized",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_stale_input(captured, change):
    graph, box = captured
    change(box)
    with pytest.raises(StaleInputError, match=CHANGES[change]) as raised:
        graph.replay()
    message = str(raised.value)
    assert "aten.slice" in message or "aten.mul" in message
    assert "[4, 3]" in message
    assert "float32" in message
    assert "test_inputs.py" in message


def test_rebound_while_another_reference_holds_the_old_memory(captured):
    graph, box = captured
    view = box["x"].view(12)
    box["x"].data = torch.zeros(4, 3)
    with pytest.raises(StaleInputError, match="rebound"):
        graph.replay()
    del view


def test_in_place_changes_are_fine(captured):
    graph, box = captured
    box["x"].fill_(7)
    box["x"].copy_(torch.full((4, 3), 8.0))
    box["unused"] = None
    graph.replay()
    assert (box["y"] == 16).all()


def test_a_view_may_die_while_its_storage_lives(platform):
    base = torch.ones(12)
    view = base.view(3, 4)[1]
    graph = platform.graph()
    with graph.capture():
        y = view + 1
    graph.replay()
    del view
    base.fill_(4)
    graph.replay()
    graph.replay()
    assert y.tolist() == [5.0] * 4
    del base
    with pytest.raises(StaleInputError, match="freed"):
        graph.replay()


def test_output_of_another_graph_that_was_freed(platform):
    """Its memory is the other graph's: torch's test_graph_three_successive frees one in the capture that reads it."""
    x = torch.ones(4)
    first, second = platform.graph(), platform.graph()
    with first.capture():
        y = x + 1
    with second.capture():
        z = y + 1
        del y
    for value in (1.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.tolist() == [value + 2] * 4
    first.close()
    with pytest.raises(StaleInputError, match="that graph's pool is gone"):
        second.replay()


def test_nothing_ran_before_the_error(platform):
    counter, x = torch.zeros(1), torch.ones(2)
    graph = platform.graph()
    with graph.capture():
        counter.add_(1)
        y = x + 1
    del x
    with pytest.raises(StaleInputError):
        graph.replay()
    assert counter.item() == 0
    del y
