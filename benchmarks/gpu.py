"""Compare the step times and peaks of methods that save activation memory on a GPU.

    python benchmarks/gpu.py                                  all sizes; half an hour
    python benchmarks/gpu.py --quick                          one size, within four minutes on an H100
    python benchmarks/gpu.py --size 8192x4x4096x1             hidden x layers x sequence x batch
    python benchmarks/gpu.py --device cpu --size 128x4x64x2   a test of this program on a CPU

The model is a GPT in plain PyTorch that saves the same tensors as Megatron's GPT. A *way* is one of the
compared methods. All ways share one model in one process, because several models do not fit on one GPU. The
ways alternate step by step. In a round, all ways have the same weights and batch, and start with gradients of
zero. The weights change between rounds.

A step is forward and backward, timed by events of the device. Each ratio to keep is the median of the ratios
of all rounds, with quartiles. The ratio of ``keep again`` is noise. The peak is the peak of the device's
allocator in the step, minus the live bytes before the step. The last rounds use deterministic kernels, and
compare the loss and all gradients bit for bit.

A *tier* is host memory, the drive or tmpfs. The bandwidth of each tier is measured first. The bound of a way
is the shortest possible time of a step: its forward takes at least as long as the forward of keep and as the
writes, and its backward takes at least as long as the backward of keep and as the reads. The needed bandwidth
is the number of bytes divided by the time of keep's forward or backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from lanes import CONTROL, checkpointed, dtype_option, show
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

import tba_offload as tba
from tba_lab.gpt import DTYPES, GptShape, choose_dtype
from tba_lab.race import Spread, measures_memory, paired_ratio, timed_rounds, turns
from tba_offload.config import parse_size
from tba_offload.device import ByteRange, device_of
from tba_offload.device.digest import sums
from tba_offload.device.host_memory import keep_freed_pages
from tba_offload.device.meters import meter_of
from tba_offload.errors import StoreError, UnsupportedError
from tba_offload.layers.find import explicit_layers
from tba_offload.session import Session
from tba_offload.store.doctor import Rates, measure
from tba_offload.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.autograd.graph import saved_tensors_hooks

Figures = dict[str, Any]

WARM_UP = 4
"""Number of first rounds that do not count, because memory is pinned and the planner measures."""

LEAST_ROUNDS = WARM_UP + 3
PROOF_ROUNDS = 2
WINDOW_LAYERS = 2
"""Default size of the in-flight window, in layers."""

HARMLESS = ("ImportError", "ModuleNotFoundError", "MissingDependencyError", "UnsupportedError")
"""Errors that leave out a way without making the benchmark fail."""

SIZES = ("4096x8x4096x2", "6144x6x4096x2", "8192x4x8192x1", "8192x4x1024x4", "8192x4x1024x8")
QUICK, QUICK_MINUTES = ("8192x4x4096x1",), 3.0
GB, GIB = 1e9, 2**30
VOCABULARY = 1024
"""Size of the vocabulary. The logits are not offloaded, so they must be small."""

SAVED_NUMBERS = 16
"""Saved elements of a layer, as a multiple of the elements of its hidden states: the inputs of two norms, of
four matrix products and of GELU, and queries, keys and values."""


# The model


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model, as ``4096x8x2048x1`` on the command line, and its dtype."""

    hidden: int
    layers: int
    sequence: int
    batch: int
    dtype: str = "bf16"

    @classmethod
    def parse(cls, text: str, dtype: str = "bf16") -> Size:
        """Return a size from hidden x layers x sequence x batch."""
        return cls(*map(int, text.split("x")), dtype=dtype)

    def __str__(self) -> str:
        return f"{self.hidden}x{self.layers}x{self.sequence}x{self.batch}"

    @property
    def layer_bytes(self) -> int:
        """Bytes that one layer saves."""
        return SAVED_NUMBERS * DTYPES[self.dtype].itemsize * self.hidden * self.sequence * self.batch

    @property
    def shape(self) -> GptShape:
        """Shape of the model."""
        heads = max(self.hidden // 128, 1)
        return GptShape(
            self.layers, self.hidden, heads, self.sequence, vocab=VOCABULARY, dtype=self.dtype, dropout=0.0
        )


class Block(nn.Module):
    """Layer in plain PyTorch that saves the same tensors as Megatron's layer: pre-norm, biases, GELU."""

    def __init__(self, shape: GptShape, **where: Any) -> None:
        super().__init__()
        hidden, inside = shape.hidden, shape.ffn_width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, **where), nn.LayerNorm(hidden, **where)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, **where), nn.Linear(hidden, hidden, **where)
        self.up, self.down = nn.Linear(hidden, inside, **where), nn.Linear(inside, hidden, **where)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class PlainGpt(nn.Module):
    """GPT with embeddings, blocks and a head."""

    def __init__(self, shape: GptShape, **where: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden, **where)
        self.positions = nn.Embedding(shape.sequence, shape.hidden, **where)
        self.layers = nn.ModuleList(Block(shape, **where) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, **where)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False, **where)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Subject:
    """The model, its gradients, and a batch of random tokens for each round."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device_of(device)
        torch.manual_seed(1)
        self.model = PlainGpt(size.shape, dtype=DTYPES[size.dtype], device=device)
        self.layers = list(self.model.layers)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.meter = meter_of(self.device)

    def attach(self, config: tba.OffloadConfig) -> tba.Session:
        """Return a session whose steps are opened by hand, because all ways share the model."""
        return Session(explicit_layers([self.model], self.layers), [self.model], config, steps_by_hand=True)

    def batch_of(self, number: int) -> Tensor:
        """Return the tokens of a round, with one token more than the sequence length."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.size.batch, self.size.sequence + 1)
        return torch.randint(0, VOCABULARY, shape, generator=generator).to(self.device.torch_device)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss of the model on a batch."""
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def fingerprint(self, loss: Tensor) -> str:
        """Return a digest of the loss and all gradients."""
        digest = hashlib.blake2b(float(loss.detach()).hex().encode(), digest_size=16)
        for parameter in self.model.parameters():
            digest.update(sums(ByteRange.of(parameter.grad.contiguous()).tensor()))
        return digest.hexdigest()

    def clear_gradients(self) -> None:
        """Set gradients to zero. Their memory stays allocated, so it does not count as activations."""
        torch._foreach_zero_([parameter.grad for parameter in self.model.parameters()])

    def learn(self) -> None:
        """Run a small step of gradient descent, so that each round has other weights."""
        with torch.no_grad():
            parameters = list(self.model.parameters())
            torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-1e-3)

    def give_up_memory(self) -> None:
        """Free reference cycles and the allocator's cache."""
        gc.collect()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the model and the gradients."""
        self.meter.close()
        self.layers = []
        del self.model
        self.give_up_memory()


# Ways


class Way:
    """One of the compared methods.

    Args:
        subject: The model to train.
        tier: Name of the tier to which bytes are offloaded; ``None`` without offloading.
        config: Configuration of tba-offload; ``None`` for other methods.
        wrap: Function that wraps a layer's forward, such as a checkpoint.
        hooks: Function that returns the saved-tensor hooks of a forward pass.
        counts: Function that returns True for saved tensors that the hooks offload.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        tier: str | None = None,
        config: tba.OffloadConfig | None = None,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        hooks: Callable[[], saved_tensors_hooks] | None = None,
        counts: Callable[[Tensor], bool] = lambda _: True,
    ) -> None:
        self.tier = tier
        self.session: tba.Session | None = None
        self._subject, self._hooks, self._counts = subject, hooks, counts
        if config is not None:
            self.session = subject.attach(config)
        elif wrap is not None:
            for layer in subject.layers:
                layer.forward = wrap(layer.forward)
        self._forwards = [vars(layer).pop("forward", None) for layer in subject.layers]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within the ``with`` block, use this way's forward in the layers."""
        for layer, forward in zip(self._subject.layers, self._forwards, strict=True):
            if forward is not None:
                layer.forward = forward
        try:
            yield
        finally:
            for layer in self._subject.layers:
                vars(layer).pop("forward", None)

    def step(self, batch: Tensor, *, measure: bool) -> tuple[Figures, Tensor]:
        """Run forward and backward. Return times of the device's clock, bytes and the peak, and the loss."""
        device, meter = self._subject.device, self._subject.meter
        figures: Figures = {}
        device.seconds([device.mark()])
        with self.installed():
            if measure:
                meter.reset()
                base = meter.live()
            marks = [device.mark()]
            with self.session.step(measure_memory=measure) if self.session else contextlib.nullcontext():
                with self._watched(figures) if self._hooks else contextlib.nullcontext():
                    loss = self._subject.loss(batch)
                marks.append(device.mark())
                loss.backward()
            marks.append(device.mark())
            start, turn, end = device.seconds(marks)
            if measure:
                peak, reserved = meter.peak(), meter.reserved
                if self.session is not None:  # it measures by the same statistics, and plans with them
                    record = self.session.records[-1]
                    peak, reserved = record.device_peak_bytes or peak, record.reserved_peak_bytes
                figures |= {"peak": max(peak - base, 0), "reserved": reserved}
        figures |= {"seconds": end - start, "forward": turn - start, "backward": end - turn}
        if self.session is not None:
            self.session.offloader.make_room(sys.maxsize)  # what is still under way must not disturb the next
            record = self.session.records[-1]
            figures |= {
                "stall": record.stall_seconds,
                "written": record.offloaded_bytes,
                "read": record.read_bytes,
                "recomputed": record.recomputed_scopes,
                "predicted_seconds": record.predicted_seconds,
                "predicted_peak": record.predicted_peak_bytes,
            }
        return figures, loss

    @contextlib.contextmanager
    def _watched(self, figures: Figures) -> Iterator[None]:
        """Count the bytes that hooks of another library offload. The same bytes are read back."""
        assert self._hooks is not None
        hooks = self._hooks()
        pack, moved = hooks.pack_hook, 0

        def counting(tensor: Tensor) -> Any:
            nonlocal moved
            moved += tensor.nbytes if self._counts(tensor) else 0
            return pack(tensor)

        hooks.pack_hook = counting
        try:
            with hooks:
                yield
        finally:
            hooks.pack_hook = pack
        figures |= {"written": moved, "read": moved}

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            with self.installed():
                self.session.close()


