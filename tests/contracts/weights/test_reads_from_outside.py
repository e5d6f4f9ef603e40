"""A frozen weight that is used outside of its layer has its values, or an error names it and the remedy."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import re
import tempfile
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    LAYERS,
    WIDE,
    Training,
    compare,
    frozen,
    frozen_parts,
    layers_of,
    live_bytes,
    make,
    nbytes_of,
    offloaded,
    pack_in_evaluation,
    peft,
    quiet,
    trained_of,
    values_of,
)
from covering import full, in_turn, of_which
from models import assert_same_tensors, same_bits
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable

TOLD = "outside of its layer"
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        *("`torch.jit:DeprecationWarning", "(M|Unm)erge lora module to:UserWarning", f".*{TOLD}"),
        *("The given NumPy array is not writable:UserWarning", ".*backward hook:UserWarning"),
        *("To copy construct from a tensor:UserWarning", "TypedStorage is deprecated:UserWarning"),
    )
]

Use = "Callable[[Training], Any]"
"""Uses while the session is open. The test compares the returned values."""


def one_of(training: Training) -> Any:
    return layers_of(training.model)[1].self_attn.q_proj.base_layer.weight


# Reading


def as_values(training: Training) -> Any:
    found: list[Any] = []
    weights = frozen(training.model)
    for weight in weights:
        found += [weight.norm(), weight.abs().max(), weight.mean().item(), weight.tolist()]
        found += [weight.clone(), weight.to(torch.float64), weight.detach()[1:, ::2].T.contiguous()]
        found.append(torch.empty_like(weight).copy_(weight))
    parameters = [parameter.detach() for parameter in training.model.parameters()]
    found += [nn.utils.get_total_norm(parameters), torch._foreach_mul([w.detach() for w in weights], 2.0)]
    return [*found, nn.utils.parameters_to_vector(training.model.parameters())]


def as_text(training: Training) -> Any:
    return [repr(each).encode() for each in (*frozen(training.model), training.model)]


def as_parts(training: Training) -> Any:
    return [values_of(weight) for weight in frozen(training.model)]


def as_arrays(training: Training) -> Any:
    arrays = [weight.detach().numpy() for weight in frozen(training.model)]
    training.step(5)
    return arrays


def as_metadata(training: Training) -> Any:
    model = training.model
    counted = [*model.get_nb_trainable_parameters(), model.base_model.model.get_memory_footprint()]
    for weight in frozen(model):
        counted += [*weight.shape, weight.nbytes, weight.is_contiguous(), weight.requires_grad, len(weight)]
        counted.append(type(weight).__name__ in {"Parameter", "Params4bit", "Int8Params", "Int8Tensor"})
        counted.append(isinstance(weight, nn.Parameter))
    return counted


def as_a_state_dict(training: Training) -> Any:
    return [values_of(value) for value in training.model.state_dict().values()]


def as_an_average_of_state_dicts(training: Training) -> Any:
    mean = make("Llama").state_dict()
    for name, value in training.model.state_dict().items():
        mean[name].lerp_(value, 0.5)
    return mean


def as_files(training: Training) -> Any:
    with quiet(), tempfile.TemporaryDirectory() as folder:
        training.model.base_model.model.save_pretrained(folder)
        return [path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors"))]


def gradients(training: Training, loss: Any) -> list[Tensor]:
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in trained_of(training.model))]


def as_a_penalty(training: Training) -> Any:
    return gradients(training, sum(weight.pow(2).sum() for weight in training.model.parameters()) / 100)


def as_a_penalty_on_products(training: Training) -> Any:
    """Autograd keeps weights for the gradients of adapters, from outside of their layers."""
    found = []
    adapted = [module for module in layers_of(training.model).modules() if hasattr(module, "lora_A")]
    for number, is_before in enumerate((False, True)):
        products = loss = 0
        for is_now in (True, False):
            if is_now is is_before:
                pairs = [(each.lora_A["default"].weight, each.get_base_layer().weight) for each in adapted]
                products = sum((down @ base.T).pow(2).mean() for down, base in pairs)
            else:
                torch.manual_seed(0)
                loss = training.model(**dict.fromkeys(("input_ids", "labels"), torch.arange(12)[None])).loss
        found += gradients(training, loss + products)
        training.step(20 + number)
    return found


def within_hooks(training: Training) -> Any:
    found, layers = [], layers_of(training.model)

    def note(*_: object) -> None:
        found.extend(layer.self_attn.q_proj.base_layer.weight.detach().sum() for layer in layers[1:3])

    handles = [layer.register_forward_hook(note) for layer in layers]
    handles += [layer.self_attn.v_proj.lora_B["default"].weight.register_hook(note) for layer in layers]
    training.step(6)
    for handle in handles:
        handle.remove()
    return found


def within_another_thread(training: Training) -> Any:
    """As where one writes a log or a checkpoint between steps."""
    sums: list[Tensor] = []

    def read() -> None:
        sums.extend(weight.detach().double().sum() for weight in frozen(training.model))

    for number in range(6, 9):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        training.step(number)
    return sums


def dequantized(training: Training) -> Any:
    found = []
    for weight in frozen(training.model):
        if hasattr(weight, "dequantize"):
            found.append(weight.dequantize())
        elif (state := getattr(weight, "quant_state", None)) is not None:
            from bitsandbytes.functional import dequantize_4bit

            found += [dequantize_4bit(weight.data, state), dequantize_4bit(weight, state)]
            module = nn.ParameterDict({"weight": weight})
            found.append(peft.utils.integrations.dequantize_module_weight(module))
    return found


# Writing


def written(training: Training) -> None:
    for number, weight in enumerate(frozen(training.model)):
        weight.data.add_(0.01)
        if number % 2:
            weight.data = weight.data * 1.5
    training.step(5)
    with torch.no_grad():
        for weight in frozen(training.model):
            weight.mul_(1.25)
            weight[1].data.fill_(0.125)


def written_by_an_alias(training: Training) -> Any:
    """The alias is older than a run of the layer, and is written after it."""
    aliases = [weight.detach()[:3] for weight in frozen(training.model)]
    training.step(5)
    found = [alias.clone() for alias in aliases]
    for alias in aliases:
        alias.mul_(1.25)
    training.step(6)
    for alias in aliases:
        alias.add_(0.01)
    return found


def initialized(training: Training) -> None:
    torch.manual_seed(9)
    weights = frozen(training.model)
    for weight in weights:
        nn.init.normal_(weight, std=0.05)
        nn.init.zeros_(weight[0])
    with torch.no_grad():
        torch._foreach_lerp_(weights, [weight.flip(0) for weight in weights], weight=0.25)


def loaded(training: Training) -> None:
    state = {name: value + 0.01 for name, value in make("Llama").state_dict().items()}
    training.model.load_state_dict(state)


def merged(training: Training, **settings: bool) -> None:
    training.model.merge_adapter(**settings)
    training.evaluate()
    training.evaluate()
    training.model.unmerge_adapter()


def merged_safely(training: Training) -> None:
    merged(training, safe_merge=True)


def disabled(training: Training) -> None:
    """As losses that compare with the base model do."""
    with training.model.disable_adapter():
        training.evaluate()


# Of all parameters


def updated(training: Training) -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        training.optimizer = kind(training.model.parameters(), lr=1e-3, weight_decay=0.1)
        training.step(7)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def averaged(training: Training) -> Any:
    ways = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": lambda mean, new, _: 0.5 * (mean + new)}
    averages = [AveragedModel(make("Llama"), **way) for way in ways]
    for number in range(7, 10):
        for average in averages:
            average.update_parameters(training.model)
        training.step(number)
    return [list(average.parameters()) for average in averages]


def kept_in_place(training: Training) -> None:
    training.model.to("cpu").to(training.model.dtype).cpu()


RIGHT: tuple[Use, ...] = (
    *(as_values, as_arrays, as_text, as_metadata, as_parts, as_a_state_dict, as_an_average_of_state_dicts),
    *(as_files, as_a_penalty, as_a_penalty_on_products, within_hooks, within_another_thread, written),
    *(written_by_an_alias, initialized, loaded, merged, merged_safely, disabled, updated, averaged),
    kept_in_place,
)
QUANTIZED: tuple[Use, ...] = (
    *(as_metadata, as_parts, as_text, as_a_state_dict, within_hooks, dequantized, merged, disabled, updated),
    kept_in_place,
)
WITHOUT_SUMS = ("torchao int8", "torchao int4")


def check(use: Use, base: str, directory: Path) -> None:
    def program(training: Training) -> None:
        training.step(0)
        training.note(use(training))
        training.finish()

    compare(lambda: make("Llama", base), program, directory)


@pytest.mark.parametrize("use", RIGHT)
def test_a_use_has_the_right_values(use: Use, tmp_path: Path) -> None:
    check(use, "fp32", tmp_path)


@pytest.mark.parametrize(("use", "base"), in_turn(QUANTIZED, ["nf4, double", "int8", "torchao int8", "bf16"]))
def test_a_use_of_a_quantized_base_has_the_right_values(use: Use, base: str, tmp_path: Path) -> None:
    if not (use in (within_hooks, kept_in_place) and base in WITHOUT_SUMS):
        check(use, base, tmp_path)


# What may be refused: ways that go round Python, or keep what they read


class Product(torch.autograd.Function):
    """A product as a program writes it that has a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0].T, None


