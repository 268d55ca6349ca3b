"""What planning takes: one tenant submits a sweep over `max_length` on many short rows, another small jobs beside it.

    python3 tests/load/planning.py target/debug/nodus-host tenants/target/wasm32-wasip2/release/sft.wasm

Starts a service of its own that runs nothing (`--hold`), in a folder that is gone afterwards; prints what each took, and the service's memory.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROW = b'{"tokens":[1,2]}\n'
BYTES = 405 << 20
LENGTHS = list(range(64, 80))


def request(url, token, method, path, body, kind="application/json"):
    headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    began = time.time()
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers, method=method), timeout=1000) as answer:
        answer.read()
    return time.time() - began


def submit(url, token, data, **fields):
    job = {"component": "sft", "model": "tiny", "data": data, "parameters": {"rank": 2}, **fields}
    return request(url, token, "POST", "/v1/jobs", json.dumps(job).encode())


def beside(url, token, took, is_over):
    number = 0
    while not is_over.is_set():
        number += 1
        took.append(submit(url, token, "small", parameters={"rank": 2, "max_length": 64 + number}))
        is_over.wait(0.5)


def measure(host, component, folder):
    def run(*words):
        return subprocess.run([host, *words, "--data-dir", folder], check=True, capture_output=True, text=True).stdout

    run("model", "import", "--random", "smollm2-135m", "--seed", "1", "--dtype", "bf16", "--name", "tiny")
    large, small = (re.search(r"nodus_\S+", run("tenant", "add", name)).group(0) for name in ("large", "small"))
    words = ["serve", "--hold", "--listen", "127.0.0.1:0", "--device", "cpu", "--component", f"sft={component}", "--data-dir", folder]
    service = subprocess.Popen([host, *words], stdout=subprocess.PIPE, text=True)
    try:
        url = next(found.group(0) for line in service.stdout if (found := re.search(r"http://\S+", line)))
        rows = ROW * (BYTES // len(ROW))
        print(f"upload of {len(rows)} bytes, {len(rows) // len(ROW)} rows: {request(url, large, 'PUT', '/v1/data/large', rows, 'application/jsonl'):.1f} s")
        request(url, small, "PUT", "/v1/data/small", ROW * 100, "application/jsonl")
        took, is_over = [], threading.Event()
        other = threading.Thread(target=beside, args=(url, small, took, is_over))
        other.start()
        sweep = [{"key": "max_length", "values": LENGTHS}]
        print(f"a sweep over {len(LENGTHS)} lengths: {submit(url, large, 'large', sweep=sweep):.1f} s")
        print(f"one with a tenth held out: {submit(url, large, 'large', held_out={'fraction': 0.1}):.1f} s")
        is_over.set()
        other.join()
        print(f"{len(took)} small submissions of another tenant meanwhile: {max(took):.2f} s at most")
        memory = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{service.pid}/status").read_text()).group(1)
        print(f"the service has had {int(memory) // 1024} MiB at most")
    finally:
        service.terminate()
        service.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(sys.argv[1], sys.argv[2], folder)
