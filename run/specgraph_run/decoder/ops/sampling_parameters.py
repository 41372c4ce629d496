"""Applies a request's sampling parameters to its logits: bias, penalties, then min_p, top_k and top_p.

Rejection sampling uses the result as the target's logits. So a request's output follows the distribution that its
parameters define, for any drafts. Each row of a verify has a context of its own: the drafts before it count as tokens
of the output, because the row is used only if they were accepted.

min_p, top_k and top_p compare integers: every token's probability in steps of 2 ** -40 of the largest one. Only
additions and products that IEEE 754 rounds in one way compute them, and sums of integers do not depend on the order.
So every device and every implementation keeps the same tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgraph.buffers import PerRequest
from specgraph.ops.library import op

EXCLUDED = -1e30
"""The logit of a token that may not be chosen. Its probability is 0 in float32, and kernels need no infinity."""

SORTED_TOGETHER = 64
"""About the number of rows to sort in one call. Fewer rows leave a GPU idle; a whole large batch takes much memory."""

LOG2_E = 1.4426950408889634
POWER_OF_TWO = (1.0, 0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017029777169228,
                0.0018671301659196615)  # fmt: skip
"""Fitted coefficients of the powers of f in 2 ** f for 0 <= f < 1, with an error within 1e-7."""
LARGEST = 40
"""log2 of the largest token's weight."""


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return softmax(logits / temperature) as integers, int64 [..., vocab], rounded down.

    The most likely token has 2 ** 40.

    Args:
        logits: float32 [..., vocab].
        temperature: above 0; it broadcasts with logits.
    """
    scale = torch.full_like(temperature, LOG2_E) / temperature
    power = (logits - logits.amax(dim=-1, keepdim=True)) * scale
    power = torch.where(power > -63, power, -63.0)  # NaN too
    whole = power.floor()
    part = power - whole
    value = torch.full_like(part, POWER_OF_TWO[-1])
    for coefficient in reversed(POWER_OF_TWO[:-1]):
        value = value * part + coefficient
    mantissa = (value * 2.0**23).long().clamp(max=2**24 - 1)
    return (mantissa << (LARGEST - 23)) >> (-whole).long()


class SamplingParameters(NamedTuple):
    """The parameters of R requests besides temperature and seed, and the tokens that penalties count."""

    top_k: PerRequest
    """int64 [R]; 0 keeps all tokens."""
    top_p: PerRequest
    """float32 [R]; 1 keeps all tokens."""
    min_p: PerRequest
    """float32 [R]; 0 keeps all tokens."""
    repetition_penalty: PerRequest
    """float32 [R]; 1 for none."""
    presence_penalty: PerRequest
    """float32 [R]; 0 for none."""
    frequency_penalty: PerRequest
    """float32 [R]; 0 for none."""
    bias: PerRequest
    """float32 [R, vocab]. vocab is the target's, here and below."""
    output_counts: PerRequest
    """int32 [R, vocab]: how often each token is in the output. A verify counts the tokens that it sampled."""
    in_prompt: PerRequest
    """bool [R, vocab]: whether each token is in the prompt."""


def _fake(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32)


@op(fake=_fake)
def adjust_logits(
    logits: Tensor,
    temperature: Tensor,
    parameters: SamplingParameters,
    draft_token_ids: Tensor,
    ancestors: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """Return logits [R * n, columns] with each request's parameters applied. An excluded token has the logit EXCLUDED.

    The order is vLLM's:

    1. Add the bias.
    2. For tokens of prompt and output: divide a positive logit by the repetition penalty, multiply a negative one.
    3. For tokens of the output: subtract the frequency penalty times the token's count, and the presence penalty.
    4. Of softmax(logits / temperature), keep the tokens with at least min_p of the largest probability.
    5. Of these, keep the top_k most likely.
    6. Of these, renormalised, keep the fewest that reach top_p.

    Ties go to lower columns. If a row has any of min_p, top_k and top_p, tokens with less than 2 ** -40 of the largest
    probability are excluded too, see `weights_of`.

    Args:
        logits: n rows per request, n = K + 1 in a verify. Row i scores the token that follows row i.
        temperature: float32 [R]; 0 is greedy, and excludes no token.
        draft_token_ids: int64 [R, K]: draft i is the token of row i + 1. -1 is no draft.
        ancestors: int64 [R * n], as `begin_rows` writes them. If bit j of a row is set, the token of row j, which is
            draft j - 1, is in the row's context. None for a chain: row i has drafts 0 to i - 1 in its context.
        draft_to_target: int64 [columns]: target id minus column, for the logits of a drafter. None if columns are
            target ids.

    Returns:
        float32, in the shape of logits.
    """
    bias, output_counts, in_prompt = parameters.bias, parameters.output_counts, parameters.in_prompt
    requests, steps = draft_token_ids.shape
    rows = logits.float().view(requests, -1, logits.shape[-1])
    per_request, columns = rows.shape[1:]
    adjusted = torch.empty_like(rows)
    temperature, top_k, top_p, min_p, repetition, presence, frequency = (
        each[:, None, None] for each in (temperature, *parameters[:6])
    )
    sampling = temperature > 0
    filtered = sampling & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    limit = torch.where(top_k > 0, top_k, columns)
    least, share = (min_p * 2.0**LARGEST).clamp(min=1.0), (top_p * 2.0**24).long()
    rank, place = (torch.arange(size, device=logits.device) for size in (columns, max(per_request, steps) + 1))
    if ancestors is None:
        context = (place[:per_request, None] > place[:steps]).expand(requests, per_request, steps)
    else:
        words = ancestors.view(requests, per_request, 1).expand(requests, per_request, steps)
        bits = place[1 : steps + 1].expand_as(words)  # a device's shift may not broadcast
        context = ((words >> bits) & 1).bool()
    context = context & (draft_token_ids >= 0)[:, None]
    ids = draft_token_ids.clamp(min=0)[:, None].expand(requests, per_request, steps)
    chosen = slice(None) if draft_to_target is None else rank + draft_to_target
    together = max(1, SORTED_TOGETHER // max(1, requests))
    for first in range(0, per_request, together):
        part = slice(first, first + together)
        counts = output_counts[:, None].repeat(1, rows[:, part].shape[1], 1)
        counts.scatter_add_(2, ids[:, part], context[:, part].to(counts.dtype))
        counts = counts[..., chosen]
        x = rows[:, part] + bias[:, None, chosen]
        penalised = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(in_prompt[:, None, chosen] | (counts > 0), penalised, x)
        x = x - frequency * counts - presence * (counts > 0)
        weights = weights_of(x, torch.where(sampling, temperature, 1.0))
        ordered, order = weights.float().sort(dim=-1, descending=True, stable=True)  # exact: 24 bits each
        kept = (ordered >= least) & (rank < limit)
        weights = torch.where(kept, ordered, 0.0).long()
        before = weights.cumsum(dim=-1)
        total = before[..., -1:]
        # top_p times the total, rounded up. The product is computed in two parts: it has more than 64 bits.
        reached = share * (total // 2**24) + (share * (total & (2**24 - 1)) + (2**24 - 1)) // 2**24
        kept &= (before - weights < reached.clamp(min=1)) | (top_p >= 1)
        kept = torch.zeros_like(kept).scatter_(2, order, kept)
        adjusted[:, part] = torch.where(kept | ~filtered, x, EXCLUDED)
    return adjusted.view_as(logits)
