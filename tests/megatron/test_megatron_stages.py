"""Layers of a model that a pipeline divides into stages and chunks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tba_lab.megatron_cpu import install, seed_all, training_device
from tba_offload.config.policy import LayerId
from tba_offload.megatron.layers import find_layers, is_megatron

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

pytestmark = pytest.mark.megatron

STAGES = 2
CHUNKS = 2
LAYERS = 8


@pytest.fixture
def second_stage() -> Iterator[None]:
    """This process as the second of two stages; the other one is PyTorch's pretence."""
    if training_device().type == "cpu":
        install()
    from megatron.core import parallel_state

    dist.init_process_group("fake", rank=1, world_size=STAGES, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=STAGES,
            virtual_pipeline_model_parallel_size=CHUNKS,
            create_gloo_process_groups=False,
        )
        seed_all(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks() -> list[nn.Module]:
    """What Megatron's training loop holds: each chunk inside ``DistributedDataParallel(Float16Module(...))``.

    megatron-core warns about its own defaults while it builds them.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    def build(chunk: int) -> nn.Module:
        last = chunk == CHUNKS - 1
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=8,
            max_sequence_length=8,
            pre_process=False,
            post_process=last,
            vp_stage=chunk,
        )
        wrapped: nn.Module = DistributedDataParallel(
            config, DistributedDataParallelConfig(), Float16Module(config, model.to(training_device()))
        )
        return wrapped

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            pipeline_model_parallel_size=STAGES,
            virtual_pipeline_model_parallel_size=CHUNKS,
            pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16,
            bf16=True,
        )
        return [build(chunk) for chunk in range(CHUNKS)]


@pytest.mark.usefixtures("second_stage")
def test_numbers_and_names_count_over_all_stages_and_chunks() -> None:
    chunks = build_chunks()
    assert is_megatron(chunks)
    assert [(layer.id, layer.chunk) for layer in find_layers(chunks)] == [
        (LayerId(2, "decoder.layers.2"), 0),
        (LayerId(3, "decoder.layers.3"), 0),
        (LayerId(6, "decoder.layers.6"), 1),
        (LayerId(7, "decoder.layers.7"), 1),
    ]