def rows() -> Tensor:
    return torch.linspace(-1, 1, 2 * 64).reshape(2, 64).requires_grad_()


def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = rows()
    run(x).pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight) @ weight


def product_within(context: Any, x: Tensor, weight: Tensor) -> Tensor:
    with context:
        return product(x, weight)


def behind_a_step(training: Training) -> Tensor:
    """The graph is older than a step, in which the layer runs."""

    def run(x: Tensor) -> Tensor:
        y = product(x, one_of(training))
        training.step(11)
        return y

    return gradient(run)


def by_its_address(weight: Tensor) -> Tensor:
    return torch.tensor((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()))


def by_an_array(weight: Tensor) -> None:
    array = weight.detach().numpy()
    array *= 1.25


def within_a_hook(training: Training, change: Callable[[Tensor], object]) -> None:
    layer = layers_of(training.model)[1]
    for module in (layer.self_attn.q_proj.base_layer, layer):
        handle = module.register_forward_hook(lambda *_: training.note(change(one_of(training))))
        training.evaluate()
        handle.remove()


def loaded_by_assignment(training: Training) -> None:
    name = next(name for name, each in training.model.named_parameters() if each is one_of(training))
    training.model.load_state_dict({name: torch.full((64, 64), 0.125)}, strict=False, assign=True)


