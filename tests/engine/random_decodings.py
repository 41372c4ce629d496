# ruff: noqa
"""Random decodings of one drafter kind: greedy texts equal no drafting, four lowerings agree, sampled rows too.

decodings.py KIND RUNS SEED. KIND may end in :tree (a draft tree), :ragged (verified_drafts) or :auto (verified_drafts "auto").
"""

import random, sys, time

sys.path[:1] = ["tests"]
import torch
from draft import pairs
from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.device.cpu import CpuPlatform
from specgraph.draft import DraftTree
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.models.decoder import AuxWeights
from specgraph.models.dflash import BlockParts
from specgraph.models.domino import Correction, DominoHead
from specgraph.models.dspark import ConfidenceHead, DSparkHead, MarkovHead
from specgraph.models.ngram import NgramHead
from specgraph.ops.linear import Weight

kind, runs, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
base, _, way_of = kind.partition(":")
CHAINS = ("eagle", "mtp", "mtp-modules", "latent", "draft-model")
LETTERS = 6  # tokens that a text of the other kinds is made of, so that random drafts are often right


def block(predicts):
    embed, head = pairs.vocabulary(torch.float32)
    draw = pairs.Draw(2, torch.float32)
    w = AuxWeights(embed, Weight(draw.weight(pairs.HIDDEN, 2 * pairs.HIDDEN)), draw.norm(), draw.norm(), head)
    return BlockParts(pairs.CONFIG, w, [draw.layer(), draw.layer()], (1, 2), 9, pairs.VOCAB - 1, predicts), draw


def head_of(target):
    H, V = pairs.HIDDEN, pairs.VOCAB
    if base == "ngram":
        return NgramHead(V)
    if base == "domino":
        b, draw = block(False)
        return DominoHead(
            b,
            Correction(
                Weight(draw.weight(48, H)),
                Weight(draw.weight(48, 16)),
                Weight(draw.weight(24, H + 16)),
                Weight(draw.weight(V, 24)),
            ),
            1,
        )
    if base in ("dspark", "dspark-gated"):
        b, draw = block(base == "dspark")
        gate = Weight(draw.weight(16, H + 16), draw.norm(16) - 1) if base == "dspark-gated" else None
        confidence = ConfidenceHead(draw.weight(1, H + 16) * 4, draw.norm(1) - 1)
        return DSparkHead(b, MarkovHead(draw.weight(V, 16) * 4, Weight(draw.weight(V, 16)), gate=gate), confidence)
    return pairs.make_head("dspark" if base == "dspark-rnn" else base, target)


def few_letters(target, head):
    """Both models say few tokens: output rows of all others are 0."""
    mapped = head.draft_to_target
    letters = torch.arange(LETTERS) if mapped is None else (torch.arange(len(mapped)) + mapped)[:LETTERS]
    draft = torch.arange(LETTERS)  # a map ascends: its first tokens are the letters
    for name, w in head.weights().items():
        if w.dim() == 2 and w.shape[0] == head.draft_vocab_size and "embed" not in name:
            w[[i for i in range(len(w)) if i not in draft.tolist()]] = 0
    target.lm_head[[i for i in range(pairs.VOCAB) if i not in letters.tolist()]] = 0


def decoder(drafted, decode, k, lengths="device", ahead=0, blocks=None):
    target, platform = pairs.make_target(), CpuPlatform()
    head = head_of(target)
    if base not in CHAINS:
        few_letters(target, head)
    extra = {"num_speculative_tokens": k}
    if drafted and way_of == "tree":
        tree = DraftTree(
            **dict(zip(("num_steps", "top_k", "num_draft_tokens"), {1: (2, 2, 4), 3: (3, 2, 7), 5: (4, 3, 12)}[k]))
        )
        extra = {"tree": tree, "num_speculative_tokens": tree.num_steps}
    elif drafted and way_of == "ragged":
        extra["verified_drafts"] = {1: 0.5, 3: 1.25, 5: 2.5}[k]
    elif drafted and way_of == "auto":
        extra |= {
            "num_speculative_tokens": 5,
            "k_candidates": (1, 2, 5),
            "verified_drafts": "auto",
            "round_times": {s: {1: 10.0, 2: 10.0 + s * k / 3, 5: 10.0 + s * k} for s in (1, 2, 4)},
        }
    c = EngineConfig(
        block_size=4,
        prefill_sizes=[8],
        max_num_requests=4,
        max_model_len=32,
        capture_sizes=[1, 2, 4],
        decode=decode,
        rounds_ahead=ahead,
        num_blocks=blocks,
        sampled=True,
        **extra,
    )
    d = SpeculativeDecoder(
        target,
        head if drafted else None,
        platform,
        c,
        attention=PagedHostAttention(platform) if lengths == "host" else PagedAttention(),
    )
    d.capture()
    return d


