"""The launcher, on a training script that has the names of Megatron-LM's and little else.

The scripts of Megatron-LM itself are not part of a package: those are run by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from covering import full

from tba_offload.report.log import read_run_log

if TYPE_CHECKING:
    from pathlib import Path

    from warm import Warm

pytestmark = pytest.mark.megatron

STEPS = 3
CHECKOUT = {
    "megatron/training/__init__.py": """
        from megatron.training.global_vars import get_args, set_args
        """,
    "megatron/training/global_vars.py": """
        _args = None
        def get_args():
            return _args
        def set_args(args):
            global _args
            _args = args
        class Writer:
            def __init__(self, name):
                self.name = name
            def add_scalar(self, tag, value, iteration):
                print(self.name, iteration, tag, value)
            def log(self, figures, iteration):
                for tag, value in figures.items():
                    print(self.name, iteration, tag, value)
        def get_tensorboard_writer():
            return Writer("board") if _args.writers else None
        def get_wandb_writer():
            return Writer("wandb") if _args.writers else None
        """,
    "megatron/training/arguments.py": """
        import argparse
        def add_megatron_arguments(parser):
            parser.add_argument("--recompute-granularity", choices=["full", "selective"])
            parser.add_argument("--seq-length", type=int, default=32)
            parser.add_argument("--global-batch-size", type=int, default=4)
            parser.add_argument("--writers", action="store_true")
            parser.add_argument("--tensorboard-log-interval", type=int, default=1)
            return parser
        def parse_args():
            return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
        """,
    "megatron/training/training.py": """
        import torch
        from megatron.core.num_microbatches_calculator import (
            destroy_num_microbatches_calculator, init_num_microbatches_calculator)
        from megatron.training import get_args
        from tba_lab.megatron_cpu import single_process
        from tba_lab.gpt import GptShape, build_gpt, gpt_loss, random_batch

        SHAPE = GptShape(layers=3, hidden=32, heads=2, sequence=32)

        def num_floating_point_operations(args, batch_size):
            return 1000 * batch_size

        def setup_model_and_optimizer():
            model = build_gpt(SHAPE, seed=1)
            return [model], torch.optim.SGD(model.parameters(), lr=0.1), None

        def schedule(*, model, seed, forward_only):
            losses = []
            for micro_batch in range(2):
                batch = random_batch(SHAPE, batch_size=2, seed=10 * seed + micro_batch)
                with torch.set_grad_enabled(not forward_only):
                    loss = gpt_loss(model[0], batch)
                    if not forward_only:
                        loss.backward()
                losses.append({"lm loss": loss.detach()})
            return losses

        def get_forward_backward_func():
            return schedule

        def pretrain(steps):
            with single_process():
                args = get_args()
                init_num_microbatches_calculator(0, None, args.global_batch_size, 2, 1)
                model, optimizer, _ = setup_model_and_optimizer()
                run = get_forward_backward_func()
                for step in range(steps):
                    args.curr_iteration = step
                    losses = run(model=model, seed=step, forward_only=False)
                    optimizer.step()
                    optimizer.zero_grad()
                    print("loss", *(each["lm loss"].item().hex() for each in losses))
                    print("validation", *(each["lm loss"].item().hex() for each in
                                          run(model=model, seed=99, forward_only=True)))
                destroy_num_microbatches_calculator()
        """,
    "pretrain.py": f"""
        from megatron.training import set_args
        from megatron.training.arguments import parse_args
        from megatron.training.training import pretrain
        if __name__ == "__main__":
            set_args(parse_args())
            pretrain({STEPS})
        """,
}
"""``pretrain.py`` of a checkout, with two micro-batches a step and an evaluation after each."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for name, text in CHECKOUT.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()[1:]
        path.write_text("\n".join(line[8:] for line in lines) + "\n")
    return root / "pretrain.py"


def figures(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("loss", "validation"))]


@pytest.fixture(scope="module")
def plain(script: Path, python_with_megatron: Warm) -> list[str]:
    """What the script says without the launcher."""
    finished = python_with_megatron.run(str(script))
    assert finished.returncode == 0, finished.stderr
    return figures(finished.stdout)


