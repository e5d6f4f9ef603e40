#!/usr/bin/env bash
# Trains a small Megatron GPT on real text three ways (keep, recompute, offload) and draws the curve.
# Does all its own set-up in .venv. Options are those of `tba-offload demo`, for example --steps 8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
setup_venv megatron,plots
output=runs/quickstart-$(date +%Y%m%d-%H%M%S)
.venv/bin/tba-offload demo --output "$output" "$@"