@dataclasses.dataclass(frozen=True)
class Places:
    """Directories, the size of the in-flight window, and the budget of ``auto`` in bytes, if any."""

    drive: str
    tmpfs: str
    window: int
    budget: int | None = None


def keep(subject: Subject, _: Places) -> Way:
    """Keep all activations."""
    return Way(subject)


def recompute(subject: Subject, _: Places) -> Way:
    """Recompute with ``torch.utils.checkpoint``."""
    return Way(subject, wrap=checkpointed)


def on_cpu(subject: Subject, _: Places) -> Way:
    """Offload with PyTorch's ``save_on_cpu``."""
    pins = subject.device.pins_memory
    return Way(
        subject,
        tier="host",
        hooks=lambda: save_on_cpu(pin_memory=pins),
        counts=lambda tensor: not tensor.is_cpu,
    )


def torchtune(subject: Subject, _: Places) -> Way:
    """Offload with torchtune's hooks, or with the copy of these hooks in TRL."""
    try:
        from torchtune.training import OffloadActivations
    except ImportError:
        from trl.models.activation_offloading import OffloadActivations
    if subject.device.torch_device.type != "cuda":
        raise UnsupportedError("torchtune's hooks need a GPU")
    least = 1024
    hooks = OffloadActivations(use_pin_memory=True, use_streams=True, min_offload_size=least)
    parameters: set[int] = set()
    if hasattr(hooks, "update_model_params"):  # TRL's leaves views of parameters where they are, too
        hooks.update_model_params(subject.model)
        parameters = {each.untyped_storage().data_ptr() for each in subject.model.parameters()}

    def counts(tensor: Tensor) -> bool:
        is_parameter = tensor.untyped_storage().data_ptr() in parameters
        return tensor.nbytes >= least and not is_parameter and not isinstance(tensor, nn.Parameter)

    return Way(subject, tier="host", hooks=lambda: hooks, counts=counts)


