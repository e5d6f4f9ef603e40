"""The house as it is drawn: which part may know which, and what must not be needed to import it."""

from __future__ import annotations

import ast
import functools
import re
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from children import FRAMEWORKS, OPTIONAL, run_without

import tba_offload

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from warm import Warm

ROOT = Path(tba_offload.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
LAB = ROOT.parent / "tba_lab"
LAB_MODULES = sorted(LAB.rglob("*.py"))

# Each part may import those listed; those in EVERYWHERE may be imported by all.
EVERYWHERE = {"compiling", "days", "errors", "formatting", "interrupts", "reading", "renamed", "writing"}
ALLOWED = {
    "compiling": {"layers"},
    "errors": set(),
    "days": set(),
    "formatting": set(),
    "reading": set(),
    "renamed": set(),
    "interrupts": set(),
    "writing": set(),
    "placements": set(),
    "config": {"placements"},
    "plan": {"config", "placements"},
    "device": set(),
    "store": {"config", "device", "plan"},
    "transfer": {"device", "plan", "store"},
    "layers": {"config"},
    "capture": {"device", "layers", "recompute", "transfer"},
    "report": set(),
    "session": {
        "adapt",
        "capture",
        "config",
        "device",
        "layers",
        "placements",
        "plan",
        "recompute",
        "report",
        "states",
        "store",
        "transfer",
        "weights",
    },
    "states": {"config", "device", "store"},
    "weights": {"config", "device", "layers", "placements", "states", "store"},
    "megatron": {"capture", "config", "effects", "layers", "report", "session", "states", "store"},
    "adapt": {"capture", "config", "plan", "report", "store", "transfer"},
    "what_if": {"config", "plan", "report"},
    "sinks": {"report"},
    "effects": {"config", "store"},
    "attachment": {"config", "effects", "layers", "megatron", "report", "session"},
    "integrations": {"attachment", "config", "layers", "report", "session"},
    "recompute": {"device", "layers"},
}
ON_TOP = {"cli", "testing", "__init__", "__main__"}


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def those_that_break(rule: Callable[[Path], object], paths: Iterable[Path]) -> dict[str, object]:
    """What a rule finds in each file where it finds something."""
    found = {str(path.relative_to(ROOT.parent)): rule(path) for path in paths}
    return {name: breach for name, breach in found.items() if breach}


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {name_of(path): path for path in [*MODULES, *LAB_MODULES]}
    order = TopologicalSorter[str]()
    for name, path in files.items():
        order.add(name, *(each for each in needed_by(path, files) if each in files))
    order.prepare()  # raises CycleError, with the circle


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def needed_by(path: Path, files: Container[str]) -> Iterator[str]:
    """The files that a file imports when it runs, inside functions too."""
    for node in statements_of(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in files else node.module or ""


def statements_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All but what is there for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from statements_of(node)


def test_imports_point_one_way() -> None:
    def wrong(path: Path) -> set[str]:
        part = part_of(path)
        if part in ON_TOP:
            return set()
        names = {name.split(".")[1] for name in imports_of(path) if name.startswith("tba_offload.")}
        inner = {name for name in names if (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}
        return inner - {part} - EVERYWHERE - ALLOWED[part]

    assert those_that_break(wrong, MODULES) == {}


def test_stores_and_transfers_know_of_plans_only_what_a_window_is() -> None:
    for path in MODULES:
        if part_of(path) in {"store", "transfer"}:
            planning = {name for name in imports_of(path) if name.startswith("tba_offload.plan")}
            assert planning <= {"tba_offload.plan.window", "tba_offload.plan.window.Window"}, path


@pytest.mark.parametrize("part", ["plan", "report", "config", "errors", "formatting"])
def test_these_never_import_torch(part: str) -> None:
    for path in MODULES:
        if part_of(path) == part:
            assert not {name for name in imports_of(path) if name.split(".")[0] == "torch"}, path


def test_only_the_megatron_part_imports_megatron() -> None:
    for path in MODULES:
        if any(name.split(".")[0] == "megatron" for name in imports_of(path)):
            assert part_of(path) == "megatron", path


TRANSFER = [path for path in MODULES if part_of(path) == "transfer"]


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that are assigned to."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute):
                    yield each


def test_the_parts_of_the_offloader_leave_the_fields_of_others_alone() -> None:
    """Records, spans and pieces change in one file; counters are there to be counted up."""
    may = {"error.__cause__", "self._shared.marks_stalls", "self._shared.inert"}

    def foreign(path: Path) -> set[str]:
        names = {ast.unparse(each) for each in assigned(tree_of(path))} - may
        own = r"self\.\w+|(self\._?ledger\.|self\.)?stats\.\w+"
        return {name for name in names if not re.fullmatch(own, name)}

    assert those_that_break(foreign, (path for path in TRANSFER if path.name != "storage.py")) == {}


LARGE_CLASSES = {
    "ActivationStore": "the contract: each of its methods is small, and most have a default",
    "CombinedStore": "the contract once more, over several stores: each of its methods is small",
    "StoreContract": "a suite of tests",
    "LayerHooks": "13 attributes that the hot path looks up in itself",
    "Lookahead": "15 attributes: the order of the last step and of this one, place by place",
    "Rebuild": "14 attributes of one tensor that is made again",
    "Transfer": "13 attributes of one transfer, by two threads in turn",
}


def test_classes_stay_small() -> None:
    """At most 20 methods and 12 attributes, frozen records left out."""

    def large(path: Path) -> list[tuple[str, int, list[str]]]:
        found = []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name not in LARGE_CLASSES:
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                own = {each.attr for each in assigned(node) if ast.unparse(each.value) == "self"}
                if len(methods) > 20 or len(own) > 12:
                    found.append((node.name, len(methods), sorted(own)))
        return found

    assert those_that_break(large, MODULES) == {}


def test_only_its_own_module_imports_a_framework() -> None:
    for path in MODULES:
        for framework in FRAMEWORKS:
            if any(name.split(".")[0] == framework for name in imports_of(path)):
                assert path == ROOT / "integrations" / f"{framework}.py"


def test_only_the_device_part_names_torch_cuda() -> None:
    paths = (path for path in [*MODULES, *LAB_MODULES] if "torch.cuda" in text_of(path))
    named = {path for path in paths if "torch.cuda" in code_of(path)}
    # The substitutes that let Megatron train on a CPU have to replace names in torch.cuda.
    substitutes = {LAB / "megatron_cpu.py", LAB / "megatron_cpu_scripts.py"}
    assert {path for path in named if path.parent != ROOT / "device"} == substitutes


def test_the_lab_is_imported_only_where_a_command_asks_for_it() -> None:
    assert LAB_MODULES
    asking = {path for path in MODULES if any(name.split(".")[0] == "tba_lab" for name in imports_of(path))}
    assert asking == {ROOT / "cli" / "demo.py", ROOT / "megatron" / "launch.py"}
    done = run_without({"tba_lab"}, "import tba_offload.cli, tba_offload.megatron.launch")
    assert done.returncode == 0, done.stderr


def code_of(path: Path) -> str:
    """A file without its comments and strings."""
    return ast.unparse(ast.fix_missing_locations(_WithoutStrings().visit(ast.parse(text_of(path)))))


class _WithoutStrings(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def test_every_public_name_is_there_without_optional_packages(python_with_torch: Warm) -> None:
    code = "import tba_offload as t\nfor name in t.__all__: getattr(t, name)\nassert not t.attach is None"
    done = run_without(OPTIONAL, code, python=python_with_torch)
    assert done.returncode == 0, done.stderr


def test_training_needs_no_optional_package(tmp_path: Path) -> None:
    """Not even NumPy, which pictures, the demo and the programs that it is built on bring along."""
    code = f"""
import sys, warnings
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own, when it is imported
import torch, tba_offload as tba
torch.set_num_threads(1)
blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4))
model = torch.nn.Sequential(*blocks)
policy = {{"budget": {{"in_flight_bytes": "32KiB"}}, "min_tensor_bytes": 0}}
for checksum in (False, True):
    policy["store"] = {{"kind": "file", "checksum": checksum}}
    with tba.attach(model, policy, directories={str(tmp_path)!r}) as session:
        with session.step() as step:
            model(torch.randn(64, 64, requires_grad=True)).square().sum().backward()
    assert step.record.offloaded_bytes > 0 < step.record.read_bytes, step.record
assert "numpy" not in sys.modules
"""
    done = run_without(OPTIONAL | {"numpy"}, code)
    assert done.returncode == 0, done.stderr


def test_policies_and_logs_need_no_torch() -> None:
    done = run_without(OPTIONAL | {"torch"}, "import tba_offload as t\nt.OffloadConfig()\nt.read_run_log")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        *(
            (f"import tba_offload.integrations.{name}", f"pip install 'tba-offload[{extra}]'")
            for name, extra in (
                ("transformers", "transformers"),
                ("lightning", "lightning"),
                ("pytorch_lightning", "lightning"),
            )
        ),
        ("import tba_offload.megatron as m; m.require_core('this')", "pip install 'tba-offload[megatron]'"),
        (
            "from tba_offload.report.rok import require_matplotlib as r; r()",
            "pip install 'tba-offload[plots]'",
        ),
        (
            """
from tba_offload.store import open_store
from tba_offload.device import device_of
open_store(kind="gds", directories=["/tmp"], device=device_of("cpu"))
""",
            f"pip install 'tba-offload[gds-cu{13 if (torch.version.cuda or '').startswith('13.') else 12}]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(code: str, remedy: str, python_with_torch: Warm) -> None:
    done = run_without(OPTIONAL, code, python=python_with_torch)
    assert done.returncode == 1
    assert "MissingDependencyError" in done.stderr
    assert remedy in done.stderr


def test_public_names() -> None:
    assert len(set(tba_offload.__all__)) == len(tba_offload.__all__) > 20
    for name in tba_offload.__all__:
        assert getattr(tba_offload, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        tba_offload.no_such_name  # noqa: B018


PLANNING = [path for path in MODULES if part_of(path) in {"adapt", "plan"}]


def test_what_plans_assigns_to_itself_alone() -> None:
    """The simulator's items are the exception: they are many, and their transitions are its business."""

    def foreign(path: Path) -> set[str]:
        functions = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))
        owners = {owner_of(name) for function in functions for name in assigned_in(function)}
        return owners - ({"self", "item"} if path.name == "traffic.py" else {"self"})

    assert those_that_break(foreign, PLANNING) == {}


def assigned_in(function: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a function or a file assigns to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def owner_of(name: ast.Attribute) -> str:
    return ast.unparse(name.value)


# The objects of which a file sets attributes, without leading underscores, and why it may.
FOREIGN = {
    "compiling.py": ("function", "marks of torch.compile, which reads them there"),
    "capture/hooks.py": (
        "capture capture.trace entry packed self.capture.trace trace",
        "counters of the step, and the entry of a storage: a call for each would be the dearest part",
    ),
    "capture/identity.py": ("tensor witness", "tensors of torch"),
    "capture/rematerialize.py": (
        "self.capture.trace self.trace trace trial twin",
        "as hooks: counters of the step, and twins of one storage",
    ),
    "capture/resize.py": ("torch.UntypedStorage", "stands in for a method of torch"),
    "capture/site.py": ("module self.layer.module", "the module's forward is wrapped, and put back"),
    "capture/trace.py": ("scope scope.marks self.marks", "parts of the trace, which this file defines"),
    "capture/transforms.py": ("torch.autograd.graph", "stands in for a function of torch"),
    "config/options.py": ("checked", "a class that this function makes"),
    "device/malloc.py": ("function", "ctypes"),
    "device/memory.py": ("finalizer", "weakref"),
    "device/streams.py": ("self.local", "state of one thread"),
    "errors.py": ("error", "an alternative constructor"),
    "megatron/arguments.py": ("action parser", "argparse; Megatron's parser is extended"),
    "megatron/script.py": ("sys", "the script sees its own command line"),
    "placements/builtin.py": ("Placement", "the class offers the placements that derive from it"),
    "plan/traffic.py": ("item", "items are many, and their transitions are this file's business"),
    "recompute/parametrized.py": ("cache", "the cache of torch.nn.utils.parametrize"),
    "recompute/saved_again.py": ("end", "the end of a run, which this file defines"),
    "renamed.py": ("module", "a module that is being made"),
    "session/budget.py": ("self.watched.capture", "the budget that it keeps to where a drive is slow"),
    "states/away.py": (
        "made master",
        "what the constructor makes; a master while it is away has another class",
    ),
    "states/host_update.py": ("self.tensor", "a tensor in host memory has a gradient there"),
    "states/masters.py": ("bound", "a tensor over bytes of a master has its gradient"),
    "states/pieces.py": ("view", "a slice of a parameter has the slice of its gradient"),
    "states/takeover.py": (
        "hooked optimizer",
        "marks of a step, which PyTorch reads; the class of the optimizer, which is put back",
    ),
    "store/base.py": ("new", "the cause of an exception"),
    "store/engine.py": (
        "self.finalizer self.lanes self.life",
        "weakref; the parts that a store is made of",
    ),
    "store/exit_status.py": ("sys", "the stream of errors at the end of the process"),
    "store/lanes.py": ("shift", "what an I/O thread is at, which this file defines"),
    "store/leases.py": ("lease", "leases, which this file defines"),
    "store/open.py": ("store", "why a kind was chosen is known after the store is open"),
    "store/posix.py": ("memoryview_at function", "ctypes"),
    "store/transfers.py": (
        "error failure lease leases transfer",
        "exceptions; and counters under the store's lock, which is held once for a transfer",
    ),
    "states/early.py": ("parameter", "frees its gradient, which autograd has put there"),
    "testing/around.py": ("store.mover", "puts faults between a store and its bytes, and takes them away"),
    "testing/faults.py": ("byte posix", "ctypes; stands in for calls of the system"),
    "transfer/failures.py": ("error", "the cause of an exception"),
    "transfer/ledger.py": ("self.stats stats", "its own figures"),
    "transfer/offloader.py": ("self.shared", "what writer and reader share is set by their owner alone"),
    "transfer/reader.py": ("self.ledger.stats stats", "figures, on the way of every tensor"),
    "transfer/reads.py": ("self.ledger.stats", "figures, on the way of every tensor"),
    "transfer/shared.py": ("self.ledger.stats", "figures, on the way of every tensor"),
    "transfer/storage.py": (
        "drop handle piece record span tensor",
        "the parts of a record, which this file defines",
    ),
    "transfer/writer.py": ("self.ledger.stats stats", "figures, on the way of every tensor"),
    "weights/piece.py": ("look.parameter", "parameters of torch, which look at their storage or at nothing"),
}


def test_state_has_one_owner() -> None:
    """Nothing is listed that is not there any more."""

    def differs(path: Path) -> set[str]:
        names = {owner_of(name) for name in assigned_in(tree_of(path))} - {"self", "cls"}
        found = {re.sub(r"(^|\.)_", r"\1", name) for name in names}
        return found ^ set(FOREIGN.get(str(path.relative_to(ROOT)), ("", ""))[0].split())

    assert those_that_break(differs, MODULES) == {}
    assert set(FOREIGN) <= {str(path.relative_to(ROOT)) for path in MODULES}
    assert all(why for _, why in FOREIGN.values())


def test_the_window_is_written_once() -> None:
    """The offloader, the store that spills and the simulator all go by it."""
    for name in ("transfer/ledger.py", "transfer/writer.py", "store/tiered.py", "plan/traffic.py"):
        assert "tba_offload.plan.window" in imports_of(ROOT / name), name


UNNAMED = re.compile(r"\b(nobody|somebody|someone|anybody|no one)\b", re.IGNORECASE)
"""Words that stand for a subject that can be named: the planner, the drive, a layer."""

AFTER = re.compile(r"\bbehind\b(?! (the host|it|kvikio's back|the store's back)\b)", re.IGNORECASE)
"""``behind`` where ``after`` is meant; a device may run behind the host, and a call pass behind a back."""

LEFT_BEHIND = re.compile(r"\b(leave|leaves|left|fallen|falls|no file|nothing) behind\b", re.IGNORECASE)

WHO = re.compile(r"\bwho\b(?= (saves|writes|reads|holds|waits|owns|calls|asks|uses))", re.IGNORECASE)


def test_prose_names_its_subject() -> None:
    def unnamed(path: Path) -> list[str]:
        text = LEFT_BEHIND.sub("", " ".join(text_of(path).split()))
        return [word[0] for pattern in (UNNAMED, AFTER, WHO) for word in pattern.finditer(text)]

    assert those_that_break(unnamed, [*MODULES, *LAB_MODULES]) == {}


def test_docstrings_of_constants_begin_with_a_noun() -> None:
    def without_noun(path: Path) -> list[str]:
        tree = tree_of(path)
        bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
        said = [
            str(getattr(node.value, "value", ""))
            for body in bodies
            for before, node in pairwise(body)
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Expr)
        ]
        return [text for text in said if text.startswith(("What ", "Who ", "How ", "When ", "Where "))]

    assert those_that_break(without_noun, [*MODULES, *LAB_MODULES]) == {}
