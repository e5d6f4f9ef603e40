"""Train torchtitan's small Llama with torchtitan's trainer, and offload its activations. Requires a GPU.

Run pip install torchtitan==0.2.2, and start the script in a checkout of torchtitan, which has tests/assets:
torchrun --nproc-per-node 2 train_torchtitan.py                         # offloads every layer
torchrun --nproc-per-node 2 train_torchtitan.py --placement keep        # to compare: equal losses
torchrun --nproc-per-node 2 train_torchtitan.py --training.steps 10     # all other options go to torchtitan
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

import tba_offload as tba

OPTIONS = [
    "--model.flavor=debugmodel",
    "--training.steps=4",
    "--activation_checkpoint.mode=none",  # with the default (selective), fewer bytes are offloaded
    "--debug.deterministic",
    "--debug.seed=0",
]


class PrintingTrainer(Trainer):
    """A trainer that prints the exact loss of each micro-batch."""

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**batch)
        print(f"step {self.step}: rank {dist.get_rank()}, loss {loss.item()!r}", flush=True)
        return loss


def policy(placement: str) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "64MiB"}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
arguments, others = parser.parse_known_args()

init_logger()
trainer = PrintingTrainer(ConfigManager().parse_args([*OPTIONS, *others]))
with tba.attach(trainer.model_parts, policy(arguments.placement)) as session:
    trainer.train()
for step, record in enumerate(session.records, start=1):
    print(f"step {step}: activation peak {(record.activation_peak_bytes or 0) / 2**20:.1f} MiB")
trainer.close()
dist.destroy_process_group()
