#!/usr/bin/env bash
# A sweep over 16 learning rates: the members share the frozen trunk, and each one's bytes are those that it has alone.
# Runs it three times: together, one after another, and one after another without a trunk cache; says how long each took.
#
#   examples/03-sweep.sh MODEL OUT      MODEL: a Hugging Face folder or a .gguf file; OUT: a folder that does not exist yet
set -euo pipefail
. "$(dirname "$0")/common.sh"

# 20 rows of 96 tokens are 10 batches of 2, so 30 steps are 3 epochs. The prompt takes the first words of the text, so that about half of
# the tokens carry a label.
python3 - examples/data/jargon.jsonl > "$NODUS_DATA_DIR/jargon20.jsonl" <<'PYTHON'
import json, sys
words = 26
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
rows = [(row["prompt"], row["completion"].split(" ")) for row in rows if len(row["completion"].split(" ")) >= 80]
for prompt, text in rows[:20]:
    print(json.dumps({"prompt": prompt + " " + " ".join(text[:words]), "completion": " " + " ".join(text[words:])}))
PYTHON
"$host" model import "$model" --name model
"$host" data put "$NODUS_DATA_DIR/jargon20.jsonl" --name jargon20
mkdir -p "$out"

rates=1e-5,2e-5,3e-5,5e-5,7e-5,1e-4,1.5e-4,2e-4,3e-4,4e-4,5e-4,7e-4,1e-3,1.5e-3,2e-3,3e-3
sweep() { # NAME OPTION...
    local name=$1
    shift
    "$host" run "$guests/sft.wasm" --model model --data jargon20 --seed 1 --out "$out/$name" \
        --sweep learning_rate=$rates --set rank=8 --set 'layers={"last": 1}' --set batch_size=2 --set max_length=96 --set epochs=3 \
        "$@" 2> "$out/$name.log"
}
sweep solo-without-cache --lane solo --trunk-cache 0
sweep solo-with-cache --lane solo
sweep fused

python3 - "$out" <<'PYTHON'
import hashlib, json, pathlib, sys
out = pathlib.Path(sys.argv[1])
arms = ["solo-without-cache", "solo-with-cache", "fused"]
machine = {arm: json.loads((out / arm / "summary.json").read_text())["machine"] for arm in arms}

def digest(arm):
    files = sorted(p for p in (out / arm).rglob("*") if p.is_file() and p.name not in ("receipt.json", "summary.json"))
    return hashlib.sha256(b"".join(p.relative_to(out / arm).as_posix().encode() + p.read_bytes() for p in files)).hexdigest()

# T and P as the solo runs measured them, where nothing is shared; N members, E epochs.
base, members, epochs = machine["solo-without-cache"], 16, 3
t, p = base["reuse"]["trunk_seconds_per_batch"], base["reuse"]["own_seconds_per_batch"]
bound = (t + p) / (t / (members * epochs) + p)
print(f"\nT {t * 1e3:.2f} ms below the cut and P {p * 1e3:.2f} ms above it for one batch; N {members}, E {epochs}")
for arm in arms:
    wall = machine[arm]["wall_seconds"]
    print(f"{arm:20} {wall:8.2f} s  {base['wall_seconds'] / wall:6.2f} times the first")
ratio = base["wall_seconds"] / machine["fused"]["wall_seconds"]
print(f"the reuse bound (T + P) / (T/(N*E) + P) is {bound:.2f}; reached: {100 * ratio / bound:.1f} %")
forming = machine["fused"]["sharing"]["forming_seconds"]
guests = machine["fused"]["guest_cpu_seconds"]
print(f"16 guests took {guests:.2f} s of CPU time, {100 * guests / machine['fused']['wall_seconds']:.2f} % of the fused run")
print(f"forming passes took {100 * forming / machine['fused']['wall_seconds']:.2f} % of the fused run")
same = len({digest(arm) for arm in arms}) == 1
print("every file of every member is byte-equal in all three" if same else "THE RUNS DIFFER")
sys.exit(not same)
PYTHON
