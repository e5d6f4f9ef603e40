#!/usr/bin/env bash
# Runs the checks and the tests in .venv, which it makes. Arguments go to pytest: -n 0 for a single process.
# What is marked full is left out, but for SAMPLE=10 SEED=1: ten per cent of it, others for each seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
setup_venv dev,docs,frameworks,quantized,megatron
# The real kvikio, for tests on a stub of the driver: in a folder of its own, so that no other test sees it.
kvikio=$PWD/.venv/kvikio packages=tests/support/stub_driver/requirements.txt
if ! cmp -s "$packages" "$kvikio/installed"; then
    rm -rf "$kvikio"
    with_progress "installing kvikio" .venv/bin/pip install --quiet --no-deps --target "$kvikio" -r "$packages"
    cp "$packages" "$kvikio/installed"
fi
# Processes that tests start, and pytest itself, find compiled what the run before has compiled.
unset PYTHONDONTWRITEBYTECODE
.venv/bin/mypy & # the longest of the checks
types=$!
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports --no-cache
wait "$types"
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
