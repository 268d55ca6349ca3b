#!/usr/bin/env bash
# Measures the same jobs alone, in processes at once, and together in one engine, with every bit compared: a table, report.json, report.html.
#
#   examples/07-bench.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
mkdir -p "$out"
"$host" bench sweep --model model --layers last:1 --jobs 4 --shape 2x64 --batches 4 --epochs 2 --warmup 2 --labelled 0.5 --out "$out/sweep"
"$host" bench tenants --model model --layers last:2 --jobs 3 --shape 1x64 --batches 3 --warmup 2 --out "$out/tenants"
"$host" bench compare "$out/sweep/report.json" "$out/sweep/report.json"