def by_another_parameter(training: Training) -> None:
    base = layers_of(training.model)[1].self_attn.q_proj.base_layer
    base.weight = nn.Parameter(torch.full((64, 64), 0.125), requires_grad=False)


OF_ONE: dict[str, Callable[[Any], Any]] = {
    # What autograd keeps
    "in a function": lambda w: gradient(lambda x: Product.apply(torch.tanh(Product.apply(x, w)), w)),
    "in a checkpoint": lambda w: gradient(lambda x: checkpoint(product, x, w, use_reentrant=False)),
    "in a reentrant checkpoint": lambda w: gradient(lambda x: checkpoint(product, x, w, use_reentrant=True)),
    "saved on the host": lambda w: gradient(lambda x: product_within(save_on_cpu(), x, w)),
    "by saved tensor hooks": lambda w: gradient(
        lambda x: product_within(saved_tensors_hooks(lambda saved: saved.numpy(), torch.from_numpy), x, w)
    ),
    "of gradients": lambda w: gradient(
        lambda x: torch.autograd.grad(torch.tanh(x @ w).pow(3).sum(), x, create_graph=True)[0]
    ),
    # What does not ask the class of a tensor, and is given another tensor on the same memory
    "by torch.tensor": lambda w: [torch.tensor(w.detach()), torch.as_tensor(w) + 0, torch.asarray(w).clone()],
    "by DLPack": lambda w: [
        each.clone() for each in map(torch.from_dlpack, (w, torch.utils.dlpack.to_dlpack(w.detach())))
    ],
    "by jvp": lambda w: torch.func.jvp(lambda x: (x * x).sum(), (w,), (torch.ones_like(w),))[1],
    "by an operator": lambda w: torch.ops.aten.sum.default(w),
    "by its storage": lambda w: torch.empty(0).set_(w.untyped_storage(), 0, w.shape, (64, 1)).clone(),
    "by its bytes": lambda w: bytes(w.untyped_storage()),
    "by its address": by_its_address,
    "copied alone": lambda w: values_of(copy.deepcopy(w)),
    "pickled alone": lambda w: values_of(pickle.loads(pickle.dumps(w))),
    # What writes
    "by an array": by_an_array,
    "by out": lambda w: torch.no_grad()(torch.mul)(w, 1.25, out=w),
    "by a vector": lambda w: nn.utils.vector_to_parameters(torch.linspace(-1, 1, w.numel()), [w]),
    "shared": lambda w: w.share_memory_(),
}
OF_ALL: dict[str, Use] = {
    "loaded by assignment": loaded_by_assignment,
    "by another parameter": by_another_parameter,
    "copied": lambda training: list(copy.deepcopy(training.model).parameters()),
    "averaged": lambda training: list(AveragedModel(training.model).parameters()),
    "pickled": lambda training: list(pickle.loads(pickle.dumps(training.model)).parameters()),
    "behind a step": behind_a_step,
    "within a hook": lambda training: within_a_hook(training, torch.no_grad()(lambda w: w.mul_(1.25))),
    "by an array within a hook": lambda training: within_a_hook(training, by_an_array),
    "trained": lambda training: (one_of(training).requires_grad_(), training.step(2))[1],
}
MAY_BE_REFUSED: dict[str, Use] = {
    **{name: lambda training, use=use: use(one_of(training)) for name, use in OF_ONE.items()},
    **OF_ALL,
}
OF_QUANTIZED = ("copied", "copied alone", "averaged", "pickled", "pickled alone", "shared")
CASES: list[Any] = [("fp32", name) for name in MAY_BE_REFUSED]
CASES += [pytest.param("nf4", name, marks=full) for name in OF_QUANTIZED]


