"""Trains a head: labels from the target, the loss, and the acceptance on held-out answers."""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from dspark import DFlashHead, DSparkHead
from head import Batch, DraftHead, Eagle3Head
from specgraph_models.config import ModelConfig
from torch.nn import functional as F

MEASURED = 5
"""The K of the reported acceptance length."""


class Target(Protocol):
    """The model that a head learns from."""

    device: torch.device
    sizes: ModelConfig
    embedding: torch.Tensor
    """[V, H]"""
    output: torch.Tensor
    """The lm_head, [V, H]. It is the embedding if they are tied."""
    norm: torch.Tensor
    """The weights of the last norm, [H]."""

    def forward(self, tokens: torch.Tensor, aux_layers: Sequence[int] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run over tokens [B, T]. Return the states after the last norm, and the inputs of each of `aux_layers`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] for states after the last norm, [N, H]."""
        ...


class Texts(NamedTuple):
    """n concatenated texts: tokens int32 [all]; first index of each text, then the end [n + 1]; prompt lengths [n]."""

    tokens: torch.Tensor
    begins: torch.Tensor
    prompts: torch.Tensor

    def lengths(self) -> torch.Tensor:
        """Return the number of tokens in each text."""
        return self.begins[1:] - self.begins[:-1]


def training_arguments(parser: argparse.ArgumentParser, seconds: float) -> argparse.Namespace:
    """Add the options of `teach`, parse all options, and set torch's seed and its precision of matrix products."""
    parser.add_argument("--kind", choices=["eagle3", "dflash", "dspark"], default="eagle3")
    parser.add_argument("--begin", type=Path, help="the folder of a head to begin from")
    parser.add_argument("--seconds", type=float, default=seconds, help="of training")
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step of training")
    parser.add_argument("--steps", type=int, default=6, help="draft steps of the training-time test, rows of a block")
    parser.add_argument("--later", type=float, default=0.85, help="of step k counts this share, to the power of k")
    parser.add_argument("--lost", type=float, default=0.2, help="weight of a draft after a wrong one of its chain")
    parser.add_argument("--hard", type=float, default=0.3, help="share of the greedy token in the label")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers and of training")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    return arguments


def teach(
    target: Target, train: Texts, held_out: Texts, drafted: int, arguments: argparse.Namespace, **config: Any
) -> None:
    """Train a head that drafts the `drafted` most frequent tokens of the answers.

    Args:
        config: further keys for config.json. `mask_token_id`, which a block head needs, is by default the rarest token
            of the texts.
    """
    device, vocab_size = target.device, target.sizes.vocab_size
    rarest = int(torch.bincount(train.tokens.long(), minlength=vocab_size).argmin())
    config = {"mask_token_id": rarest, **config}
    make: Callable[[dict[str, Any]], DraftHead] = Eagle3Head
    sizes, mask = layer_sizes(target.sizes), config.pop("mask_token_id")
    described = eagle3_config({**sizes, **config}, target.sizes.num_layers, drafted)
    if arguments.kind != "eagle3":
        make = DSparkHead if arguments.kind == "dspark" else DFlashHead
        block = {"draft_vocab_size": drafted, "mask_token_id": mask}
        described = block_config({**sizes, **config}, target.sizes.num_layers, arguments.kind, arguments.steps, block)
    head = make(described).to(device)
    answers = torch.cat([text[prompt:] for text, prompt in each_text(train)])
    counts = torch.bincount(answers.long(), minlength=vocab_size)
    chosen = counts.topk(drafted).indices.sort().values
    sample = next(batches(train, 8192, device))
    inside = torch.arange(sample.tokens.shape[1], device=device) < sample.lengths[:, None]
    inside[:, 0] = False  # a first token's states are a thousand times larger
    aux = torch.cat(target.forward(sample.tokens, head.aux_layers)[1], dim=-1)
    head.begin(chosen.to(device), target.output, target.norm, aux[inside])
    if arguments.begin is not None:
        head.load(arguments.begin)
    covered = counts[head.draft_ids().cpu()].sum() / counts.sum()
    print(f"{covered:.4f} of the answers' tokens can be drafted", flush=True)
    fit(Lesson(target, head, arguments), train, held_out, arguments)


