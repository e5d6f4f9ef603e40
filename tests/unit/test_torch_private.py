"""Private names of PyTorch: each is there and does what the package takes it to do; one file has them all."""

from __future__ import annotations

import re

import pytest
import torch
from places import ROOT
from torch import nn

from tba_offload import torch_private as private


def test_no_other_file_names_one() -> None:
    """Names below ``torch._`` and ``torch.x._``."""
    library = ROOT / "tba_offload"
    name = re.compile(
        r"\btorch(?!\.ops)(\.\w+)*\._[a-zA-Z]\w*|\bnn\.Module\._\w+|_execution_engine|_sequence_nr"
    )
    found = {
        f"{file.relative_to(library)}: {match[0]}"
        for file in library.rglob("*.py")
        if file.name != "torch_private.py"
        for match in name.finditer(file.read_text())
    }
    assert found == set()


def test_hooks_are_pushed_found_and_popped() -> None:
    pack, unpack = (lambda tensor: (tensor,)), (lambda packed: packed[0])
    assert private.hooks_on_top() is None
    private.push_hooks(pack, unpack)
    assert private.hooks_on_top() == (pack, unpack)
    private.pop_hooks()
    assert private.hooks_on_top() is None
    assert private.hooks_are_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert not private.hooks_are_allowed()


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[object] = []

    def inside(_: torch.Tensor) -> None:
        seen.extend((private.is_recomputation(), private.current_backward() >= 0, private.keeps_graph()))
        private.call_after_backward(lambda: seen.append("end"))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(inside)
    y.sum().backward()
    assert seen == [True, True, False, "end"]
    assert not private.is_recomputation()
    assert (private.current_backward(), private.keeps_graph()) == (-1, True)


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    before = private.latest_node()
    y = x * 2
    assert y.grad_fn is not None
    assert private.number_of(y.grad_fn) == before
    assert private.latest_node() == before + 1


def test_transforms_and_their_wrappers_are_told() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((private.is_transformed(), private.is_transform_wrapper(x)))
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    function(torch.ones(2))
    assert seen == [(True, True), (False, False)]


def test_a_version_counter_is_shared_by_views_and_not_by_data() -> None:
    x = torch.ones(4)
    version = x._version
    assert private.shares_version(x.detach(), x)
    assert not private.shares_version(x.data, x)
    assert x._version == version


def test_the_tensors_of_a_storage_are_counted() -> None:
    x = torch.ones(4)
    alone = private.users_of(x.untyped_storage())
    view = x[1:]
    assert private.users_of(x.untyped_storage()) == alone + 1
    del view
    assert private.users_of(x.untyped_storage()) == alone


def test_subclasses_are_taken_for_plain_tensors() -> None:
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> None:
            raise AssertionError

    refusing = torch.ones(2).as_subclass(Refusing)
    with private.without_subclasses():
        assert refusing.numel() == 2
    assert private.factories.zeros_like(torch.ones(2)).tolist() == [0, 0]


def test_a_function_in_front_of_an_operation_sees_its_calls() -> None:
    calls: list[str] = []
    operation = torch.ops.aten.relu.default

    def front(keys: private.KeySet, /, *args: torch.Tensor) -> torch.Tensor:  # type: ignore[valid-type]
        calls.append("relu")
        with private.sharing_versions():
            return operation.redispatch(keys & private.AFTER_BACKEND_SELECT, *args)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("relu", front, "BackendSelect", with_keyset=True)
    try:
        assert torch.relu(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
    finally:
        library._destroy()
    torch.relu(torch.ones(1))
    assert calls == ["relu"]


def test_the_compiler_leaves_functions_alone() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(private.not_traced(plain), backend="eager")
    assert compiled(torch.ones(1)).tolist() == [2]
    assert private.is_compiled(compiled)
    assert not private.is_compiled(plain)
    before = private.switch_tracer(None)
    assert private.switch_tracer(before) is None
    assert nn.Module.__call__.__code__.co_filename == private.CALLS


def test_what_does_not_exist_is_no_error() -> None:
    private.load_compiler()
    assert private.graph_node(torch.device("cpu")) is None


def test_a_session_is_asked_before_a_storage_is_resized_and_transforms_start_without_its_hooks() -> None:
    class Session:
        is_of_tba_offload = True
        asked: list[int] = []  # noqa: RUF012

        def protect(self, storage: torch.UntypedStorage) -> None:
            self.asked.append(storage.nbytes())

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    session = Session()
    private.watch(session)
    private.push_hooks(session.pack, session.pack)
    try:
        with pytest.raises(RuntimeError, match="not here"):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                assert private.hooks_on_top() is None
                private.push_hooks(session.pack, session.pack)
        assert private.hooks_on_top() is not None
        torch.ones(4).untyped_storage().resize_(0)
    finally:
        private.pop_hooks()
        private.unwatch(session)
    assert session.asked == [16]
    assert torch.UntypedStorage.resize_ is private._resize
