"""Sizes, lowerings and inputs of a drafter: the defaults, and the refusals before any device work."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from specgraph.attention import KVCache
from specgraph.capture import resolve
from specgraph.capture.lowering import Collectives
from specgraph.device import LOWERINGS, Capabilities, LoweringName, Platform
from specgraph.device.capabilities import no, yes
from specgraph.draft import DraftConfig, Drafter
from specgraph.errors import UnsupportedError
from torch import Tensor

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import HostBatch, make_batches, make_config, random_caches
from specgraph_conformance.rig import expect_equal, expect_refusal
from specgraph_conformance.tiny_models import MAX_POSITIONS, make_head


@case(
    "drafting.default-sizes",
    "By default the captured numbers of requests are 1, 2, 4, multiples of 8 to 64, multiples of 16 and the maximum; "
    "prompt passes have powers of two from 16 to 512 or max_model_len.",
    hazard="default-sizes",
    cause="capture_sizes or prefill_sizes: a ladder that begins or ends at another size",
    quick=True,
)
def test_default_sizes(platform: Platform) -> None:
    for most in range(1, 300):
        steps = {n for n in range(1, most) if n in (1, 2, 4) or (n <= 64 and n % 8 == 0) or n % 16 == 0}
        config = DraftConfig(num_speculative_tokens=2, max_num_requests=most, max_model_len=64)
        assert config.sizes == tuple(sorted(steps | {most})), f"capture sizes {config.sizes} up to {most} requests"
    for longest in (16, 17, 33, 128, 511, 512, 513, 5000):
        powers = [n for n in (16, 32, 64, 128, 256) if n < longest]
        config = DraftConfig(num_speculative_tokens=2, max_num_requests=1, max_model_len=longest)
        wanted = (*powers, min(longest, 512))
        assert config.prefill_rows == wanted, f"prefill sizes {config.prefill_rows} up to {longest} tokens"


@case(
    "drafting.wrong-sizes-refused",
    "Sizes outside of the limits, named twice, none at all, or short of the largest batch are one ConfigError that "
    "names them; in range they are taken as named.",
    hazard="default-sizes",
    cause="capture_sizes, prefill_sizes or RunnerConfig: a bound that is off by one",
    quick=True,
)
def test_wrong_sizes(platform: Platform) -> None:
    for name, limit in (("capture_sizes", "max_num_requests"), ("prefill_sizes", "max_model_len")):
        small: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_requests": 8, "max_model_len": 8}
        for wrong, said in (([0, 8], r"\[0\]"), ([8, 9], rf"\[9\].*1\.\.8.*{limit}"), ([8, 8], "twice"), ([], "empty")):
            given: dict[str, Any] = {**small, name: wrong}
            expect_refusal(lambda given=given: DraftConfig(**given), f"{name} {wrong} up to 8", said)
        given = {**small, name: [8, 1, 3]}
        made = DraftConfig(**given)
        assert (made.sizes if name == "capture_sizes" else made.prefill_rows) == (1, 3, 8)
    short: dict[str, Any] = {"max_num_requests": 4, "capture_sizes": (1, 3)}
    what = "a largest size of 3 for batches of up to 4 without a fallback"
    expect_refusal(lambda: make_config(decode="merged", fallback="error", **short), what, r"\b3\b.*\b4\b")
    assert make_config(decode="merged", fallback="eager", **short).sizes == (1, 3)
    assert make_config(decode="eager", fallback="error", **short).sizes == (1, 3)


@case(
    "drafting.past-the-largest-size",
    "A batch larger than every captured size runs eagerly where the fallback allows it, and the reason names both "
    "numbers.",
    hazard="default-sizes",
    cause="dispatch: the reason names another size, or the batch is cut to the largest one",
)
def test_past(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(decode="auto", capture_sizes=(1, 3), fallback="eager"), "paged")
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [4])
    drafts = made.propose(batch)
    assert not drafts.dispatch.captured
    reason = drafts.dispatch.reason
    assert re.search(r"\b3\b.*\b4\b", reason), f"the reason names other sizes than 3 and 4: {reason}"
    eager = rig(platform, make_config(capture_sizes=(1, 3), fallback="eager"), "paged")
    expect_equal(drafts.token_ids, eager.propose(batch).token_ids, "the drafts")


@case(
    "drafting.lowering-follows-capabilities",
    "A named lowering is refused exactly where the platform lacks what it needs, with that capability's reason; `auto` "
    "takes the strongest one that is not refused.",
    hazard="lowering-refused-wrongly",
    cause="a condition on merged_loop, task_update, host parameters or collectives that is the wrong way round",
    quick=True,
)
def test_lowerings(platform: Platform) -> None:
    for graphs, loop, update, host in product((True, False), repeat=4):
        given = replace(
            platform.capabilities,
            graphs=_support(graphs, "no graph here"),
            merged_loop=_support(loop, "no loop here"),
            task_update=_support(update, "no update here"),
            default_lowering="merged",
        )
        parameters = ("seq_lens",) if host else ()
        reasons = {
            "eager": [],
            "piecewise": ["no graph here"] * (not graphs),
            "step": ["no graph here"] * (not graphs) + ["no update here"] * (host and not update),
        }
        reasons["merged"] = [*reasons["step"], *["no loop here"] * (not loop)]
        about = f"graphs {graphs}, merged_loop {loop}, task_update {update}, host parameters {host}"
        for name in LOWERINGS:
            refused = _refused(name, given, parameters)
            wanted = reasons[name]
            assert bool(refused) == bool(wanted), f"{name} is {'refused' if refused else 'allowed'} with {about}"
            assert not wanted or any(reason in refused for reason in wanted), f"{name} with {about}: {refused}"
        strongest = next(name for name in ("merged", "step", "piecewise", "eager") if not reasons[name])
        chosen = resolve("auto", given, parameters).lowering
        assert chosen == strongest, f"`auto` takes {chosen} instead of {strongest} with {about}"
    able = replace(platform.capabilities, graphs=yes(), merged_loop=yes(), default_lowering="merged")
    for has, (collectives, without) in product((True, False), _WITHOUT_COLLECTIVES.items()):
        given = replace(able, collectives_in_graph=_support(has, "no collectives here"))
        about = f"collectives {collectives}, collectives_in_graph {has}"
        allowed = LOWERINGS if has else without
        for name in LOWERINGS:
            refused = _refused(name, given, (), collectives)
            assert bool(refused) != (name in allowed), f"{name} is {'refused' if refused else 'allowed'} with {about}"
            assert not refused or "no collectives here" in refused, f"{name} with {about}: {refused}"
        chosen = resolve("auto", given, (), collectives=collectives)
        assert chosen.lowering == max(allowed, key=LOWERINGS.index), f"`auto` takes {chosen.lowering} with {about}"
        assert chosen.prefill != "full" or "merged" in allowed, f"prompts are captured whole with {about}"


_WITHOUT_COLLECTIVES: Mapping[Collectives, Sequence[LoweringName]] = {
    "none": LOWERINGS,
    "in_attention": ("eager", "piecewise"),
    "anywhere": ("eager",),
}
"""The lowerings of a platform that can't capture collectives, by the collectives of the model's passes."""


def _support(has: bool, reason: str) -> Any:
    return yes() if has else no(reason)


def _refused(
    name: LoweringName,
    capabilities: Capabilities,
    host_parameters: tuple[str, ...],
    collectives: Collectives = "none",
) -> str:
    """Return the error's message. Empty if the lowering is allowed."""
    try:
        resolve(name, capabilities, host_parameters, collectives=collectives)
    except UnsupportedError as error:
        return str(error)
    return ""