def chi_square(n):
    """Second and third tokens of n sampled texts of one prompt, against the target's exact distribution in float64; launches per round."""
    from goodness_of_fit import p_value

    d = decoder(True, "round", 3)
    prompt, counts = [3, 1, 2], {}
    target = pairs.make_target(torch.float64)
    head = head_of(pairs.make_target())
    if base not in CHAINS:
        few_letters(target, head)
    alone = SpeculativeDecoder(
        target,
        None,
        CpuPlatform(),
        EngineConfig(
            block_size=4,
            prefill_sizes=[8],
            max_num_requests=1,
            max_model_len=32,
            capture_sizes=[1],
            decode="eager",
            num_speculative_tokens=1,
            rounds_ahead=0,
        ),
    )
    known = {}

    def after(text):
        if text not in known:
            alone.target.prefill(list(text), 0, [1, 2, 3])
            known[text] = (alone.target.prompt_logits[0].double() / T).softmax(-1)
        return known[text]

    T, before = 0.4, (d.runners["round"].launches["round"], d.rounds.num_rounds)
    asked = [
        Request(prompt_token_ids=prompt, max_tokens=5, temperature=T, seed=1000 + s + 1_000_000 * seed)
        for s in range(n)
    ]
    results = d.generate(asked)
    launches, rounds = d.runners["round"].launches["round"] - before[0], d.rounds.num_rounds - before[1]
    first = after(tuple(prompt))
    second = sum(first[a] * after((*prompt, a)) for a in range(pairs.VOCAB) if first[a] > 1e-9)
    got = torch.bincount(torch.tensor([r.token_ids[1] for r in results]), minlength=pairs.VOCAB)
    p2 = p_value(got.tolist(), second.tolist())
    third = sum(
        first[a] * after((*prompt, a))[b] * after((*prompt, a, b))
        for a in range(pairs.VOCAB)
        for b in range(pairs.VOCAB)
        if first[a] * after((*prompt, a))[b] > 1e-6
    )
    p3 = p_value(
        torch.bincount(torch.tensor([r.token_ids[2] for r in results]), minlength=pairs.VOCAB).tolist(), third.tolist()
    )
    mean = 1 + sum(d.metrics.accepted) / max(1, d.metrics.num_drafts)
    print(
        f"chi-square {kind} {seed}: {n} texts, acceptance length {mean:.2f}, second token p {p2:.3f}, third p {p3:.3f}; {launches} launches in {rounds} rounds; {time.process_time():.0f} CPU s",
        flush=True,
    )


if len(sys.argv) > 4:
    with torch.inference_mode():
        chi_square(int(sys.argv[4]))
    sys.exit()

made = {}


def get(*key):
    if key not in made:
        made[key] = decoder(True, *key)
    return made[key]


def serve(d, asked, gaps):
    got, ids = {}, []
    before = (d.metrics.num_drafts, list(d.metrics.accepted), dict(d.metrics.drafts_by_k))

    def step():
        for c in d.step():
            got.setdefault(c.request, []).extend(c.token_ids)

    for q, gap in zip(asked, gaps):
        ids.append(d.add(q))
        for _ in range(gap):
            step()
    while d.num_unfinished:
        step()
    d.step()
    by_k = {k: n - before[2].get(k, 0) for k, n in sorted(d.metrics.drafts_by_k.items())}
    return [got.get(i, []) for i in ids], (
        d.metrics.num_drafts - before[0],
        [a - b for a, b in zip(d.metrics.accepted, before[1])],
        {k: n for k, n in by_k.items() if n},
    )


r, t0, bad = random.Random(f"{kind}{seed}"), time.time(), []
tokens = drafted = accepted = sampled = 0
with torch.inference_mode():
    plain = decoder(False, "eager", 1)
    for run in range(runs):
        k, asked = r.choice([1, 3, 5]), []
        for i in range(r.randint(1, 7)):
            length = r.randint(1, 15)
            prompt = [r.randrange(pairs.VOCAB) for _ in range(length)]
            asked.append(
                Request(
                    prompt_token_ids=prompt,
                    max_tokens=r.randint(1, 32 - length),
                    seed=i,
                    temperature=r.choice([0.0, 0.0, 0.7]),
                )
            )
        gaps = [r.randint(0, 3) for _ in asked]
        greedy = [i for i, q in enumerate(asked) if q.temperature == 0]
        want = {i: list(plain.generate([asked[i]])[0].token_ids) for i in greedy}
        texts, counts = {}, {}
        for way in ("eager", "step", "merged", "round"):
            texts[way], counts[way] = serve(get(way, k), asked, gaps)
            if any(texts[way][i] != want[i] for i in greedy):
                bad.append((run, way, k, "tokens"))
            if texts[way] != texts["eager"]:
                bad.append((run, way, k, "drawn tokens"))
        if len({str(v) for v in counts.values()}) > 1:
            bad.append((run, "counts differ", counts))
        host = [("merged", k, "host", 1), ("step", k, "host", 0)] if base != "ngram" and not way_of else []
        way = r.choice([("round", k, "device", 1), ("round", k, "device", 1, 13), ("merged", k, "device", 1), *host])
        got, _ = serve(get(*way), asked, gaps)
        if any(got[i] != want[i] for i in greedy):
            bad.append((run, way, "tokens"))
        tokens += sum(map(len, texts["eager"]))
        sampled += len(asked) - len(greedy)
        drafted += counts["round"][0]
        accepted += sum(counts["round"][1])
print(
    f"{kind} {seed}: {runs} runs, {tokens} tokens, {sampled} sampled requests, {drafted} drafts, {accepted / max(drafted, 1):.2f} tokens accepted a draft; differences {len(bad)} {bad[:3]}; {time.process_time():.0f} CPU s",
    flush=True,
)
