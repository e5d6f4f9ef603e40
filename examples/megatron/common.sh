# Sourced by the scripts of this directory: they say what to train and how it is laid out, and this starts it.
#
# From the environment:
#   MEGATRON       a checkout of Megatron-LM, or a training script; the first argument of a script does the same
#   POLICY         policy file
#   DIRECTORIES    where offloaded bytes go, one directory for each drive, separated by spaces
#   RUN_LOG        file for the run log, for `tba-offload rok`; none if unset
#   DATA           arguments that name data and tokenizer; mock data if unset
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun
#   PYTHON         interpreter
#   PLAIN=1        the same training without offloading, for comparison
#   CPU=1          on CPUs with gloo, for trying things out, in fp32 unless --bf16 is among the other arguments;
#                  GPUS_PER_NODE is then the number of processes
# Other arguments go to the training script behind those of the example, so that they override them.

if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    MEGATRON=$1
    shift
fi
OVERRIDES=("$@")
POLICIES=$(dirname "${BASH_SOURCE[0]}")/policies

data_arguments() {
    echo "${DATA:---mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 98,1,1}"
}

# What all examples have in common.
training_arguments() {
    echo --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
        --eval-interval 1000 --eval-iters 10 --log-interval 10
    if [ -z "${CPU:-}" ]; then
        echo --bf16 # CPUs without instructions for it need a hundred times as long as with fp32
    fi
}

# What Megatron needs where there is no GPU, no Transformer Engine and no Apex.
cpu_arguments() {
    echo --transformer-impl local --distributed-backend gloo --use-cpu-initialization --num-workers 0 \
        --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-rope-fusion
}

training_script() {
    local script=${MEGATRON:?name a checkout of Megatron-LM: $0 /path/to/Megatron-LM}
    if [ -d "$script" ]; then
        script=$script/pretrain_gpt.py
    fi
    echo "$script"
}

# train ARGUMENTS...: of the training script
train() {
    local script how=() offloading=()
    script=$(training_script)
    if [ -n "${PLAIN:-}" ]; then
        how=("$script")
        if [ -n "${CPU:-}" ]; then
            how=(-m tba_lab.megatron_cpu_scripts "$script")
        fi
    else
        how=(-m tba_offload.megatron.launch ${CPU:+--cpu} "$script")
        # shellcheck disable=SC2206 # one word for each drive
        offloading=(--tba-policy "$POLICY" --tba-directory ${DIRECTORIES:-/mnt/nvme0/tba})
        if [ -n "${RUN_LOG:-}" ]; then
            offloading+=(--tba-run-log "$RUN_LOG")
        fi
    fi
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron asks for it
    if [ -n "${CPU:-}" ]; then
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    fi
    # shellcheck disable=SC2046 # words
    exec "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" \
        --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
        --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
        "${how[@]}" $(data_arguments) $(training_arguments) "$@" ${CPU:+$(cpu_arguments)} "${offloading[@]}" "${OVERRIDES[@]}"
}
