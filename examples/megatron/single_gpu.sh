#!/usr/bin/env bash
# One GPU with gradient accumulation: a GPT of 1.3 billion parameters.
#
# Offloading frees memory for a larger micro-batch: 8 sequences instead of 2, with the same global batch.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-1}
POLICY=${POLICY:-$POLICIES/maximum_savings.yaml}

train \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 8 --global-batch-size 256 \
    --train-iters 100000 --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 1000
