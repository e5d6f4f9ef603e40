"""The example of accelerate, sharded by its FSDP2 on ranks of a CPU: a program with the example's options.

accelerate 1.15 never chooses FSDP on a CPU. Its state is made here as ``accelerate launch --use_fsdp`` has it
and shared with the ``Accelerator`` that the example makes.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys

import transformers
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from places import EXAMPLES
from transformers import GPT2LMHeadModel  # noqa: F401, so that it is imported once and not on each rank

LAUNCHED = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}

os.environ |= LAUNCHED
if "--checkpointing" in sys.argv:
    sys.argv.remove("--checkpointing")
    os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "true"
    # Its checkpoints draw other numbers in their second run, so that nothing may be dropped.
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    transformers.GPT2Config = functools.partial(transformers.GPT2Config, **without)
Accelerator().state.fsdp_plugin = FullyShardedDataParallelPlugin()
PartialState().distributed_type = DistributedType.FSDP
names = runpy.run_path(str(EXAMPLES / "train_accelerate.py"), run_name="__main__")
model, session = names["model"], names.get("session")
