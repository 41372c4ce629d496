"""Tests of others that are not run here; README.md beside this file says why. Each plugin takes the hook from here."""

from __future__ import annotations

import pytest

LEFT_OUT = {
    "test_fia_out_4in1_with_graph",
    "test_paged_attention_aclgraph_update",
    "test_eagle_step_slot_mapping_kernel_exceeds_max",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that `LEFT_OUT` names."""
    for item in items:
        if item.name in LEFT_OUT:
            item.add_marker(pytest.mark.skip(reason="left out, see tests/peers/README.md"))
