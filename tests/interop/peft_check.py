#!/usr/bin/env python3
"""Loads an adapter folder with transformers + PEFT and holds its loss against ours.

The rows are a JSON Lines file of {"tokens", "weights"}: weight i belongs to token i as a target, the first is ignored, no
weights mean ones. The loss is the weighted mean over all rows of all lines, in nats, in float32 without dropout.

Exit code: 0 when it is within the tolerance of the expected value (or none was given), 1 when it is not, 2 when the adapter
does not load as it should: a warning of PEFT's, a key left over or missing.
"""
import argparse, json, sys, warnings

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights
from transformers import AutoModelForCausalLM


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--model', required=True, help='Hugging Face folder of the base model')
    ap.add_argument('--adapter', help='PEFT folder; without it the base model alone')
    ap.add_argument('--rows', required=True, help='JSON Lines of tokens and weights')
    ap.add_argument('--expected', type=float, help='the mean loss that we report')
    ap.add_argument('--tolerance', type=float, default=1e-4)
    a = ap.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation='eager')
    if a.adapter:
        model = load(model, a.adapter)
    model.eval()
    loss = mean_loss(model, a.rows)
    print(f'{loss:.7f}')
    if a.expected is not None and not abs(loss - a.expected) <= a.tolerance:
        print(f'the loss is {loss:.7f}, expected {a.expected:.7f} within {a.tolerance:g}', file=sys.stderr)
        sys.exit(1)


def load(model, folder):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        model = PeftModel.from_pretrained(model, folder)
    complaints = [str(w.message) for w in heard if issubclass(w.category, UserWarning)]
    in_file, in_model = load_peft_weights(folder), get_peft_model_state_dict(model, save_embedding_layers=False)
    if complaints or in_file.keys() != in_model.keys():
        print(f'PEFT complains: {complaints}; keys in one place only: {sorted(in_file.keys() ^ in_model.keys())}', file=sys.stderr)
        sys.exit(2)
    for name, tensor in in_file.items():
        if not torch.equal(tensor, in_model[name]):
            print(f'{name} is not what the file holds', file=sys.stderr)
            sys.exit(2)
    return model


@torch.no_grad()
def mean_loss(model, path):
    losses = weights_sum = 0.0
    for line in open(path, encoding='utf-8'):
        if not line.strip():
            continue
        row = json.loads(line)
        tokens = torch.tensor([row['tokens']])
        weights = torch.tensor(row.get('weights') or [1.0] * tokens.shape[1], dtype=torch.float64)[1:]
        logits = model(input_ids=tokens[:, :-1]).logits[0]
        each = torch.nn.functional.cross_entropy(logits.float(), tokens[0, 1:], reduction='none').double()
        losses += float((each * weights)[weights > 0].sum())
        weights_sum += float(weights.sum())
    return losses / weights_sum


if __name__ == '__main__':
    main()
