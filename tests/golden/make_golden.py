#!/usr/bin/env python3
"""Golden LoRA references: tiny random decoders and 20 steps of fine-tuning by transformers + PEFT.

Makes, under --out (the working directory unless said otherwise), for each model asked for (all of them unless some are named):

  models/NAME/             config.json, model.safetensors (float32)
  data/tokens.json         input_ids, labels, attention_mask, each [20 steps, 2 rows, 32 tokens]
  runs/NAME-TARGETS/       init/ and final/ (PEFT adapters), grads_step0.safetensors and grads_step1.safetensors, loss.json

CPU, float32, one thread, eager attention, no dropout; step s trains on data[s]. Each run is repeated in float64, and a run
whose losses move by more than 3e-6 is an error: some gradient is then so near zero that Adam turns its rounding into a step,
and no other implementation could follow. Choose another LORA_SEEDS entry in that case.

    python3 -m venv v && v/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 safetensors
    v/bin/python make_golden.py qwen3 mistral
"""
import argparse, json, os, platform, shutil
import peft, safetensors.torch as st, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)

V, B, S, STEPS = 256, 2, 32, 20
LR, BETAS, EPS, WD = 1e-2, (0.9, 0.999), 1e-8, 0.01
RANK, ALPHA = 4, 8
FP64_DRIFT_MAX = 3e-6
COMMON = dict(
    vocab_size=V, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.08,  # larger than the usual 0.02, so that logits and gradients are not tiny
    bos_token_id=1, eos_token_id=2, pad_token_id=0)
QV = ['q_proj', 'v_proj']
ALL = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']

# name: (model class, config class, what differs from COMMON, seed of the weights, runs)
MODELS = {
    'llama': (LlamaForCausalLM, LlamaConfig, dict(rms_norm_eps=1e-5, tie_word_embeddings=False), 1234,
              {'qv': QV, 'all': ALL, 'qv-rslora': QV}),
    'qwen2': (Qwen2ForCausalLM, Qwen2Config, dict(rms_norm_eps=1e-6, tie_word_embeddings=True), 1235, {'qv': QV, 'all': ALL}),
    # A head size that is not hidden / heads, so that whoever derives it is caught.
    'qwen3': (Qwen3ForCausalLM, Qwen3Config, dict(rms_norm_eps=1e-6, tie_word_embeddings=True, head_dim=32), 1238,
              {'qv': QV, 'all': ALL}),
    # A window shorter than the sequences, so that whoever ignores it is caught.
    'mistral': (MistralForCausalLM, MistralConfig, dict(rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=12), 1239,
                {'qv': QV, 'all': ALL}),
}
LORA_SEEDS = {'qwen3-all': 102, 'mistral-qv': 102, 'mistral-all': 102}  # where 101 gives a first gradient too near zero


def tokens():
    """A noisy affine recurrence, learnable. Row 1 is shorter and padded at the right: id 0, label -100, mask 0. The first 4
    labels of each row are -100, as a prompt's."""
    g = torch.Generator().manual_seed(7)
    ids = torch.zeros(STEPS, B, S, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for s in range(STEPS):
        for b in range(B):
            n = S if b == 0 else int(torch.randint(20, S, (1,), generator=g))
            x, row = int(torch.randint(3, V, (1,), generator=g)), []
            for _ in range(n):
                row.append(x)
                x = 3 + (5 * (x - 3) + 11) % (V - 3)
            ids[s, b, :n], mask[s, b, :n], labels[s, b, 4:n] = torch.tensor(row), 1, torch.tensor(row[4:])
    return ids, labels, mask


def make_model(name, folder):
    cls, config, extra, seed, _ = MODELS[name]
    torch.manual_seed(seed)
    model = cls(config(**{**COMMON, **extra})).float().eval()
    # Biases and norms are born 0 and 1: other values, so that whoever forgets them is caught.
    for _, p in model.named_parameters():
        if p.ndim == 1:
            with torch.no_grad():
                p.add_(torch.randn(p.shape) * 0.05)
    model.save_pretrained(folder)
    drop(folder, 'generation_config.json')


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=BETAS, eps=EPS, weight_decay=WD)


def train(model, data, on_gradient=lambda step, _: None):
    ids, labels, mask = data
    optimiser, losses, norms = adamw(model), [], []
    model.train()
    for s in range(STEPS):
        optimiser.zero_grad(set_to_none=True)
        out = model(input_ids=ids[s], attention_mask=mask[s], labels=labels[s])
        out.loss.backward()
        losses.append(out.loss.item())
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        norms.append(torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values())).item())
        if s < 2:
            on_gradient(s, grads)
        optimiser.step()
    return losses, norms


