# ruff: noqa
"""Whether the greedy tokens of lora/{stock,specgraph}.json are the target's own, with the adapter for prompts of odd lengths: by the target in float32
(transformers), on the machine whose Python made the prompts. python3 build/lead/v/lora_judge.py FOLDERS OUT.json"""

import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from judge import NEAR_TIE, Judge
from prompts import python_prompts
from specgraph import shipped_pair

folders, out = Path(sys.argv[1]), Path(sys.argv[2])
target = shipped_pair()[0]
plain, merged = Judge(target), Judge(target)
tensors, config = (
    load_file(folders / "lora/adapter_model.safetensors"),
    json.loads((folders / "lora/adapter_config.json").read_text()),
)
scale = config["lora_alpha"] / config["r"]
named = dict(merged.model.named_parameters())
with torch.no_grad():
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            key = name.removeprefix("base_model.model.").replace("lora_A.", "")
            named[key] += scale * (tensors[name.replace("lora_A", "lora_B")].float() @ a.float()).to(named[key].device)
prompts = python_prompts(target / "tokenizer.json", 64, seed=1)
here, result = Path(__file__).parent / "lora", {}
runs = {way: json.loads((here / f"lora-{way}.json").read_text()) for way in ("stock", "specgraph")}
for part in ("one", "all", "eight"):
    for way, run in runs.items():
        gaps = []
        for prompt, tokens in zip(prompts, run[part]["tokens"]):
            gaps.append((merged if len(prompt) % 2 else plain).largest_gap(prompt, tokens))
        result[f"{part} {way}"] = {
            "prompts": len(gaps),
            "largest_gap": round(max(gaps), 4),
            "wrong": sum(g >= NEAR_TIE for g in gaps),
        }
    differ = [i for i, (x, y) in enumerate(zip(*(run[part]["tokens"] for run in runs.values()))) if x != y]
    result[f"{part} differ"] = {
        i: [
            round((merged if len(prompts[i]) % 2 else plain).largest_gap(prompts[i], run[part]["tokens"][i]), 4)
            for run in runs.values()
        ]
        for i in differ
    }
without = [plain.largest_gap(p, t) for p, t in zip(prompts, runs["stock"]["all"]["tokens"]) if len(p) % 2]
result["odd prompts judged without the adapter"] = {
    "prompts": len(without),
    "wrong": sum(g >= NEAR_TIE for g in without),
}
out.write_text(json.dumps(result, indent=1) + "\n")
print(json.dumps(result))
