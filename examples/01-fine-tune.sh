#!/usr/bin/env bash
# Fine-tune a LoRA adapter by parameters alone: import a model, put data, run sft.wasm.
#
#   examples/01-fine-tune.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?a Hugging Face folder or a .gguf file} out=${2:?a folder for the results}

cargo build --quiet --release --package nodus-host
(cd tenants && CARGO_TARGET_DIR=target cargo build --quiet --release --target wasm32-wasip2)
host=target/release/nodus-host

# A data folder of its own, so that trying this leaves your models and data alone.
NODUS_DATA_DIR=$(mktemp -d)
export NODUS_DATA_DIR
trap 'rm -rf "$NODUS_DATA_DIR"' EXIT

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
"$host" run tenants/target/wasm32-wasip2/release/sft.wasm \
    --model model --data jargon --held-out-count 16 --seed 1 --out "$out" \
    --set rank=8 --set learning_rate=1e-3 --set schedule=cosine --set warmup_ratio=0.1 \
    --set batch_size=2 --set max_length=96 --set steps=40 --set evaluate_every=20

head -n 3 "$out/losses.jsonl"
cat "$out/held_out.jsonl"
