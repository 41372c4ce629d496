# ruff: noqa
"""Logits of drafter heads at random sizes and options against other people's code: random_heads.py KIND FIRST LAST.

eagle3, peagle, dflash, dspark, dflash2, mtp: the models of `speculators` 0.9.0. domino: the DFlash model of `speculators` and SGLang 0.5.23's
rollout of Domino. ngram: vLLM 0.33's two Triton kernels, interpreted. The folder ORACLES has the package, domino_utils.py, the kernels as
vllm_ngram.py, and stubs.py, which puts empty modules in the place of what `speculators` imports for training.
"""

import importlib.util, json, os, random, sys, tempfile, time
from pathlib import Path

sys.path[:1] = [os.environ["ORACLES"], "tests/models", "tests", "tests/models/speculators_fixtures"]

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
if sys.argv[1] == "ngram":
    os.environ["TRITON_INTERPRET"] = "1"
import stubs  # what `speculators` imports for training alone
import torch
import conftest as c
import write as w
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config
from specgraph.checkpoints import load_drafter, load_target

torch.set_num_threads(1)
plain = lambda fixture: getattr(fixture, "_get_wrapped_function", lambda: fixture.__wrapped__)()
attend, store = plain(c.dense_attend)(), plain(c.dense_store)()
chain, block = plain(c.chain_logits)(attend), plain(c.block_rows)(attend, store)


def sizes(r):
    kv = r.choice([1, 2])
    w.VOCAB = r.choice([48, 64, 97])
    w.DRAFT_VOCAB = r.choice([17, 24, 40])
    heads = kv * r.choice([1, 2, 3])
    w.HIDDEN = heads * 8 * r.choice([1, 2, 3])
    w.ROWS = r.randint(8, 13)
    w.STEPS = r.randint(2, 4)
    w.SIZES = dict(
        vocab_size=w.VOCAB,
        hidden_size=w.HIDDEN,
        intermediate_size=r.choice([16, 32, 56]),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=r.choice([4, 8, 16]),
        max_position_embeddings=64,
        rms_norm_eps=r.choice([1e-6, 1e-5, 1e-3]),
        rope_parameters={"rope_type": "default", "rope_theta": r.choice([1e2, 1e4, 1e6])},
    )


def worst(pairs):
    found = [float((a.float() - b.float()).abs().max()) for a, b in pairs]
    assert found
    return max(x if x == x else float("inf") for x in found)


def vocabulary(model):
    chosen = torch.randperm(w.VOCAB, generator=torch.Generator().manual_seed(5))[: w.DRAFT_VOCAB].sort().values
    model.d2t.copy_(chosen - torch.arange(w.DRAFT_VOCAB))
    model.t2d.zero_()[chosen] = True


def layers_of(r, most, kinds=(LlamaConfig, Qwen3Config)):
    made = r.choice(kinds)(**w.SIZES, **w.OWNERS, num_hidden_layers=r.randint(1, most))
    made._attn_implementation = "eager"
    return made


def eagle3(r, seed, target):
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    norms = r.choice([{}, {"fc_norm": True}, {"norm_before_fc": True}])
    aux = sorted(r.sample([1, 2, 3, 4], 3))
    model = (
        Eagle3DraftModel(
            Eagle3SpeculatorConfig(
                transformer_layer_config=layers_of(r, 2),
                eagle_aux_hidden_state_layer_ids=aux,
                speculators_config=w.speculators_config("eagle3", w.STEPS),
                draft_vocab_size=r.choice([w.VOCAB, w.DRAFT_VOCAB]),
                norm_before_residual=r.random() < 0.5,
                norm_output=r.random() < 0.5,
                **norms,
            )
        )
        .float()
        .eval()
    )
    w.randomise(model, seed)
    if model.use_draft_vocab:
        vocabulary(model)
    given = w.inputs(3 * w.HIDDEN, seed + 1)
    hidden = w.record(model.lm_head)
    model(
        given["aux_hidden"][None], given["token_ids"][None], torch.zeros(1, w.ROWS, dtype=torch.long), ttt_steps=w.STEPS
    )
    logits = [model.lm_head(h)[0] if h.dim() == 3 else model.lm_head(h) for h in list(hidden)]
    w.save("head", model, given)
    head = load_drafter(w.HERE / "head", target)
    assert list(head.aux_layers) == aux
    return worst(
        (got, logits[step][row])
        for row in range(w.ROWS)
        for step, got in enumerate(chain(head, given["token_ids"], given["aux_hidden"], row, w.STEPS))
    )