def assert_named(error: Exception) -> None:
    named = r"layers\.\d+\.[\w.]+weight|[\w.]*_proj\.[\w.]*weight|frozen weights"
    assert re.search(named, str(error)), error
    assert "close" in str(error).lower(), error


@pytest.mark.parametrize(("base", "name"), CASES)
def test_a_use_has_the_right_values_or_an_error_that_names_the_weight(
    base: str, name: str, tmp_path: Path
) -> None:
    use = MAY_BE_REFUSED[name]
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    error: Exception | None = None
    with offloaded(found.model, tmp_path) as session:
        found.step(0)
        try:
            found.note(use(found))
        except SessionError as raised:
            error = raised.with_traceback(None)
        found.finish()
        gc.collect()
        assert session.weights is not None
        assert session.weights.resident_bytes == 0
    plain.step(0)
    if error is None:
        plain.note(use(plain))
    else:
        assert name not in {"trained", "by an array within a hook"}
        assert_named(error)
    plain.finish()
    assert_same_tensors(found.results(), plain.results())


@pytest.mark.parametrize("base", of_which(["fp32", "nf4", "int8", "torchao int8"], "fp32", "nf4"))
def test_a_model_is_merged_and_unloaded_while_it_is_attached(base: str, tmp_path: Path) -> None:
    """Quantized weights are replaced; then the error names one, and what the model computes is as before."""
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    with offloaded(found.model, tmp_path):
        for training in (plain, found):
            training.step(0)
        try:
            found.model = found.model.merge_and_unload()
        except SessionError as error:
            assert_named(error)
        else:
            plain.model = plain.model.merge_and_unload()
        for training in (plain, found):
            training.evaluate()
    for training in (plain, found):
        training.evaluate()
    assert_same_tensors(found.seen, plain.seen)


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "was set to torch.bfloat16 of": lambda layer: layer.to(torch.bfloat16),
    "was set to torch.float32 of (2, 2)": lambda layer: setattr(
        layer.self_attn.q_proj.base_layer.weight, "data", torch.zeros(2, 2)
    ),
    "was set to torch.uint8 of (2048, 1) on meta": lambda layer: layer.to("meta"),
    "cannot be converted": lambda layer: layer.to("cpu"),
    "cannot be copied": lambda layer: copy.deepcopy(layer.self_attn.q_proj.base_layer.weight),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_change_that_a_weight_in_the_store_cannot_follow_is_named(said: str, tmp_path: Path) -> None:
    """And no value is lost."""
    base = {"was set to torch.uint8": "nf4", "cannot be converted": "torchao int8"}.get(said[:22], "fp32")
    training, other = (Training(make("Llama", base)) for _ in range(2))
    with offloaded(training.model, tmp_path):
        training.step(0)
        message = rf"layers\.1\.self_attn\.q_proj\.base_layer\.weight .*{re.escape(said)}(?s:.*)[Cc]lose"
        with pytest.raises(SessionError, match=message):
            REFUSED[said](layers_of(training.model)[1])
        training.evaluate()
    assert_same_tensors(*([part for _, part in frozen_parts(each.model)] for each in (training, other)))


