#!/usr/bin/env bash
# An audit: a job that ran beside others is verified, run again alone, and compared bit for bit; then a file is altered.
#
#   examples/05-audit.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
"$host" run "$guests/sft.wasm" --model model --data jargon --held-out-count 8 --seed 1 --out "$out" \
    --sweep rank=4,8 --sweep learning_rate=3e-4,1e-3 \
    --set 'layers={"last": 2}' --set batch_size=2 --set max_length=64 --set steps=8

"$host" audit verify "$out"
"$host" audit replay "$out/learning_rate=0.001,rank=8"
"$host" audit ledger --tenant local

printf '\none bit of an adapter is flipped:\n'
adapter="$out/learning_rate=0.001,rank=8/adapter/adapter_model.safetensors"
python3 -c 'import sys; f = open(sys.argv[1], "r+b"); f.seek(5000); b = f.read(1)[0]; f.seek(5000); f.write(bytes([b ^ 1]))' "$adapter"
! "$host" audit verify "$out/learning_rate=0.001,rank=8"
! "$host" audit replay "$out/learning_rate=0.001,rank=8"
