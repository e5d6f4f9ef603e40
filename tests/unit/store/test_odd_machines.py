"""Stores on machines that are not as usual: full disks, layers in memory, one owner for all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
from harness import MIB
from torch import nn

import tba_offload as tba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tba_offload.session import Session


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4))
    )


def offloading(*directories: Path) -> dict[str, object]:
    return {
        "default": "offload",
        "budget": {"in_flight_bytes": "4MiB"},
        "store": {"directories": [str(each) for each in directories]},
    }


def step(session: Session, model: nn.Sequential, rows: int) -> None:
    with session.step():
        model(torch.randn(rows, 128)).square().mean().backward()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root, to mount")

    with ExitStack() as stack:

        def mount(name: str, *arguments: str) -> Path:
            place = tmp_path / name
            place.mkdir()
            done = subprocess.run(["mount", *arguments, place], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no mount here: {done.stderr}")
            stack.callback(subprocess.run, ["umount", "-l", place], check=True)
            return place

        yield mount


@pytest.fixture
def disk(mounted: Callable[..., Path], tmp_path: Path) -> Callable[[int], Path]:
    def make(nbytes: int) -> Path:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, nbytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        return mounted("disk", "-o", "loop", str(image))

    return make


def free(place: Path) -> int:
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


@pytest.mark.filterwarnings("ignore:the store is full")
def test_checkpoints_are_saved_to_the_disk_of_the_activations(disk: Callable[[int], Path]) -> None:
    """It has less than a store leaves to others, so activations stay in memory."""
    place, model = disk(128 * MIB), blocks()
    before = free(place)
    with tba.attach(model, offloading(place)) as session:
        for _ in range(2):
            step(session, model, 3000)
            torch.save(model.state_dict(), place / "checkpoint.pt")
            assert free(place) > before - 2 * (place / "checkpoint.pt").stat().st_size - MIB
    assert session.records[-1].fallback_kept_bytes > 0


def test_a_missing_directory_for_temporary_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python replaces it without a word, perhaps by a small disk or by memory."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("TMP", str(tmp_path))
    model = blocks()
    with (
        pytest.warns(UserWarning, match=r"the store uses .*TMPDIR \('.*scratch'\) is missing"),
        tba.attach(model, {"default": "offload"}) as session,
    ):
        step(session, model, 8)
    assert session.store.description["directory"] == str(tmp_path)


def test_a_server_may_give_all_files_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that squashes root does: files that this process has just made are not its own."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    model = blocks()
    with tba.attach(model, offloading(tmp_path)) as session:
        step(session, model, 3000)
    assert session.records[-1].read_bytes > 0
