"""What a head learns from the answers of its target, and how much of what it drafts they accept."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from target import TargetPass, Text

sys.path.append(str(Path(__file__).parents[1] / "smollm2"))  # where the head is
from head import Batch, Eagle3Head

MEASURED = 5
"""Draft tokens that the acceptance length is reported for."""
LOST = 0.2
"""Weight of a draft after a wrong one of its chain: a verify would drop it."""
GREEDY = 0.3
"""Share of the target's greedy token in the label; the rest is the target's distribution."""


def batches(texts: Sequence[Text], size: int, device: torch.device) -> Iterator[Batch]:
    """Yield all texts once, in random order, texts of about the same length together, about `size` tokens at a time."""
    lengths = torch.tensor([len(text.tokens) for text in texts])
    noisy = lengths + 48 * torch.rand(lengths.shape)  # other texts are together in each epoch
    groups, group, widest = list[list[int]](), list[int](), 0
    for index in noisy.argsort().tolist():
        widest = max(widest, len(texts[index].tokens))
        if group and widest * (len(group) + 1) > size:
            groups.append(group)
            group, widest = [], len(texts[index].tokens)
        group.append(index)
    groups.append(group)
    for i in torch.randperm(len(groups)).tolist():
        chosen = [texts[index] for index in groups[i]]
        width = (max(len(text.tokens) for text in chosen) // 8 + 2) * 8  # with some rows behind the longest text's end
        tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
        for line, text in zip(tokens, chosen, strict=True):
            line[: len(text.tokens)] = torch.tensor(text.tokens)
        yield Batch(tokens.to(device), lengths[groups[i]].to(device),
                    torch.tensor([text.prompt for text in chosen], device=device))  # fmt: skip


class CrossEntropy(torch.autograd.Function):
    """Cross entropy, summed over rows with a weight each, whose backward keeps one gradient in place of its steps."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """logits, label [N, V]; weight [N]."""
        log_shares = logits.float().log_softmax(-1)
        loss = -(label * log_shares).sum(-1) @ weight
        ctx.save_for_backward(((log_shares.exp_() - label) * weight[:, None]).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


class Lesson:
    """What the head learns from a batch, and what it would have drafted."""

    def __init__(self, target: TargetPass, head: Eagle3Head, steps: int) -> None:
        """steps: of draft, in the training-time test."""
        self.target, self.head, self.steps, self.draft_ids = target, head, steps, head.draft_ids()
        self._autocast = {"device_type": target.device.type, "dtype": torch.bfloat16}
        self._autocast["enabled"] = target.device.type != "cpu"

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses [steps]; hits [steps, N]: whether drafts are the target's greedy tokens; their texts [N].

        N drafts begin after each token of the answers, but the last ones. The label is the target's distribution over
        the draft vocabulary, normalised, and in a part the greedy token. A draft whose label's row lies behind the
        text's end counts for nothing in the loss. No draft begins where one of its hits would be unknown.
        """
        target, head, steps = self.target, self.head, self.steps
        hidden, aux = target(batch.tokens, head.aux_layers)
        row = torch.arange(batch.tokens.shape[1] - steps, device=target.device)
        begins = (row >= batch.prompts[:, None] - 1) & (row < batch.lengths[:, None] - 2)
        text, place = begins.nonzero(as_tuple=True)
        whole = place < batch.lengths[text] - 1 - steps
        embeds = target.model.embed_tokens[batch.tokens].float()
        with torch.autocast(**self._autocast):
            states = [state[text, place] for state in head.unroll(embeds, aux.float(), steps)]
        labels, greedy, number = self._labels(batch, hidden)
        losses, hits = list[torch.Tensor](), list[torch.Tensor]()
        right = torch.ones_like(whole)
        for step, state in enumerate(states):
            inside = place + 1 + step < batch.lengths[text] - 1
            which = number[text, torch.where(inside, place + 1 + step, place + 1)]
            weight = torch.where(right, 1.0, LOST) * inside / inside.sum().clamp(min=1)
            with torch.autocast(**self._autocast):
                logits = head.lm_head(state)
            losses.append(CrossEntropy.apply(logits, labels[which], weight))
            hits.append(self.draft_ids[logits.detach().argmax(-1)] == greedy[which])
            right = right & hits[-1]
        return torch.stack(losses), torch.stack(hits)[:, whole], text[whole]

    @torch.no_grad()
    def _labels(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return labels [M, draft vocab] and greedy tokens [M] of the rows in the answers, and their numbers [B, T]."""
        row = torch.arange(batch.tokens.shape[1], device=hidden.device)
        wanted = (row >= batch.prompts[:, None]) & (row < batch.lengths[:, None])
        logits = self.target.model.logits(hidden[wanted])
        greedy = logits.argmax(-1)
        labels = logits[:, self.draft_ids].float().softmax(-1)
        index = torch.searchsorted(self.draft_ids, greedy).clamp_(max=self.draft_ids.numel() - 1)
        hard = GREEDY * (self.draft_ids[index] == greedy)[:, None]
        labels.mul_(1 - hard).scatter_add_(1, index[:, None], hard)
        return labels.to(hidden.dtype), greedy, wanted.flatten().cumsum(0).sub_(1).view(wanted.shape)


@torch.no_grad()
def acceptance(lesson: Lesson, texts: Sequence[Text], size: int) -> tuple[list[float], float]:
    """Return the share of drafts, begun after every token of greedy answers, whose tokens up to step k are right; and
    the mean acceptance length, where a draft begins where the one before it ended."""
    chains = list[torch.Tensor]()
    tokens = rounds = 0
    for batch in batches(texts, size, lesson.target.device):
        _, hits, text = lesson(batch)
        chains.append(hits.int().cumprod(0))
        accepted = chains[-1][:MEASURED].sum(0).tolist()
        ends = torch.searchsorted(text, text, right=True).tolist()  # of each row's text
        row = 0
        while row < len(accepted):
            following = min(row + accepted[row] + 1, ends[row])
            tokens, rounds, row = tokens + accepted[row] + 1, rounds + 1, following
    return torch.cat(chains, dim=1).float().mean(1).tolist(), tokens / max(rounds, 1)