def ours(kind: str, tier: str, placement: str) -> Callable[[Subject, Places], Way]:
    """Return a function that makes a way with tba-offload."""

    def make(subject: Subject, places: Places) -> Way:
        is_auto = placement == "auto"
        config = tba.OffloadConfig(
            default=tba.Placement(placement),
            budget=tba.BudgetConfig(
                in_flight_bytes=0 if is_auto and places.budget else places.window,
                activation_bytes=places.budget if is_auto else None,
            ),
            store=tba.StoreConfig(
                kind=kind, directories=() if kind == "host" else (Path(getattr(places, tier)),)
            ),
        )
        return Way(subject, tier=tier, config=config)

    return make


OURS: dict[str, Callable[[Subject, Places], Way]] = {
    "host": ours("host", "host", "offload"),
    "drive": ours("auto", "drive", "offload"),
    "gds": ours("gds", "drive", "offload"),
    "tmpfs": ours("file", "tmpfs", "offload"),
    "auto, host": ours("host", "host", "auto"),
    "auto, drive": ours("auto", "drive", "auto"),
    "auto, tmpfs": ours("file", "tmpfs", "auto"),
}
"""For each way with tba-offload, the function that makes the way. The name is the tier."""

WAYS = {"keep": keep, CONTROL: keep, "recompute": recompute, "save_on_cpu": on_cpu, "torchtune": torchtune}
WAYS |= OURS


