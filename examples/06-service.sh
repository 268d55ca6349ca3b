#!/usr/bin/env bash
# The service: two tenants on one model. One sweeps three learning rates, the other trains an unrelated job; both watch, fetch and verify.
# In the middle the service is killed and started again: the jobs go on, and no step is told twice.
#
#   examples/06-service.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

"$host" model import "$model" --name model
mkdir -p "$out"
token() { "$host" tenant add "$1" | grep -o 'nodus_[A-Za-z0-9_-]*'; }
alice=$(token alice) bob=$(token bob)

serve() {
    "$host" serve --listen 127.0.0.1:0 --component "sft=$guests/sft.wasm" > "$out/serve.log" 2>> "$out/serve.err" &
    server=$!
    until grep -q listening "$out/serve.log"; do kill -0 $server; sleep 0.1; done
    NODUS_URL=$(sed 's/^listening on //' "$out/serve.log")
    export NODUS_URL
}
serve
trap 'kill $server; wait $server || true; rm -rf "$NODUS_DATA_DIR"' EXIT

submit() { # TOKEN OPTION...
    NODUS_TOKEN=$1 "$host" submit sft --model model --data examples/data/jargon.jsonl --set batch_size=2 --set max_length=64 --set steps=12 --json "${@:2}" |
        python3 -c 'import json, sys; print("\n".join(job["id"] for job in json.load(sys.stdin)["jobs"]))'
}
sweep=$(submit "$alice" --sweep learning_rate=1e-4,3e-4,1e-3 --set 'layers={"last": 1}')
single=$(submit "$bob" --seed 7)

first=$(head -n 1 <<< "$sweep")
until NODUS_TOKEN=$alice "$host" jobs --json | python3 -c 'import json, sys; jobs = [json.loads(line) for line in sys.stdin]; sys.exit(not any((job.get("last_step") or {"step": 0})["step"] >= 3 or job["state"] == "failed" for job in jobs))'; do
    sleep 0.2
done
echo "killing the service in the middle"
kill -KILL $server
wait $server 2> /dev/null || true
serve

NODUS_TOKEN=$alice "$host" watch "$first" | tail -n 4
NODUS_TOKEN=$bob "$host" watch "$single" | tail -n 2
NODUS_TOKEN=$alice "$host" jobs
for id in $sweep; do NODUS_TOKEN=$alice "$host" fetch "$id" --out "$out/alice/$id"; done
NODUS_TOKEN=$bob "$host" fetch "$single" --out "$out/bob"
"$host" audit verify "$out/alice/$first"
# As an auditor elsewhere would, who has the model and the ready-made component: everything else comes from the service, and every bit is compared.
NODUS_TOKEN=$alice "$host" audit job "$first" --out "$out/audited" --replay --component "$guests/sft.wasm"
# What is not yours is not there.
if NODUS_TOKEN=$bob "$host" fetch "$first" --out "$out/stolen" 2> "$out/refused"; then exit 1; fi
cat "$out/refused"
echo "the page: $NODUS_URL/ while the service runs"
