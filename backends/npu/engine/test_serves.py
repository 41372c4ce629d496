"""The unmodified wheels of vLLM 0.23.0 and vllm-ascend 0.23.0 on the simulated runtime, all limits on.

`make test-npu-engine` runs it in an environment of its own. It needs 5 GB of wheels, so `.ci/run` does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve import LENGTH, PROMPTS, SETTINGS, VOCABULARY

SUCCESSORS = [[(prompt[-1] + n) % VOCABULARY for n in range(1, LENGTH + 1)] for prompt in PROMPTS]
GREEDY, ONE_LEFT = {"temperature": 0}, {"temperature": 1.0, "top_k": 1, "seed": 3}


def served(**what: Any) -> dict[str, Any]:
    """Run serve.py in a process of its own, and return what it printed."""
    build = Path(os.environ["ASCENDSIM_BUILD"]).resolve()
    paths = {"LD_LIBRARY_PATH": str(build / "values" / "lib64"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(Path(__file__).with_name("serve.py")), str(build), json.dumps(what)]
    done = subprocess.run(command, env=os.environ | SETTINGS | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["violations"] == []
    assert all(limit["on"] for limit in report["limits"])
    return report


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_target(model):
    wide = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 4}
    report = served(model=model, drafts=False, sampling=[GREEDY, ONE_LEFT, wide])
    assert report["answers"][:2] == [SUCCESSORS, SUCCESSORS]
    assert report["calls"]["aclnnApplyTopKTopP"] == 2 * LENGTH
    assert all(report["calls"][name] for name in ("RopeOperation", "ReshapeAndCacheOperation", "aclnnSwiGlu"))


def test_drafts_in_graphs():
    """vllm-ascend's own EAGLE-3 loop: one graph of all steps, whose attention gets its lengths by task updates. Three
    requests are padded to four, so an update has rows without keys."""
    report = served(model="llama", drafts=True, sampling=[GREEDY])
    assert report["answers"] == [SUCCESSORS]
    calls = report["calls"]
    assert calls["aclmdlRIExecuteAsync"] > 0
    assert calls["aclmdlRICaptureTaskUpdateBegin"] == calls["aclmdlRICaptureTaskUpdateEnd"] > 0
