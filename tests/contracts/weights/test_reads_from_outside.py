"""A frozen weight that is used outside of its layer has its values, or an error names it and the remedy."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bases import (
    LAYERS,
    WIDE,
    Training,
    copied,
    frozen_parts,
    layers_of,
    live_bytes,
    make,
    nbytes_of,
    offloaded,
    parts_of,
    peft,
    quiet,
    trained_of,
)
from covering import in_turn, of_which
from models import assert_same_tensors, same_bits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tba_offload.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLD = "outside of its layer"
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(M|Unm)erge lora module to:UserWarning"),
    pytest.mark.filterwarnings(f"ignore:.*{TOLD}"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
]

Use = "Iterator[None]"
"""What a program does: until the first ``yield`` before it attaches, then while the session is open."""


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in layers_of(model).parameters() if not each.requires_grad and each.ndim > 1]


def adapted(model: nn.Module) -> list[Any]:
    return [each for each in layers_of(model).modules() if hasattr(each, "lora_A")]


def values_of(tensor: Any) -> list[Tensor]:
    return [part.clone() for _, part in parts_of(tensor)]


# Reading


def as_a_norm(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        training.seen += [weight.norm(), weight.abs().max(), torch.tensor(weight.mean().item())]
    training.seen.append(nn.utils.get_total_norm([each.detach() for each in training.model.parameters()]))


def as_a_vector(training: Training) -> Use:
    yield
    training.seen.append(nn.utils.parameters_to_vector(training.model.parameters()).detach())


def as_copies(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        training.seen += [weight.clone(), weight.to(torch.float64), weight.detach()[1:, ::2].T.contiguous()]
        training.seen += [torch.empty_like(weight).copy_(weight), torch.tensor(weight.tolist())]
    training.seen += torch._foreach_mul([each.detach() for each in frozen(training.model)], 2.0)


def as_arrays(training: Training) -> Use:
    yield
    arrays = [weight.detach().numpy() for weight in frozen(training.model)]
    training.step(5)
    training.seen += [torch.tensor(array) for array in arrays]


def as_text(training: Training) -> Use:
    yield
    told = [str(weight) for weight in frozen(training.model)] + [repr(training.model)]
    training.seen.append(torch.tensor(list("".join(told).encode())))


def as_metadata(training: Training) -> Use:
    yield
    model = training.model
    counted = [*model.get_nb_trainable_parameters(), model.base_model.model.get_memory_footprint()]
    for weight in frozen(model):
        counted += [*weight.shape, weight.nbytes, weight.is_contiguous(), weight.requires_grad, len(weight)]
        counted.append(type(weight).__name__ in {"Parameter", "Params4bit", "Int8Params", "Int8Tensor"})
        counted.append(isinstance(weight, nn.Parameter))
    training.seen.append(torch.tensor(counted))


def as_parts(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        training.seen += values_of(weight)


def as_a_state_dict(training: Training) -> Use:
    yield
    state = training.model.state_dict()
    for value in state.values():
        training.seen += values_of(value)


def as_an_average_of_state_dicts(training: Training) -> Use:
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    yield
    for name, value in training.model.state_dict().items():
        before[name].lerp_(value, 0.5)
    training.seen += before.values()


def as_files(training: Training, folder: Path) -> Use:
    yield
    with quiet():
        training.model.base_model.model.save_pretrained(folder)
    training.seen += [torch.tensor(list(path.read_bytes())) for path in sorted(folder.glob("*.safetensors"))]


def as_a_penalty(training: Training) -> Use:
    yield
    loss = sum(weight.pow(2).sum() for weight in training.model.parameters()) / 100
    loss.backward()
    training.seen += [loss.detach(), *(each.grad.clone() for each in trained_of(training.model))]


def as_a_penalty_on_products(training: Training) -> Use:
    """Autograd keeps weights for the gradients of adapters, from outside of their layers."""
    yield
    for number, is_before in enumerate((False, True)):
        products: Any = 0
        for is_now in (True, False):
            if is_now is is_before:
                products = sum(
                    (each.lora_A["default"].weight @ each.get_base_layer().weight.T).pow(2).mean()
                    for each in adapted(training.model)
                )
            else:
                torch.manual_seed(0)
                loss = training.model(**dict.fromkeys(("input_ids", "labels"), torch.arange(12)[None])).loss
        (loss + products).backward()
        training.seen += [products.detach(), *(each.grad.clone() for each in trained_of(training.model))]
        training.step(20 + number)


def within_hooks(training: Training) -> Use:
    """Each layer's forward and backward read the weights of the layers beside it."""
    yield
    layers = layers_of(training.model)

    def note(*_: object) -> None:
        for layer in layers[1:3]:
            training.seen.append(layer.self_attn.q_proj.base_layer.weight.detach().sum())

    handles = [layer.register_forward_hook(note) for layer in layers]
    handles += [layer.self_attn.v_proj.lora_B["default"].weight.register_hook(note) for layer in layers]
    training.step(6)
    for handle in handles:
        handle.remove()


