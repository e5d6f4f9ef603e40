"""Ranks that train small models through megatron-core's own schedules, with and without a session.

As a program it does the job of a file: it forks the ranks, since importing takes far longer than training.

    python megatron_ranks.py JOB

A job says how a model is spread over the ranks and which policies to train under. All are
trained in the same processes, one after the other and from the same seed, and what training left behind is
saved: losses, gradients, parameters, random states. Comparing it is the business of the test.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import json
import multiprocessing
import os
import pickle
import random
import sys
import time
import types
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tba_offload.planner.auto import Controller
    from tba_offload.planner.measure import StepObservation
    from tba_offload.planner.model import Plan

SEED = 1234
STEPS = 3
HIDDEN, HEADS, SEQUENCE, VOCAB, MICRO_BATCH = 32, 4, 16, 64, 2
EVALUATION = 1000
"""Stands for the number of an iteration where the model is evaluated."""
PRELOADED = (
    *("megatron.core.models.gpt", "megatron.core.models.bert.bert_model", "megatron.core.models.T5.t5_model"),
    *("megatron.core.distributed", "megatron.core.optimizer"),
    *("tba_offload.megatron.arguments", "tba_offload.megatron.training", "torch._dynamo"),
)
"""What every rank of every job would otherwise import by itself; the last for custom operators of torch."""
JOB_SECONDS = 240
"""Ranks that take longer are killed."""


@dataclass(frozen=True)
class Layout:
    """A model and how it is spread over ranks.

    Attributes:
        stages: The layers of each pipeline stage, as a policy counts them.
        model: ``gpt``, ``llama``, ``moe``, ``balanced moe``, ``mtp`` (that predicts a second token too),
            ``bert`` or ``t5``.
        tensor: Ranks that share every layer.
        data: Ranks that train on different texts.
        chunks: Model chunks on each stage; with more than one the schedule is interleaved.
        expert: Ranks that share the experts, whatever else they share.
        micro_batches: How many each of the three steps has.
        sequence_parallel: Whether tensor-parallel ranks divide the sequence between the layers' matrices.
        distributed_optimizer: Whether data-parallel ranks divide the optimizer. Gradients are then exchanged
            during backward and parameters during forward.
        bf16: Whether the model computes in bf16; the optimizer has fp32 copies then.
        recompute_attention: Whether Megatron recomputes the core of attention by itself.
        hidden: Width of the layers.
    """

    stages: tuple[tuple[str, ...], ...]
    model: str = "gpt"
    tensor: int = 1
    data: int = 1
    chunks: int = 1
    expert: int = 1
    micro_batches: tuple[int, int, int] = (2, 2, 2)
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    bf16: bool = False
    recompute_attention: bool = False
    hidden: int = HIDDEN

    @property
    def pipeline(self) -> int:
        return len(self.stages)

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def has_experts(self) -> bool:
        return self.model.endswith("moe")

    @property
    def layers(self) -> int:
        """What Megatron calls the number of layers: those of the decoder, without further predictions."""
        named = [layer for stage in self.stages for layer in stage]
        return sum(not layer.startswith(("encoder", "mtp")) for layer in named)

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank: stages are the outermost dimension."""
        return rank // (self.tensor * self.data)


@dataclass(frozen=True)
class Job:
    """What the ranks are told; a variant without flags is training that the package never touches."""

    layout: Layout
    variants: dict[str, list[str] | None]
    directory: str
    steps: int = STEPS
    at_odds: tuple[str, ...] = ()  # variants in which each rank decides otherwise than the one before

    def save(self) -> Path:
        path = Path(self.directory) / "job"
        path.write_bytes(pickle.dumps(self))
        return path

    def results(self, variant: str, rank: int) -> Path:
        return Path(self.directory) / f"{variant}.{rank}.pt"

    def output(self, rank: int) -> Path:
        return Path(self.directory) / f"rank{rank}.txt"


