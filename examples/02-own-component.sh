#!/usr/bin/env bash
# Run a tenant's own component: successive halving over learning rates (halving/src/lib.rs).
#
#   examples/02-own-component.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
"$host" run "$guests/halving.wasm" \
    --model model --data jargon --held-out-count 8 --seed 1 --out "$out" \
    --set learning_rates='[3e-4, 1e-3, 3e-3, 1e-2]' --set steps_per_round=5 --set batch_size=2 --set max_length=64

cat "$out/log.txt" "$out/metrics.jsonl"
