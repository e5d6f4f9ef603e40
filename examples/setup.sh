# Creates .venv in the checkout and installs the package there. Other scripts source this file.
#
# Without an NVIDIA GPU it installs the CPU build of torch, which saves gigabytes of CUDA libraries.
# TORCH_BUILD=cuda installs the CUDA build instead. PYTHON sets the interpreter (3.11 or later), and TORCH_VERSION
# the version of torch.

VENV=.venv
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# find_python MINOR CANDIDATES...: prints the first candidate that is Python 3.MINOR or later
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
    echo "found no Python 3.$minor or later. Set PYTHON=/path/to/python" >&2
    return 1
}

# with_progress WHAT COMMAND...: prints WHAT, runs the command, and prints the elapsed time every 15 seconds
with_progress() {
    local what=$1 began=$SECONDS status=0 heartbeat
    shift
    echo "$what" >&2
    # The loop checks that the script still runs, because Ctrl-C does not stop background jobs.
    while sleep 15 && kill -0 $$ 2>/dev/null; do
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
            { echo "found no CPU build of torch, so this installs the CUDA build" >&2 && $pip "torch==$TORCH_VERSION"; }
    fi
}

# setup_venv EXTRAS [REQUIREMENTS...]: creates $VENV in the root of the checkout. Example: setup_venv megatron,plots
setup_venv() {
    local extras=$1 done_by python
    shift
    # Skip pip if it has nothing to do, because it needs seconds to find that out.
    done_by="$extras $* $TORCH_VERSION $(cksum <pyproject.toml)"
    if [ "$(cat "$VENV/installed" 2>/dev/null)" = "$done_by" ]; then
        return
    fi
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python 11 python3.11 python3 python3.12 python3.13 python)
        with_progress "creating $VENV" "$python" -m venv "$VENV"
    fi
    with_progress "installing torch" install_torch
    with_progress "installing tba-offload[$extras]" "$VENV/bin/pip" install --quiet --editable ".[$extras]" "$@"
    echo "$done_by" >"$VENV/installed"
}
