"""torchtitan's Llama sharded by its own ``fully_shard`` also on one rank, where its trainer does without.

torchtitan imports it: ``--experimental.custom_import=titan_one_rank --model.name=llama3_one_rank``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torchtitan.models.llama3 import get_train_spec, parallelize_llama
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.protocols.train_spec import register_train_spec


def shard(model: torch.nn.Module, parallel_dims: Any, job_config: Any) -> torch.nn.Module:
    model = parallelize_llama(model, parallel_dims, job_config)
    apply_fsdp(
        model,
        parallel_dims.world_mesh,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        pp_enabled=False,
    )
    return model


register_train_spec("llama3_one_rank", replace(get_train_spec(), parallelize_fn=shard))
