#!/usr/bin/env bash
# Run a tenant's own component: successive halving over learning rates (halving/src/lib.rs).
#
#   examples/02-own-component.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?a Hugging Face folder or a .gguf file} out=${2:?a folder for the results}

cargo build --quiet --release --package nodus-host
(cd tenants && CARGO_TARGET_DIR=target cargo build --quiet --release --target wasm32-wasip2)
host=target/release/nodus-host

NODUS_DATA_DIR=$(mktemp -d)
export NODUS_DATA_DIR
trap 'rm -rf "$NODUS_DATA_DIR"' EXIT

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
"$host" run tenants/target/wasm32-wasip2/release/halving.wasm \
    --model model --data jargon --held-out-count 8 --seed 1 --out "$out" \
    --set learning_rates='[3e-4, 1e-3, 3e-3, 1e-2]' --set steps_per_round=5 --set batch_size=2 --set max_length=64

cat "$out/log.txt" "$out/metrics.jsonl"
