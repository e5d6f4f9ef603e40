"""Train a small transformer in a plain PyTorch loop, and offload its activations.

python examples/train_pytorch.py                     # offloads every layer
python examples/train_pytorch.py --placement keep    # to compare: equal losses, higher peak
python examples/train_pytorch.py --placement examples/policies/keep_last_layers.yaml
"""

import argparse

import torch
from torch import nn

import tba_offload as tba

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 1000, 256, 8, 2, 128


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

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tba.attach(model, policy(arguments.placement)) as session:
    for step in range(arguments.steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = session.records[-1].activation_peak_bytes
        print(f"step {step + 1}: loss {loss.item()!r}, activation peak {(peak or 0) / 2**20:.1f} MiB")
