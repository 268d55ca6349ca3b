"""The service on real cards: lanes, MPS daemons, faults and kills; every job's bytes held against the same job in another lane.

    python3 service.py NODUS_HOST SFT.wasm [--cards N] [--steps N]

Needs nothing but the two files, a card (with two, jobs are placed over both), nvidia-smi and nvidia-cuda-mps-control. Exits with 1 at the first
thing that is not as it should be. Works in a folder of its own under /tmp, which it removes, as it ends what it started.
"""

import argparse
import collections
import contextlib
import glob
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FAULT = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
ptx = b'''.version 7.0
.target sm_80
.address_size 64
.visible .entry k() { .reg .b64 %a; .reg .b32 %v; mov.u64 %a, 64; mov.u32 %v, 1; st.global.u32 [%a], %v; ret; }
'''
device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
ready = [cu.cuInit(0), cu.cuDeviceGet(ctypes.byref(device), 0), cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cu.cuCtxSetCurrent(context)]
ready += [cu.cuModuleLoadData(ctypes.byref(module), ptx), cu.cuModuleGetFunction(ctypes.byref(kernel), module, b"k")]
launched = cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None)
raise SystemExit(0 if not any(ready) and not launched and cu.cuCtxSynchronize() else f"no fault: {ready} {launched}")
"""

began = time.monotonic()


def tell(text):
    print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)


def demand(truth, text):
    if not truth:
        sys.exit(f"FAILED: {text}")


def output(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    demand(done.returncode == 0, f"{' '.join(map(str, command[1:3]))}: {done.stderr.strip()}")
    return done.stdout


def memory():
    """MiB in use on every card."""
    return [int(line) for line in output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()]


class Service:
    def __init__(self, host, component, folder, cards):
        self.host, self.component, self.folder, self.cards = host, component, folder, cards
        self.env = dict(os.environ, NODUS_DATA_DIR=str(folder / "data"))
        for seed, name in enumerate(["m", "n"], 1):
            self.say("model", "import", "--random", "llama-1.1b", "--seed", str(seed), "--dtype", "bf16", "--name", name)
        self.token = next(word for word in self.say("tenant", "add", "someone").split() if word.startswith("nodus_"))
        unbounded = ["running-jobs=none", "requests-per-second=none", "device-bytes=none"]
        self.say("tenant", "quota", "someone", "queued-jobs=1000", *unbounded)
        self.data = folder / "t.jsonl"
        random.seed(1)
        rows = [json.dumps({"tokens": [random.randrange(31000) for _ in range(96)]}) for _ in range(64)]
        self.data.write_text("\n".join(rows) + "\n")

    def say(self, *words):
        return output(self.host, *words, env=self.env, cwd=self.folder)

    @contextlib.contextmanager
    def running(self, *options):
        devices = [word for card in range(self.cards) for word in ("--device", f"cuda:{card}")]
        log = open(self.folder / "serve.err", "a")
        command = [self.host, "serve", "--listen", "127.0.0.1:0", "--component", f"sft={self.component}", "--snapshot-every", "2", *devices, *options]
        process = subprocess.Popen(command, env=dict(self.env, NODUS_LOG="info"), cwd=self.folder, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = next((line for line in process.stdout if "listening on " in line), None)
            demand(line, "the service did not start: see serve.err")
            self.env |= {"NODUS_URL": line.split("listening on ")[1].strip(), "NODUS_TOKEN": self.token}
            yield
            process.send_signal(signal.SIGTERM)
            demand(process.wait(60) == 0, "the service did not end cleanly")
        finally:
            process.kill()

    def submit(self, model, rate, lane, steps):
        settings = [word for pair in ["batch_size=4", "max_length=96", f"steps={steps}", f"learning_rate={rate}"] for word in ("--set", pair)]
        said = self.say("submit", "sft", "--model", model, "--data", str(self.data), *settings, "--lane", lane, "--json")
        return json.loads(said)["jobs"][0]["id"]

    def jobs(self):
        return {job["id"]: job for job in map(json.loads, self.say("jobs", "--json").splitlines())}

    def show(self, ids):
        known = self.jobs()
        for job in map(known.get, ids):
            told = job.get("reason") or job.get("message") or ""
            print(f"          {job['id'][-6:]} {job['lane']:5} {job['model']} {job['state']:9} step {step(job):5} on {card_of(job)}, attempt {job['attempts']} {told}")
        print(f"          memory in use: {' and '.join(map(str, memory()))} MiB", flush=True)
        return known

    def wait(self, what, truth, seconds=120):
        until = time.monotonic() + seconds
        while not truth(self.jobs()):
            demand(time.monotonic() < until, f"{what}: not within {seconds} s\n{json.dumps(list(self.jobs().values()), indent=1)[:4000]}")
            time.sleep(0.2)

    def at_work(self, ids, beyond=50):
        self.wait("jobs at work", lambda jobs: all(step(jobs[id]) > beyond or jobs[id]["state"] != "running" and ended(jobs[id]) for id in ids))

    def end(self, ids):
        self.wait("jobs ended", lambda jobs: all(ended(jobs[id]) for id in ids), 240)
        for id, job in self.jobs().items():
            demand(id not in ids or job["state"] == "succeeded", f"job {id} ended {job['state']}: {job.get('message')}")

    def adapter(self, id):
        self.say("fetch", id, "--out", id)
        return (self.folder / id / "adapter" / "adapter_model.safetensors").read_bytes()

    def daemon(self, card):
        """The folder of a card's daemon."""
        found = sorted(glob.glob(str(self.folder / "data" / f"mps-{card}-*")))
        demand(len(found) == 1, f"card {card} has one MPS daemon: {found}")
        return found[0]


