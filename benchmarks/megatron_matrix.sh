#!/usr/bin/env bash
# pretrain_gpt.py of a Megatron-LM checkout, with and without offloading, in many layouts: the same training?
#     bash benchmarks/megatron_matrix.sh CHECKOUT [--layout NAME]... [--door launch|patch|both] [--states]
#         [--flags FLAGS] [--markdown FILE]
# $PYTHON chooses the interpreter, which needs tba-offload[scripts]: pip install -e '.[scripts]'
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo CUDA_DEVICE_MAX_CONNECTIONS=1
exec "${PYTHON:-$root/.venv/bin/python}" "$root/benchmarks/megatron_matrix.py" "$@"
