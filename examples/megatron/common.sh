# Starts the training that a script of this directory describes. The scripts source this file.
#
# Environment variables:
#   MEGATRON       a checkout of Megatron-LM, or a training script; also the first argument of each script
#   POLICY         the policy file
#   DIRECTORIES    directories to offload to, one for each drive, separated by spaces
#   RUN_LOG        the file of the run log for `tba-offload rok`; default: no run log
#   DATA           arguments for data and tokenizer; default: mock data
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun
#   PYTHON         the interpreter
#   PLAIN=1        train without offloading, for comparison
#   CPU=1          train on CPUs with gloo, in fp32 unless the other arguments contain --bf16;
#                  GPUS_PER_NODE is then the number of processes
# Other arguments go to the training script after the arguments of the example, and override them.

if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    MEGATRON=$1
    shift
fi
OVERRIDES=("$@")
POLICIES=$(dirname "${BASH_SOURCE[0]}")/policies

data_arguments() {
    echo "${DATA:---mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 98,1,1}"
}

# prints the arguments that all examples share
training_arguments() {
    echo --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
        --eval-interval 1000 --eval-iters 10 --log-interval 10
    if [ -z "${CPU:-}" ]; then
        echo --bf16 # CPUs without bf16 instructions are a hundred times slower with bf16 than with fp32
    fi
}

# prints the arguments for machines without GPU, Transformer Engine and Apex
cpu_arguments() {
    echo --transformer-impl local --distributed-backend gloo --use-cpu-initialization --num-workers 0 \
        --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-rope-fusion
}

training_script() {
    local script=${MEGATRON:?the checkout of Megatron-LM is missing. Run $0 /path/to/Megatron-LM}
    if [ -d "$script" ]; then
        script=$script/pretrain_gpt.py
    fi
    echo "$script"
}

# train ARGUMENTS...: starts the training script with these arguments
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
        # shellcheck disable=SC2206 # each word is a directory
        offloading=(--tba-policy "$POLICY" --tba-directory ${DIRECTORIES:-/mnt/nvme0/tba})
        if [ -n "${RUN_LOG:-}" ]; then
            offloading+=(--tba-run-log "$RUN_LOG")
        fi
    fi
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron requires this variable
    if [ -n "${CPU:-}" ]; then
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    fi
    # shellcheck disable=SC2046 # each word is an argument
    exec "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" \
        --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
        --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
        "${how[@]}" $(data_arguments) $(training_arguments) "$@" ${CPU:+$(cpu_arguments)} "${offloading[@]}" "${OVERRIDES[@]}"
}
