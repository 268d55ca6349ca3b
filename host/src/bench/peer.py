"""The jobs of a measurement by PyTorch and PEFT, as a user would run them: told by one JSON line what to do, answers as our own workers do.

Weights, adapters' starts and tokens are made by the same counter-based generator (Philox4x32-10), so that losses can be held against ours.
"""

import contextlib
import hashlib
import json
import math
import struct
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

MASK = 0xFFFFFFFF
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS_KEY = 0x62656E636800
RANDOM_RANGE = struct.unpack("f", struct.pack("f", 0.034641016))[0]


def philox(key, counter):
    """Four words (int64 tensors below 2^32) for four tensors of counters."""
    a, b, c, d = counter
    k0, k1 = key & MASK, key >> 32
    for _ in range(10):
        # The products wrap as signed numbers; the words are cut out of them bit by bit.
        p0, p1 = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = ((p1 >> 32) & MASK) ^ b ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ d ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return a, b, c, d


def stream_key(seed, ids):
    words = b"".join(struct.pack("<Q", word) for word in [seed, *ids])
    return struct.unpack("<Q", hashlib.sha256(words).digest()[:8])[0]


def numbers(key, count, last, device):
    """`count` numbers in [-1, 1): number 4 i + j is word j of counter i."""
    index = torch.arange((count + 3) // 4, device=device, dtype=torch.int64)
    zero = torch.zeros_like(index)
    words = torch.stack(philox(key, (index & MASK, index >> 32, zero, zero + last)), 1).reshape(-1)[:count]
    return 2.0 * ((words >> 8).double() / 16777216.0) - 1.0


@torch.no_grad()
def fill(model, recipe, device):
    stored = {"f32": torch.float32, "bf16": torch.bfloat16}[recipe["dtype"]]
    for name, parameter in model.named_parameters():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        flat, chunk = parameter.data.view(-1), 1 << 26
        values = numbers(stream_key(recipe["seed"], list(name.encode())), flat.numel(), 1, device) if flat.numel() <= chunk else None
        if values is None:
            values = torch.cat([part for part in chunks(stream_key(recipe["seed"], list(name.encode())), flat.numel(), chunk, device)])
        flat.copy_((values * RANDOM_RANGE + centre).float().to(stored))


def chunks(key, count, size, device):
    for start in range(0, count, size):
        length = min(size, count - start)
        index = torch.arange(start // 4, (start + length + 3) // 4, device=device, dtype=torch.int64)
        zero = torch.zeros_like(index)
        words = torch.stack(philox(key, (index & MASK, index >> 32, zero, zero + 1)), 1).reshape(-1)[:length]
        yield (2.0 * ((words >> 8).float() / 16777216.0) - 1.0).double()


def hf_config(config):
    kind = config["architecture"]
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
    more = ["max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    values = {name: config[name] for name in names + more}
    return AutoConfig.for_model(kind, rope_parameters={"rope_type": "default", "rope_theta": values.pop("rope_theta")}, **values)


def base_model(order, device, dtype):
    if order["folder"]:
        return AutoModelForCausalLM.from_pretrained(order["folder"], dtype=dtype).to(device)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf_config(order["recipe"]["config"]), dtype=dtype)
    fill(model, order["recipe"], device)
    return model


def rank_of(work, job):
    return work["rank"] if work["kind"] == "sweep" else max(work["rank"] >> (job % 3), 1)


def seed_of(work, job):
    return work["seed"] if work["kind"] == "sweep" else work["seed"] + job


def learning_rate(work, job):
    f32 = lambda x: struct.unpack("f", struct.pack("f", x))[0]
    if work["kind"] != "sweep":
        return f32(1e-4)
    return f32(f32(1e-4) * f32(1.125**job))


def adapted(model, work, job, device):
    layers = model.config.num_hidden_layers
    last = work["layers"].get("last") if isinstance(work["layers"], dict) else None
    chosen = range(layers - min(last, layers), layers) if last else range(layers)
    rank = rank_of(work, job)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=MODULES, layers_to_transform=list(chosen), task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_A." in name:
                layer, module = int(name.split(".layers.")[1].split(".")[0]), next(i for i, m in enumerate(MODULES) if f".{m}." in name)
                key = stream_key(seed_of(work, job), [1, 0, layer, module])
                bound = 1.0 / math.sqrt(parameter.shape[1])
                parameter.copy_((numbers(key, parameter.numel(), 0, device).float() * bound).view_as(parameter))
    return peft


def batches(work, job, vocabulary, device):
    """Inputs and targets (batch, sequence, position) of every batch, those of warm-up last."""
    owner = 0 if work["kind"] == "sweep" else job
    count = work["batches"] + work["warmup"] // 2
    number, sequence, position = torch.meshgrid(
        torch.arange(count, device=device), torch.arange(work["sequences"], device=device), torch.arange(work["length"] + 1, device=device), indexing="ij"
    )
    tokens = philox(TOKENS_KEY ^ work["seed"], (position, sequence, torch.full_like(position, owner), number))[0] % vocabulary
    targets = tokens[..., 1:].clone()
    targets[..., : work["length"] - work["labelled"]] = -100
    return tokens[..., :-1].contiguous(), targets.contiguous()


class Job:
    def __init__(self, model, work, job, mode, device):
        self.work, self.job, self.mode = work, job, mode
        self.inputs, self.targets = batches(work, job, model.config.vocab_size, device)
        self.model = adapted(model, work, job, device)
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        on_card = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=learning_rate(work, job), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=on_card, capturable=on_card and mode == "graph"
        )
        self.forward = torch.compile(self.loss) if mode == "compile" else self.loss
        self.graph = self.capture() if mode == "graph" else None

    def loss(self, inputs, targets):
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)

    def eager(self, inputs, targets):
        loss = self.forward(inputs, targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=self.mode != "graph")
        return loss

    def capture(self):
        """The whole step as one graph; what capturing trains is put back."""
        start = [p.detach().clone() for p in self.parameters]
        self.now = self.inputs[0].clone(), self.targets[0].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.eager(*self.now)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.captured = self.eager(*self.now)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, start):
                parameter.copy_(value)
                for state in self.optimiser.state[parameter].values():
                    state.zero_()
        return graph

    def step(self, step):
        warmup = self.work["warmup"]
        number = self.work["batches"] + step // 2 if step < warmup else (step - warmup) % self.work["batches"]
        if self.graph is None:
            return self.eager(self.inputs[number], self.targets[number]).item()
        self.now[0].copy_(self.inputs[number])
        self.now[1].copy_(self.targets[number])
        self.graph.replay()
        return self.captured.item()

    def finish(self):
        digest = hashlib.sha256(b"".join(p.detach().float().cpu().numpy().tobytes() for p in self.parameters))
        size = sum(4 * p.numel() for p in self.parameters)
        self.graph = None
        return f"sha256:{digest.hexdigest()}", size


