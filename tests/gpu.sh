#!/usr/bin/env bash
# Tests and benchmark on a machine with an NVIDIA GPU, also one without a network that is there for minutes only.
#
#     bash tests/gpu.sh download WHEELS
#         where there is a network: fills a folder with what that machine may lack, about 17 MB. torch, numpy and
#         cupy are not among them: it has its own, which know the GPU. Whatever else lies in the folder is
#         installed there too.
#     bash tests/gpu.sh run WHEELS RESULTS STEP...
#         where there is a GPU: does the steps one after another, whatever becomes of the one before, each within
#         a limit of its own, and writes RESULTS/STEP.log. The exit status is 1 if any of them failed.
#
#     step       limit  what
#     doctor      45 s  versions, which way bytes take to a drive and to memory, and how fast
#     smoke      125 s  device, memory and a few models with every placement, up to the first failure
#     quick      255 s  benchmarks/gpu.py --quick; everything that it wrote is RESULTS/quick.tar.gz
#     tests      120 s  all that is marked gpu but what the next two have, by JOBS processes at once, 8 by default
#     alone       70 s  those whose times or peaks other processes would change
#     compiled   100 s  compiled layers, and other allocators: processes and compilers of their own
#     states      90 s  benchmarks/states.py: steps whose backward covers what travels
#     sanitizer  190 s  the tests of orderly access once more, under compute-sanitizer if that is there
#     benchmark  560 s  benchmarks/gpu.py; likewise
#
# Runbook for a machine that runs commands of ten minutes, fifteen in all with the half that each start takes, and
# gets what is in a folder. Results are written as they come, also those of a step that is cut off. Limits are for
# what hangs: on an H200 doctor, tests, alone and compiled took 110 s together, and quick 150 s.
#     1. here:  bash tests/gpu.sh download WHEELS
#     2. there: bash tests/gpu.sh run WHEELS RESULTS doctor smoke                  within 2:50 min
#     3. there: bash tests/gpu.sh run WHEELS RESULTS quick tests alone compiled    within 9:05 min
#     4. there, another time: bash tests/gpu.sh run WHEELS RESULTS states sanitizer    within 4:40 min
#     5. there, another time: bash tests/gpu.sh run WHEELS RESULTS benchmark         within 9:20 min
# Mend what the second step found before going on; LIMIT=seconds replaces the limit of every step, and ARGUMENTS go
# to pytest, or to the benchmark: ARGUMENTS='-x -k host', ARGUMENTS='--size 8192x4x4096x1 --model torch'.
#
# PYTHON is the interpreter that has torch, python3 by default. TARGET is its version, 3.12 by default, and CUDA the
# major version of CUDA whose kvikio is wanted, 13 by default: both concern the download. DRIVE is a directory on
# the drive that is measured, by default the checkout's. Wheels go to SITE, a folder of their own and not a virtual
# environment: one that is made inside of another does not see what that has installed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3} TARGET=${TARGET:-3.12} CUDA=${CUDA:-13}

usage() {
    sed -n '4p;9p' "${BASH_SOURCE[0]}" | sed 's/^# *//' >&2
    exit 2
}

# download_wheels FOLDER: without dependencies, since each is named, or is on the machine; the versions are those
# that were installed together on such a Python
download_wheels() {
    local platforms=(--platform manylinux2014_x86_64) name
    for name in 2_28 2_27 2_24 2_17; do
        platforms+=(--platform "manylinux_${name}_x86_64")
    done
    "$PYTHON" -m pip download --quiet --dest "$1" --no-deps --only-binary :all: --implementation cp \
        --python-version "$TARGET" "${platforms[@]}" -r tests/gpu/requirements.txt \
        -r <(sed "s/cu13/cu$CUDA/" tests/support/stub_driver/requirements.txt)
}

install_wheels() {
    SITE=${SITE:-$(mktemp -d)}
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" \
        "$1"/*.whl || return
    export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
    export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_ADDOPTS="-p xdist.plugin -p pytest_timeout -p no:cacheprovider"
}

# cuFile asks udev's database for the file system on a drive, and takes no file of a drive that is not in it. On
# a machine without udev, as many containers are, it is told what it would find.
stand_in_for_udev() {
    local entry
    entry=/run/udev/data/b$(stat --format %Hd:%Ld "${DRIVE:-.}")
    [ -e "$entry" ] && return
    mkdir -p /run/udev/data 2>/dev/null &&
        printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n' "$(stat --file-system --format %T "${DRIVE:-.}" |
            sed 's,ext2/ext3,ext4,')" >"$entry" || true
}

