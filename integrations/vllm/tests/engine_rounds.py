"""vLLM's side of a propose, with a dense float64 chain as the oracle: one engine for every test of the speculator."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from draft.test_against_dense import dense_attend, dense_chain
from mixtures import (
    POSITIONS,
    TP_GROUP,
    DeepSeekMTP,
    Glm4MoeMTP,
    Qwen3NextMTP,
    as_vllm_stores,
    forward_context,
    mixture_folder,
)
from specgraph_models import load_drafter, load_target
from specgraph_models.checkpoints import target_shape
from specgraph_models.mtp import MtpHead
from specgraph_models.parallel import split_over
from specgraph_plugin.vllm.config import Settings
from specgraph_plugin.vllm.draft_model import draft_layers, layer_name
from specgraph_run import shipped_pair
from specgraph_vllm.mixtures import summed_in_graph
from specgraph_vllm.speculator import adopt
from tiny_checkpoints import write_eagle3, write_target
from vllm_objects import DFlashQwen3ForCausalLM as DFLASH
from vllm_objects import Eagle3LlamaForCausalLM as EAGLE3
from vllm_objects import EagleLlamaForCausalLM as EAGLE
from vllm_objects import LlamaForCausalLM as LM
from vllm_objects import MiMoMTP as MTP
from vllm_objects import Qwen3DSparkForCausalLM as DSPARK
from vllm_objects import StockSpeculator, dspark_folder, input_batch, kv_cache, mimo_folder, split, vllm_config

from specgraph.draft import BlockKind, ParallelKind

K, BLOCK, MAX_LEN, MAX_SEQS, SLOTS, MAX_ROWS = 4, 16, 96, 3, 5, 48
DRAFTERS = Path(__file__).parents[3] / "examples/tiny-python/drafters"
E4M3 = torch.float8_e4m3fn


MIXTURES = {"glm": Glm4MoeMTP, "qwen": Qwen3NextMTP, "deepseek": DeepSeekMTP}


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.float().to(E4M3).double()


def dense_context(head, aux, past):
    """Store the context of rows at positions 0.. in `past`."""
    rows = dense_attend(head.attention_layers, torch.arange(len(aux)), past)
    query = aux.new_zeros(len(aux), head.attention_layers[0].num_heads, head.attention_layers[0].head_dim)
    head.store_context(head.combine(aux), lambda index, key, value: rows(index, query, key, value))


def dense_block(head, tokens, aux, k):
    """The drafts of a block behind rows (tokens[i], aux[i]) at positions 0.., whose last token is the anchor."""
    past: dict = {}
    dense_context(head, aux, past)
    first = 0 if head.sample_from_anchor else 1
    ids = torch.tensor([[int(tokens[-1]), *[head.mask_token_id] * (k + first - 1)]])
    rows = dense_attend(head.attention_layers, torch.arange(len(aux), len(aux) + k + first), past, causal=False)
    logits, drafts = head.logits(head.forward(ids, rows)[first:]), [int(tokens[-1])]
    for row in logits:
        if head.kind == BlockKind():  # DSpark's table of which token follows which
            row = row + head.markov.output.matrix @ head.markov.embed[drafts[-1]]
        token = int(row.argmax())
        drafts.append(token if head.draft_to_target is None else token + int(head.draft_to_target[token]))
    return drafts[1:]


class Engine:
    """vLLM's side: request slots, block tables, the KV cache, and rounds whose accepted counts are drawn."""

    def __init__(
        self,
        folder,
        kind: str = "eagle3",
        divided: bool | None = None,
        ranks=None,
        stored: torch.dtype = torch.float32,
        allocate=kv_cache,
        **settings,
    ) -> None:
        """Kind "fp8" is EAGLE-3 with an FP8 KV cache, "shipped" the shipped pair.

        Args:
            divided: drafts are sampled, and whether their logits are divided by the temperature; `stored`: vLLM's dtype
                of them.
            ranks: this process is one of those that split the module.
            allocate: makes a layer's KV cache in a layout of vLLM.
        """
        fp8, kind = kind == "fp8", kind.replace("fp8", "eagle3")
        self.stored = in_e4m3 if fp8 else lambda x: x
        self.g = torch.Generator().manual_seed(3)
        if kind == "eagle3":
            target_folder, draft_folder, made = write_target(folder / "t"), write_eagle3(folder / "d"), EAGLE3
        elif kind == "shipped":
            (target_folder, draft_folder), made = shipped_pair(), EAGLE3
        elif kind == "eagle":
            target_folder, draft_folder, made = shipped_pair()[0], DRAFTERS / "eagle1", EAGLE
        elif kind == "mtp":
            target_folder = draft_folder = mimo_folder(folder / "t")
            made = MTP
        elif kind == "dflash":
            target_folder, draft_folder, made = shipped_pair()[0], DRAFTERS / "dflash", DFLASH
        elif kind.startswith("dspark"):
            target_folder, draft_folder, made = shipped_pair()[0], dspark_folder(folder / "d"), DSPARK
        elif kind in MIXTURES:
            target_folder = draft_folder = mixture_folder(folder / "t", kind)
            made = MIXTURES[kind]
        elif kind == "target as drafter":
            target_folder = draft_folder = shipped_pair()[0]
            made = LM
        else:
            target_folder, draft_folder, made = shipped_pair()[0], DRAFTERS / "draft-model", LM
        if kind in MIXTURES:
            target = target_shape(target_folder, max_model_len=POSITIONS, dtype=torch.float32)
            read = load_drafter(draft_folder, target_shape(target_folder, max_model_len=POSITIONS, dtype=torch.float64))
            shared = read.embed_tokens, read.lm_head
            self.oracle = MtpHead(read.sizes, read.modules, *shared, carries_normed=kind != "glm")  # as vLLM's do
        else:
            target = load_target(target_folder, dtype=torch.float32)
            self.oracle = load_drafter(draft_folder, load_target(target_folder, dtype=torch.float64))
        config = json.loads((draft_folder / "config.json").read_text())
        self.module, self.vocab = made(draft_folder, config, target, torch.float32), target.vocab_size
        if kind == "dspark-fill-in":  # as in folders of speculators: the anchor's row predicts nothing
            self.module.config.sample_from_anchor = self.oracle.sample_from_anchor = False
        size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        if size > 1:
            split(self.module, rank, size)
        self.first = {} if made is LM else None
        """By slot, a prompt's first token: a language model has its key and value too."""
        self.names = [layer_name(layer) for layer in draft_layers(self.module)]
        per_request, layer = MAX_LEN // BLOCK, self.oracle.attention_layers[0]
        heads = max(1, layer.num_kv_heads // size)
        first = rank * layer.num_kv_heads // size
        self.heads = slice(first, first + heads)
        blocks = 1 + SLOTS * per_request
        self.tensors = [allocate(blocks, heads, BLOCK, layer.head_dim, torch.float32) for _ in self.names]
        if layer.latent:
            self.tensors = [torch.zeros(blocks, BLOCK, layer.head_dim)]
        if fp8:
            self.tensors = [kv.transpose(1, 2).to(E4M3).view(torch.uint8).transpose(1, 2) for kv in self.tensors]
        self.tensor = self.tensors[0]
        self.blocks = (torch.randperm(SLOTS * per_request, generator=self.g) + 1).view(SLOTS, -1).int()
        self.last_sampled = torch.full((SLOTS, 1), 7)
        of = {"kv_cache_dtype": "fp8" if fp8 else "auto", "_k_scale_float": 1.0, "_v_scale_float": 1.0}
        context = {n: SimpleNamespace(kv_cache=kv, **of) for n, kv in zip(self.names, self.tensors, strict=True)}
        s = self.speculator = StockSpeculator(
            vllm_config(
                compilation_config__static_forward_context=context,
                model_config__get_hidden_size=lambda: target.hidden_size,
            ),
            torch.device("cpu", 0),
        )
        if divided is not None:
            s.draft_logits = torch.zeros(SLOTS, K, self.vocab, dtype=stored)
        context = forward_context
        if ranks is not None:
            context = summed_in_graph(context, TP_GROUP, split_over(ranks))
        adopt(s, Settings(**settings), lambda: bool(divided), context, ranks)
        self.temperature, self.seeds = torch.tensor([0.0, 0.7, 1.0, 1.3, 0.5]), torch.arange(SLOTS) + 99
        s.num_speculative_steps, s.max_num_reqs, s.max_model_len, s.max_num_tokens = K, MAX_SEQS, MAX_LEN, MAX_ROWS
        s.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a", *self.names])])
        s.block_tables = SimpleNamespace(
            **{"block_sizes" if made is LM else "kernel_block_sizes": [BLOCK]},
            input_block_tables=[torch.full((MAX_SEQS, per_request + 2), 3).int()],
        )
        self.tokens, self.aux, self.prompts = {}, {}, set()
        self.next_prefill = torch.full((SLOTS,), 5, dtype=torch.int32)

    def start(self) -> None:
        self.speculator.load_model(self.module)
        self.speculator.capture()

    def prompt(self, slot: int, length: int) -> None:
        """A prompt, as vLLM leaves it after its own code has drafted: rows 0 .. length - 1 are in the cache."""
        self.tokens[slot] = torch.randint(0, self.vocab, (length,), generator=self.g)
        self.aux[slot] = torch.randn(length, self.oracle.aux_size, generator=self.g)
        if self.first is not None:
            self.first[slot] = torch.randint(0, self.vocab, (1,), generator=self.g)
        past: dict = {}
        ids, aux = self.history(slot)
        if self.oracle.kind in (ParallelKind(), BlockKind()):
            dense_context(self.oracle, aux, past)
        else:
            rows = dense_attend(self.oracle.attention_layers, torch.arange(len(ids)), past)
            self.oracle.forward(ids, self.oracle.combine(aux), rows)
        for position in range(len(ids)):
            block = self.blocks[slot, position // BLOCK]
            for layer, tensor in enumerate(self.tensors):
                if tensor.dim() == 3:
                    tensor[block, position % BLOCK] = as_vllm_stores(past[layer][0][position])[0].float()
                    continue
                if tensor.dim() == 5:
                    tensor[:, block, position % BLOCK] = torch.stack([*(x[position] for x in past[layer])]).float()
                    continue
                pair = torch.cat([past[layer][0][position], past[layer][1][position]], -1)
                tensor[block, :, position % BLOCK] = pair[self.heads].float()

    def history(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and hidden states of all rows that the drafter has seen, from position 0 on."""
        if self.first is None:
            return self.tokens[slot], self.aux[slot].double()
        tokens = torch.cat([self.first[slot], self.tokens[slot]])
        return tokens, torch.zeros(len(tokens), self.oracle.aux_size, dtype=torch.float64)

    def drafted(self, slot: int) -> list[int]:
        """The drafts over the whole history, dense."""
        if self.oracle.kind in (ParallelKind(), BlockKind()):
            return dense_block(self.oracle, *self.history(slot), K)
        return dense_chain(self.oracle, *self.history(slot), K, stored=self.stored)[1]

    def round(self, slots: list[int], counts: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
        """One decode round: the drafts of specgraph, and those of the dense chain over each whole history."""
        rows, aux, starts = [], [], []
        for slot, count in zip(slots, counts, strict=True):
            # Row at position p: token p, hidden state p. `tokens` holds the token *after* each position of the cache.
            start = len(self.tokens[slot])
            ids = torch.randint(0, self.vocab, (K + 1,), generator=self.g)
            ids[0] = self.tokens[slot][-1]
            states = torch.randn(K + 1, self.oracle.aux_size, generator=self.g)
            last = torch.randint(0, self.vocab, (), generator=self.g)
            self.last_sampled[slot, 0] = last
            self.tokens[slot] = torch.cat([self.tokens[slot], ids[1:count], last[None]])
            self.aux[slot] = torch.cat([self.aux[slot], states[:count]])
            states[count:] *= 5  # rejected rows
            rows.append(ids)
            aux.append(states)
            starts.append(start)
        table = self.speculator.block_tables.input_block_tables[0]
        table[: len(slots), : self.blocks.shape[1]] = self.blocks[slots]
        batch = input_batch(rows, starts, slots)
        padding = torch.zeros(5, self.oracle.aux_size)
        states = torch.cat([*aux, padding])
        parts = [part.contiguous() for part in states.chunk(3, dim=1)] if self.oracle.aux_layers else None
        drafts = self.propose(batch, parts, counts, last=states)
        want = [self.drafted(slot) for slot in slots]
        return drafts, want

    def mixed(self, work: dict[int, tuple]) -> tuple[torch.Tensor, list[list[int] | None]]:
        """One pass over prompts' chunks and rounds of any lengths; as `round`, but None where nothing was sampled.

        Args:
            work: by slot, the tokens of its rows, how many tokens the target sampled, the prompt's next token, and how
                many rows behind a prompt's end are draft tokens, if any are.
        """
        rows, aux, starts, drafts, rejected, prefilling, prompts = [], [], [], [], [], [], []
        for slot, (ids, count, following, *padded) in work.items():
            start = len(self.tokens[slot])
            prompt = start == 0 or slot in self.prompts
            drafted = sum(padded) if prompt else len(ids) - 1
            valid = len(ids) - drafted + max(count - 1, 0)
            states = torch.randn(len(ids), self.oracle.aux_size, generator=self.g)
            self.next_prefill[slot], last = following, torch.randint(0, self.vocab, (), generator=self.g)
            if count:
                self.last_sampled[slot, 0] = last
                self.prompts.discard(slot)
            after = last[None] if count else torch.tensor([following])
            if start == 0 and self.first is not None:
                self.first[slot] = ids[:1]
            self.tokens[slot] = torch.cat([self.tokens[slot], ids[1:valid], after])
            self.aux[slot] = torch.cat([self.aux[slot], states[:valid]])
            states[valid:] *= 5
            length = start + len(ids) - drafted if count else MAX_LEN
            for into, value in zip(
                (rows, aux, starts, drafts, rejected, prefilling, prompts),
                (ids, states, start, drafted, len(ids) - valid, prompt, length), strict=True,
            ):  # fmt: skip
                into.append(value)
        slots, counts = list(work), [count for _, count, *_ in work.values()]
        self.speculator.block_tables.input_block_tables[0][: len(slots), : self.blocks.shape[1]] = self.blocks[slots]
        states = torch.cat([*aux, torch.zeros(5, self.oracle.aux_size)])
        parts = [part.contiguous() for part in states.chunk(3, dim=1)] if self.oracle.aux_layers else None
        batch = input_batch(rows, starts, slots, prefilling, prompts, drafts)
        made = self.propose(batch, parts, counts, last=states, rejected=rejected)
        return made, [self.drafted(slot) if count else None for slot, count in zip(slots, counts, strict=True)]

    def propose(self, batch, aux, counts, *extra, last=None, rejected=None, **options):
        sampled = torch.tensor(counts, dtype=torch.int32)
        rest = K + 1 - sampled if rejected is None else torch.tensor(rejected, dtype=torch.int32)
        tensors = (last, aux, sampled, rest, self.last_sampled, self.next_prefill, self.temperature, self.seeds)
        with torch.inference_mode():
            return self.speculator.propose(batch, {}, {}, *tensors, *extra, **options)
