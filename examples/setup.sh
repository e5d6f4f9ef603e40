# Sourced by the scripts that a newcomer runs: makes .venv in the checkout and installs the package there.
#
# Without an NVIDIA GPU a CPU build of torch is installed, which spares gigabytes of CUDA libraries, unless
# TORCH_BUILD=cuda.
# PYTHON picks the interpreter (3.11 or later), TORCH_VERSION the version of torch.

VENV=.venv
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# find_python MINOR CANDIDATES...: the first that is Python 3.MINOR or later
find_python() {
    local minor=$1 candidate
    shift
    for candidate in "${PYTHON:-}" "$@"; do
        if [ -n "$candidate" ] &&
            "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $minor))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "needs Python 3.$minor or later; name it with PYTHON=/path/to/python" >&2
    return 1
}

# saying WHAT COMMAND...: runs it; says at once and then every 5 seconds what is going on
saying() {
    local what=$1 began=$SECONDS status=0 heartbeat
    shift
    echo "$what" >&2
    # It sees for itself whether the script is still there, since Ctrl-C does not reach a background job.
    while sleep 5 && kill -0 $$ 2>/dev/null; do
        echo "$what: $((SECONDS - began)) s so far" >&2
    done &
    heartbeat=$!
    "$@" || status=$?
    kill "$heartbeat" 2>/dev/null || true
    wait "$heartbeat" 2>/dev/null || true
    return "$status"
}

install_torch() {
    local pip="$VENV/bin/pip install --quiet"
    if "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        return
    fi
    if nvidia-smi >/dev/null 2>&1; then
        $pip "torch>=$TORCH_VERSION"
    elif [ "${TORCH_BUILD:-}" = cuda ]; then
        $pip "torch==$TORCH_VERSION"
    else
        $pip "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
            $pip "torch==$TORCH_VERSION+cpu" --index-url "$TORCH_CPU_INDEX" 2>/dev/null ||
            { echo "found no CPU build, so that torch brings its CUDA libraries" >&2 && $pip "torch==$TORCH_VERSION"; }
    fi
}

# setup_venv EXTRAS [REQUIREMENTS...]: from the root of the checkout, e.g. setup_venv megatron,plots; makes $VENV
setup_venv() {
    local extras=$1 done_by python
    shift
    # pip takes its time to find that nothing is to be done.
    done_by="$extras $* $TORCH_VERSION $(cksum <pyproject.toml)"
    if [ "$(cat "$VENV/installed" 2>/dev/null)" = "$done_by" ]; then
        return
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python 11 python3.11 python3 python3.12 python3.13 python)
        saying "creating $VENV" "$python" -m venv "$VENV"
    fi
    saying "installing torch" install_torch
    saying "installing tba-offload[$extras]" "$VENV/bin/pip" install --quiet --editable ".[$extras]" "$@"
    echo "$done_by" >"$VENV/installed"
}
