"""Small decoders on the cpu platform, drafts that are right up to a random place, and transformers' greedy text."""

import torch
from specgraph_conformance.decode_rig import decoder_settings
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph.attention import PagedAttention, PagedHostAttention
from specgraph.cpu import CpuPlatform

VOCAB = 120


def decoder_of(target, head, attention="device", **changes):
    """A decoder of up to two requests; its prefill passes have up to 8 rows."""
    settings = {
        "num_speculative_tokens": 3, "max_num_requests": 2, "max_model_len": 64, "block_size": 4, "capture_sizes": [2],
        "prefill": "eager", "prefill_sizes": [8], "decode": "eager", **changes,
    }  # fmt: skip
    platform = CpuPlatform()
    config, options = decoder_settings(**settings)
    backend = PagedHostAttention(platform) if attention == "host" else PagedAttention()
    made = SpeculativeDecoder(target, head, platform, config, options, query_len=config.query_len, attention=backend)
    made.capture()
    return made


def closed(decoder):
    decoder.close()
    decoder.platform.close()


def texts(decoder, prompts, max_tokens):
    return [
        r.token_ids for r in decoder.generate([Request(prompt_token_ids=p, max_tokens=max_tokens) for p in prompts])
    ]


def theirs(model, prompts, max_tokens):
    """The greedy text of each prompt by a transformers model."""

    def greedy(prompt):
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
        return made[0, len(prompt) :].tolist()

    return [greedy(prompt) for prompt in prompts]


def some_prompts(seed, lengths):
    """Random prompts without token 0, transformers' padding, which it masks."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=g).tolist() for n in lengths]


def oracle_drafts(decoder, known, rng):
    """Let the drafter of a decoder draft the known texts, wrong from a random place on in each round.

    known: prompt -> the prompt and its greedy continuation.
    """
    drafter, vocab = decoder.drafter, decoder.target.model.vocab_size
    propose = drafter.propose

    def scripted(batch, **options):
        propose(batch, **options)
        k = options["num_speculative_tokens"]
        k = decoder.config.num_speculative_tokens if k is None else k
        memory = drafter.shared
        drafts = drafter.draft_programs[False].buffers.draft_token_ids
        for row, state in enumerate(decoder.rounds.rows):
            if state is None or not int(memory.num_sampled[row]):
                continue
            text = known[tuple(state.request.prompt_token_ids)]
            first = int(memory.start_positions[row] + memory.num_sampled[row]) + 1
            right = text[first : first + k]
            right += [0] * (k - len(right))
            place = rng.randint(0, k)
            wrong = [
                token if i < place else (token + 1 + rng.randrange(vocab - 1)) % vocab for i, token in enumerate(right)
            ]
            drafts[row, :k] = torch.tensor(wrong, dtype=drafts.dtype)

    drafter.propose = scripted
