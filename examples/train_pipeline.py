"""Train a small transformer with torch.distributed.pipelining, and offload its activations.

torchrun --nproc-per-node 2 examples/train_pipeline.py                     # offloads every layer
torchrun --nproc-per-node 2 examples/train_pipeline.py --placement keep    # to compare: equal losses
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import tba_offload as tba

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH, MICRO_BATCHES = 1000, 256, 8, 1, 128, 4


class Stage(nn.Module):
    """The layers of one rank. The first rank also has the embedding, and the last rank the head."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if rank == 0 else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
            for _ in range(LAYERS // ranks)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY) if rank == ranks - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of one micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


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
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(rank)
model = Stage(rank, ranks).to(device)
stage = PipelineStage(model, rank, ranks, device)
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tba.attach(model, policy(arguments.placement)) as session:
    for step in range(arguments.steps):
        torch.manual_seed(step)  # all ranks draw the same batch: put your own dataset here
        tokens = torch.randint(VOCABULARY, (MICRO_BATCHES * BATCH, LENGTH + 1), device=device)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == ranks - 1:
            schedule.step(target=tokens[:, 1:], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        peak = (session.records[-1].activation_peak_bytes or 0) / 2**20
        loss = f"loss {torch.stack(losses).mean().item()!r}, " if losses else ""
        print(f"step {step + 1}: rank {rank}, {loss}activation peak {peak:.1f} MiB")

dist.destroy_process_group()