class Contest:
    """Comparison of all ways at one size."""

    def __init__(self, subject: Subject, *, rounds: int, minutes: float | None) -> None:
        self.subject, self._limit, self._minutes = subject, rounds, minutes
        self.ways: dict[str, Way] = {}
        self.steps: dict[str, list[Figures]] = {}
        self.proofs: dict[str, list[str]] = {}
        self.left_out: dict[str, str] = {}

    def enter(self, names: Sequence[str], places: Places, share: float, tiers: Mapping[str, Figures]) -> None:
        """Make the ways, with keep first, because the budget of auto is a share of keep's peak."""
        for name in names:
            with self._failures_of(name):
                self.ways[name] = way = WAYS[name](self.subject, places)
                self.steps[name] = []
                if (trouble := tiers.get(way.tier or "", {}).get("error")) is not None:
                    raise UnsupportedError(f"the tier {way.tier} cannot be used: {trouble}")
                if name == "keep":
                    peaks = [self._step("keep", 0, measure=True)["peak"] for _ in range(2)]
                    places = dataclasses.replace(places, budget=int(share * peaks[-1]) or None)

    def run(self) -> None:
        """Run rounds until the number of rounds or of minutes is reached. Then compare bits."""
        began, is_cpu = time.perf_counter(), self.subject.device.torch_device.type == "cpu"
        for number in range(self._limit):
            for name in turns(list(self.ways), number):
                with self._failures_of(name):
                    measured = not is_cpu or measures_memory(number)
                    self.steps[name].append(self._step(name, number, measure=measured))
            self.subject.learn()
            told = (f"{name} {self.steps[name][-1]['seconds']:.3f}" for name in self.ways)
            click.echo(f"  round {number}: {', '.join(told)}", err=True)
            over = self._minutes is not None and time.perf_counter() - began > 60 * self._minutes
            if over and number + 1 >= LEAST_ROUNDS:
                break
        torch.use_deterministic_algorithms(mode=True)
        for number in range(PROOF_ROUNDS):
            for name in turns(list(self.ways), number):
                with self._failures_of(name):
                    self.subject.clear_gradients()
                    _, loss = self.ways[name].step(self.subject.batch_of(-1 - number), measure=False)
                    self.proofs.setdefault(name, []).append(self.subject.fingerprint(loss))
            self.subject.learn()
        torch.use_deterministic_algorithms(mode=False)

    def close(self) -> None:
        """End all sessions."""
        for way in self.ways.values():
            way.close()
        self.ways.clear()

    def _step(self, name: str, number: int, *, measure: bool) -> Figures:
        self.subject.clear_gradients()
        return self.ways[name].step(self.subject.batch_of(number), measure=measure)[0]

    @contextlib.contextmanager
    def _failures_of(self, name: str) -> Iterator[None]:
        """If a way fails, print the error and leave the way out. The other ways continue."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other ways continue after any error
            self.left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            click.echo(f"  {name} is left out: {self.left_out[name]}", err=True)
            if not self.left_out[name].startswith(HARMLESS):
                traceback.print_exc(limit=-3)
            way = self.ways.pop(name, None)
            self.steps.pop(name, None)
            if way is not None:
                with contextlib.suppress(Exception):  # the first error was printed
                    way.close()
            self.subject.give_up_memory()


# Figures


def tiers_of(places: Places, size: Size, subject: Subject) -> dict[str, Figures]:
    """Return the measured rates of each tier, with extents of the size of the activations."""
    extent = max(min(size.layer_bytes // SAVED_NUMBERS, 64 << 20), 4096)
    found: dict[str, Figures] = {}
    for name, kind in (("host", "host"), ("drive", "auto"), ("tmpfs", "file")):
        directories = () if kind == "host" else (Path(getattr(places, name)),)
        try:
            with open_store(kind=kind, directories=directories, device=subject.device) as store:
                rates = measure(store, subject.device, extent_bytes=extent, extents=4)
                found[name] = {**rates._asdict(), "extent_bytes": extent, "store": store.description}
        except StoreError as error:
            found[name] = {"error": str(error)}
    return found


MEDIANS = (
    "forward",
    "backward",
    "stall",
    "written",
    "read",
    "recomputed",
    "predicted_seconds",
    "predicted_peak",
)


def row_of(contest: Contest, name: str, tiers: Mapping[str, Figures]) -> Figures:
    """Return the figures of a way: ratios to keep, the needed bandwidth, and the bound of its tier."""
    kept, steps = contest.steps["keep"][WARM_UP:], contest.steps[name][WARM_UP:]
    is_cpu = contest.subject.device.torch_device.type == "cpu"  # where sampling takes time
    rounds = timed_rounds(kept, steps, measured=lambda step: is_cpu and "peak" in step)
    base, counted = ([step[lane] for step in rounds] for lane in range(2))
    tier = contest.ways[name].tier
    row: Figures = {
        "name": name,
        "tier": tier,
        "seconds": dataclasses.asdict(Spread.of([step["seconds"] for step in counted])),
        "over_keep": dataclasses.asdict(
            paired_ratio([step["seconds"] for step in counted], [step["seconds"] for step in base])
        ),
        "peak_bytes": max((step["peak"] for step in steps if "peak" in step), default=None),
        "reserved_bytes": max((step["reserved"] for step in steps if step.get("reserved")), default=None),
        "peak_over_keep": None,
        "same_bits": contest.proofs[name] == contest.proofs.get("keep"),
        **{key: median(counted, key) for key in MEDIANS},
    }
    keeps = max((step["peak"] for step in kept if "peak" in step), default=0)
    if keeps and row["peak_bytes"] is not None:
        row["peak_over_keep"] = row["peak_bytes"] / keeps
    if tier is None or row["written"] is None:
        return row
    forward, backward = median(base, "forward"), median(base, "backward")
    # Bytes that are not written are in the in-flight window until backward uses the bytes.
    bound = max(forward, row["written"] / tiers[tier]["write"])
    bound += max(backward, row["read"] / tiers[tier]["read"])
    return row | {
        "needs_write": row["written"] / forward,
        "needs_read": row["read"] / backward,
        "bound_seconds": bound,
        "over_bound": row["seconds"]["median"] / bound,
    }


def median(steps: Sequence[Figures], name: str) -> Any:
    """Return the median of a figure; ``None`` if the figure is unknown."""
    known = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(known) if known else None


def show_rows(document: Figures) -> None:
    """Print the rows of one size."""
    heads = ("way", "step s", "x keep (quartiles)", "peak GiB", "x keep", "reserved GiB", "written GiB")
    heads += (
        "stall s",
        "needs GB/s: write, read",
        "tier GB/s: write, read, both",
        "bound s",
        "x bound",
        "bits",
    )
    rows = []
    for row in document["rows"]:
        tier = document["tiers"].get(row["tier"] or "", {})
        rows.append(
            (
                row["name"],
                number(row["seconds"]["median"], 4),
                str(Spread(**row["over_keep"])),
                number(row["peak_bytes"], unit=GIB),
                number(row["peak_over_keep"]),
                number(row["reserved_bytes"], unit=GIB),
                number(row["written"], unit=GIB),
                number(row["stall"], 4),
                ", ".join(number(row.get(f"needs_{each}"), 1, GB) for each in ("write", "read")).strip(", "),
                ", ".join(number(tier.get(each), 1, GB) for each in Rates._fields).strip(", "),
                number(row.get("bound_seconds"), 4),
                number(row.get("over_bound")),
                "same" if row["same_bits"] else "differ",
            )
        )
    show(heads, rows, f"{document['size']}, {document['dtype']}; {document['rounds']} rounds")
    for name, why in document["left_out"].items():
        click.echo(f"left out: {name}, because {why}")


def number(value: float | None, digits: int = 3, unit: float = 1.0) -> str:
    """Return a number as text; an empty string for ``None``."""
    return "" if value is None else f"{value / unit:.{digits}f}"


def machine_of(device: torch.device) -> Figures:
    """Return a description of the machine, with versions of packages."""
    found: Figures = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    found |= {"instruction_set": torch.backends.cpu.get_cpu_capability(), "cuda": str(torch.version.cuda)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_bytes": properties.total_memory}
    for name in ("torch", "tba-offload", "kvikio-cu13", "kvikio-cu12", "torchtune", "trl"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    help=f"Hidden size x layers x sequence length x batch size.  [default: {SIZES}]",
)
@dtype_option
@click.option("--way", "ways", type=click.Choice(tuple(WAYS)), multiple=True, help="A way.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=LEAST_ROUNDS), default=16, show_default=True)
@click.option("--minutes", type=float, help="Minutes after which no further round of a size starts.")
@click.option("--budget", default=0.5, show_default=True, help="Budget of auto / peak of keep; 0: no budget.")
@click.option("--window", help="Size of the in-flight window.  [default: the bytes of two layers]")
@click.option("--drive", default=".", show_default=True, help="Directory on the drive.")
@click.option("--tmpfs", default="/dev/shm", show_default=True, help="Directory in memory.")  # noqa: S108
@click.option("--output", default="benchmarks/results", show_default=True, help="Directory for results.")
@click.option("--quick", is_flag=True, help=f"Size {QUICK[0]}, at most {QUICK_MINUTES:g} minutes of rounds.")
def main(
    *,
    device: str,
    sizes: tuple[str, ...],
    dtype: str,
    ways: tuple[str, ...],
    output: str,
    quick: bool,
    **how: Any,
) -> None:
    """Compare all ways at all sizes."""
    where, started = torch.device(device), datetime.now(UTC)
    if where.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the rounds that compare bits
    else:
        keep_freed_pages()
    dtype, why = choose_dtype(dtype, where)
    click.echo(why, err=True)
    names = ("keep", *(way for way in ways or WAYS if way != "keep"))
    folder = Path(output) / f"gpu-{started:%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    machine = machine_of(where)
    document: Figures = {"started": started.isoformat(timespec="seconds"), "machine": machine, "sizes": []}
    document["command"] = sys.argv[1:]
    broken = []
    with contextlib.ExitStack() as stack:
        on = [
            stack.enter_context(tempfile.TemporaryDirectory(dir=each))
            for each in (how["drive"], how["tmpfs"])
        ]
        for size in (Size.parse(text, dtype) for text in sizes or (QUICK if quick else SIZES)):
            window = WINDOW_LAYERS * size.layer_bytes
            places = Places(*on, parse_size(how["window"]) if how["window"] else window)
            subject = Subject(size, where)
            click.echo(f"{size}: measuring the rates of the tiers", err=True)
            tiers = tiers_of(places, size, subject)
            minutes = how["minutes"] or (QUICK_MINUTES if quick else None)
            contest = Contest(subject, rounds=how["rounds"], minutes=minutes)
            try:
                contest.enter(names, places, how["budget"], tiers)
                contest.run()
                found = {
                    "size": str(size),
                    "dtype": dtype,
                    "rounds": max(map(len, contest.steps.values())),
                    "tiers": tiers,
                    "rows": [row_of(contest, name, tiers) for name in contest.ways],
                    "left_out": contest.left_out,
                    "steps": contest.steps,
                }
            finally:
                contest.close()
                subject.close()
            document["sizes"].append(found)
            # Write after each size, so that an error at the next size loses no results.
            (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
            show_rows(found)
            broken += [row["name"] for row in found["rows"] if row["name"] in OURS and not row["same_bits"]]
            failed = {name: why for name, why in contest.left_out.items() if not why.startswith(HARMLESS)}
            broken += [name for name in failed if name in OURS]
    click.echo(f"written to {folder}")
    if broken:
        raise click.ClickException(f"these ways failed or gave other bits: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
