#!/usr/bin/env bash
# Mixture of experts, expert parallel over one node: 24 layers of 8 experts, 2 for each token.
#
# The router changes the size of the experts' activations in each step.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
POLICY=${POLICY:-$POLICIES/no_slowdown.yaml}

grouped=--moe-grouped-gemm
if [ -n "${CPU:-}" ]; then
    grouped= # needs Transformer Engine
fi

train \
    --expert-model-parallel-size 8 --num-experts 8 --moe-router-topk 2 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 \
    --moe-token-dispatcher-type alltoall $grouped --use-distributed-optimizer \
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 \
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --micro-batch-size 2 --global-batch-size 256 \
    --train-iters 100000 --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 2000
