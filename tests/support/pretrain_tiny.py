"""A training script of our own on the ``megatron.training`` that the megatron-core package carries.

It trains a GPT on Megatron's mock data. Every rank reads its own data, and every rank writes what it has
computed, bit for bit, to a file of its own: the losses of all micro-batches, and a digest of each parameter.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from torch import Tensor, nn

_losses: list[tuple[str, int, str]] = []
_chunks: dict[int, nn.Module] = {}


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("tiny")
    group.add_argument("--figures", metavar="DIR", help="Where each rank writes what it computed.")
    group.add_argument(
        "--suspect-iteration", type=int, help="Doubt the losses of this one, so that Megatron runs it again."
    )
    return parser


def datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build()
    return train, valid, test


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    _chunks[id(model)] = model
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"], training=model.training)


def loss_of(mask: Tensor, losses: Tensor, *, training: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().int()
    args = get_args()
    if args.suspect_iteration is not None and training:
        get_rerun_state_machine().validate_result(
            result=loss.detach().clone(),  # the schedule changes the loss in place
            rejection_func=lambda _: args.curr_iteration + 1 == args.suspect_iteration,
            message="a doubt on purpose",
            fatal=False,
        )
    _losses.append(("train" if training else "valid", args.curr_iteration + 1, loss.item().hex()))
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def write_figures(directory: Path) -> None:
    parameters = {
        f"{chunk}:{name}": hashlib.sha256(parameter.detach().view(torch.uint8).numpy()).hexdigest()
        for chunk, model in enumerate(_chunks.values())
        for name, parameter in model.named_parameters()
    }
    directory.mkdir(parents=True, exist_ok=True)
    figures = {"losses": _losses, "parameters": parameters}
    (directory / f"rank{get_args().rank}.json").write_text(json.dumps(figures, indent=1))


def main() -> None:
    args = parse_and_validate_args(
        extra_args_provider=add_own_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    try:
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    finally:
        if args.figures is not None:
            write_figures(Path(args.figures))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # gloo may abort otherwise


if __name__ == "__main__":
    main()
