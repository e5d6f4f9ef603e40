#!/usr/bin/env bash
# Trains a small Megatron GPT on real text three ways: keep, recompute and offload. Compares memory and speed.
# Installs everything into .venv. Options are those of `tba-offload demo`, for example --steps 8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
if [ ! -f .venv/installed ]; then
    echo "This takes about 8 minutes: 4 to install PyTorch and megatron-core into .venv, once, and 4 to train." >&2
else
    echo "This takes about 4 minutes on two CPU cores." >&2
fi
setup_venv megatron,report
output=runs/quickstart-$(date +%Y%m%d-%H%M%S)
.venv/bin/tba-offload demo --output "$output" "$@"
