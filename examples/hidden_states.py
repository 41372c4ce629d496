"""Have a target answer prompts, and write its hidden states as `speculators train` reads them.

    python examples/hidden_states.py TARGET --prompts PROMPTS.jsonl --out DATA

TARGET is a folder of any architecture that specgraph runs, on any platform. PROMPTS.jsonl holds {"prompt": TEXT} per
line. DATA becomes a dataset of speculators 0.9: token ids, the mask of the answers' tokens and counts of these tokens,
and in DATA/hidden_states a file per text with the states of four layers. It needs the package `datasets`;
docs/training.md goes on from there.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from specgraph import PagedAttention, allocate_caches, load_generator
from specgraph.attention import AttentionMetadata, StepContext
from specgraph.engine import TextGenerator

Text = tuple[list[int], int]
"""Tokens of a prompt and its answer, and how many of them are the prompt's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--platform", help="NAME or NAME:INDEX")
    parser.add_argument("--chat", action="store_true", help="put prompts into the target's chat template")
    parser.add_argument("--requests", type=int, default=64, help="prompts that are answered at once")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of a prompt and its answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--layers", type=int, nargs=3, help="that the drafter reads; default: 2, the middle, last - 3")
    arguments = parser.parse_args()
    with load_generator(
        arguments.target, speculate=False, platform=arguments.platform, max_num_requests=arguments.requests,
        capture_sizes=[arguments.requests], max_model_len=arguments.max_model_len, sampled=arguments.temperature > 0,
    ) as generator:  # fmt: skip
        lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
        requests = [
            generator.request(
                json.loads(line)["prompt"], chat=arguments.chat, max_tokens=arguments.max_tokens,
                temperature=arguments.temperature, seed=number,
            )
            for number, line in enumerate(lines)
        ]  # fmt: skip
        answers = generator.generate(requests)
        texts = [
            ([*request.prompt_token_ids, *answer.token_ids], len(request.prompt_token_ids))
            for request, answer in zip(requests, answers, strict=True)
        ]
        write_dataset(texts, generator.decoder.target.model.vocab_size, arguments.out)
        folder = arguments.out / "hidden_states"
        folder.mkdir(exist_ok=True)
        for number, states in enumerate(hidden_states(generator, texts, arguments.layers)):
            held = {"hidden_states": states, "token_ids": torch.tensor(texts[number][0])}
            save_file(held, folder / f"hs_{number}.safetensors")
    new = sum(len(tokens) - prompt for tokens, prompt in texts)
    print(f"{arguments.out}: {len(texts)} texts, {new} tokens of answers")


def write_dataset(texts: Sequence[Text], vocab_size: int, out: Path) -> None:
    """Write token ids, the mask of the answers, and how often each token occurs in them."""
    import datasets

    counts, rows = torch.zeros(vocab_size, dtype=torch.int64), list[dict[str, object]]()
    for tokens, prompt in texts:
        mask = [0] * prompt + [1] * (len(tokens) - prompt)
        rows.append({"input_ids": tokens, "loss_mask": mask, "seq_len": len(tokens)})
        counts += torch.bincount(torch.tensor(tokens[prompt:], dtype=torch.int64), minlength=vocab_size)
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(out)
    torch.save({token: count for token, count in enumerate(counts.tolist()) if count}, out / "token_freq.pt")


@torch.inference_mode()
def hidden_states(
    generator: TextGenerator, texts: Sequence[Text], chosen: Sequence[int] | None
) -> Iterator[torch.Tensor]:
    """Yield the states of each text [T, 4, hidden_size]: those that enter three layers, and what the last one leaves.

    The last is taken before the final norm, which `speculators` applies itself.
    """
    target, platform, config = generator.decoder.target.model, generator.platform, generator.decoder.config
    layers, depth = target.attention_layers, len(target.attention_layers)
    chosen = (*(chosen or (2, depth // 2, depth - 3)), depth)
    attention, size = PagedAttention(), config.block_size
    blocks = -(-config.max_model_len // size)
    caches = allocate_caches(layers, 1 + blocks, size, target.dtype, platform.device)
    table = torch.arange(1, 1 + blocks, dtype=torch.int32, device=platform.device)[None]
    for tokens, _ in texts:
        rows = torch.arange(len(tokens), device=platform.device)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, len(tokens)], dtype=torch.int32, device=platform.device),
            seq_lens=torch.tensor([len(tokens)], dtype=torch.int32, device=platform.device),
            positions=rows, slot_mapping=size + rows, block_table=table, query_len=len(tokens),
        )  # fmt: skip
        context = StepContext(metadata)

        def attend(
            index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: StepContext = context
        ) -> torch.Tensor:
            return attention.forward(layers[index], index, query, key, value, caches[index], context)

        states = target.forward(torch.tensor(tokens, device=platform.device), attend, chosen).aux_hidden
        yield states.unflatten(-1, (len(chosen), -1)).cpu().contiguous()


if __name__ == "__main__":
    main()
