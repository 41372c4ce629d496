"""What any draft tree of top-k 4 could accept with the shipped EAGLE-3 pair, with hindsight, at most.

    python examples/tiny-python/tree_bounds.py

The drafter draws a chain that knows the target's next tokens: at each of 5 steps it takes the target's own token where
that is among its k most likely ones, and is wrong where it is not. That is the longest path that a tree of every
node's k best tokens has, whatever nodes are chosen and however many; a real tree has to choose without hindsight.
Before that, the tree of 5 steps and top-k 4 that verifies 63 of its 68 candidates: what is left for a choice of fewer.
"""

import argparse
from pathlib import Path

import corpus
import torch
from acceptance import EAGLE3, HERE, MAX_MODEL_LEN, TARGET, decode
from tokenizers import Tokenizer

from specgraph.checkpoints import load_drafter, load_target
from specgraph.device import open_platform
from specgraph.draft import DraftTree, chain
from specgraph.draft.buffers import DraftBuffers
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.models.protocol import DraftHead
from specgraph.ops.draft_sampling import to_target_ids


def main() -> None:
    """Decode every prompt with the drafter that knows, for each k."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--top-k", default="1,4,8")
    parser.add_argument("--limit", type=int, help="only so many prompts")
    a = parser.parse_args()
    platform = open_platform("cpu")
    target = load_target(TARGET, platform.device, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    head = load_drafter(EAGLE3, target)
    encoder = Tokenizer.from_file(str(Path(TARGET) / "tokenizer.json"))
    prompts = [encoder.encode(each["text"]).ids for each in corpus.read_prompts(HERE / "prompts.jsonl")[: a.limit]]
    requests = [Request(prompt_token_ids=ids, max_tokens=96, stop_token_ids=(0,)) for ids in prompts]
    limits = {"max_num_requests": 1, "max_model_len": MAX_MODEL_LEN, "decode": "eager"}
    every = DraftTree(num_steps=5, top_k=4, num_draft_tokens=64)
    m = decode(platform, target, head, requests, 5, "merged", every).metrics
    print(f"tree {every}: {m.mean_acceptance_length:.4f} tokens per verify", flush=True)
    config = EngineConfig(num_speculative_tokens=a.steps, **limits)

    def generate(decoder: SpeculativeDecoder, request: Request) -> list[int]:
        return decoder.generate([request])[0].token_ids

    with torch.inference_mode():
        alone = SpeculativeDecoder(target, None, platform, config, query_len=a.steps + 1)
        texts = [[*r.prompt_token_ids, *generate(alone, r)] for r in requests]
        now: list[int] = []
        chain.ChainProgram.joined_steps = lambda program: None  # each token is picked by `draft_one` below
        for k in map(int, a.top_k.split(",")):
            decoder = SpeculativeDecoder(target, head, platform, config)

            def knowing(own: DraftHead, b: DraftBuffers, hidden: torch.Tensor, k: int = k) -> None:
                logits = own.logits(hidden)[0].float()
                known = to_target_ids(logits.topk(k).indices, own.draft_to_target).tolist()
                step = int(b.draft_step)
                place = int(b.inputs.start_positions[0] + b.inputs.num_sampled[0]) + 1 + step
                token = now[place] if place < len(now) and now[place] in known else known[0]
                b.step_token_ids[0] = token
                b.draft_token_ids[0, step] = token

            chain.draft_one = knowing
            for request, text in zip(requests, texts, strict=True):
                now[:] = text
                assert text[len(request.prompt_token_ids) :] == generate(decoder, request)
            m = decoder.metrics
            rates = ", ".join(f"{rate:.3f}" for rate in m.acceptance_per_position)
            print(f"top-k {k}: at most {m.mean_acceptance_length:.4f} tokens per verify; {rates}", flush=True)


if __name__ == "__main__":
    main()