# limited SECONDS COMMAND...: ends it by a signal that shows where it stands, then for good
limited() {
    local seconds=$1
    shift
    timeout --signal=INT --kill-after=15 "${LIMIT:-$seconds}" "$@"
}

TESTS=("$PYTHON" -m pytest -m gpu tests/gpu tests/unit/store) # there are no others
TOGETHER=(-n "${JOBS:-8}")
ALONE='takes_the_time or allocators_peak'
APART='compiled or another_allocator'
SMOKE='gpu_memory or (test_same_bits and gpt and dtype0)'
STATES=(--device cuda --store host --precision high --matrices 6 --width 8192 --sub-group 256MiB --rows 32768)
ORDERLY='gpu_memory or stream'

# packing FOLDER ARCHIVE COMMAND...: what it writes into the folder is in the archive every ten seconds
packing() {
    local folder=$1 archive=$2 status=0 packer
    shift 2
    while sleep 10; do pack "$folder" "$archive"; done >/dev/null 2>&1 & # or tee would wait for a sleep
    packer=$!
    "$@" || status=$?
    kill "$packer" 2>/dev/null
    wait "$packer" 2>/dev/null
    pack "$folder" "$archive"
    return "$status"
}

pack() {
    tar -C "$1" -czf "$2.new" . 2>/dev/null && mv "$2.new" "$2"
}

do_step() {
    local results=$2 arguments=() folder
    read -ra arguments <<<"${ARGUMENTS:-}"
    case $1 in
    doctor)
        nvidia-smi
        limited 45 "$PYTHON" -m tba_offload doctor "${DRIVE:-.}" /dev/shm
        ;;
    smoke)
        limited 125 "${TESTS[@]}" "${TOGETHER[@]}" -x -W default -k "($SMOKE) and not ($APART)" "${arguments[@]}"
        ;;
    quick)
        folder=$(mktemp -d)
        packing "$folder" "$results/$1.tar.gz" limited 255 "$PYTHON" benchmarks/gpu.py \
            --drive "${DRIVE:-.}" --output "$folder" --quick "${arguments[@]}"
        ;;
    tests)
        limited 120 "${TESTS[@]}" "${TOGETHER[@]}" -k "not ($APART or $ALONE)" --durations=10 "${arguments[@]}"
        ;;
    alone)
        limited 70 "${TESTS[@]}" -k "($ALONE) and not ($APART)" "${arguments[@]}"
        ;;
    compiled)
        limited 100 "${TESTS[@]}" "${TOGETHER[@]}" -k "$APART" --durations=10 "${arguments[@]}"
        ;;
    states)
        limited 90 "$PYTHON" benchmarks/states.py "${DRIVE:-.}" "${STATES[@]}" "${arguments[@]}"
        ;;
    sanitizer)
        if ! command -v compute-sanitizer >/dev/null; then
            echo "skipped: compute-sanitizer is not on PATH; it is a part of the CUDA toolkit"
            return
        fi
        # Without the caching allocator every tensor is an allocation of its own, whose bounds are known.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited 190 \
            compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 --print-limit 20 \
            "${TESTS[@]}" -k "($ORDERLY) and not ($APART)" --timeout 170 "${arguments[@]}"
        ;;
    benchmark)
        folder=$(mktemp -d)
        packing "$folder" "$results/$1.tar.gz" limited 560 "$PYTHON" benchmarks/gpu.py \
            --drive "${DRIVE:-.}" --output "$folder" --minutes 1.2 "${arguments[@]}"
        ;;
    *)
        echo "there is no step $1" >&2
        return 2
        ;;
    esac
}

[ $# -ge 2 ] || usage
what=$1 wheels=$2
shift 2
case $what in
download)
    download_wheels "$wheels"
    ;;
run)
    [ $# -ge 2 ] || usage
    results=$1 failed=0
    shift
    mkdir -p "$results"
    install_wheels "$wheels" || exit
    stand_in_for_udev
    for step in "$@"; do
        step=${step#--}
        echo "== $step"
        do_step "$step" "$results" 2>&1 | tee "$results/$step.log" || failed=1
    done
    exit $failed
    ;;
*)
    usage
    ;;
esac