def peagle(r, seed, target):
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers_of(r, 3),
        draft_vocab_size=w.DRAFT_VOCAB,
        norm_before_residual=r.random() < 0.5,
        eagle_aux_hidden_state_layer_ids=sorted(r.sample([1, 2, 3, 4], 3)),
        mask_token_id=r.randrange(w.VOCAB),
        speculators_config=w.speculators_config("peagle", w.STEPS + 1),
        **r.choice([{}, {"norm_before_fc": True}]),
    )
    model = PEagleDraftModel(config).float().eval()
    w.randomise(model, seed)
    vocabulary(model)
    given, taken, drawn = w.inputs(3 * w.HIDDEN, seed + 1), core.generate_cod_sample_indices, []

    def kept(**settings):
        drawn.extend(taken(**settings))
        return tuple(drawn)

    core.generate_cod_sample_indices = kept
    hidden = w.record(model.lm_head)
    model(
        given["aux_hidden"][None],
        given["token_ids"][None],
        torch.zeros(1, w.ROWS, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, w.ROWS, w.HIDDEN),
        num_depths=w.STEPS + 1,
        down_sample_ratio=1.0,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    core.generate_cod_sample_indices = taken
    logits = model.lm_head(hidden[0])
    logits = logits[0] if logits.dim() == 3 else logits
    w.save("head", model, given)
    head = load_drafter(w.HERE / "head", target)
    combined, pairs = head.combine(given["aux_hidden"]), []
    for anchor, depth, want in zip(drawn[0].tolist(), drawn[1].tolist(), logits):
        if anchor < 0:
            continue
        ids = torch.cat([given["token_ids"][: anchor + 1], torch.full((depth,), head.mask_token_id)])
        out = head.forward(
            ids,
            torch.cat([combined[: anchor + 1], head.mask_hidden.expand(depth, -1)]),
            attend(head.attention_layers, torch.arange(len(ids))),
        )
        pairs.append((head.logits(out.hidden)[-1], want))
    assert len(pairs) > w.ROWS
    return worst(pairs)


def mtp(r, seed, target):
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    layer = Qwen3Config(**w.SIZES, **w.OWNERS, num_hidden_layers=1)
    layer._attn_implementation = "eager"
    model = (
        MTPDraftModel(
            MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=w.speculators_config("mtp", w.STEPS))
        )
        .float()
        .eval()
    )
    w.randomise(model, seed)
    model.embed_tokens.weight.copy_(target.embed_tokens)
    model.lm_head.weight.copy_(target.lm_head)
    given = w.inputs(w.HIDDEN, seed + 1)
    logits, _, _ = model(given["token_ids"][None], given["aux_hidden"][None])
    w.save("head", model, given)
    head = load_drafter(w.HERE / "head", target)
    rows, pairs = logits[0].shape[1], []
    hidden = head.combine(given["aux_hidden"])[:rows]
    for step, want in enumerate(logits):
        out = head.forward(
            given["token_ids"][step + 1 : step + 1 + rows], hidden, attend(head.attention_layers, torch.arange(rows))
        )
        pairs.append((head.logits(out.hidden), want[0]))
        hidden = out.carry
    return worst(pairs)


