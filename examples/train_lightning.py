"""Train a small transformer with PyTorch Lightning, and offload its activations.

pip install 'tba-offload[lightning]'
python examples/train_lightning.py                     # offloads every layer
python examples/train_lightning.py --placement keep    # to compare: equal losses, higher peak
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn

from tba_offload.integrations.lightning import OffloadCallback

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 1000, 256, 8, 2, 128


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], input_ids.device)
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def policy(placement: str) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "4MiB"}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

pl.seed_everything(0)
model = LanguageModel()
texts = torch.randint(VOCABULARY, (arguments.steps * BATCH, LENGTH + 1))  # put your own dataset here
callback = OffloadCallback(policy(arguments.placement))
trainer = pl.Trainer(
    max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(model, torch.utils.data.DataLoader(texts, batch_size=BATCH))

for loss, step in zip(model.losses, callback.session.records, strict=True):
    peak = (step.activation_peak_bytes or 0) / 2**20
    print(f"step {step.step}: loss {loss.item()!r}, activation peak {peak:.1f} MiB")
