"""Collectives in captured graphs, of one rank and of several ranks, which have a process and a device each."""

from __future__ import annotations

import fcntl
import json

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform
from specgraph_models.parallel import Ranks

from specgraph_conformance.case import Absent, case
from specgraph_conformance.plugin import SESSION, is_worker
from specgraph_conformance.rank import CHAIN, check_chain, run_ranks
from specgraph_conformance.rig import captured, on_host, replay_and_wait
from specgraph_conformance.shared_experts import SCENARIOS
from specgraph_conformance.split_models import SPLIT

NEEDS = ("collectives_in_graph",)


@pytest.mark.parametrize("count", [1, 2, 8])
@case(
    "collectives.chain-in-one-graph",
    "One rank: all-reduces and all-gathers, one to eight of each between dependent ops in one graph, are captured, and "
    "every replay gives what eager gives.",
    hazard="merged-chain-collectives",
    cause="the communication library allocates or synchronises in the capture, or its stream isn't joined to it",
    needs=NEEDS,
)
def test_chain_of_one(platform: Platform, ranks: Ranks, count: int, seed: int) -> None:
    check_chain(platform, ranks, count, seed)


@case(
    "collectives.gather-in-graph",
    "One rank: an all-gather in a graph copies what is in its input at each replay.",
    hazard="merged-chain-collectives",
    cause="the communication library allocates or synchronises in the capture",
    needs=NEEDS,
)
def test_gather_of_one(platform: Platform, ranks: Ranks) -> None:
    x, out = torch.zeros(64, device=platform.device), torch.zeros(64, device=platform.device)

    def body() -> None:
        out.copy_(ops.all_gather(x * 2, ranks.name, 1))

    graph = captured(platform, body)
    for value in (3.0, -1.0):
        x.fill_(value)
        replay_and_wait(platform, graph)
        assert on_host(out).unique().tolist() == [2 * value]


Outcomes = dict[str, str]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes | str:
    """Return the error of each scenario with a selected case. The same two processes run all scenarios.

    All workers of a run share the result. The first worker that needs it starts the ranks, and the others wait.
    """
    session = request.config.stash[SESSION]
    found = session.item
    assert found.backend is not None
    places = [f"{found.name}:{rank}" for rank in range(2)]
    if (count := found.backend.probe().device_count) < 2:
        if found.backend.accelerator:
            return f"collectives between ranks need two devices, and there is {count}"
        places = [found.name] * 2  # processes share the host
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if is_worker(request.config) else folder
    selected = {item.name for item in request.session.items}
    tasks = [name for name in (*SCENARIOS, *SPLIT, CHAIN) if f"test_{name}" in selected]
    with (folder / "ranks.json").open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        if not (written := shared.read()):
            store = tmp_path_factory.mktemp("ranks") / "store"  # torch can't join ranks through a used file
            wrong = run_ranks(places, str(store), session.seed, seconds=150, tasks=tasks)
            shared.write(written := json.dumps(wrong))
        return json.loads(written)


def ranks_agree(scenario: str, id: str, property: str, *, hazard: str, cause: str) -> None:
    """Add a case to this module: a scenario gave no error on either rank."""

    @case(id, property, hazard=hazard, cause=cause, needs=("collectives_in_graph",), timeout=180)
    def test(outcomes: Outcomes | str) -> None:
        if isinstance(outcomes, str):
            raise Absent(outcomes)
        assert not outcomes[scenario], outcomes[scenario]

    globals()[f"test_{scenario}"] = test


