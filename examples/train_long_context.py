"""Train a transformer with few layers on one long sequence, and offload a share of each layer's activations.

python examples/train_long_context.py                        # offloads half of each layer's activations
python examples/train_long_context.py --placement keep       # to compare: equal losses, higher peak
python examples/train_long_context.py --placement recompute-except-attention    # for slower drives
python examples/train_long_context.py --placement auto --activation-bytes 60MiB    # the planner decides

With long sequences, activations fill the memory, and each layer saves gigabytes. A pipeline stage may have
only a few layers. If its drive is too slow for all of them, offload a share of each layer: for layers that
save 6 GB/s and a drive that writes 3 GB/s, offload-50%. For slower drives, offload only the outputs of
attention and recompute the rest, which is cheap compared with attention.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import tba_offload as tba

VOCABULARY, WIDTH, HEADS, LAYERS = 1000, 128, 2, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        ]
        attended = functional.scaled_dot_product_attention(
            *heads, is_causal=True
        )  # without a matrix of length x length
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        # Logits of all tokens would be larger than the activations of a layer, so compute them in parts.
        pieces = zip(x.split(256, dim=1), tokens[:, 1:].split(256, dim=1), strict=True)
        losses = [
            torch.utils.checkpoint.checkpoint(self.piece, *piece, use_reentrant=False) for piece in pieces
        ]
        return torch.stack(losses).sum() / (tokens.shape[1] - 1)

    def piece(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), reduction="sum")


def policy(placement: str, activation_bytes: str | None) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "4MiB", "activation_bytes": activation_bytes}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="offload-50%", help="keep, offload, auto, … or a policy file")
parser.add_argument("--activation-bytes", help="budget of auto")
parser.add_argument("--length", type=int, default=2048, help="tokens in the sequence")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tba.attach(model, policy(arguments.placement, arguments.activation_bytes)) as session:
    for step in range(arguments.steps):
        tokens = torch.randint(VOCABULARY, (1, arguments.length + 1), device=device)
        placed = sorted(set(session.plan.placements))
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record = session.records[-1]
        peak = (record.activation_peak_bytes or 0) / 2**20
        print(f"step {step + 1}: loss {loss.item()!r}, activation peak {peak:.1f} MiB, {', '.join(placed)}")
