#!/bin/sh
# Train EAGLE-1, MTP, DFlash and the small draft model at once on one accelerator: TARGET STDLIB OUT SECONDS TOKENS.
set -e
cd "$(dirname "$0")"
target=$1 stdlib=$2 out=$3 seconds=$4 tokens=$5
mkdir -p "$out"
python3 continuations.py --target "$target" --stdlib "$stdlib" --out "$out/continuations.safetensors" \
    --generate "$tokens"
for name in eagle1 mtp dflash draft-model; do
    python3 train_drafter.py "$name" --target "$target" --stdlib "$stdlib" --seconds "$seconds" \
        --continuations "$out/continuations.safetensors" --out "$out/$name" --figures "$out/$name.json" \
        >"$out/$name.log" 2>&1 &
done
wait
