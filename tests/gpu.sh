#!/usr/bin/env bash
# The tests that need an NVIDIA GPU, also on a machine without a network.
#     bash tests/gpu.sh download WHEELS    where there is a network: fills a folder with what the tests need
#     bash tests/gpu.sh run WHEELS         where there is a GPU: installs from it into .venv-gpu, and runs the tests
# torch is not among the wheels: the interpreter (PYTHON, 3.12 by default) has one that knows the GPU.
# CUDA names the major version of CUDA whose kvikio is wanted, 13 by default. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 2 ]; then
    sed -n '3,4s/^# *//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
what=$1 wheels=$2
shift 2
CUDA=${CUDA:-13}
PYTHON=${PYTHON:-python3.12}

case $what in
download)
    # Without dependencies where these are large: cupy and CUDA's libraries are on the machine with the GPU.
    "$PYTHON" -m pip download --quiet --dest "$wheels" --no-deps "kvikio-cu$CUDA" "libkvikio-cu$CUDA" \
        rapids-logger cuda-pathfinder
    "$PYTHON" -m pip download --quiet --dest "$wheels" --only-binary :all: \
        click 'pydantic>=2.7' pyyaml rich xxhash numpy hypothesis pytest pytest-timeout 'setuptools>=77' wheel
    ;;
run)
    "$PYTHON" -m venv --system-site-packages .venv-gpu
    .venv-gpu/bin/pip install --quiet --no-index --find-links "$wheels" --no-deps "$wheels"/*kvikio*.whl \
        "$wheels"/rapids_logger*.whl "$wheels"/cuda_pathfinder*.whl
    .venv-gpu/bin/pip install --quiet --no-index --find-links "$wheels" \
        click pydantic pyyaml rich xxhash numpy hypothesis pytest pytest-timeout setuptools wheel
    .venv-gpu/bin/pip install --quiet --no-index --no-deps --no-build-isolation --editable .
    export CUBLAS_WORKSPACE_CONFIG=:4096:8
    .venv-gpu/bin/python -m pytest -m gpu "$@"
    ;;
*)
    echo "neither download nor run: $what" >&2
    exit 2
    ;;
esac