def _longer(tensor: Tensor, dim: int) -> Tensor:
    return tensor.repeat_interleave(2, dim)


WRONG_TENSORS: dict[str, Callable[[HostBatch], HostBatch]] = {
    "sampled_token_ids-short": lambda b: replace(b, sampled_token_ids=b.sampled_token_ids[:-1]),
    "sampled_token_ids-long": lambda b: replace(b, sampled_token_ids=_longer(b.sampled_token_ids, 0)),
    "start_positions-short": lambda b: replace(b, start_positions=b.start_positions[:-1]),
    "start_positions-long": lambda b: replace(b, start_positions=[*b.start_positions, 3]),
    "aux_hidden-short": lambda b: replace(b, aux_hidden=b.aux_hidden[:-1]),
    "aux_hidden-long": lambda b: replace(b, aux_hidden=_longer(b.aux_hidden, 0)),
    "aux_hidden-wide": lambda b: replace(b, aux_hidden=_longer(b.aux_hidden, 1)),
    "block_table-short": lambda b: replace(b, blocks=b.blocks[:-1]),
    "block_table-wide": lambda b: replace(b, blocks=[row + [0] * 30 for row in b.blocks]),
    "sampled_token_ids-narrow": lambda b: replace(b, sampled_token_ids=b.sampled_token_ids[:, :-1]),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@case(
    "drafting.wrong-tensors-refused",
    "A round with one tensor too small or too large is a ConfigError that names the tensor; the next round is right.",
    hazard="wrong-round-taken",
    cause="SharedBuffers.load: a shape that is not compared, or compared in one direction only",
    quick=True,
)
def test_wrong_tensors(platform: Platform, wrong: str, seed: int) -> None:
    made = rig(platform, make_config(), "paged")
    first, second = make_batches(made.config, made.head.aux_size, seed, [3, 3])
    made.propose(first)
    bad = WRONG_TENSORS[wrong](second)
    given = replace(
        bad.on(platform.device, made.head.dtype), num_sampled=second.on(platform.device, made.head.dtype).num_sampled
    )
    host: dict[str, Any] = {"host_start_positions": second.start_positions, "host_num_sampled": second.num_sampled}
    name, _, how = wrong.partition("-")
    said = "rows per request" if how == "narrow" else name
    expect_refusal(lambda: made.drafter.propose(given, **host), f"a round whose {name} is too {how}", said)
    after = made.propose_to_host(second)
    fresh = rig(platform, make_config(), "paged")
    fresh.propose(first)
    expect_equal(after.token_ids, fresh.propose_to_host(second).token_ids, "the drafts of the next round")


WRONG_CACHES: dict[str, Callable[[list[KVCache]], list[KVCache]]] = {
    "fewer-layers": lambda caches: caches[:-1],
    "more-layers": lambda caches: [*caches, caches[0]],
    "fewer-heads": lambda caches: [KVCache(c.key[:, :, :1], c.value[:, :, :1]) for c in caches],
    "more-heads": lambda caches: [KVCache(_longer(c.key, 2), _longer(c.value, 2)) for c in caches],
    "smaller-blocks": lambda caches: [KVCache(c.key[:, :8], c.value[:, :8]) for c in caches],
    "larger-blocks": lambda caches: [KVCache(_longer(c.key, 1), _longer(c.value, 1)) for c in caches],
    "values-of-another-width": lambda caches: [KVCache(c.key, c.value[..., :-8]) for c in caches],
}


@pytest.mark.parametrize("wrong", WRONG_CACHES)
@case(
    "drafting.wrong-caches-refused",
    "KV caches of another number, block size, number of heads or head size than the head's are a ConfigError.",
    hazard="wrong-round-taken",
    cause="check_caches: a shape that is not compared, or compared in one direction only",
    quick=True,
)
def test_wrong_caches(platform: Platform, wrong: str, seed: int) -> None:
    config, head = make_config(), make_head("mtp-modules", 1, platform.device)
    caches = WRONG_CACHES[wrong](random_caches(head, config, platform.device, seed))
    expect_refusal(
        lambda: Drafter(head, caches, platform, config), f"KV caches with {wrong.replace('-', ' ')}", "cache"
    )


@case(
    "drafting.shorter-context-refused",
    "A drafter that was loaded for fewer positions than max_model_len is refused by an error that names both numbers.",
    hazard="context-of-the-drafter",
    cause="the drafter's rotary table is read past its end where a text of the target is longer",
    quick=True,
)
def test_shorter_context(platform: Platform) -> None:
    head = make_head("eagle", 1, platform.device)
    config = make_config(max_model_len=MAX_POSITIONS + 1)
    caches = random_caches(head, config, platform.device, 0)
    what = f"a drafter of {MAX_POSITIONS} positions for texts of {MAX_POSITIONS + 1}"
    expect_refusal(lambda: Drafter(head, caches, platform, config), what, rf"{MAX_POSITIONS + 1}.*{MAX_POSITIONS}")


@case(
    "drafting.wrong-prompt-passes-refused",
    "A prompt pass of more rows than the largest size, or of none, is a CapacityError that names the largest size; "
    "nothing is written.",
    hazard="wrong-round-taken",
    cause="PrefillProgram.dispatch: an empty pass is padded to the smallest size, or the message names another size",
    quick=True,
)
def test_wrong_passes(platform: Platform, seed: int) -> None:
    made = rig(platform, make_config(prefill_sizes=(8, 16)), "paged")
    before = made.host_caches()
    (batch,) = make_batches(made.config, made.head.aux_size, seed, [1])
    for rows in (0, 17):
        aux = batch.aux_hidden[:1].expand(rows, -1).to(platform.device, made.head.dtype)
        expect_refusal(
            lambda rows=rows, aux=aux: made.drafter.prefill([1] * 40, range(rows), batch.blocks[0], aux),
            f"a prompt pass of {rows} rows, where the largest has 16,",
            rf"\b{rows} rows.*\b16\b",
        )
    for seen, kept in zip(made.host_caches(), before, strict=True):
        expect_equal(seen[0], kept[0], "keys after refused passes")