# How it is told, and what it takes


def test_the_first_read_from_outside_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    def told() -> list[str]:
        lines = [*caplog.messages, *(str(warning.message) for warning in recwarn.list)]
        return [line for line in lines if TOLD in line]

    training = Training(make("Llama"))
    with offloaded(training.model, tmp_path):
        for _ in range(2):
            training.step(0)
            for weight in frozen(training.model):
                assert isinstance(weight, nn.Parameter)
                assert type(weight).__name__ == "Parameter"
                assert (len(weight), weight.dtype) == (weight.shape[0], torch.float32)
            assert told() == []
        for weight in frozen(training.model):
            weight.norm()
    [line] = told()
    assert re.search(
        r"weight [\w.]*layers\.0\.[\w.]*q_proj[\w.]*weight was read from the store for a use outside of its",
        line,
    )


@pytest.mark.parametrize("base", of_which(["bf16", "nf4, double", "torchao int8"], "bf16"))
def test_a_read_of_all_weights_takes_the_memory_of_one_after_the_other(base: str, tmp_path: Path) -> None:
    model = make("Llama", base, **WIDE)
    total = nbytes_of(frozen_parts(model))
    with offloaded(model, tmp_path):
        most, before = 0, live_bytes()
        for weight in frozen(model):
            values = values_of(weight)
            most = max(most, live_bytes() - before - sum(value.nbytes for value in values))
            del values
        after = live_bytes() - before
    assert most < total / LAYERS
    assert abs(after) < total / LAYERS / 10


@pytest.mark.parametrize("base", of_which(["fp32", "nf4", "torchao int8"], "fp32", "nf4"))
def test_aliases_outlive_the_session(base: str, tmp_path: Path) -> None:
    """After the session, a write to such an alias changes the weight."""
    results = []
    for attach in (nullcontext, partial(offloaded, directory=tmp_path)):
        training = Training(make("Llama", base))
        training.step(0)
        with attach(training.model):
            training.step(0)
            aliases = [part.detach() for _, part in frozen_parts(training.model)]
        results.append([alias.clone() for alias in aliases])
        for alias in aliases:
            alias.view(-1)[0] = 1
        results[-1] += [part for _, part in frozen_parts(training.model)]
    assert_same_tensors(results[1], results[0])


@pytest.mark.parametrize("base", of_which(["fp32", "nf4", "torchao int8"], "fp32", "nf4"))
def test_adapters_that_read_the_norms_of_weights(base: str, tmp_path: Path) -> None:
    """DoRA, whose layers compute with the weight itself."""

    def made() -> Any:
        model = make("Llama", base).unload()
        torch.manual_seed(1)
        with quiet():
            lora = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
            return peft.get_peft_model(model, lora).train()

    compare(made, Training.finish, tmp_path)


def test_a_base_that_packs_its_weights_anew_in_evaluation(tmp_path: Path) -> None:
    """bitsandbytes does on some processors, and sets weights of another shape within the layer."""
    from bitsandbytes.functional import has_avx512bf16

    plain, found = (make("Llama", "nf4").eval() for _ in range(2))
    after: Any = plain
    for model in (plain, found):
        pack_in_evaluation(model, does=has_avx512bf16())
    words = torch.arange(3, 9)[None]
    with torch.no_grad(), offloaded(found, tmp_path):
        expected = plain(input_ids=words).logits
        try:
            assert same_bits(found(input_ids=words).logits, expected)
        except SessionError as error:
            assert_named(error)
            after = make("Llama", "nf4")
    assert_same_tensors(*([part for _, part in frozen_parts(each)] for each in (found, after)))
