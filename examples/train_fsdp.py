"""Train a small transformer with FSDP2 (fully_shard), and offload its activations.

torchrun --nproc-per-node 2 examples/train_fsdp.py                     # offloads every layer
torchrun --nproc-per-node 2 examples/train_fsdp.py --placement keep    # to compare: equal losses
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tba_offload as tba

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 1000, 256, 8, 1, 128


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], input_ids.device)
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def policy(placement: str) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "4MiB"}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
rank = dist.get_rank()
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))

torch.manual_seed(0)
model = LanguageModel().to(device)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(rank)
with tba.attach(model, policy(arguments.placement)) as session:
    for step in range(arguments.steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=device)  # put your own dataset here
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = (session.records[-1].activation_peak_bytes or 0) / 2**20
        print(f"step {step + 1}: rank {rank}, loss {loss.item()!r}, activation peak {peak:.1f} MiB")

dist.destroy_process_group()
