"""What lossless compression of activations would gain: by data type and codec, and on which machine.

    pip install lz4 zstandard
    python benchmarks/compression.py                              a GPT-2 that trains on source code
    python benchmarks/compression.py --steps 1000 --width 512

The tensors that a step of a trained model saves are compressed by each codec, as their bytes lie and by byte
planes: all first bytes, then all second ones, so that signs and exponents lie together. Each row has the
share that remains, and the processor time of both directions for each GiB of activations. Compression gains
where a drive moves fewer bytes a second than free cores compress: below ``gains below`` for each such core,
and then at most by ``at most``, where cores are many. On every machine it costs that processor time.
"""

from __future__ import annotations

import copy
import statistics
import sysconfig
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel

from tba_lab.demo.dtype import DTYPES, instruction_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

GIB = 1 << 30
LEAST = 64 << 10
"""Bytes; smaller tensors stay in memory."""

CHUNK = 1 << 20
"""Bytes that are compressed at once: they fit the cache of a core."""

SEQUENCE, BATCH = 256, 4


class Codec(NamedTuple):
    """Compresses bytes and gives them back."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


class Row(NamedTuple):
    """What a codec does with activations.

    Attributes:
        codec: Its name.
        planes: Whether bytes were sorted by their place in a number.
        remains: Compressed bytes by those before.
        seconds: Processor time of both directions for each GiB before.
    """

    codec: str
    planes: bool
    remains: float
    seconds: float

    @property
    def gains_below(self) -> float:
        """Bytes a second of a drive in each direction, for each free core, below which it gains."""
        return 2 * GIB / self.seconds

    @property
    def at_most(self) -> float:
        """By how much more bytes the drive seems to move."""
        return 1 / self.remains


def codecs() -> dict[str, Codec]:
    """Return the codecs by name, fastest first."""
    lz4, zstandard = import_module("lz4.frame"), import_module("zstandard")
    found = {"lz4": Codec(lz4.compress, lz4.decompress)}
    for level in (1, 3):
        compressor, decompressor = zstandard.ZstdCompressor(level), zstandard.ZstdDecompressor()
        found[f"zstd {level}"] = Codec(compressor.compress, decompressor.decompress)
    return found


def text() -> Tensor:
    """Return the source of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(
        bytearray().join(path.read_bytes() for path in sorted(folder.glob("*.py"))), dtype=torch.uint8
    )


def batches(tokens: Tensor, count: int) -> Iterator[Tensor]:
    """Sequences from everywhere in a text."""
    source = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH, 1), generator=source)
        yield tokens[starts + torch.arange(SEQUENCE)].long()


def trained(width: int, layers: int, steps: int) -> nn.Module:
    """Return a GPT-2 that has seen some text."""
    torch.manual_seed(0)
    config = GPT2Config(
        bos_token_id=None,
        eos_token_id=None,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        n_positions=SEQUENCE,
        vocab_size=256,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches(text(), steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return model


def saved_by(trained: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return what a step of a model saves in `dtype`, each storage once."""
    model = copy.deepcopy(trained).to(dtype)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if tensor.dtype is dtype and tensor.nbytes >= LEAST and place not in parameters:
            found.setdefault(place, tensor.detach())
        return tensor

    (tokens,) = batches(text(), 1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _loss = model(input_ids=tokens, labels=tokens).loss
    return [tensor.contiguous().flatten() for tensor in found.values()]


def chunks(tensors: Sequence[Tensor], *, planes: bool) -> Iterator[bytes]:
    """Yield the bytes of tensors in pieces of :data:`CHUNK`, each sorted into planes if that is wanted."""
    for tensor in tensors:
        for part in tensor.view(torch.uint8).split(CHUNK):
            sorted_by_place = part.view(-1, tensor.element_size()).T.contiguous() if planes else part
            yield sorted_by_place.numpy().tobytes()


def measure(name: str, codec: Codec, tensors: Sequence[Tensor], *, planes: bool, rounds: int) -> Row:
    """Compresses everything, gives it back and compares it.

    Raises:
        AssertionError: Other bytes came back.
    """
    before = list(chunks(tensors, planes=planes))
    seconds, compressed = [], 0
    for _ in range(rounds):
        began = time.thread_time()
        packed = [codec.compress(chunk) for chunk in before]
        after = [codec.decompress(chunk) for chunk in packed]
        seconds.append(time.thread_time() - began)
        compressed = sum(map(len, packed))
        if after != before:
            raise AssertionError(f"{name} gave other bytes back")
    nbytes = sum(map(len, before))
    return Row(name, planes, compressed / nbytes, statistics.median(seconds) / nbytes * GIB)


def table_of(rows: Sequence[Row], title: str) -> Table:
    """All rows of one data type."""
    table = Table(title=title)
    for head in ("codec", "bytes", "remains", "CPU s/GiB, both", "gains below, GB/s a core", "at most"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.codec,
            "by planes" if row.planes else "as they lie",
            f"{row.remains:.3f}",
            f"{row.seconds:.2f}",
            f"{row.gains_below / 1e9:.2f}",
            f"{row.at_most:.2f} x",
        )
    return table


@click.command()
@click.option("--width", default=256, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--steps", default=200, show_default=True, help="Of training before.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--dtype", "dtypes", type=click.Choice(tuple(DTYPES)), multiple=True, default=("fp32", "bf16"))
def main(*, width: int, layers: int, steps: int, rounds: int, dtypes: tuple[str, ...]) -> None:
    """Measure what lossless compression of activations would gain."""
    console, model = Console(width=110), trained(width, layers, steps)
    for dtype in dtypes:
        tensors = saved_by(model, DTYPES[dtype])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        rows = [
            measure(name, codec, tensors, planes=planes, rounds=rounds)
            for planes in (False, True)
            for name, codec in codecs().items()
        ]
        title = f"{dtype}, {len(tensors)} activations, {nbytes / 2**20:.1f} MiB; {instruction_set()}"
        console.print(table_of(rows, title))


if __name__ == "__main__":
    main()