@dataclass
class History:
    """What training left behind on one rank.

    Attributes:
        losses: Of every step, what the loss function reported for each micro-batch: numbers in hexadecimal.
        evaluations: Likewise of the evaluations.
        norms: The norm of the gradients of every step.
        placements: Of every step, the name of each layer of this rank → what the session did with it.
        proposals: Likewise, what this rank wanted whenever the ranks had to agree.
        tensors: Gradients of every step, parameters, the optimizer's copies of them, buffers, random states.
    """

    losses: list[list[list[str]]] = dataclasses.field(default_factory=list)
    evaluations: list[list[list[str]]] = dataclasses.field(default_factory=list)
    norms: list[str] = dataclasses.field(default_factory=list)
    placements: list[dict[str, str]] = dataclasses.field(default_factory=list)
    proposals: list[dict[str, str]] = dataclasses.field(default_factory=list)
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def main() -> None:
    from tba_lab.megatron_cpu_scripts import install_for_scripts

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    install_for_scripts()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each collection in a rank would copy all pages
    statuses = run_ranks(pickle.loads(Path(sys.argv[1]).read_bytes()))
    sys.stdout.write(f"\n{json.dumps(statuses)}\n")


def run_ranks(job: Job) -> list[int | None]:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(job, rank)) for rank in range(job.layout.ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + JOB_SECONDS
    while any(process.exitcode is None for process in ranks):
        if time.monotonic() > deadline or any(process.exitcode for process in ranks):
            break
        time.sleep(0.02)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return statuses


def run_rank(job: Job, rank: int) -> None:
    with job.output(rank).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    ranks = job.layout.ranks
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=JOB_SECONDS),
    )
    initialize_parallelism(job.layout)
    for variant, flags in job.variants.items():
        history = train(job.layout, flags, job.steps, at_odds=variant in job.at_odds)
        torch.save(dataclasses.asdict(history), job.results(variant, rank))
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def initialize_parallelism(layout: Layout) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1 if layout.expert > 1 else None,
    )


# Training, in the order in which Megatron's training loop does it


def train(layout: Layout, flags: list[str] | None, steps: int = STEPS, *, at_odds: bool = False) -> History:
    from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
    from megatron.core.pipeline_parallel import get_forward_backward_func

    seed()
    config = make_config(layout)
    chunks = make_chunks(layout, config)
    optimizer = make_optimizer(layout, config, chunks)
    count_micro_batches(layout)
    history = History()
    schedule, close = get_forward_backward_func(), lambda: None
    if flags is not None:
        schedule, close = attach(layout, flags, chunks, schedule)
        watch_planner(history, at_odds=at_odds)
    consumed = 0
    for iteration in range(steps):
        update_num_microbatches(consumed, consistency_check=False)
        run = functools.partial(
            schedule,
            forward_step_func=functools.partial(forward_step, layout.model),
            model=chunks,
            num_microbatches=get_num_microbatches(),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            decoder_seq_length=SEQUENCE,
        )
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        note_placements(history)
        reported = run(data_iterator=make_data(layout, iteration), forward_only=False)
        history.losses.append([numbers_of(each) for each in reported])
        note_gradients(history, iteration, chunks)
        _, norm, _ = optimizer.step()
        history.norms.append(float(norm).hex())
        consumed += get_num_microbatches() * MICRO_BATCH * layout.data
        if iteration < STEPS or iteration == steps - 1:
            evaluate(history, chunks, functools.partial(run, data_iterator=make_data(layout, EVALUATION)))
    close()
    note_state(history, chunks)
    return history


def evaluate(history: History, chunks: list[nn.Module], run: Callable[..., Any]) -> None:
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        reported = run(forward_only=True)
    for chunk in chunks:
        chunk.train()
    history.evaluations.append([numbers_of(each) for each in reported])


def seed() -> None:
    """Starts the generators like Megatron: pipeline stages differ, data-parallel ranks do not."""
    from megatron.core import parallel_state

    from tba_lab.megatron_cpu import seed_all

    number = SEED + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - that is the one that Megatron seeds
    seed_all(number)


