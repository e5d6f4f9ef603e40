"""Patches for Megatron-LM checkouts.

The scripts of a patched checkout have the ``--tba-`` flags and need no launcher. Each known release of
Megatron-LM has one patch. ``git apply`` changes all files of the patch, or no file. The checkout does not
need to be a git repository.
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
"""For each release with a patch, the first two numbers of the version in ``package_info.py``."""

_VERSION_FILE = Path("megatron/core/package_info.py")
_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Checkout:
    """Megatron-LM checkout of a known release.

    Attributes:
        directory: Root directory of the checkout.
        release: Name of the release, a key of :data:`RELEASES`.
    """

    directory: Path
    release: str

    @classmethod
    def at(cls, directory: str | os.PathLike[str]) -> Checkout:
        """Return the checkout in a directory.

        Raises:
            PatchError: The directory is not a Megatron-LM checkout, or no patch exists for its version.
        """
        root = Path(directory)
        try:
            text = (root / _VERSION_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise PatchError(f"{root} is not a Megatron-LM checkout: {error}") from None
        numbers = dict(_NUMBER.findall(text))
        version = ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
        for release, beginning in RELEASES.items():
            if version.startswith(f"{beginning}."):
                return cls(root, release)
        raise PatchError(
            f"{root} is Megatron-LM {version}, and patches exist only for {', '.join(RELEASES)}. Use "
            "tba-offload launch, which changes no file"
        )

    def patch(self, *, check: bool = False) -> bool:
        """Apply the patch to the checkout.

        Args:
            check: Whether to check the patch without changing files.

        Returns:
            True if the checkout was not patched before.

        Raises:
            PatchError: The files of the checkout differ from the files of the release, so the patch does not
                apply.
        """
        if not self._fault("--check", "--reverse"):
            return False
        if self._fault("--check"):
            raise PatchError(
                f"{self.directory}: the patch does not apply, because the files differ from {self.release}. "
                "Use tba-offload launch, which changes no file"
            )
        return check or self._apply()

    def unpatch(self, *, check: bool = False) -> bool:
        """Remove the patch from the checkout.

        Args:
            check: Whether to check that the patch can be removed, without changing files.

        Returns:
            True if the checkout was patched before.

        Raises:
            PatchError: Some lines of the patch were changed or are missing in the checkout.
        """
        if not self._fault("--check", "--reverse"):
            return check or self._apply("--reverse")
        if self._fault("--check"):
            raise PatchError(
                f"{self.directory}: some lines of the patch for {self.release} were changed. Remove by hand "
                "each block of lines that begins with '# tba-offload:'"
            )
        return False

    def _apply(self, *options: str) -> bool:
        if fault := self._fault("--whitespace=nowarn", *options):
            raise PatchError(f"{self.directory}: git apply failed: {fault}")
        return True

    def _fault(self, *options: str) -> str:
        """Return the error of ``git apply`` with the given options, or an empty string on success."""
        git = shutil.which("git")
        if git is None:
            raise PatchError("tba-offload patch needs git. Install git")
        # Do not search for a repository above the checkout.
        root = self.directory.resolve()
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"}
        patch = Path(__file__).parent.resolve() / "patches" / self.release / "tba-offload.patch"
        command = [git, "apply", *options, str(patch)]
        done = subprocess.run(  # noqa: S603 - no shell, and this module builds the arguments
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        return done.stderr.strip() or "unknown error" if done.returncode else ""
