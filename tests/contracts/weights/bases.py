"""Small models of transformers with adapters on frozen bases of many kinds, and programs that train them."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import logging
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from later import Later
from models import assert_same_tensors
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.report.log import StepRecord

transformers, peft = Later("transformers"), Later("peft")

LAYERS, VOCABULARY = 4, 64
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = 8
PICKED = {"num_experts_per_tok": 2}
QWEN2_MOE = {"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": PICKED | {"num_local_experts": EXPERTS},
    "Qwen2Moe": PICKED | QWEN2_MOE,
}
"""Sizes that a family has of its own."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

WIDE = {"hidden_size": 384, "intermediate_size": 768}
"""Frozen weights so large that activations are small beside them."""


def bitsandbytes(**settings: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    # Its kernels for one row want a multiple of 32 outputs.
    left_out = {"llm_int8_skip_modules": ["lm_head", "shared_expert_gate"]}
    return transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **left_out, **settings)


def torchao(name: str, **settings: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quant_type=getattr(quantization, name)(**settings))


BASES: dict[str, Callable[[], Any]] = {
    "fp32": lambda: torch.float32,
    "bf16": lambda: torch.bfloat16,
    "nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, double": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda: bitsandbytes(load_in_8bit=True),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4": lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
}
"""The data type of a base, or how it is quantized when it is loaded."""


@functools.cache
def saved(family: str, **sizes: Any) -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **sizes})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder.name)
    return Path(folder.name)


@contextmanager
def quiet() -> Iterator[None]:
    """Progress bars and remarks of the packages about kernels that a CPU lacks do not matter here."""
    transformers.logging.disable_progress_bar()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


def make(family: str, base: str = "fp32", **sizes: Any) -> Any:
    with quiet():
        chosen = BASES[base]()
        how = {"dtype": chosen} if isinstance(chosen, torch.dtype) else {"quantization_config": chosen}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            saved(family, **sizes), **{"dtype": torch.float32, "device_map": "cpu"} | how
        )
        for parameter in model.parameters():
            if type(parameter) is nn.Parameter:  # in memory of malloc's, and not in the file that was loaded
                parameter.data = parameter.data.clone()
        pack_in_evaluation(model, does=False)
        torch.manual_seed(1)
        # Where experts are one parameter, peft adapts those without dropout only.
        modules = ATTENTION if family == "Mixtral" else "all-linear"
        lora = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": "gaussian", "target_modules": modules}
        return peft.get_peft_model(model, peft.LoraConfig(**lora)).train()


def pack_in_evaluation(model: nn.Module, *, does: bool) -> None:
    """Whether bitsandbytes packs weights for evaluation in a way that cannot train."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = does


def layers_of(model: Any) -> nn.ModuleList:
    found: nn.ModuleList = model.base_model.model.model.layers
    return found


def policy(directory: Path, **settings: Any) -> dict[str, Any]:
    store = {"kind": "file", "directories": [str(directory)]}
    made = {"default": "keep", "min_tensor_bytes": "128B", "weights": {"frozen": "offload"}, "store": store}
    return made | settings


@contextmanager
def offloaded(model: Any, directory: Path, **settings: Any) -> Iterator[tba.Session]:
    with tba.attach(model, policy(directory, **settings), measure_memory=False) as session:
        assert session.weights is not None
        assert session.weights.nbytes
        yield session


def trained_of(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_parts(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All plain tensors of the frozen weights of the layers, by name: quantized weights have several."""
    found = []
    for name, parameter in layers_of(model).named_parameters():
        if not parameter.requires_grad:
            found += [(f"{name}{end}", part) for end, part in parts_of(parameter)]
    for name, module in layers_of(model).named_modules():
        state = getattr(module, "state", None)  # of bitsandbytes' layers of 8 bits, once they have run
        if isinstance(getattr(state, "SCB", None), Tensor):
            found.append((f"{name}.weight.SCB", state.SCB))
    return found


def parts_of(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from ((f".{name}{end}", part) for end, part in parts_of(getattr(tensor, name)))
        return
    yield "", tensor
    state = getattr(tensor, "quant_state", None)
    for holder, name in ((state, "absmax"), (state, "code"), (state, "offset"), (tensor, "SCB")):
        if isinstance(part := getattr(holder, name, None), Tensor):
            yield f".{name}", part
    if (nested := getattr(state, "state2", None)) is not None:
        yield from ((f".state2.{name}", getattr(nested, name)) for name in ("absmax", "code"))


def nbytes_of(parts: list[tuple[str, Tensor]]) -> int:
    return sum(part.numel() * part.itemsize for _, part in parts)


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in layers_of(model).parameters() if not each.requires_grad and each.ndim > 1]


def values_of(tensor: Any) -> list[Tensor]:
    return [part.clone() for _, part in parts_of(tensor)]


# ---- training ------------------------------------------------------------------------------------


def batch(number: int, *, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(number)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=source)
    return {"input_ids": ids, "labels": ids}


class Training:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(trained_of(model), lr=1e-2)
        self.seen: list[Tensor] = []

    def step(self, number: int, *, micro_batches: int = 1, **sizes: int) -> None:
        torch.manual_seed(number)
        for micro_batch in range(micro_batches):
            loss = self.model(**batch(10 * number + micro_batch, **sizes)).loss
            loss.backward()
            self.seen.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(**batch(99)).logits)
        self.model.train()

    def generate(self) -> None:
        self.model.eval()
        ids = batch(98, rows=1, length=4)["input_ids"]
        words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self.seen.append(self.model.generate(**words, max_new_tokens=3, do_sample=False))
        self.model.train()

    def finish(self) -> None:
        self.step(1)
        self.evaluate()

    def note(self, found: object) -> None:
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self.seen.append(leaf.detach().clone())
            elif leaf is not None:
                self.seen.append(torch.tensor(list(leaf) if isinstance(leaf, bytes) else leaf))

    def trained(self) -> list[Tensor]:
        return [*self.seen, *(each.detach().clone() for each in trained_of(self.model))]

    def results(self) -> list[Tensor]:
        return [*self.trained(), *(part for _, part in frozen_parts(self.model))]


def compare(
    made: Callable[[], Any], program: Callable[[Training], object], directory: Path, **settings: Any
) -> list[StepRecord]:
    """Train two equal models by a program, one with its frozen weights offloaded: the same bits.

    Afterwards no weight is left in memory.
    """
    plain, found = Training(made()), Training(made())
    program(plain)
    with offloaded(found.model, directory, **settings) as session:
        program(found)
        gc.collect()
        assert session.weights is not None
        assert session.weights.resident_bytes == 0
    assert_same_tensors(found.results(), plain.results())
    return session.records


# ---- memory, as malloc counts it -----------------------------------------------------------------


class _MallInfo(ctypes.Structure):
    _fields_ = [("counts", ctypes.c_size_t * 10)]


_malloc = ctypes.CDLL(None)
_malloc.mallinfo2.restype = _MallInfo


def live_bytes() -> int:
    _, _, _, _, hblkhd, _, _, uordblks, _, _ = _malloc.mallinfo2().counts
    return int(uordblks + hblkhd)


class Observer:
    def __init__(self, model: nn.Module) -> None:
        self.seen: list[int] = []
        for module in model.modules():
            module.register_forward_pre_hook(self._look)
            module.register_forward_hook(self._watch)

    def _look(self, *_: object) -> None:
        self.seen.append(live_bytes())

    def _watch(self, _module: nn.Module, _arguments: object, output: object) -> None:
        self._look()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._look)  # type: ignore[no-untyped-call]
