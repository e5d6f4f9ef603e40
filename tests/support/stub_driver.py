"""The real kvikio without a GPU: a driver and a cuFile of host memory, for processes of their own.

gcc makes ``libcuda.so.1`` and ``libcufile.so.0`` of :data:`SOURCES`; such a process finds them first. kvikio
is that of ``requirements.txt`` there, without its dependencies: they bring cupy, which needs CUDA.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from children import environment
from places import SUPPORT

from tba_offload.device import Device

SOURCES = SUPPORT / "stub_driver"
PACKAGES = Path(os.environ.get("KVIKIO_PACKAGES", Path(sys.prefix) / "kvikio"))
"""The folder that kvikio is installed in, beside the virtual environment's own packages."""
INSTALL = f"pip install --no-deps --target {PACKAGES} -r {SOURCES / 'requirements.txt'}"


def build(folder: Path) -> None:
    for name in ("libcuda.so.1", "libcufile.so.0"):
        source = SOURCES / f"{name.partition('.')[0]}.c"
        flags = ["-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", *flags, "-o", folder / name, source], check=True)


def variables(folder: Path) -> dict[str, str]:
    found = environment()
    paths = [found["PYTHONPATH"], str(PACKAGES)]
    # cuFile's stub needs no /run/udev, without which kvikio does not ask it.
    own = {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "libcufile.so.0"),  # a CUDA build of PyTorch brings a cuFile of its own
        "PYTHONPATH": os.pathsep.join(paths),
        "KVIKIO_COMPAT_MODE": "OFF",
    }
    return found | own


# In such a process


@cache
def libcuda() -> ctypes.CDLL:
    """The driver, which is loaded already or comes from the same place."""
    library = ctypes.CDLL("libcuda.so.1")
    library.stub_count.restype = ctypes.c_long
    return library


@cache
def libcufile() -> ctypes.CDLL:
    library = ctypes.CDLL("libcufile.so.0")
    library.stub_get.restype = ctypes.c_long
    library.stub_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
    return library


def count(name: str) -> int:
    found = int(libcuda().stub_count(name.encode()))
    assert found >= 0, name
    return found


def told(name: str) -> int:
    return int(libcufile().stub_get(name.encode()))


def tell(name: str, value: int) -> None:
    libcufile().stub_set(name.encode(), value)


def start_counting() -> None:
    libcuda().stub_reset()
    tell("transfers", 0)


class StubDevice(Device):
    """The driver's device: it computes on the CPU, at once."""

    pins_memory = True