ranks_agree(
    "equal",
    "collectives.experts-between-ranks",
    "Two ranks that hold half of the experts each, with as many requests each, decode the tokens of float64.",
    hazard="collective-order-differs",
    cause="a rank issues its collectives in another order, or adds up another rank's rows",
)
ranks_agree(
    "sizes",
    "collectives.unequal-batches",
    "Three requests on one rank and one on the other: both ranks run the padded size of the larger batch.",
    hazard="rank-captures-other-size",
    cause="a rank captures other sizes, or pads for its own batch only",
)
ranks_agree(
    "idle",
    "collectives.rank-without-requests",
    "A rank without requests takes part in every round of the other one, and writes nothing.",
    hazard="idle-rank-skips-round",
    cause="a rank that has nothing to do returns before the agreement, or before a pass",
)
ranks_agree(
    "k",
    "collectives.k-of-all-ranks",
    "Where K follows the batch size, it follows that of the largest batch of all ranks.",
    hazard="ranks-differ-in-k",
    cause="a rank drafts as many tokens as its own batch asks for",
)
ranks_agree(
    "prompts",
    "collectives.prompts-of-other-lengths",
    "A prompt of three chunks on one rank, of one on the other: the rank with fewer passes runs inert ones.",
    hazard="dummy-run-skips-collectives",
    cause="a pass without rows returns before the experts' collectives",
)
ranks_agree(
    "split",
    "collectives.split-target-and-drafter",
    "Two ranks that split target and drafter decode the tokens of float64, and a drafter with the target's own weights "
    "has all drafts accepted.",
    hazard="ranks-add-twice",
    cause="every rank adds the residual, a rank's part is another one's, or token ids are not moved by its place",
)
ranks_agree(
    "split_sampled",
    "collectives.drafts-of-all-ranks",
    "Two ranks that split target and drafter draw the same drafts and the same tokens, each for itself.",
    hazard="ranks-draft-other-tokens",
    cause="a rank draws with noise of its own, or from its part of the logits",
)
ranks_agree(
    "split_logits",
    "collectives.logits-of-all-ranks",
    "Where logits are gathered from two ranks that split the vocabulary, tokens and log-probabilities are those of "
    "float64.",
    hazard="logits-gathered-by-rank",
    cause="the gather is rank by rank, and rows are read from it as if it were row by row",
)
ranks_agree(
    CHAIN,
    "collectives.chain-between-devices",
    "Two ranks on two devices: chains of one to eight all-reduces and all-gathers in one graph per rank give the "
    "values of float64 and the bits of eager at every replay.",
    hazard="merged-chain-collectives",
    cause="the barrier state of one collective is baked into the next: don't claim merged loops with collectives",
)
ranks_agree(
    "keys_heads",
    "collectives.heads-of-ranks-that-share-keys",
    "Two ranks that hold half of each request's keys attend with the query heads of both, and decode the tokens of "
    "float64; a drafter with the target's own weights has all drafts accepted.",
    hazard="heads-gathered-in-other-order",
    cause="heads are read row by row from a gather that is rank by rank, or another rank's are taken",
)
ranks_agree(
    "keys_lse",
    "collectives.parts-of-this-replay",
    "Parts of attention are added up by the log-sum-exp of the same replay.",
    hazard="lse-of-last-replay",
    cause="the gather of parts does not wait for the attention that writes them, or reads another buffer",
)
ranks_agree(
    "keys_lengths",
    "collectives.lengths-of-each-rank",
    "Attention with lengths from the host gets the number of keys that its own rank holds.",
    hazard="lengths-of-another-rank",
    cause="all ranks update with the lengths of one, or with those of whole requests",
)
ranks_agree(
    "keys_updates",
    "collectives.updates-of-each-rank",
    "Every rank updates the lengths of every replay, also where its own part has not grown.",
    hazard="rank-skips-update",
    cause="a rank leaves the lengths of an earlier replay in its graph",
)
ranks_agree(
    "keys_none",
    "collectives.rank-without-keys",
    "Prompts of one and two tokens: a rank that holds no key of a request adds nothing to its attention.",
    hazard="rank-without-keys",
    cause="the log-sum-exp of no keys is 0 or NaN instead of -inf, or the row is left as it was",
)
ranks_agree(
    "keys_tree",
    "collectives.trees-of-ranks-that-share-keys",
    "The keys of a tree's accepted path move to their places on whichever rank these are.",
    hazard="tree-rows-moved-within-a-rank",
    cause="a rank moves rows among its own cells only, or by slots that are not divided by the number of ranks",
)
