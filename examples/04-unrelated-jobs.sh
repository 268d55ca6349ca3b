#!/usr/bin/env bash
# Unrelated jobs together: different components, data, seeds and adapters on one model, as a manifest lists them. They share the
# frozen weights and the passes, never an activation.
#
#   examples/04-unrelated-jobs.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
head -n 200 examples/data/jargon.jsonl > "$NODUS_DATA_DIR/first.jsonl"
tail -n 200 examples/data/jargon.jsonl > "$NODUS_DATA_DIR/last.jsonl"
"$host" data put "$NODUS_DATA_DIR/first.jsonl" --name first
"$host" data put "$NODUS_DATA_DIR/last.jsonl" --name last

# What a manifest names is relative to its folder.
cat > "$NODUS_DATA_DIR/jobs.toml" <<TOML
[[jobs]]
name = "customer-a"
component = "$guests/sft.wasm"
model = "model"
data = "first"
held_out_count = 8
seed = 1
params = { rank = 8, learning_rate = 1e-3, batch_size = 2, max_length = 96, steps = 10 }

[[jobs]]
name = "customer-b"
component = "$guests/sft.wasm"
model = "model"
data = "last"
seed = 2
params = { rank = 4, targets = "all-linear", layers = { last = 4 }, learning_rate = 5e-4, batch_size = 1, max_length = 64, steps = 15 }

[[jobs]]
name = "own-search"
component = "$guests/halving.wasm"
model = "model"
data = "last"
held_out_count = 8
seed = 3
params = { learning_rates = [3e-4, 1e-3, 3e-3, 1e-2], steps_per_round = 3, batch_size = 2, max_length = 64 }
TOML
"$host" run --manifest "$NODUS_DATA_DIR/jobs.toml" --out "$out"