def test_losses_are_the_same_and_steps_are_logged(
    script: Path, plain: list[str], tmp_path: Path, python_with_megatron: Warm
) -> None:
    policy, log = tmp_path / "policy.yaml", tmp_path / "run.jsonl"
    policy.write_text(
        "layers:\n  - match: 0\n    placement: recompute\n  - match: 2\n    placement: keep\n"
        "budget:\n  in_flight_bytes: 64KiB\nmin_tensor_bytes: 1KiB\n"
    )
    flags = ("--tba-policy", str(policy), "--tba-directory", str(tmp_path), "--tba-run-log", str(log))
    finished = python_with_megatron.run("-m", "tba_offload", "launch", str(script), *flags)
    assert finished.returncode == 0, finished.stderr
    assert figures(finished.stdout) == plain
    assert len(plain) == 2 * STEPS
    lines = [line for line in finished.stdout.splitlines() if "decoder.layers." in line]
    rows = [line.translate(str.maketrans("│┃", "  ")).split() for line in lines]
    assert [[row[0], row[2]] for row in rows] == [["0", "recompute"], ["1", "offload"], ["2", "keep"]]
    assert "rule '0' (line 2)" in finished.stdout
    steps = read_run_log(log).steps
    assert len(steps) == STEPS  # evaluations are none
    for step, line in zip(steps, plain[::2], strict=True):
        losses = [float.fromhex(word) for word in line.split()[1:]]
        assert step.loss == sum(losses) / 2
        assert (step.tokens, step.model_flops, step.scopes, step.recomputed_scopes) == (128, 4000, 6, 2)
        assert step.offloaded_bytes > 0
    assert sorted(tmp_path.iterdir()) == [policy, log]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (
            ("--tba-checksum", "--recompute-granularity", "full"),
            2,
            "remove --recompute-granularity, or the --tba- flags",
        ),
        pytest.param((), 0, "validation", marks=full),  # without flags it changes nothing
        pytest.param(("--tba-policy", "/no/such/policy.yaml"), 2, "/no/such/policy.yaml", marks=full),
        pytest.param(("--help",), 0, "--tba-activation-bytes SIZE", marks=full),
    ],
)
def test_the_command_line_is_checked_before_training(
    flags: tuple[str, ...], status: int, message: str, script: Path, python_with_megatron: Warm
) -> None:
    finished = python_with_megatron.run("-m", "tba_offload", "launch", str(script), *flags)
    assert finished.returncode == status
    assert message in " ".join((finished.stdout + finished.stderr).split())
    assert (figures(finished.stdout) == []) is bool(flags)


def test_a_policy_that_does_not_fit_the_model_is_one_message(
    script: Path, tmp_path: Path, python_with_megatron: Warm
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("layers:\n- {match: 7, placement: keep}\n- {match: x, placement: keep}\n")
    flags = ("--tba-policy", str(policy), "--tba-directory", str(tmp_path))
    finished = python_with_megatron.run("-m", "tba_offload", "launch", str(script), *flags)
    assert finished.returncode == 1
    assert figures(finished.stdout) == []
    assert "Traceback" not in finished.stderr
    said = finished.stderr[finished.stderr.index("tba-offload: rank 0 on ") :].splitlines()
    assert [f"{policy}:{line}: the rule" in message for line, message in zip((2, 3), said, strict=True)] == [
        True,
        True,
    ]


def test_what_is_no_script_of_megatron_is_one_line(tmp_path: Path, python_with_torch: Warm) -> None:
    run = python_with_torch.run
    finished = run("-m", "tba_offload", "launch", str(tmp_path / "none.py"))
    assert finished.returncode == 1
    assert finished.stderr.startswith("Error: there is no script")
    alone = tmp_path / "alone.py"
    alone.write_text("raise SystemExit(7)\n")
    inner = tmp_path / "megatron" / "training"
    inner.mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    (inner / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='six')\n")
    finished = run("-m", "tba_offload", "launch", str(alone))
    assert finished.returncode == 1
    said = "megatron.training needs the module six, which is missing; pip install 'tba-offload[scripts]'"
    assert finished.stderr == f"Error: alone.py: {said}\n"