def backbone(r, seed, target, size, mask):
    """A DFlash model of the package; inputs, rows, hidden states and logits of three blocks."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    model = (
        DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=layers_of(r, 3),
                draft_vocab_size=w.VOCAB,
                block_size=size,
                aux_hidden_state_layer_ids=[1, 3],
                mask_token_id=mask,
                speculators_config=w.speculators_config("dflash", size - 1),
            )
        )
        .float()
        .eval()
    )
    w.randomise(model, seed)
    model.embed_tokens.weight.copy_(target.embed_tokens)
    model.lm_head.weight.copy_(target.lm_head)
    given = w.inputs(2 * w.HIDDEN, seed + 1)
    hidden, logits, _, _, rows = model._backbone_forward(
        given["aux_hidden"][None],
        given["token_ids"][None],
        torch.ones(1, w.ROWS),
        torch.zeros(1, w.ROWS, w.HIDDEN),
        torch.zeros(1, w.ROWS, dtype=torch.long),
        max_anchors=3,
    )
    w.save("head", model, given)
    return model, given, rows, hidden[0], logits[0]


def dflash(r, seed, target):
    size = r.randint(2, 6)
    _, given, rows, _, logits = backbone(r, seed, target, size, r.randrange(w.VOCAB))
    head = load_drafter(w.HERE / "head", target)
    return worst(
        (
            head.logits(block(head, int(given["token_ids"][i[0]]), given["aux_hidden"], int(i[0]), size - 1))[
                -len(want) :
            ],
            want,
        )
        for i, want in zip(rows.split(size), logits.split(size))
    )


def dspark(r, seed, target, made):
    size, anchor = r.randint(2, 6), r.random() < 0.5
    kind = r.choice(["vanilla", "gated", "rnn"])
    model, expected = w.dspark(
        made,
        seed,
        r.randint(1, 3),
        block_size=size,
        sample_from_anchor=anchor,
        markov_head_type=kind,
        markov_rank=r.choice([3, 6, 8]),
        draft_vocab_size=r.choice([w.VOCAB, w.DRAFT_VOCAB]),
        confidence_head_with_markov=r.random() < 0.5,
    )
    w.save("head", model, expected)
    head, pairs, first = load_drafter(w.HERE / "head", target), [], int(not anchor)
    for rows, logits, confidence in zip(
        expected["rows"].split(size), expected["logits"].split(size), expected["confidence"].split(size)
    ):
        tokens = expected["token_ids"][rows]
        rows_of = block(head, int(tokens[0]), expected["aux_hidden"], int(rows[0]), size - 1)[None]
        got, following = rows_of[:, first:], head.in_order(rows_of)
        before = tokens[: got.shape[1]][None]
        pairs += [(following(row, before[:, row]).tensor()[0], want) for row, want in enumerate(logits[first:])]
        pairs.append((head.confidence(got, before)[0], confidence[first:]))
    return worst(pairs)


def dflash2(r, seed, target, made):
    size, anchor = r.randint(2, 6), False
    taps = r.randint(2, min(4, size))
    group = r.choice([4, 8])
    top = r.choice([3, 5, 8])
    model, expected = w.dflash2(
        made,
        seed,
        r.randint(1, 3),
        block_size=size,
        sample_from_anchor=anchor,
        conv_kernel_size=taps,
        conv_group_size=group,
        selector_rank=r.choice([3, 6]),
        selector_top_k=top,
    )
    w.save("head", model, expected)
    head, pairs, first = load_drafter(w.HERE / "head", target), [], int(not anchor)
    for rows, ids, scores in zip(*(expected[n].split(size) for n in ("rows", "candidates", "scores"))):
        tokens = expected["token_ids"][rows]
        following = head.in_order(block(head, int(tokens[0]), expected["aux_hidden"], int(rows[0]), size - 1)[None])
        for row in range(size - first):
            logits = following(row, tokens[row : row + 1]).tensor()[0]
            assert (logits > -1e29).sum() == top
            pairs.append((logits[ids[row + first]], scores[row + first]))
    return worst(pairs)


def domino(r, seed, target):
    spec = importlib.util.spec_from_file_location("domino_utils", Path(os.environ["ORACLES"]) / "domino_utils.py")
    sg = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sg)
    size, shift, mask = r.randint(3, 7), r.random() < 0.5, r.randrange(w.VOCAB)
    state, inner = r.choice([4, 6, 12]), r.choice([5, 8])
    model, given, rows, hidden, _ = backbone(r, seed, target, size, mask)
    torch.manual_seed(seed)
    gru = torch.nn.GRU(w.HIDDEN, state, batch_first=True, bias=False)
    proj = torch.nn.Sequential(
        torch.nn.Linear(w.HIDDEN + state, inner, bias=False),
        torch.nn.SiLU(),
        torch.nn.Linear(inner, w.VOCAB, bias=False),
    )
    for p in (*gru.parameters(), *proj.parameters()):
        p.data.normal_(0, 0.4)
    folder = w.HERE / "head"
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"prefix_gru.{n}": t.detach().clone() for n, t in gru.named_parameters()} | {
        f"embed_proj.{n}": t.detach().clone() for n, t in proj.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors")
    section = dict(
        projector_type="domino",
        gru_hidden_dim=state,
        emb_dim=inner,
        pure_draft_prefix_len=1,
        shift_label=shift,
        target_layer_ids=[0, 2],
        mask_token_id=mask,
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                **json.loads((folder / "config.json").read_text())["transformer_layer_config"],
                "block_size": size,
                "dflash_config": section,
            }
        )
    )
    head, seen, pairs = load_drafter(folder, target), [], []

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def argmax(self, x, dim):
            seen.append(x.clone())
            return torch.argmax(x, dim=dim)

    sg.torch = Torch()
    for i, states in zip(rows.split(size), hidden.split(size)):
        seen.clear()
        bonus = given["token_ids"][i[:1]]
        drafts = sg.domino_greedy_rollout(
            draft_hidden=states[None],
            bonus_tokens=bonus,
            target_embedding=model.embed_tokens,
            lm_head_weight=model.lm_head.weight,
            prefix_gru=gru,
            embed_proj=proj,
            vocab_size=w.VOCAB,
            shift_label=shift,
            candidate_pool_size=0,
            in_cuda_graph=False,
        )[0]
        following = head.in_order(block(head, int(bonus), given["aux_hidden"], int(i[0]), size - 1)[None])
        before = [int(bonus), *drafts.tolist()]
        assert len(seen) == size - 1
        pairs += [(following(row, torch.tensor([before[row]])).tensor()[0], want[0]) for row, want in enumerate(seen)]
    return worst(pairs)


def ngram(r, seed, target):
    """Drafts of random texts, against vLLM's two Triton kernels in the interpreter; what it fills with the last token we repeat."""
    import vllm_ngram as v
    from specgraph import ops

    n, size, limit, k, most = r.randint(1, 5), r.randint(1, 9), r.randint(8, 90), r.randint(1, 7), r.randint(1, 8)
    least, letters = r.randint(1, most), r.randint(1, 4)
    lengths = [r.randint(1, limit) for _ in range(n)]
    texts = torch.randint(0, letters, (n, limit), dtype=torch.int32)
    columns = -(-limit // size)
    table = (torch.randperm(n * columns) + 1).view(n, columns).int()
    history = torch.full((n * columns + 1, size), 99, dtype=torch.int32)
    for text, blocks, length in zip(texts, table.tolist(), lengths):
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(length)])
        ops.keep_tokens(text[:length].long(), slots, history)
    ours = torch.full((n, k), -1)
    total = torch.tensor(lengths, dtype=torch.int32)
    ops.ngram_propose(history, table, total, least, most, limit, ours)
    tile, two = 16, lambda x: 1 << max(0, x - 1).bit_length()
    parts = -(-limit // tile)
    scratch, theirs = torch.zeros(n, parts, dtype=torch.long), torch.zeros(n, k, dtype=torch.long)
    rows, sampled = torch.arange(n), torch.ones(n, dtype=torch.int32)
    last = texts.gather(1, (total.long() - 1)[:, None])[:, 0].long()
    v._ngram_scan_kernel[(n, parts)](
        texts, texts.stride(0), rows, total, sampled, scratch, parts, limit, least, most, two(most), tile
    )
    v._ngram_finalize_kernel[(n,)](
        texts, texts.stride(0), rows, total, sampled, last, scratch, parts, theirs, limit, parts, k, two(k), two(parts)
    )
    for i, text in enumerate(texts.tolist()):
        score = int(scratch[i].max())
        L = limit + 1
        start = (score - 1) % L + (score - 1) // L if score else lengths[i] - 1
        follow = min(k, lengths[i] - start)
        assert follow > 0 and ours[i, :follow].tolist() == theirs[i, :follow].tolist(), (i, ours[i], theirs[i])
        ngram.matched = getattr(ngram, "matched", 0) + bool(score)
    return 0.0


kind, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
most, bad, start, n = 0.0, [], time.process_time(), 0
w.print = lambda *a: None
with torch.no_grad():
    for seed in range(first, last):
        r = random.Random(f"{kind}{seed}")
        sizes(r)
        with tempfile.TemporaryDirectory() as folder:
            w.HERE = Path(folder)
            w.TARGET = w.HERE / "target"
            torch.manual_seed(seed)
            made = w.write_target() if kind != "ngram" else None
            target = load_target(w.TARGET) if made else None
            try:
                found = globals()[kind](r, seed, target, *([made] if kind in ("dspark", "dflash2") else []))
            except Exception as error:
                bad.append((seed, type(error).__name__, str(error)[:300]))
                continue
            most, n = max(most, found), n + 1
            if not found < 1e-4:
                bad.append((seed, found))
print(
    f"oracle {kind} {n} configs, worst {most:.1e}, bad {len(bad)} {bad[:3]}; {time.process_time() - start:.0f} CPU s",
    flush=True,
)
