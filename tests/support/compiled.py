"""Libraries that tests need of a compiler, made once for each source and version of PyTorch."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import torch


def library_of(source: Path) -> Path:
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tba-offload-tests"
    library = cache / f"{source.stem}-{key}.so"
    if library.exists():
        return library
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = cache / f"{library.stem}-{os.getpid()}.so"  # several processes may build at once
    root = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(source), "-o", str(new)]
    command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    new.rename(library)
    return library
