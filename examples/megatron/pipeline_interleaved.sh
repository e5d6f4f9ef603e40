#!/usr/bin/env bash
# Interleaved pipeline: 7 billion parameters in 4 stages of 2 chunks, on two groups of 4 GPUs.
#
# The first stages hold the activations of several micro-batches for the longest time. There, offloading saves the most
# memory and the drive has the most time.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
POLICY=${POLICY:-$POLICIES/maximum_savings.yaml}

train \
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 2 --global-batch-size 256 \
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000
