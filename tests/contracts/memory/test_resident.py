"""On a CPU the process grows with what is live, as the operating system counts it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

# The tensors of a layer are small enough for malloc's heap, where the inputs that stay lie between holes.
LOOP = """
import json, sys, warnings
from pathlib import Path
import torch
from torch import nn
import tba_offload as tba

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

torch.set_num_threads(1)
warnings.simplefilter("ignore")
model = nn.Sequential()
model.layers = nn.ModuleList(Block() for _ in range(20))
policy = {"default": sys.argv[1], "budget": {"in_flight_bytes": "4MiB"}}
grown, peaks = [], []
with tba.attach(model, policy, directories=sys.argv[2]) as session:
    for tokens in (1500, 6000, 6000):  # the first one loads libraries, and fills buffers of I/O
        Path("/proc/self/clear_refs").write_text("5")
        before, x = resident("VmRSS"), torch.randn(tokens, 128)
        with session.step():
            for layer in model.layers:
                x = layer(x)
            x.square().mean().backward()
        model.zero_grad()
        grown.append(resident("VmHWM") - before)
    peaks = [record.activation_peak_bytes for record in session.records]
print(json.dumps([grown[1:], peaks[1:]]))
"""


@pytest.mark.parametrize("placement", ["recompute", "offload"])
def test_the_process_grows_by_no_more_than_a_quarter_beyond_the_live_peak(
    placement: str, tmp_path: Path, python_with_torch: Warm
) -> None:
    done = python_with_torch.run("-c", LOOP, placement, str(tmp_path), timeout=250)
    assert done.returncode == 0, done.stderr
    grown, peaks = json.loads(done.stdout.splitlines()[-1])
    assert max(grown) < 1.25 * max(peaks), (grown, peaks)
    assert min(grown[1:]) > 0.8 * min(peaks[1:]), (grown, peaks)
