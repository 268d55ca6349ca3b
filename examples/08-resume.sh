#!/usr/bin/env bash
# A run that is killed and goes on: the same job twice, once undisturbed and once killed with SIGKILL half-way. Every file is the same but for
# the times in the receipt and its place in the ledger.
#
#   examples/08-resume.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
"$host" data put examples/data/jargon.jsonl --name jargon
mkdir -p "$out"
job() { # NAME OPTION...
    local name=$1
    shift
    exec "$host" run "$guests/sft.wasm" --model model --data jargon --held-out-count 16 --seed 1 --out "$out/$name" --snapshot-every 2 \
        --set rank=8 --set learning_rate=1e-3 --set batch_size=2 --set max_length=96 --set steps=30 "$@"
}
(job undisturbed)

job interrupted & run=$!
until [ "$(wc -l < "$out/.interrupted.partial/losses.jsonl" 2> /dev/null || echo 0)" -ge 15 ]; do sleep 0.2; done
kill -KILL $run
wait $run || true
(job interrupted --resume)

for file in losses.jsonl held_out.jsonl metrics.jsonl log.txt adapter/adapter_model.safetensors adapter/adapter_config.json; do
    cmp "$out/undisturbed/$file" "$out/interrupted/$file"
done
"$host" audit verify "$out/interrupted"
echo "killed half-way and gone on with: every byte as without"
