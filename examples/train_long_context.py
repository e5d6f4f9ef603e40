"""Train a transformer on long packed sequences: layer inputs are offloaded, other activations are recomputed.

python examples/train_long_context.py                        # 4096 tokens; about a minute on a CPU
python examples/train_long_context.py --length 32768 --steps 2  # about three minutes a step on two cores
python examples/train_long_context.py --placement recompute  # like gradient checkpointing: higher peak
python examples/train_long_context.py --placement keep --chunk 0    # session.why() explains the peak

Three things let memory grow slowly with the length of a sequence:

* The placement recompute-offload writes the input of each layer. Backward recomputes all other activations of
  a layer. Memory holds the activations of one layer, and the inputs in flight.
* The loss is computed in chunks of tokens. Logits of all tokens are often larger than all other activations.
* Documents are packed into one sequence, and attention runs document by document. A mask of length x length
  elements would grow with the square of the length.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import tba_offload as tba

VOCABULARY, WIDTH, HEADS, LAYERS = 8000, 256, 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        attended = [
            scaled_dot_product_attention(*document.unbind(2), is_causal=True)
            for document in heads.split(lengths, dim=3)
        ]
        x = x + self.out(torch.cat(attended, dim=2).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.chunk = chunk

    def forward(self, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the mean loss of the next token."""
        x, targets = self.embedding(tokens[:, :-1]), tokens[:, 1:]
        for layer in self.layers:
            x = layer(x, lengths)
        if not self.chunk:
            return self.loss_of(x, targets) / targets.numel()
        parts = zip(x.split(self.chunk, dim=1), targets.split(self.chunk, dim=1), strict=True)
        losses = [checkpoint(self.loss_of, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / targets.numel()

    def loss_of(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")


def packed(length: int) -> list[int]:
    """Return the lengths of four documents that fill a sequence."""
    lengths = [length // 8, length // 4, length // 8]
    return [*lengths, length - sum(lengths)]


def policy(placement: str, length: int) -> dict[str, object] | str:
    """Return a policy with an in-flight window of two layer inputs, ``fit`` or the path of a policy file."""
    if placement == "fit" or placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": 2 * 4 * WIDTH * length}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="recompute-offload", help="keep, recompute, … or a policy file")
parser.add_argument("--length", type=int, default=4096, help="number of tokens in a sequence")
parser.add_argument("--chunk", type=int, default=512, help="tokens in a chunk of the loss; 0: no chunks")
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = LanguageModel(arguments.chunk).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tba.attach(model, policy(arguments.placement, arguments.length)) as session:
    for step in range(arguments.steps):
        tokens = torch.randint(VOCABULARY, (1, arguments.length + 1), device=device)
        loss = model(tokens, packed(arguments.length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record = session.records[-1]
        peak = (record.activation_peak_bytes or 0) / 2**20
        written = record.offloaded_bytes / 2**20
        print(
            f"step {step + 1}: loss {loss.item()!r}, activation peak {peak:.1f} MiB, "
            f"{record.tokens / record.seconds:.0f} tokens/s, {written:.1f} MiB written"
        )
    print(session.why())
