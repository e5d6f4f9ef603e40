"""What the GPU benchmark races: one GPT, and the ways in which its activations are kept.

All ways share the model, its gradients and its allocator, since several models of realistic width do not fit
one GPU. What a way puts into the layers' ``forward`` is there only while it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt_runner import HEAD_WIDTH, checkpointed, decoder_of
from torch import Tensor, distributed, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

import tba_offload as tba
from tba_lab.demo.dtype import DTYPES
from tba_lab.gpt import GptShape, build_gpt, causal_mask, model_flops, random_batch
from tba_offload.config.policy import Placement
from tba_offload.device import ByteRange, device_of
from tba_offload.device.checksum import sums
from tba_offload.device.memory import meter_of
from tba_offload.errors import UnsupportedError
from tba_offload.layers.stack import explicit_layers
from tba_offload.megatron.layers import find_stack
from tba_offload.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import saved_tensors_hooks

VOCABULARY = 1024
"""Small, so that the logits, which are not offloaded, weigh little."""

SAVED_NUMBERS = 16
"""Activations of a layer, by the element of its hidden states: the inputs of two norms, of four matrix
products and of GELU, queries, keys, values."""

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """What is trained: as ``4096x8x2048x1`` on the command line, in a dtype."""

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
        """What one layer saves."""
        return SAVED_NUMBERS * DTYPES[self.dtype].itemsize * self.hidden * self.sequence * self.batch

    @property
    def shape(self) -> GptShape:
        """The model."""
        heads = max(self.hidden // HEAD_WIDTH, 1)
        return GptShape(
            self.layers, self.hidden, heads, self.sequence, vocab=VOCABULARY, dtype=self.dtype, dropout=0.0
        )


class Block(nn.Module):
    """A layer in plain PyTorch that saves what Megatron's does: pre-norm, biases, GELU."""

    def __init__(self, shape: GptShape, **where: Any) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, **where), nn.LayerNorm(hidden, **where)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, **where), nn.Linear(hidden, hidden, **where)
        self.up, self.down = (
            nn.Linear(hidden, shape.ffn_width, **where),
            nn.Linear(shape.ffn_width, hidden, **where),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class PlainGpt(nn.Module):
    """Embedding, blocks, head."""

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
    """The model, its gradients, and a batch of random tokens for each round.

    Args:
        kind: "megatron" or "torch".
        size: Of what size.
        device: Where it lies; megatron-core has its own mind, see :func:`tba_lab.gpt.build_gpt`.
    """

    def __init__(self, kind: str, size: Size, device: torch.device) -> None:
        self.kind, self.size, self.device = kind, size, device_of(device)
        shape = size.shape
        if kind == "megatron":
            self.model: nn.Module = build_gpt(shape, seed=1)
            self.layers: Sequence[nn.Module] = list(decoder_of(self.model).layers)
            for module in self.model.modules():
                if type(module).__name__ == "DotProductAttention":
                    module.forward = _attend
        else:
            torch.manual_seed(1)
            model = PlainGpt(shape, dtype=DTYPES[size.dtype], device=device)
            self.model, self.layers = model, list(model.layers)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.meter = meter_of(self.device)
        self.tokens = size.batch * size.sequence
        self.flops = model_flops(shape, size.batch)

    def attach(self, config: tba.OffloadConfig) -> tba.Session:
        """Return a session on the layers; Megatron's are found, which brings Megatron's own recomputation.

        Its steps are opened by hand: by itself the session of each way would open one in the forward of all.
        """
        chunks = [self.model]
        stack = find_stack(chunks) if self.kind == "megatron" else explicit_layers(chunks, self.layers)
        return Session(stack, chunks, config, steps_by_hand=True)

    def batch_of(self, number: int) -> Any:
        """Return the batch of a round, on the device."""
        batch = random_batch(self.size.shape, batch_size=self.size.batch, seed=number)
        batch["attention_mask"] = causal_mask(1)  # attention knows that it is causal
        where = self.device.torch_device
        return {name: tensor.to(where) for name, tensor in batch.items()}

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of the model on a batch."""
        if self.kind == "megatron":
            # Its own loss is a collective operation, for which a group of one has no fast backend.
            logits = self.model(batch["tokens"], batch["position_ids"], batch["attention_mask"])
        else:
            logits = self.model(batch["tokens"])
        return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    def fingerprint(self, loss: Tensor) -> str:
        """Return a word that tells any other bit in the loss or in a gradient."""
        digest = hashlib.blake2b(repr(float(loss.detach()).hex()).encode(), digest_size=16)
        for parameter in self.model.parameters():
            digest.update(sums(ByteRange.of(parameter.grad.contiguous()).tensor()))
        return digest.hexdigest()

    def clear_gradients(self) -> None:
        """Set them to zero; their memory stays, so that it counts as no activation."""
        torch._foreach_zero_([parameter.grad for parameter in self.model.parameters()])

    def learn(self) -> None:
        """Record that a small step of plain gradient descent, so that no round is like the one before."""
        with torch.no_grad():
            parameters = list(self.model.parameters())
            torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-1e-3)

    def give_up_memory(self) -> None:
        """Lets go of what is in the allocator's cache and in cycles."""
        gc.collect()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Frees model and gradients."""
        self.meter.close()
        self.layers = []
        del self.model
        self.give_up_memory()


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    """In place of Megatron's own attention, which keeps all scores: (sequence, batch, heads, width) each."""
    parts = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
    return mixed.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that give the same bits every time; they are not always the fastest."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


class Way:
    """One way of keeping activations.

    Args:
        subject: What is trained.
        tier: Where bytes go, by its name; ``None`` if none travel.
        config: Of tba-offload; ``None`` if it takes no part.
        wrap: Makes a layer's forward anew, as checkpoints do.
        hooks: Makes the saved-tensor hooks around a forward pass.
        counts: Which saved tensors the hooks move.
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
        """While the block runs, the layers' forward is this way's."""
        for layer, forward in zip(self._subject.layers, self._forwards, strict=True):
            if forward is not None:
                layer.forward = forward
        try:
            yield
        finally:
            for layer in self._subject.layers:
                vars(layer).pop("forward", None)

    def step(self, batch: Any, *, measure: bool) -> tuple[Figures, Tensor]:
        """Forward and backward: seconds by the device's clock, bytes, peak if it is measured; the loss."""
        device, meter = self._subject.device, self._subject.meter
        figures: Figures = {}
        device.seconds([device.mark()])
        with self.installed():
            if measure:
                meter.reset()
                base = meter.live()
            began = time.perf_counter()
            marks = [device.mark()]
            session_step = self.session.step(measure_memory=measure) if self.session else None
            with session_step or contextlib.nullcontext():
                with self._watched(figures) if self._hooks else contextlib.nullcontext():
                    loss = self._subject.loss(batch)
                marks.append(device.mark())
                loss.backward()
            marks.append(device.mark())
            start, turn, end = device.seconds(marks)
            figures["host_seconds"] = time.perf_counter() - began
            if measure:
                peak, reserved = meter.peak(), meter.reserved()
                if self.session is not None:  # it measures by the same statistics, and plans with them
                    record = self.session.report()[-1]
                    peak, reserved = record.device_peak_bytes or peak, record.reserved_peak_bytes
                figures["peak"] = max(peak - base, 0)
                figures["reserved"] = reserved
        figures |= {"seconds": end - start, "forward": turn - start, "backward": end - turn}
        if self.session is not None:
            figures |= self._record()
        return figures, loss

    @contextlib.contextmanager
    def _watched(self, figures: Figures) -> Iterator[None]:
        """Return the hooks of another library, counted.

        What they move in one direction they move in the other.
        """
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

    def _record(self) -> Figures:
        assert self.session is not None
        self.session.offloader.quiesce()  # what is still under way must not disturb the next
        record = self.session.report()[-1]
        return {
            "stall": record.stall_seconds,
            "written": record.offloaded_bytes,
            "read": record.read_bytes,
            "forwarded": record.forwarded_bytes,
            "kept": record.kept_bytes + record.fallback_kept_bytes,
            "recomputed": record.recomputed_scopes,
            "predicted_seconds": record.predicted_seconds,
            "predicted_peak": record.predicted_peak_bytes,
        }

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            with self.installed():
                self.session.close()


@dataclasses.dataclass(frozen=True)
class Places:
    """Where ours writes, and how much may be in flight.

    Attributes:
        drive: A directory on a drive.
        tmpfs: A directory in memory, in place of an array of drives that is as fast.
        window: Bytes in flight.
        budget: Activation peak of ``auto``, bytes; ``None`` for none.
    """

    drive: Path
    tmpfs: Path
    window: int
    budget: int | None = None


def make_way(name: str, subject: Subject, places: Places) -> Way:
    """One of :data:`WAYS`.

    Raises:
        ImportError: What it needs is not installed.
        UnsupportedError: It cannot be had here.
    """
    return WAYS[name](subject, places)


def _keep(subject: Subject, _: Places) -> Way:
    return Way(subject)


def _recompute(subject: Subject, _: Places) -> Way:
    return Way(subject, wrap=checkpointed)


def _save_on_cpu(subject: Subject, _: Places) -> Way:
    pins = subject.device.pins_memory
    return Way(
        subject,
        tier="host",
        hooks=lambda: save_on_cpu(pin_memory=pins),
        counts=lambda tensor: not tensor.is_cpu,
    )


def _torchtune(subject: Subject, _: Places) -> Way:
    """Torchtune's own, or as TRL carries it on."""
    try:
        from torchtune.training import OffloadActivations
    except ImportError:
        from trl.models.activation_offloading import OffloadActivations
    _needs_a_gpu(subject)
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


def _deepspeed(subject: Subject, _: Places) -> Way:
    """Recomputes layers from inputs that lie in host memory."""
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    _needs_a_gpu(subject)
    if not distributed.is_initialized():  # it asks for its rank
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    checkpointing.configure(None, checkpoint_in_cpu=True)

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            count = len(arguments)

            def call(*values: Any) -> Any:
                return forward(*values[:count], **dict(zip(named, values[count:], strict=True)))

            return checkpointing.checkpoint(call, *arguments, *named.values())

        return run

    return Way(subject, tier="host", wrap=wrapped)


def _needs_a_gpu(subject: Subject) -> None:
    if subject.device.torch_device.type != "cuda":
        raise UnsupportedError("it needs a GPU")


def _ours(kind: str, tier: str, placement: Placement) -> Callable[[Subject, Places], Way]:
    def make(subject: Subject, places: Places) -> Way:
        directories = () if kind == "host" else (getattr(places, tier),)
        is_auto = placement is Placement.AUTO
        config = tba.OffloadConfig(
            default=placement,
            budget=tba.BudgetConfig(
                in_flight_bytes=None if is_auto and places.budget else places.window,
                activation_bytes=places.budget if is_auto else None,
            ),
            store=tba.StoreConfig(kind=kind, directories=directories),
        )
        return Way(subject, tier=tier, config=config)

    return make


WAYS: dict[str, Callable[[Subject, Places], Way]] = {
    "keep": _keep,
    "recompute": _recompute,
    "save_on_cpu": _save_on_cpu,
    "torchtune": _torchtune,
    "deepspeed": _deepspeed,
    "host": _ours("host", "host", Placement.OFFLOAD),
    "drive": _ours("auto", "drive", Placement.OFFLOAD),
    "gds": _ours("gds", "drive", Placement.OFFLOAD),
    "tmpfs": _ours("file", "tmpfs", Placement.OFFLOAD),
    "auto, host": _ours("host", "host", Placement.AUTO),
    "auto, drive": _ours("auto", "drive", Placement.AUTO),
    "auto, tmpfs": _ours("file", "tmpfs", Placement.AUTO),
}
"""Name → what makes it; from "host" on they are ours, and the name says where bytes go."""

OURS = tuple(WAYS)[list(WAYS).index("host") :]


@contextlib.contextmanager
def directory_in(parent: str) -> Iterator[Path]:
    """Return a new directory, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tba-bench-", dir=parent) as name:
        yield Path(name)
