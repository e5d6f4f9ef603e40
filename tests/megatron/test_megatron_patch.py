"""Patching a checkout: only the files of a known release, only once, and back again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tba_offload.errors import PatchError
from tba_offload.megatron import patch as patching
from tba_offload.megatron.patch import RELEASES, Checkout

PATCHES = Path(patching.__file__).parent / "patches"
VERSION = 'MAJOR = {}\nMINOR = {}\nPATCH = 0\nPRE_RELEASE = ""\n'


def originals(release: str) -> dict[str, str]:
    """The lines of each file that a patch stands between, as they are before it; the rest does not matter."""
    files: dict[str, str] = {}
    name = ""
    for line in (PATCHES / release / "tba-offload.patch").read_text().splitlines():
        if line.startswith("+++ b/"):
            name = line.removeprefix("+++ b/")
            files[name] = ""
        elif line.startswith("@@"):
            start = int(line.split()[1].removeprefix("-").split(",")[0])
            files[name] += "#\n" * (start - 1 - files[name].count("\n"))
        elif line.startswith(" ") and name:
            files[name] += line[1:] + "\n"
    return files


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout


def contents(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}


@pytest.fixture(params=RELEASES)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    release: str = request.param
    root = tmp_path / "Megatron-LM"
    for name, text in originals(release).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "megatron/core").mkdir(parents=True)
    (root / "megatron/core/package_info.py").write_text(VERSION.format(*RELEASES[release].split(".")))
    return root


def commit(root: Path) -> Path:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "release")
    return root


@pytest.mark.parametrize("committed", [False, True])
def test_a_patch_goes_in_once_and_comes_out_again(committed: bool, tree: Path) -> None:
    root = commit(tree) if committed else tree
    before = contents(root)
    found = Checkout.at(root)
    assert found.patch(check=True)
    assert contents(root) == before
    assert found.patch()
    after = contents(root)
    added = {
        name: [line.strip() for line in after[name].splitlines() if line not in before[name].splitlines()]
        for name in after
        if after[name] != before[name]
    }
    assert sorted(added) == ["megatron/training/arguments.py", "megatron/training/training.py"]
    lines = [line for found in added.values() for line in found if line]
    assert sum(line.startswith("# tba-offload: ") for line in lines) == 3
    assert len(lines) == 9
    for line in lines:
        if "import" in line:
            exec(line, {})  # the names that a checkout calls are there
    assert not found.patch()
    assert contents(root) == after
    assert found.unpatch(check=True)
    assert contents(root) == after
    assert found.unpatch()
    assert not found.unpatch()
    assert contents(root) == before


def test_other_files_are_refused(tree: Path) -> None:
    path = tree / "megatron/training/arguments.py"
    path.write_text("# another file\n")
    before = contents(tree)
    with pytest.raises(PatchError, match="the patch does not apply"):
        Checkout.at(tree).patch()
    assert contents(tree) == before


def test_lines_that_were_changed_are_not_taken_out(tree: Path) -> None:
    found = Checkout.at(tree)
    found.patch()
    path = tree / "megatron/training/arguments.py"
    path.write_text(path.read_text().replace("# tba-offload: ", "# mine: "))
    before = contents(tree)
    with pytest.raises(PatchError, match="Remove by hand each block"):
        found.unpatch()
    assert contents(tree) == before


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "is not a Megatron-LM checkout"),
        (VERSION.format(0, 12), "is Megatron-LM 0.12.0, and patches exist only for core_v0.16.1"),
        ("", "is Megatron-LM ?.?.?"),
    ],
)
def test_an_unknown_tree_is_refused(version: str | None, message: str, tmp_path: Path) -> None:
    if version is not None:
        (tmp_path / "megatron/core").mkdir(parents=True)
        (tmp_path / "megatron/core/package_info.py").write_text(version)
    with pytest.raises(PatchError) as caught:
        Checkout.at(tmp_path)
    assert message in str(caught.value)
