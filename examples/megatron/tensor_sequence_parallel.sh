#!/usr/bin/env bash
# Tensor and sequence parallel over one node: 7 billion parameters, sequences of 32768 tokens.
#
# Each rank holds one part of every activation, and writes this part to the rank's own drives.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
POLICY=${POLICY:-$POLICIES/long_context.yaml}

train \
    --tensor-model-parallel-size 8 --sequence-parallel \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 32768 --max-position-embeddings 32768 \
    --micro-batch-size 1 --global-batch-size 32 \
    --train-iters 20000 --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 500
