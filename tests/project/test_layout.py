"""Tests lie in folders that say what they hold."""

from __future__ import annotations

from places import SUPPORT, TESTS

HOMES = {"benchmarks", "contracts", "fuzz", "gpu", "lab", "megatron", "project", "support", "unit"}


def test_no_test_lies_in_the_flat_folder() -> None:
    flat = [path.name for path in TESTS.glob("test_*.py")]
    assert flat == [], (
        f"move {flat} to tests/contracts/<promise> (what docs/understand/contracts.md promises), "
        "tests/unit/<part of the package>, tests/megatron, tests/lab, tests/benchmarks, tests/gpu or "
        "tests/project (the repository itself)"
    )


def test_folders_are_those_that_contributors_are_told_of() -> None:
    contributing = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"} == HOMES
    assert all(f"`{name}" in contributing for name in HOMES)


def test_a_file_of_tests_has_a_name_of_its_own() -> None:
    """Pages name it without its folder, and pytest imports it so."""
    names = [path.name for path in TESTS.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_support_has_no_tests_and_tests_import_no_tests_of_other_folders() -> None:
    assert list(SUPPORT.glob("test_*.py")) == []
    for path in TESTS.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]) and words[1].startswith("test_"):
                assert (path.parent / f"{words[1]}.py").exists(), (path.name, line)
