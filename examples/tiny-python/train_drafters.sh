#!/bin/sh
# Train EAGLE-1, MTP, DFlash and the small draft model at once on one accelerator: TARGET STDLIB OUT SECONDS TOKENS.
set -e
cd "$(dirname "$0")"
target=$1 stdlib=$2 out=$3 seconds=$4 tokens=$5
mkdir -p "$out"
python3 continuations.py --target "$target" --stdlib "$stdlib" --out "$out/continuations.safetensors" \
    --generate "$tokens"
for name in eagle1 mtp dflash draft_model; do
    folder=$(echo "$name" | tr _ -)
    python3 "train_$name.py" --target "$target" --stdlib "$stdlib" --continuations "$out/continuations.safetensors" \
        --seconds "$seconds" --out "$out/$folder" --figures "$out/$folder.json" >"$out/$folder.log" 2>&1 &
done
wait
