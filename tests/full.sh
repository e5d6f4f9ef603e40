#!/usr/bin/env bash
# Runs every test there is: what tests/run.sh, tests/run_megatron_training.sh and tests/run_deepspeed.sh run, what is
# marked full, and all combinations of settings where those take a few. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FULL=1
bash tests/run.sh "$@"
bash tests/run_megatron_training.sh "$@"
bash tests/run_deepspeed.sh "$@"