def count_micro_batches(layout: Layout) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    known = inspect.signature(calculator.init_num_microbatches_calculator).parameters
    # Some releases have no default for it.
    constant = {} if "step_batch_size_schedule" in known else {"rampup_batch_size": None}
    calculator.destroy_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        rank=dist.get_rank(),
        global_batch_size=layout.micro_batches[-1] * MICRO_BATCH * layout.data,
        micro_batch_size=MICRO_BATCH,
        data_parallel_size=layout.data,
        **constant,
    )


def numbers_of(reported: dict[str, Tensor]) -> list[str]:
    return [number.hex() for value in reported.values() for number in value.double().flatten().tolist()]


def note_placements(history: History) -> None:
    from tba_offload.megatron import training

    session = training._session
    if session is not None:
        names = [layer.id.name for layer in session.layers]
        history.placements.append(dict(zip(names, map(str, session.plan.placements), strict=True)))


def note_gradients(history: History, iteration: int, chunks: list[nn.Module]) -> None:
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = parameter.main_grad.clone()  # type: ignore[attr-defined]
            history.tensors[f"gradient {iteration} {index} {name}"] = gradient


def note_state(history: History, chunks: list[nn.Module]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            history.tensors[f"parameter {index} {name}"] = parameter.detach().clone()
            copied = getattr(parameter, "main_param", None)
            if copied is not None:
                history.tensors[f"optimizer {index} {name}"] = copied.detach().clone()
        for name, buffer in chunk.named_buffers():
            history.tensors[f"buffer {index} {name}"] = buffer.clone()
    for name, state in get_cuda_rng_tracker().get_states().items():
        history.tensors[f"random {name}"] = state.clone()
    history.tensors["random default"] = torch.get_rng_state()
    for name, values in router_losses().items():
        history.tensors[f"router {name}"] = values


# What differs between the releases of megatron-core


def router_losses() -> dict[str, Tensor]:
    """What routers added up for logging, once for each micro-batch, recomputed or not; now it is zero."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        known = moe_utils.get_moe_layer_wise_logging_tracker()
        losses = {name: entry["values"].clone() for name, entry in known.items()}
        moe_utils.clear_aux_losses_tracker()
    else:
        tracker = get_moe_metrics_tracker()
        losses = {name: entry.values.clone() for name, entry in tracker.metrics.items()}
        tracker.clear()
    return losses


# The session, as a user of Megatron-LM gets it


def attach(
    layout: Layout, flags: list[str], chunks: list[nn.Module], schedule: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[], None]]:
    from tba_offload.megatron import training
    from tba_offload.megatron.arguments import add_arguments

    arguments = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    arguments.global_batch_size = layout.micro_batches[-1] * MICRO_BATCH * layout.data
    arguments.num_layers, arguments.seq_length = layout.layers, SEQUENCE
    arguments.hidden_size, arguments.num_attention_heads = layout.hidden, HEADS
    pretend_training_loop(arguments)
    training.attach_model(chunks)
    session = training._session
    assert session is not None

    def close() -> None:
        session.close()
        training._session = None  # the loop trains one model in a process, this one several

    return training.stepping(schedule), close


def watch_planner(history: History, *, at_odds: bool) -> None:
    from tba_offload.megatron import training

    session = training._session
    controller = session.planning.controller if session is not None else None
    if session is None or controller is None or session.world.agree is None:
        return
    agree = session.world.agree

    def noting(proposed: dict[str, Any], need: Any) -> dict[str, Any]:
        history.proposals.append({name: str(placement) for name, placement in proposed.items()})
        return agree(proposed, need)

    kind = at_odds_with_others() if at_odds else type(controller)
    session.planning.start(kind(dataclasses.replace(controller.task, agree=noting)))


def at_odds_with_others() -> type[Controller]:
    """One that decides by its rank and by how often it has; of several, the last one needs it most."""
    from tba_offload.config.policy import Placement
    from tba_offload.planner.auto import Controller
    from tba_offload.planner.model import Plan, Prediction

    choices = (
        *(Placement.KEEP, Placement.OFFLOAD, Placement.RECOMPUTE, Placement.RECOMPUTE_OFFLOAD),
        Placement.RECOMPUTE_EXCEPT_ATTENTION,
    )
    turns = itertools.count(dist.get_rank())

    class AtOdds(Controller):
        def _after_step(self, seen: StepObservation) -> Plan:
            turn = next(turns)
            layers = range(len(self.task.policy))
            placements = tuple(choices[(turn + layer) % len(choices)] for layer in layers)
            return Plan(placements, window=seen.plan.window, prediction=Prediction(1.0, 0.0, 0, 0, 0))

        def need_of(self, proposed: Plan) -> tuple[float, float]:
            return 0.0, float(dist.get_rank())

    return AtOdds


def pretend_training_loop(arguments: argparse.Namespace) -> None:
    """What the integration asks Megatron's training loop; only some releases of the package have one."""
    package, variables, training = (
        types.ModuleType(f"megatron.training{name}") for name in ("", ".global_vars", ".training")
    )
    package.__path__ = []
    variables.get_args = lambda: arguments  # type: ignore[attr-defined]
    variables.get_tensorboard_writer = variables.get_wandb_writer = lambda: None  # type: ignore[attr-defined]
    training.num_floating_point_operations = lambda _, batch: 1000 * batch  # type: ignore[attr-defined]
    package.training = training  # type: ignore[attr-defined]
    for module in (package, variables, training):
        sys.modules[module.__name__] = module


# Models


def make_config(layout: Layout) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    settings: dict[str, Any] = {"num_layers": layout.layers, "hidden_size": layout.hidden}
    settings |= {"num_attention_heads": HEADS, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    settings |= {"bf16": layout.bf16, "params_dtype": dtype, "pipeline_dtype": dtype}
    settings |= {"use_cpu_initialization": True, "attention_softmax_in_fp32": True}
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")
    settings |= {"apply_rope_fusion": False} | {f"{name}_fusion": False for name in fusions}
    for name in ("tensor", "pipeline", "expert"):
        settings[f"{name}_model_parallel_size"] = getattr(layout, name)
    settings["sequence_parallel"] = layout.sequence_parallel
    settings["deallocate_pipeline_outputs"] = True  # like the scripts: what a stage has sent is freed
    if layout.chunks > 1:
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        settings["virtual_pipeline_model_parallel_size"] = layout.chunks
    if layout.recompute_attention:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(**settings | _STYLES.get(layout.model, {}))


_MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
_MOE |= {"moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall"}
_MOE |= {"expert_tensor_parallel_size": 1, "add_bias_linear": False}
_LLAMA = {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "ffn_hidden_size": 64}
_STYLES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"activation_func": F.silu, "add_bias_linear": False},
    "moe": _MOE,
    # Routers count tokens in buffers, and balance by averages over micro-batches and by a bias.
    "balanced moe": _MOE
    | {
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    },
    "mtp": {"mtp_num_layers": 1},
}