def make_run(name, run, targets, model_dir, folder, data):
    cls = MODELS[name][0]
    load = lambda dtype: cls.from_pretrained(model_dir, dtype=dtype, attn_implementation='eager')
    seed, rslora = LORA_SEEDS.get(f'{name}-{run}', 101), run.endswith('rslora')
    base = load(torch.float32)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias='none', target_modules=targets,
                                            task_type='CAUSAL_LM', use_rslora=rslora))
    for c in model.peft_config.values():
        c.base_model_name_or_path = f'tiny-{name}'
    os.makedirs(folder, exist_ok=True)
    save = lambda part: (model.save_pretrained(os.path.join(folder, part), save_embedding_layers=False), drop(os.path.join(folder, part), 'README.md'))
    save('init')
    smallest = []

    def keep(step, grads):
        grads = {k.replace('.default', ''): g.clone().contiguous() for k, g in grads.items()}
        st.save_file(grads, os.path.join(folder, f'grads_step{step}.safetensors'))
        # The first gradient of B is that of step 0, the first of A that of step 1, since B starts at zero.
        smallest.extend(g.abs().min().item() for k, g in grads.items() if ('lora_B' in k) == (step == 0))

    losses, norms = train(model, data, keep)
    save('final')
    model.eval()
    with torch.no_grad():
        after = sum(model(input_ids=i, attention_mask=m, labels=l).loss.item() for i, l, m in zip(*data)) / STEPS
    double = PeftModel.from_pretrained(load(torch.float64), os.path.join(folder, 'init'), is_trainable=True).double()
    losses64, _ = train(double, data)
    drift = max(abs(x - y) for x, y in zip(losses, losses64))
    # The base in bfloat16, PEFT's adapters in float32: how far bfloat16 by itself leads from float32.
    losses16, _ = train(PeftModel.from_pretrained(load(torch.bfloat16), os.path.join(folder, 'init'), is_trainable=True), data)
    json.dump(dict(
        model=name, target_modules=targets, r=RANK, lora_alpha=ALPHA, use_rslora=rslora, scaling=ALPHA / RANK ** (0.5 if rslora else 1),
        lora_seed=seed, lr=LR, betas=BETAS, eps=EPS, weight_decay=WD, steps=STEPS, schedule='constant', grad_clip=None, loss=losses,
        grad_norm=norms, eval_mean_loss_after=after, loss_mostly_fp64=losses64, loss_bf16=losses16, max_abs_loss_diff_fp32_vs_fp64=drift,
        versions=dict(torch=torch.__version__, peft=peft.__version__, transformers=transformers.__version__,
                      python=platform.python_version())), open(os.path.join(folder, 'loss.json'), 'w'), indent=1)
    print(f'{name}-{run}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, after {after:.6f}, float64 moves it by {drift:.2g}', flush=True)
    # AdamW's first move of a weight is lr g / (|g| + eps): near eps, rounding decides it.
    if min(smallest) < 5 * EPS:
        raise SystemExit(f'{name}-{run}: a first gradient is {min(smallest):.2g}, expected at least {5 * EPS:.0e}; set LORA_SEEDS')
    if drift > FP64_DRIFT_MAX:
        raise SystemExit(f'{name}-{run}: float64 moves the losses by {drift:.2g}, expected at most {FP64_DRIFT_MAX:.0e}; set LORA_SEEDS')


def drop(folder, name):
    path = os.path.join(folder, name)
    if os.path.exists(path):
        os.remove(path)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('models', nargs='*', default=list(MODELS), help=f'of {", ".join(MODELS)}')
    ap.add_argument('--out', default='.')
    a = ap.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    data = tokens()
    os.makedirs(os.path.join(a.out, 'data'), exist_ok=True)
    with open(os.path.join(a.out, 'data', 'tokens.json'), 'w') as f:
        json.dump(dict(zip(('input_ids', 'labels', 'attention_mask'), (t.tolist() for t in data))), f)
    for name in a.models:
        model_dir = os.path.join(a.out, 'models', name)
        shutil.rmtree(model_dir, ignore_errors=True)
        make_model(name, model_dir)
        for run, targets in MODELS[name][4].items():
            folder = os.path.join(a.out, 'runs', f'{name}-{run}')
            shutil.rmtree(folder, ignore_errors=True)
            make_run(name, run, targets, model_dir, folder, data)


if __name__ == '__main__':
    main()
