#!/usr/bin/env bash
# Data parallel with the distributed optimizer: 7 billion parameters on 8 GPUs.
#
# Parameters, gradients and the rank's part of the optimizer fill most of a GPU. The planner uses the remaining memory
# for activations: it offloads layers, and keeps layers if memory is free.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
POLICY=${POLICY:-$POLICIES/no_slowdown.yaml}

train \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 2 --global-batch-size 256 \
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000
