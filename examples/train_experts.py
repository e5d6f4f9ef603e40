"""Train LoRA adapters on a mixture of experts in a plain PyTorch loop, and offload the frozen experts.

pip install 'tba-offload[frameworks]'
python examples/train_experts.py                   # a tiny Mixtral with random weights
python examples/train_experts.py --frozen keep     # to compare: equal losses, all weights in memory
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

import tba_offload as tba

TINY = MixtralConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=128,
)


def policy(placement: str, frozen: str) -> dict[str, object] | str:
    """Return a policy for activations and frozen weights, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "min_tensor_bytes": "64KiB", "weights": {"frozen": frozen}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="keep", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--frozen", default="offload", help="keep, offload or offload-N%%")
parser.add_argument(
    "--words", type=int, default=4, help="words per step; with many words, all experts are read"
)
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

torch.manual_seed(0)
lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
model = get_peft_model(AutoModelForCausalLM.from_config(TINY), lora)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
layers = model.base_model.model.model.layers
frozen_bytes = sum(each.nbytes for each in layers.parameters() if not each.requires_grad)

with tba.attach(model, policy(arguments.placement, arguments.frozen)) as session:
    for step in range(arguments.steps):
        words = torch.randint(TINY.vocab_size, (1, arguments.words))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        read = session.records[-1].weights_read_bytes or 0
        print(
            f"step {step + 1}: loss {loss.item()!r}, {read / 2**20:.1f} MiB of frozen weights read, "
            f"{2 * frozen_bytes / 2**20:.1f} MiB if all experts were read"
        )