def bits(loss):
    return f"{struct.unpack('<I', struct.pack('<f', loss))[0]:08x}"


def main():
    out = sys.stdout
    sys.stdout = sys.stderr
    order = json.loads(sys.stdin.readline())
    say = lambda value: (out.write(json.dumps(value) + "\n"), out.flush())
    work, device = order["work"], torch.device(order["device"])
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[order["dtype"]]
    model = base_model(order, device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "device": name}
    steps, warmup = work["batches"] * work["epochs"], work["warmup"]
    jobs, done, seconds, is_ready = order["jobs"], [], 0.0, False
    for number in jobs:
        job = Job(model, work, number, order["mode"], device)
        losses = [job.step(step) for step in range(warmup)]
        if not is_ready:
            # Later jobs of the process set up after the line to go; their set-up is not counted either.
            say({"class": versions})
            sys.stdin.readline()
            is_ready = True
        began, step_ms = time.perf_counter(), []
        for step in range(warmup, warmup + steps):
            asked = time.perf_counter()
            losses.append(job.step(step))
            step_ms.append((time.perf_counter() - asked) * 1e3)
        seconds += time.perf_counter() - began
        digest, size = job.finish()
        done.append({"job": number, "loss_bits": [bits(x) for x in losses], "grad_norm_bits": [], "adapter": digest, "adapter_bytes": size, "step_ms": step_ms})
        model = job.model.unload()
        del job
        with contextlib.suppress(AttributeError):
            torch._dynamo.reset()
    say({"seconds": seconds, "jobs": done, "sharing": {}})


main()
