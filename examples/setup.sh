# Sourced by the scripts that a newcomer runs: makes .venv in the checkout and installs the package there.
#
# Without an NVIDIA GPU a CPU build of torch is installed, which spares gigabytes of CUDA libraries.
# PYTHON picks the interpreter (3.11 or later), TORCH_VERSION the version of torch.

TORCH_VERSION=${TORCH_VERSION:-2.13.0}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "needs Python 3.11 or later; name it with PYTHON=/path/to/python" >&2
    return 1
}

install_torch() {
    if .venv/bin/python -c 'import torch' 2>/dev/null; then
        return
    fi
    if nvidia-smi >/dev/null 2>&1; then
        .venv/bin/pip install --quiet "torch>=$TORCH_VERSION"
    else
        .venv/bin/pip install --quiet "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
            .venv/bin/pip install --quiet "torch==$TORCH_VERSION+cpu" --index-url "$TORCH_CPU_INDEX"
    fi
}

# setup_venv EXTRAS: from the root of the checkout, e.g. setup_venv megatron,plots
setup_venv() {
    if [ ! -x .venv/bin/python ]; then
        echo "creating .venv" >&2
        "$(find_python)" -m venv .venv
    fi
    echo "installing torch and tba-offload[$1]" >&2
    install_torch
    .venv/bin/pip install --quiet --editable ".[$1]"
}