def step(job):
    return (job.get("last_step") or {}).get("step") or 0


def card_of(job):
    """Of `cuda:0 (NVIDIA H200)`, the first word."""
    return (job.get("placed") or "nothing").split()[0].rstrip(",")


def ended(job):
    return job["state"] not in ("queued", "running")


def processes(text, variable=""):
    """Those whose command line, and whose environment where asked for, hold a text."""
    found = []
    for folder in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            line = pathlib.Path(folder, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and (not variable or variable in pathlib.Path(folder, "environ").read_bytes().decode(errors="replace")):
                found.append(int(pathlib.Path(folder).name))
    return found


def disturbed(service, ids, card, act):
    """Jobs on a card begin again after `act`; those on another do not notice."""
    before = service.jobs()
    act()
    hit = [id for id in ids if card_of(before[id]) == f"cuda:{card}" and not ended(before[id])]
    demand(hit, f"no job is on card {card}")
    service.wait("jobs begun again", lambda jobs: all(jobs[id]["attempts"] > before[id]["attempts"] and (step(jobs[id]) > step(before[id]) or ended(jobs[id])) for id in hit))
    after = service.show(ids)
    for id in set(ids) - set(hit):
        demand(after[id]["attempts"] == before[id]["attempts"], f"job {id} on {card_of(before[id])} was begun again for what happened on card {card}")


def lanes(service, steps):
    one, alone, other = service.submit("m", 1e-4, "fused", steps), service.submit("m", 3e-4, "solo", steps), service.submit("n", 5e-4, "fused", steps)
    if service.cards > 1:
        service.at_work([one, alone, other])
        tell("two models fused, one job solo")
        jobs = service.show([one, alone, other])
        demand(card_of(jobs[alone]) not in (card_of(jobs[one]), card_of(jobs[other])), "a solo job has a card to itself")
    service.end([one, alone, other])
    beside = {"m 1e-4": one, "m 3e-4": alone, "n 5e-4": other}
    mps = {name: service.submit(name[0], name[2:], "mps", steps) for name in ["m 1e-4", "m 3e-4", "n 1e-4", "n 5e-4"]}
    ids = list(mps.values())
    service.at_work(ids)
    tell("four jobs of the lane mps")
    jobs = service.show(ids)
    demand(len({card_of(jobs[id]) for id in ids}) == min(service.cards, 4), "jobs are placed over all cards")
    last = service.cards - 1
    tell(f"a client of card {last}'s daemon faults")
    disturbed(service, ids, last, lambda: output(sys.executable, "-c", FAULT, env=dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=service.daemon(last)), timeout=60))
    tell("card 0's daemon is killed")
    disturbed(service, ids, 0, lambda: [os.kill(pid, signal.SIGKILL) for pid in processes("nvidia-cuda-mps-control", str(service.folder / "data" / "mps-0-"))])
    service.end(ids)
    beside["n 1e-4"] = service.submit("n", 1e-4, "fused", steps)
    service.end([beside["n 1e-4"]])
    for name, id in mps.items():
        demand(service.adapter(id) == service.adapter(beside[name]), f"{name}: the bytes of lane mps differ from those of {service.jobs()[beside[name]]['lane']}")
    tell(f"{len(mps)} adapters: bytes equal to those of the lanes fused and solo")


def crowded(service, steps):
    ids = [service.submit("m", f"{n}e-5", "fused", steps) for n in range(1, 11)] + [service.submit("n", 1e-4, "mps", steps), service.submit("n", 2e-4, "fused", steps)]
    alone = ids[10]
    service.at_work([alone])
    tell("twelve jobs within 9 GiB a card")
    service.show(ids)
    # The one engine that knows of a daemon.
    for engine in processes("nodus-host engine", str(service.folder)):
        os.kill(engine, signal.SIGKILL)
    service.end(ids)
    jobs = service.jobs()
    demand(jobs[alone]["attempts"] > 1, "the job whose engine was killed began again")
    tell(f"an engine was killed: {dict(collections.Counter(jobs[id]['state'] for id in ids))}, {sum(jobs[id]['attempts'] for id in ids)} attempts")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("host", type=pathlib.Path)
    arguments.add_argument("component", type=pathlib.Path)
    arguments.add_argument("--cards", type=int, default=len(memory()))
    arguments.add_argument("--steps", type=int, default=4000)
    asked = arguments.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nodus-cards-"))
    try:
        service = Service(asked.host.resolve(), asked.component.resolve(), folder, asked.cards)
        with service.running("--mps-engines", str(max(2, 4 // asked.cards))):
            lanes(service, asked.steps)
        with service.running("--memory", "9GiB"):
            crowded(service, asked.steps // 3)
        print(service.say("state", "fsck", "--deep").strip())
        tell("all as it should be")
    finally:
        log = folder / "serve.err"
        kept = os.environ.get("OUT")
        if kept and log.exists():
            shutil.copy(log, kept)
        for pid in processes("nodus-host", str(folder)) + processes("nvidia-cuda-mps", str(folder)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
