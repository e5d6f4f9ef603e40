"""Train a Hugging Face model in a loop of accelerate, and offload its activations.

pip install 'tba-offload[accelerate,transformers]'
python examples/train_accelerate.py                      # a tiny GPT-2 with random weights
python examples/train_accelerate.py --placement keep     # to compare: equal losses, higher peak
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import GPT2Config, GPT2LMHeadModel

import tba_offload as tba

TINY = GPT2Config(
    vocab_size=1000, n_positions=128, n_embd=256, n_layer=8, n_head=4, use_cache=False, eos_token_id=0
)


def policy(placement: str) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "4MiB"}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = GPT2LMHeadModel(TINY)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
count = 4 * arguments.steps * accelerator.num_processes
texts = torch.randint(TINY.vocab_size, (count, 128))  # put your own dataset here
batches = torch.utils.data.DataLoader(texts, batch_size=2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

with tba.attach(model, policy(arguments.placement)) as session:
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step = session.records[-1]
            peak = (step.activation_peak_bytes or 0) / 2**20
            print(f"step {step.step}: loss {loss.item()!r}, activation peak {peak:.1f} MiB")
