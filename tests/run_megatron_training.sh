#!/usr/bin/env bash
# Runs the tests of Megatron's own training loop in .venv312, which it makes. Arguments go to pytest: -n 0 for a
# single process. With TORCH_BUILD=cuda it gets PyTorch's CUDA build also where there is no GPU, for the tests of
# that.
#
# megatron-core carries megatron.training from 0.19, for which it asks for Python 3.12. It is found on PATH, among
# the versions of pyenv, or by uv; PYTHON names another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
VENV=.venv312

pythons=(python3.12)
if command -v pyenv >/dev/null; then
    pythons+=("$(pyenv root)"/versions/3.12*/bin/python)
fi
if command -v uv >/dev/null; then
    pythons+=("$(uv python find 3.12 2>/dev/null || true)")
fi
PYTHON=$(find_python 12 "${pythons[@]}")

setup_venv dev,scripts megatron-core==0.19.2 torchtitan==0.2.2
# What tests/run.sh leaves out, and what another release of megatron-core could break.
tests=(tests/megatron/test_megatron_{pretrain,examples,parallel,layers}.py)
# From Python 3.12 on a frame keeps more alive, and a process that ends starts no thread.
tests+=(tests/contracts/memory/test_memory_promise.py tests/unit/session/test_steps.py)
# TensorBoard is there.
tests+=(tests/unit/session/test_sinks.py)
if .venv312/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    tests+=(tests/gpu/on_cuda_build.py tests/unit/integrations/on_torchtitan.py)
fi
.venv312/bin/python -m pytest -n 2 --dist worksteal "${tests[@]}" "$@"
