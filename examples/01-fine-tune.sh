#!/usr/bin/env bash
# Fine-tune a LoRA adapter by parameters alone: import a model, put data, run sft.wasm.
#
#   examples/01-fine-tune.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
"$host" run "$guests/sft.wasm" \
    --model model --data jargon --held-out-count 16 --seed 1 --out "$out" \
    --set rank=8 --set learning_rate=1e-3 --set schedule=cosine --set warmup_ratio=0.1 \
    --set batch_size=2 --set max_length=96 --set steps=40 --set evaluate_every=20

head -n 3 "$out/losses.jsonl"
cat "$out/held_out.jsonl"
