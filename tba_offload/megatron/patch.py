"""Patches a Megatron-LM checkout, so that its own scripts have the flags without a launcher.

There is a patch for each known release. It is applied by ``git apply``, which changes all files or none and
needs no repository.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tba_offload.errors import PatchError

RELEASES = {"core_v0.16.1": "0.16", "core_v0.19.0": "0.19", "main": "0.20"}
"""Name of a release to the version that its ``megatron/core/package_info.py`` begins with."""

_VERSION_FILE = Path("megatron/core/package_info.py")
_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)
_TARGET = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Checkout:
    """A Megatron-LM tree of a known release.

    Attributes:
        directory: Its root.
        release: The name of the release.
    """

    directory: Path
    release: str

    @classmethod
    def at(cls, directory: str | os.PathLike[str]) -> Checkout:
        """Find out which release lies in a directory.

        Raises:
            PatchError: None, or one that there is no patch for.
        """
        root = Path(directory)
        try:
            text = (root / _VERSION_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise PatchError(f"{root} is no Megatron-LM checkout: {error}") from None
        numbers = dict(_NUMBER.findall(text))
        version = ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
        for release, beginning in RELEASES.items():
            if version.startswith(f"{beginning}."):
                return cls(root, release)
        raise PatchError(
            f"{root} is Megatron-LM {version}, and there are patches for {', '.join(RELEASES)} only; use "
            "tba-offload launch, which changes no file"
        )

    def patch(self, *, check: bool = False) -> bool:
        """Put the patch in.

        Args:
            check: Change nothing.

        Returns:
            Whether it was not in before.

        Raises:
            PatchError: The files are not those of the release.
        """
        if not self._fault("--check", "--reverse"):
            return False
        if changed := self._own_changes():
            names = ", ".join(changed)
            raise PatchError(
                f"{self.directory}: {names} differs from what is committed; commit or stash it first"
            )
        if self._fault("--check"):
            raise PatchError(
                f"{self.directory}: the patch for {self.release} does not fit, so these are not its files; "
                "use tba-offload launch, which changes no file"
            )
        return check or self._apply()

    def unpatch(self, *, check: bool = False) -> bool:
        """Take the patch out again.

        Args:
            check: Change nothing.

        Returns:
            Whether it was in.

        Raises:
            PatchError: The lines of the patch were changed since, or only some of them are there.
        """
        if not self._fault("--check", "--reverse"):
            return check or self._apply("--reverse")
        if self._fault("--check"):
            raise PatchError(
                f"{self.directory}: the lines of the patch for {self.release} are not there as they were put "
                "in; take them out by hand, they begin with '# tba-offload:'"
            )
        return False

    def _apply(self, *options: str) -> bool:
        if fault := self._fault("--whitespace=nowarn", *options):
            raise PatchError(f"{self.directory}: git apply failed: {fault}")
        return True

    def _fault(self, *options: str) -> str:
        """Return what keeps ``git apply`` with these options from its work; empty if it has done it."""
        done = self._git("apply", *options, str(self._patch))
        return done.stderr.strip() or "unknown error" if done.returncode else ""

    def _own_changes(self) -> list[str]:
        """Files of the patch that differ from what is committed, where there is a repository."""
        targets = _TARGET.findall(self._patch.read_text(encoding="utf-8"))
        status = self._git("status", "--porcelain", "--untracked-files=no", "--", *targets)
        return [line[3:] for line in status.stdout.splitlines()] if status.returncode == 0 else []

    @property
    def _patch(self) -> Path:
        return Path(__file__).parent.resolve() / "patches" / self.release / "tba-offload.patch"

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        git = shutil.which("git")
        if git is None:
            raise PatchError("patching a checkout needs git, which is not installed")
        # A repository that the checkout merely lies in is not asked.
        root = self.directory.resolve()
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"}
        return subprocess.run(  # noqa: S603 - no shell, and the arguments are ours
            [git, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
