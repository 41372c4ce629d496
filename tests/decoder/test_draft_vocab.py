"""Decoding with drafters whose vocabulary is cut: the target's tokens, and its distribution."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from goodness_of_fit import follows
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_conformance.oracles import DenseKeys
from specgraph_models import DraftVocabulary, cut_vocabulary
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph.attention import PagedAttention
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftTree
from specgraph.errors import ConfigError

KINDS = (
    "eagle", "eagle3", "mtp", "mtp-modules", "latent", "peagle", "dflash", "dspark", "dflash2", "domino", "draft-model",
)  # fmt: skip
TREES = ("eagle", "eagle3", "mtp", "dflash", "draft-model")
DECODINGS = int(os.environ.get("SPECGRAPH_DRAFT_VOCABS", "1"))
"""Random decodings per kind; 200 in the long form."""
DRAWS = int(os.environ.get("SPECGRAPH_DRAFT_VOCAB_DRAWS", "72"))
"""Sampled requests per kind; in the long form 4000, of all kinds."""


def cut_head(kind: str, ids: list[int]) -> Any:
    """Return a head that drafts these tokens alone, or those that it knows of them."""
    head = make_head(kind, make_target())
    cut_vocabulary(head, DraftVocabulary("the list", torch.tensor(ids)))
    return head


def make_decoder(kind: str | None, ids: list[int], **settings: Any) -> SpeculativeDecoder:
    defaults = {"num_speculative_tokens": 3, "block_size": 4, "prefill": "eager", "prefill_sizes": [8]}
    config = decoder_settings(max_model_len=64, **(defaults | settings))
    head, rows = (None, config[0].query_len) if kind is None else (cut_head(kind, ids), None)
    decoder = SpeculativeDecoder(
        make_target(), head, CpuPlatform(), *config, attention=PagedAttention(), query_len=rows
    )
    if decoder.config.decode != "eager":
        decoder.capture()
    return decoder


def known_ids(kind: str) -> list[int]:
    """Return the target's ids that a whole head of this kind drafts."""
    head = make_head(kind, make_target())
    offsets = 0 if head.draft_to_target is None else head.draft_to_target
    return (torch.arange(head.draft_vocab_size) + offsets).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_targets_with_any_vocabulary(kind):
    """Lists of 3 tokens to all, in any order; chains and trees, in the lowerings that need no long capture."""
    r, accepted = Random(KINDS.index(kind)), 0
    known = known_ids(kind)
    for number in range(DECODINGS):
        size = r.randint(3, len(known)) if number else len(known) // 2
        ids = r.sample(known, size)
        ids += r.sample([each for each in range(VOCAB) if each not in ids], r.randint(0, VOCAB - len(ids)) // 2)
        n, k = r.randint(1, 3), r.randint(2, 4)
        settings: dict[str, Any] = {"max_num_requests": n, "capture_sizes": [n], "num_speculative_tokens": k}
        settings["decode"] = r.choice(["eager"] * 6 + ["step", "merged"])
        if kind in TREES and r.random() < 0.3:
            top_k = min(2, len(set(ids) & set(known)))
            settings["tree"] = DraftTree(num_steps=k, top_k=top_k, num_draft_tokens=k + 2)
        asked = [
            Request(
                prompt_token_ids=[r.randrange(VOCAB) for _ in range(r.randint(1, 12))], max_tokens=r.randint(1, 14),
                temperature=0.0,
            )
            for _ in range(r.randint(1, 4))
        ]  # fmt: skip
        made = make_decoder(kind, ids, **settings)
        tokens = [each.token_ids for each in made.generate(asked)]
        accepted += sum(made.metrics.accepted)
        allowed = set(ids)
        made.close()
        expect_best(asked, tokens)
        assert made.drafter.head.draft_vocab_size == len(allowed & set(known))
    assert accepted > 0 or DECODINGS < 20, "no draft was accepted"


def expect_best(asked: list[Request], results: list[list[int]]) -> None:
    """Check each token against the target in float64, without a cache or a drafter."""
    for request, tokens in zip(asked, results, strict=True):
        logits = target_logits([*request.prompt_token_ids, *tokens[:-1]])[len(request.prompt_token_ids) - 1 :]
        short = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == request.max_tokens
        assert float(short.max()) < 1e-3


def target_logits(ids: list[int]) -> torch.Tensor:
    """Return the target's logits after each token, float64 [n, VOCAB]."""
    target = make_target(torch.float64)
    dense = DenseKeys.empty(target.attention_layers)
    dense.at(range(len(ids)))
    return target.logits(target.forward(torch.tensor(ids), dense.attend).hidden)


@pytest.mark.hazard("draft-vocabulary-map")
@pytest.mark.parametrize("kind", KINDS if DRAWS > 1000 else ("dspark",))
def test_sampled_output_has_the_targets_distribution(kind):
    """With drafts of a tenth of the vocabulary: chi-square of the second and the third token, by the first one."""
    ids, prompt, temperature = Random(3).sample(known_ids(kind), 5), [3, 1, 40], 3.0
    n = 64 if DRAWS > 1000 else 24
    made = make_decoder(
        kind, ids, num_speculative_tokens=2, sampled=True, max_num_requests=n, capture_sizes=[n], decode="eager"
    )
    asked = [
        Request(prompt_token_ids=prompt, max_tokens=4, temperature=temperature, seed=seed) for seed in range(DRAWS)
    ]
    tokens = [each.token_ids for each in made.generate(asked)]
    made.close()
    drafted = torch.arange(made.drafter.head.draft_vocab_size) + made.drafter.head.draft_to_target
    assert sum(made.metrics.accepted) > 0
    assert sorted(drafted.tolist()) == sorted(ids)
    shares = (target_logits(prompt)[-1] / temperature).softmax(-1)
    assert follows(torch.tensor([each[0] for each in tokens]).bincount(minlength=VOCAB).tolist(), shares.tolist())
    for place in (1, 2):  # the exact share of each token at this place, given the tokens before it
        wanted = torch.zeros(VOCAB, dtype=torch.float64)
        for each in tokens:
            wanted += (following(tuple(prompt + each[:place])) / temperature).softmax(-1)
        counts = torch.tensor([each[place] for each in tokens]).bincount(minlength=VOCAB)
        assert follows(counts.tolist(), (wanted / len(tokens)).tolist()), place


SEEN: dict[tuple[int, ...], torch.Tensor] = {}


def following(ids: tuple[int, ...]) -> torch.Tensor:
    if ids not in SEEN:
        SEEN[ids] = target_logits(list(ids))[-1]
    return SEEN[ids]


def test_a_token_that_the_drafter_lacks_is_handed_over():
    """The target's tokens are none of the list, and each next draft follows the one that was sampled."""
    ids = [5, 9, 17]
    made = make_decoder("mtp", ids, max_num_requests=1, capture_sizes=[1], decode="merged")
    [result] = made.generate([Request(prompt_token_ids=[3, 1, 40], max_tokens=12)])
    expect_best([Request(prompt_token_ids=[3, 1, 40], max_tokens=12)], [result.token_ids])
    assert set(result.token_ids) - set(ids)
    taken = made.drafter.inputs(1)
    assert int(taken.sampled_token_ids.max()) < VOCAB
    made.close()


def test_a_tree_wider_than_the_vocabulary_is_refused():
    tree = DraftTree(num_steps=2, top_k=4, num_draft_tokens=6)
    with pytest.raises(ConfigError, match=r"a draft tree of top_k 4, and EagleHead drafts 3 tokens"):
        make_decoder("eagle", [4, 5, 6], num_speculative_tokens=2, tree=tree)
