"""The store on kvikio: the real one, on a stub of the driver everywhere, and on a GPU where there is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver
from places import ROOT
from store_contract import at_lead, pattern

from tba_offload.device.digest import sums

# The real kvikio


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    assert stub_driver.PACKAGES.is_dir(), (
        f"bash tests/run.sh installs kvikio, and so does: {stub_driver.INSTALL}"
    )
    folder = tmp_path_factory.mktemp("driver")
    stub_driver.build(folder)
    return stub_driver.variables(folder)


def test_the_contract_and_every_fault_on_the_real_kvikio(variables: dict[str, str]) -> None:
    """The tests of ``gds_on_stub_driver.py``."""
    tests = Path(__file__).with_name("gds_on_stub_driver.py")
    alone = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    # A CUDA build of PyTorch asks the stub for devices, and warns that its own calls are not there.
    no_gpu = ["-W", "ignore:CUDA initialization:UserWarning"]
    command = [sys.executable, "-m", "pytest", "-q", *alone, *no_gpu, tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert int(passed) > 30
    assert "skipped" not in done.stdout


# Sums


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4095, 4096, 4097, 100_003])
def test_sums_tell_every_changed_byte_and_no_address(nbytes: int) -> None:
    data = pattern(nbytes)
    expected = sums(data)
    moved = at_lead(nbytes, 3, 4096).copy_(data)
    assert sums(moved) == expected
    assert len(expected) <= 4096 + 8 * (nbytes // 4096) + 4096
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = data.clone()
        changed[place] ^= 1
        assert sums(changed) != expected