def make_chunks(layout: Layout, config: Any) -> list[nn.Module]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    def make(chunk: int) -> nn.Module:
        stage = chunk if layout.chunks > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = MODELS.get(layout.model, make_gpt)(
            layout,
            config,
            pre_process=first,
            post_process=last,
            **({} if stage is None else {"vp_stage": stage}),
        )
        model.vp_stage = stage
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return Float16Module(config, model) if layout.bf16 else model

    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.distributed_optimizer,
        overlap_param_gather=layout.distributed_optimizer,
        bucket_size=20 * layout.hidden**2 if layout.distributed_optimizer else None,
    )
    return [
        DistributedDataParallel(config, data_parallel, make(chunk), disable_bucketing=chunk > 0)
        for chunk in range(layout.chunks)
    ]


SIZES = {"vocab_size": VOCAB, "max_sequence_length": SEQUENCE}


def make_gpt(layout: Layout, config: Any, **where: Any) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    llama, further = layout.model == "llama", None
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    if layout.model == "mtp":
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    embedded = {"position_embedding_type": "rope" if llama else "learned_absolute"}
    settings: dict[str, Any] = {**embedded, "mtp_block_spec": further, **SIZES, **where}
    model: nn.Module = GPTModel(config, spec, share_embeddings_and_output_weights=not llama, **settings)
    return model


