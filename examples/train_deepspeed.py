"""Train a small transformer with DeepSpeed's ZeRO, and offload its activations.

pip install tba-offload deepspeed
torchrun --nproc-per-node 2 examples/train_deepspeed.py                     # offloads every layer
torchrun --nproc-per-node 2 examples/train_deepspeed.py --placement keep    # to compare: equal losses

Without a GPU, set DS_ACCELERATOR=cpu. The first start takes minutes, because DeepSpeed compiles C++ code.
"""

import argparse

import deepspeed
import torch
from torch import nn

import tba_offload as tba

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH, MICRO_BATCHES = 1000, 256, 8, 1, 128, 2


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
parser.add_argument("--stage", type=int, default=3, help="stage of ZeRO: 1, 2 or 3")
arguments = parser.parse_args()

torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        # Backward allocates buckets. Small buckets keep the activation peak of a small model visible.
        "zero_optimization": {"stage": arguments.stage, "reduce_bucket_size": 1_000_000},
    },
)
rank = torch.distributed.get_rank()

torch.manual_seed(rank)
with tba.attach(engine, policy(arguments.placement)) as session:
    for step in range(arguments.steps):
        with session.step():  # ZeRO updates copies of the parameters, so the loop marks the step
            for _ in range(MICRO_BATCHES):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=engine.device)
                logits = engine(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                engine.backward(loss)
                engine.step()
        peak = (session.records[-1].activation_peak_bytes or 0) / 2**20
        print(f"step {step + 1}: rank {rank}, loss {loss.item()!r}, activation peak {peak:.1f} MiB")

torch.distributed.destroy_process_group()
