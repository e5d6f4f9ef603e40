#!/usr/bin/env bash
# Runs the checks and the tests in .venv, which it makes. Arguments go to pytest: -n 0 for a single process.
# What is marked full is left out, but for SAMPLE=10 SEED=1: ten per cent of it, others for each seed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/setup.sh
setup_venv dev,docs,frameworks,megatron
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python -m pytest -n 2 --dist worksteal "$@"