def make_bert(layout: Layout, config: Any, **where: Any) -> nn.Module:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    settings: dict[str, Any] = {"share_embeddings_and_output_weights": True, **SIZES, **where}
    model: nn.Module = BertModel(config, 2, bert_layer_local_spec, **settings)
    return model


def make_t5(layout: Layout, config: Any, **where: Any) -> nn.Module:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    encoder = t5_spec.get_t5_encoder_with_local_block_spec(layout.layers)
    decoder = t5_spec.get_t5_decoder_with_local_block_spec(layout.layers)
    settings: dict[str, Any] = {"share_embeddings_and_output_weights": True, **SIZES, **where}
    model: nn.Module = T5Model(config, copy.deepcopy(config), encoder, decoder, **settings)
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {"bert": make_bert, "t5": make_t5}


def make_optimizer(layout: Layout, config: Any, chunks: list[nn.Module]) -> Any:
    """megatron-core's Adam; it and the gradients are then part of the schedule's configuration."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=layout.bf16,
            params_dtype=config.params_dtype,
            clip_grad=1.0,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.distributed_optimizer,
        ),
        chunks,
    )
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if layout.distributed_optimizer:
        unsynchronized = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = unsynchronized if len(chunks) > 1 else unsynchronized[0]
    return optimizer


# Data


def make_data(layout: Layout, iteration: int) -> Any:
    iterators = [batches(layout, iteration) for _ in range(layout.chunks)]
    return iterators if len(iterators) > 1 else iterators[0]


def batches(layout: Layout, iteration: int) -> Iterator[dict[str, Tensor]]:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(iteration * 100 + parallel_state.get_data_parallel_rank())
    while True:
        text = torch.randint(0, VOCAB, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
        real = torch.ones(MICRO_BATCH, SEQUENCE, dtype=torch.long)
        real[::2, -3:] = 0
        yield {
            "tokens": text[:, :-1].clone(),
            "labels": text[:, 1:].clone(),
            "real": real,
            "positions": torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1),
            "order": torch.randint(0, 2, (MICRO_BATCH,), generator=generator),
        }


def forward_step(kind: str, data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Any]:
    batch = next(data)
    if kind == "bert":
        types_ = (batch["positions"] >= SEQUENCE // 2).long()
        output = model(batch["tokens"], batch["real"], tokentype_ids=types_, lm_labels=batch["labels"])
        return output, functools.partial(sentence_loss, batch)
    if kind == "t5":
        unseen, future = batch["real"][:, None, None, :] < 1, causal()
        output = model(
            batch["tokens"],
            batch["labels"].roll(1, 1),
            unseen.expand(-1, -1, SEQUENCE, -1),
            future.expand(MICRO_BATCH, -1, -1, -1),
            unseen.expand(-1, -1, SEQUENCE, -1),
            lm_labels=batch["labels"],
        )
    else:
        weights = batch["real"].float()
        output = model(
            batch["tokens"], batch["positions"], causal(), labels=batch["labels"], loss_mask=weights
        )
    return output, functools.partial(token_loss, batch)


def causal() -> Tensor:
    return torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]


def token_loss(batch: dict[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weights = batch["real"].flatten().float()
    loss = (output.flatten().float() * weights).sum()
    count = weights.sum().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.detach().clone().view(1), count.view(1)])}


def sentence_loss(
    batch: dict[str, Tensor], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    losses, order = output
    weights = batch["real"].flatten().float()
    words = (losses.flatten().float() * weights).sum() / weights.sum()
    sentences = F.cross_entropy(order.view(-1, 2).float(), batch["order"])
    reported = {"lm loss": words.detach().clone(), "sop loss": sentences.detach().clone()}
    return words + sentences, reported


if __name__ == "__main__":
    main()