def layer_sizes(sizes: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json about layers. A head's layers are as wide as the target's."""
    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    if sizes.latent is not None:  # a head has no latent attention: its own sizes
        heads, kv_heads, head_dim = max(1, sizes.hidden_size // 128), max(1, sizes.hidden_size // 512), 128
    return {
        "vocab_size": sizes.vocab_size, "hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_act": "silu",
        "attention_bias": False, "rms_norm_eps": sizes.rms_norm_eps, "rope_theta": sizes.rotary.theta,
        "max_position_embeddings": sizes.max_position_embeddings,
    }  # fmt: skip


def default_layers(depth: int) -> list[int]:
    """Return the three layers of a target that a head takes the inputs of."""
    return [min(2, depth), depth // 2, max(depth - 3, 0)]


def eagle3_config(sizes: dict[str, Any], depth: int, drafted: int) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 head for a target of `depth` layers, in its authors' format."""
    return {
        **sizes, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": drafted,
        "target_hidden_size": sizes["hidden_size"], "num_hidden_layers": 1, "mlp_bias": False,
        "norm_before_residual": False,
        "eagle_config": {
            "use_aux_hidden_state": True, "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": default_layers(depth),
        },
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def block_config(sizes: dict[str, Any], depth: int, kind: str, drafts: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a DFlash or DSpark head for a target of `depth` layers, in the format of `speculators`."""
    first, _, last = default_layers(depth)
    if kind == "dspark":
        own = own | {"markov_head_type": "vanilla", "markov_rank": 64, "enable_confidence_head": True}
        own |= {"confidence_head_with_markov": True}
    drafting = kind == "dspark"  # the last known token's row drafts
    layers = {name: value for name, value in sizes.items() if name != "rope_theta"}
    return {
        "architectures": ["DSparkDraftModel" if drafting else "DFlashDraftModel"], "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            **layers, "model_type": "qwen3", "num_hidden_layers": 3, "tie_word_embeddings": False,
            "rope_parameters": {"rope_theta": sizes["rope_theta"], "rope_type": "default"},
        },
        "aux_hidden_state_layer_ids": [first + (last - first) * i // 4 for i in range(5)],
        "block_size": drafts if drafting else drafts + 1, "sample_from_anchor": drafting, **own,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def each_text(texts: Texts) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each text's tokens and its prompt's length."""
    yield from zip(texts.tokens.split(texts.lengths().tolist()), texts.prompts.tolist(), strict=True)


def batches(texts: Texts, size: int, device: torch.device) -> Iterator[Batch]:
    """Yield all texts once, in batches of about `size` tokens, in random order. A batch has texts of similar length."""
    lengths = texts.lengths()
    noisy = lengths + 48 * torch.rand(lengths.shape)  # so that each epoch batches other texts together
    known = lengths.tolist()
    groups, group, widest = list[list[int]](), list[int](), 0
    for index in noisy.argsort().tolist():
        widest = max(widest, known[index])
        if group and widest * (len(group) + 1) > size:
            groups.append(group)
            group, widest = [], known[index]
        group.append(index)
    groups.append(group)
    for i in torch.randperm(len(groups)).tolist():
        chosen = torch.tensor(groups[i])
        width = (int(lengths[chosen].max()) // 8 + 2) * 8  # some rows more than the longest text
        places = texts.begins[chosen][:, None] + torch.arange(width)
        tokens = texts.tokens[places.clamp(max=texts.tokens.numel() - 1)].long()
        tokens.masked_fill_(torch.arange(width) >= lengths[chosen][:, None], 0)
        yield Batch(*(each.to(device) for each in (tokens, lengths[chosen], texts.prompts[chosen])))


class CrossEntropy(torch.autograd.Function):
    """Weighted sum of the rows' cross entropy. It saves memory: forward stores the gradient and no other tensor."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the loss of logits and label [N, V], with weight [N]."""
        log_shares = logits.float().log_softmax(-1)
        loss = -(label * log_shares).sum(-1) @ weight
        ctx.save_for_backward(((log_shares.exp_() - label) * weight[:, None]).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


class Lesson:
    """Computes the loss of a batch: it compares the head's drafts with the target's distributions."""

    def __init__(self, target: Target, head: DraftHead, arguments: argparse.Namespace) -> None:
        self.target, self.head, self.steps = target, head, arguments.steps
        self.hard, self.lost = arguments.hard, arguments.lost
        self.draft_ids = head.draft_ids()

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses [steps], the hits [S, N], and the text of each chain of drafts [N].

        S is the number of draft steps, at most `steps`. A hit is True if the draft is the target's greedy token. A
        chain is left out of hits and texts if one of its hits would be past its text's end, and so unknown.

        The label mixes the target's distribution, normalised over the draft vocabulary, with the greedy token (share
        `hard`). A draft with its label past the text's end has no weight in the loss. A draft after a wrong one of its
        chain has the weight `lost`, since a verify would drop it.
        """
        target, head = self.target, self.head
        hidden, aux = target.forward(batch.tokens, head.aux_layers)
        narrow = torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.device.type != "cpu")
        with narrow:
            text, place, states = head.draft(target.embedding, batch, torch.cat(aux, dim=-1).float(), self.steps)
        last = batch.lengths[text] - 1
        labels, greedy, number = self._labels(batch, hidden)
        losses, hits = hidden.new_zeros(self.steps, dtype=torch.float32), list[torch.Tensor]()
        whole = place + len(states) <= last
        right = torch.ones_like(whole)
        for step, state in enumerate(states):
            inside, before = place + step < last, batch.tokens[text, place + step]
            which = number[text, torch.where(inside, place + step, place)]
            weight = torch.where(right, 1.0, self.lost) * inside / inside.sum().clamp(min=1)
            with narrow:
                logits, confidence = head.logits(state, before), head.confidence(state, before)
            losses[step] += CrossEntropy.apply(logits, labels[which], weight)
            hits.append(self.draft_ids[logits.detach().argmax(-1)] == greedy[which])
            if confidence is not None:
                chance = hits[-1].float()
                losses[step] += F.binary_cross_entropy_with_logits(confidence.float(), chance, weight, reduction="sum")
            right = right & hits[-1]
        return losses, torch.stack(hits)[:, whole], text[whole]

    @torch.no_grad()
    def _labels(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return labels [M, draft vocab] and greedy tokens [M] of the answers' M rows, and each row's number [B, T]."""
        row = torch.arange(batch.tokens.shape[1], device=hidden.device)
        wanted = (row >= batch.prompts[:, None]) & (row < batch.lengths[:, None])
        logits = self.target.logits(hidden[wanted])
        greedy = logits.argmax(-1)
        labels = logits[:, self.draft_ids].float().softmax(-1)
        index = torch.searchsorted(self.draft_ids, greedy).clamp_(max=self.draft_ids.numel() - 1)
        hard = self.hard * (self.draft_ids[index] == greedy)[:, None]
        labels.mul_(1 - hard).scatter_add_(1, index[:, None], hard)
        return labels.to(hidden.dtype), greedy, wanted.flatten().cumsum(0).sub_(1).view(wanted.shape)


@torch.no_grad()
def acceptance(lesson: Lesson, texts: Texts, size: int) -> tuple[list[float], float]:
    """Return two measures over greedy answers, which `texts` must be.

    The first is, for each draft step, the share of drafts that are right up to this step, over drafts after every
    token. The second is the mean acceptance length, over drafts that each begin at the end of the one before.
    """
    lesson.head.eval()
    chains = list[torch.Tensor]()
    tokens = rounds = 0
    for batch in batches(texts, size, lesson.target.device):
        _, hits, text = lesson(batch)
        chains.append(hits.int().cumprod(0))
        accepted = chains[-1][:MEASURED].sum(0).tolist()
        ends = torch.searchsorted(text, text, right=True).tolist()  # the end of each chain's text
        row = 0
        while row < len(accepted):
            following = min(row + accepted[row] + 1, ends[row])
            tokens, rounds, row = tokens + accepted[row] + 1, rounds + 1, following
    lesson.head.train()
    return torch.cat(chains, dim=1).float().mean(1).tolist(), tokens / max(rounds, 1)


def fit(lesson: Lesson, train: Texts, held_out: Texts, arguments: argparse.Namespace) -> None:
    """Train for `--seconds` by AdamW: the learning rate has a short linear warm-up, then a cosine down to 1 %."""
    head, path = lesson.head, arguments.out / f"{arguments.kind}.pt"
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    device = lesson.target.device
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    step, before, epoch, seen, warmup = 0, 0.0, 0, 0, 0.02
    if path.exists():
        state = torch.load(path, map_location=device)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step, before, epoch, seen = state["at"]
    start, saved = time.perf_counter(), time.perf_counter()
    later = arguments.later ** torch.arange(arguments.steps, device=device)
    recent = torch.zeros(arguments.steps, device=device)
    queue: Iterator[Batch] = iter(())

    def report() -> None:
        rates, length = acceptance(lesson, held_out, arguments.batch)
        head.save(arguments.out / arguments.kind)
        at = step, time.perf_counter() - start + before, epoch, seen
        torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict(), "at": at}, path)
        print(
            f"{at[1]:.0f} s, step {step}, epoch {epoch}, {seen / 1e6:.1f}M tokens, loss "
            f"{' '.join(f'{x:.3f}' for x in recent.tolist())}; held out: {' '.join(f'{x:.3f}' for x in rates)}, "
            f"length at {MEASURED}: {length:.3f}", flush=True,
        )  # fmt: skip

    report()
    while (progress := (time.perf_counter() - start + before) / arguments.seconds) < 1:
        batch = next(queue, None)
        if batch is None:
            epoch, queue = epoch + 1, batches(train, arguments.batch, device)
            continue
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * (cosine if progress >= warmup else max(progress, warmup / 50) / warmup)
        losses = lesson(batch)[0]
        (losses * later).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = recent.lerp(losses.detach(), max(1 / (step + 1), 0.02))
        step, seen = step + 1, seen + int(batch.lengths.sum())  # waits for the device, so that the clock is right
        if time.perf_counter() - saved > 60:
            report()
            saved = time.perf_counter()
    report()
