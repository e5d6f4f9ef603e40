"""The figures of the house are counted right, and of a commit without importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import BENCHMARKS

sys.path.append(str(BENCHMARKS))  # after all others: it has an io.py

import house

SOURCES = {
    "tba_offload/one.py": '''
from tba_offload.store import two

class Large:
    def __init__(self, other):
        """Counted too."""
        self.a = self.b = 1
        other.c = 2

    def short(self):
        self.a += 1
''',
    "tba_offload/store/__init__.py": "",
    "tba_offload/store/two.py": "def late():\n    import tba_offload.one\n\nclass Small: ...\n",
    "tba_lab/demo/three.py": "from tba_offload.store.two import late\n",
}


def test_the_figures() -> None:
    found = house.measured(SOURCES)
    assert found.lines == {"tba_offload": 11, "tba_offload/store": 4, "tba_lab": 1}
    assert sorted(found.functions) == [2, 2, 4]
    assert [str(each) for each in found.classes] == ["Large 8/2/2", "Small 1/0/0"]
    assert (found.circles, found.foreign) == (1, 1)


def test_what_only_type_checkers_import_makes_no_circle() -> None:
    late = "if TYPE_CHECKING:\n    import tba_offload.one\n"
    assert house.measured({**SOURCES, "tba_offload/store/two.py": late}).circles == 0


def test_a_table_has_a_row_for_each_figure() -> None:
    printed = "\n".join(house.table(house.House(), house.measured(SOURCES)))
    for word in ("lines of tba_offload/store", "median length", "Large 8/2/2", "import circles", "foreign"):
        assert word in printed


@pytest.mark.full
def test_this_tree_has_no_circle() -> None:
    found = house.measured(house.of_tree())
    assert found.circles == 0
    assert found.lines.total() > 10_000


@pytest.mark.parametrize(("arguments", "says"), [([], "usage"), (["no-such-commit"], "no-such-commit")])
def test_a_wrong_commit_is_an_error(arguments: list[str], says: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "house.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert says in done.stderr