def within_another_thread(training: Training) -> Use:
    """As where one writes a log or a checkpoint between steps."""
    yield
    sums: list[Tensor] = []

    def read() -> None:
        sums.extend(weight.detach().double().sum() for weight in frozen(training.model))

    for number in range(6, 9):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        training.step(number)
    training.seen += sums


def dequantized(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        if hasattr(weight, "dequantize"):
            training.seen.append(weight.dequantize())
        elif getattr(weight, "quant_state", None) is not None:
            from bitsandbytes.functional import dequantize_4bit

            training.seen.append(dequantize_4bit(weight.data, weight.quant_state))
            training.seen.append(dequantize_4bit(weight, weight.quant_state))


# Writing


def added_to(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        weight.data.add_(0.01)
    training.step(5)
    with torch.no_grad():
        for weight in frozen(training.model):
            weight.mul_(1.25)


def assigned(training: Training) -> Use:
    yield
    for weight in frozen(training.model):
        weight.data = weight.data * 1.5
        weight.data -= 0.01


def written_by_an_alias(training: Training) -> Use:
    """The alias is older than a run of the layer, and is written after it."""
    yield
    aliases = [weight.detach()[:3] for weight in frozen(training.model)]
    training.step(5)
    training.seen += [alias.clone() for alias in aliases]
    for alias in aliases:
        alias.mul_(1.25)
    training.step(6)
    for alias in aliases:
        alias.add_(0.01)


def initialized(training: Training) -> Use:
    yield
    torch.manual_seed(9)
    for weight in frozen(training.model):
        nn.init.normal_(weight, std=0.05)
        nn.init.zeros_(weight[0])


def copied_to(training: Training) -> Use:
    yield
    with torch.no_grad():
        torch._foreach_lerp_(
            frozen(training.model), [each.flip(0) for each in frozen(training.model)], weight=0.25
        )
    for weight in frozen(training.model):
        weight[1].data.fill_(0.125)


def merged(training: Training) -> Use:
    yield
    training.model.merge_adapter()
    training.evaluate()
    training.evaluate()
    training.model.unmerge_adapter()


def merged_safely(training: Training) -> Use:
    yield
    training.model.merge_adapter(safe_merge=True)
    training.evaluate()
    training.model.unmerge_adapter()


def disabled(training: Training) -> Use:
    """As losses that compare with the base model do."""
    yield
    with training.model.disable_adapter():
        training.evaluate()


# Of all parameters


def updated(training: Training) -> Use:
    yield
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(training.model.parameters(), lr=1e-3, weight_decay=0.1)
        training.optimizer = optimizer
        training.step(7)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def averaged(training: Training) -> Use:
    average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    yield
    for number in range(7, 10):
        average.update_parameters(training.model)
        training.step(number)
    training.seen += [each.detach() for each in average.parameters()]


def averaged_one_by_one(training: Training) -> Use:
    average = AveragedModel(training.model, avg_fn=lambda mean, new, _: 0.5 * mean + 0.5 * new)
    yield
    average.update_parameters(training.model)
    average.update_parameters(training.model)
    training.seen += [each.detach() for each in average.parameters()]


def kept_in_place(training: Training) -> Use:
    yield
    training.model.to("cpu")
    training.model.float()


# What may be refused


def copied_while_attached(training: Training) -> Use:
    yield
    copy.deepcopy(training.model)


def copied_alone(training: Training) -> Use:
    yield
    training.seen += values_of(copy.deepcopy(frozen(training.model)[1]))


def averaged_while_attached(training: Training) -> Use:
    yield
    AveragedModel(training.model)


def pickled(training: Training) -> Use:
    yield
    pickle.dumps(training.model)


def pickled_alone(training: Training) -> Use:
    yield
    training.seen += values_of(pickle.loads(pickle.dumps(frozen(training.model)[1])))


def halved(training: Training) -> Use:
    yield
    training.model.to(torch.bfloat16)


def of_another_shape(training: Training) -> Use:
    yield
    weight = frozen(training.model)[0]
    weight.data = torch.zeros(2, 2)


def used_by_others(training: Training) -> Use:
    yield
    layers = layers_of(training.model)
    layers[0].self_attn.q_proj.base_layer.weight.share_memory_()


RIGHT = (
    *(as_a_norm, as_a_vector, as_copies, as_arrays, as_text, as_metadata, as_parts, as_a_state_dict),
    *(as_an_average_of_state_dicts, as_a_penalty, as_a_penalty_on_products, within_hooks),
    *(within_another_thread, added_to, assigned, written_by_an_alias, initialized, copied_to),
    *(merged, merged_safely, disabled, updated, averaged, averaged_one_by_one, kept_in_place),
)
QUANTIZED = (
    as_metadata,
    as_parts,
    as_text,
    as_a_state_dict,
    within_hooks,
    dequantized,
    merged,
    disabled,
    updated,
)
MAY_BE_REFUSED = (
    *(copied_while_attached, copied_alone, averaged_while_attached, pickled, pickled_alone, used_by_others),
)
REFUSED = (halved, of_another_shape)
UNLIKE = {
    ("torchao int8", within_hooks),  # it cannot be summed
    ("torchao int4", within_hooks),
}
NAMED = re.compile(r"layers\.\d+\.[\w.]+weight|[\w.]*_proj\.[\w.]*weight|frozen weights")


def run(use: Callable[[Training], Any], training: Training, directory: Path | None) -> Exception | None:
    """A step, the use, a step and an evaluation. Returns the error of the use, if any."""
    program = use(training)
    next(program)
    if directory is None:
        training.step(0)
        next(program, None)
        finish(training)
        return None
    error: Exception | None = None
    with offloaded(training.model, directory) as session:
        training.step(0)
        try:
            next(program, None)
        except SessionError as raised:
            error = raised.with_traceback(None)
        del program
        finish(training)
        gc.collect()
        assert session.weights is not None
        if error is None:
            assert session.weights.resident_bytes == 0
    return error


def assert_named(error: Exception) -> None:
    """It names the weight and the remedy."""
    assert NAMED.search(str(error)), error
    assert "close" in str(error).lower(), error


def finish(training: Training) -> None:
    training.step(1)
    training.evaluate()


def everything(training: Training) -> list[Tensor]:
    return [*training.results(), *(part for _, part in frozen_parts(training.model))]


@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.__name__)
def test_a_use_has_the_right_values(use: Callable[[Training], Any], tmp_path: Path) -> None:
    check(use, "fp32", tmp_path)


@pytest.mark.parametrize(("use", "base"), in_turn(QUANTIZED, ["nf4, double", "int8", "torchao int8", "bf16"]))
def test_a_use_of_a_quantized_base_has_the_right_values(
    use: Callable[[Training], Any], base: str, tmp_path: Path
) -> None:
    if (base, use) in UNLIKE:
        return
    check(use, base, tmp_path)


def check(use: Callable[[Training], Any], base: str, directory: Path) -> None:
    plain, found = (Training(make("Llama", base)) for _ in range(2))
    run(use, plain, None)
    error = run(use, found, directory)
    assert error is None
    assert_same_tensors(everything(found), everything(plain))


def test_files_have_the_right_values(tmp_path: Path) -> None:
    runs = []
    for name, directory in (("plain", None), ("found", tmp_path)):
        training = Training(make("Llama"))
        run(lambda training, name=name: as_files(training, tmp_path / name), training, directory)
        runs.append(everything(training))
    assert_same_tensors(*runs)


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


@pytest.mark.parametrize("base", of_which(["fp32", "nf4"], "fp32"))
@pytest.mark.parametrize("use", MAY_BE_REFUSED, ids=lambda use: use.__name__)
def test_a_use_has_the_right_values_or_an_error_that_names_the_weight(
    use: Callable[[Training], Any], base: str, tmp_path: Path
) -> None:
    found = Training(make("Llama", base))
    error = run(use, found, tmp_path)
    plain = Training(make("Llama", base))
    run(use if error is None else as_before, plain, None)
    if error is not None:
        assert_named(error)
    assert_same_tensors(everything(found), everything(plain))


@pytest.mark.parametrize("use", REFUSED, ids=lambda use: use.__name__)
def test_a_conversion_is_refused_by_name_and_no_value_is_lost(
    use: Callable[[Training], Any], tmp_path: Path
) -> None:
    training = Training(make("Llama"))
    before = copied(frozen_parts(training.model))
    with offloaded(training.model, tmp_path):
        training.step(0)
        program = use(training)
        next(program)
        with pytest.raises(SessionError) as raised:
            next(program)
        assert_named(raised.value)
        del program, raised
    assert_same_tensors([part for _, part in frozen_parts(training.model)], [part for _, part in before])


def as_before(_: Training) -> Use:
    yield


# How it is told, and what it takes


def test_the_first_read_from_outside_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    training = Training(make("Llama"))
    with offloaded(training.model, tmp_path):
        for _ in range(2):
            training.step(0)
            assert as_told(caplog, recwarn) == []
        for weight in frozen(training.model):
            weight.norm()
    [line] = as_told(caplog, recwarn)
    assert re.search(r"layers\.0\.[\w.]*q_proj[\w.]*weight", line)


def as_told(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> list[str]:
    lines = [*caplog.messages, *(str(warning.message) for warning in recwarn.list)]
    return [line for line in lines if TOLD in line]


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
def test_adapters_that_read_the_norms_of_weights(base: str, tmp_path: Path) -> None:
    """DoRA, whose layers compute with the weight itself."""
    results = []
    for directory in (None, tmp_path):
        model = make("Llama", base).unload()
        torch.manual_seed(1)
        with quiet():
            lora = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
            training = Training(peft.get_peft_model(model, lora).train())
        if directory is None:
            finish(training)
        else:
            with offloaded(training.model, directory):
                finish(training)
        results.append(everything(training))
    assert_same_tensors(*results)


def test_a_base_that_packs_its_weights_anew_in_evaluation(tmp_path: Path) -> None:
    """bitsandbytes does on some processors, and sets weights of another shape within the layer."""
    from bitsandbytes.functional import has_avx512bf16

    plain, found = (make("Llama", "nf4") for _ in range(2))
    before = copied(frozen_parts(plain))
    for model in (plain, found):
        model.eval()
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = has_avx512bf16()
    words = torch.arange(3, 9)[None]
    with torch.no_grad(), offloaded(found, tmp_path):
        expected = plain(input_ids=words).logits
        try:
            assert same_bits(found(input_ids=words).logits, expected)
        except SessionError as error:
            assert_named(error)
            plain = None
    after = before if plain is None else frozen_parts(plain)
    assert_same_tensors([part for _, part in frozen_parts(found)], [part for _, part in after])
