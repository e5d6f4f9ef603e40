"""Offloading in the ``Trainer`` of Hugging Face's transformers, and so in TRL's trainers.

::

    from tba_offload.integrations.transformers import OffloadCallback

    Trainer(model, arguments, train_dataset=dataset, callbacks=[OffloadCallback("policy.yaml")]).train()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tba_offload.errors import MissingDependencyError
from tba_offload.integrations.training import Training

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingDependencyError("transformers", "OffloadCallback", extra="transformers") from error

if TYPE_CHECKING:
    import os

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session


class OffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches offloading to the model of a ``Trainer`` while it trains.

    The figures of the last step, peak, bytes and stall, are added to what the trainer logs of its training.

    Args:
        config: As for :func:`tba_offload.attach`. Where it has ``states``, those of the trainer's optimizer
            are offloaded too.
        run_log: As for :func:`tba_offload.attach`.
        options: More arguments for :func:`tba_offload.attach`.
    """

    def __init__(
        self, config: ConfigLike = None, *, run_log: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._training = Training(config, run_log, options)

    @property
    def session(self) -> Session | None:
        """The session of this training, or the last one; ``None`` before the first."""
        return self._training.session

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches the model, which the trainer has moved, wrapped and set up by now."""
        self._come_first(sys._getframe(1).f_locals.get("self"))
        optimizer = kwargs.get("optimizer")
        self._training.begin(
            kwargs["model"],
            optimizers=() if optimizer is None else (optimizer,),
            batch_size=_sequences_of_a_step(args, state),
        )

    def _come_first(self, handler: object) -> None:
        """Let those that report, to TensorBoard and others, see the figures too.

        A trainer calls the callbacks that report before those that it is given, and does not tell a callback
        of the others: they are known to the caller of our method.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open a step where DeepSpeed trains: it updates copies of parameters, so none opens itself."""
        if getattr(args, "deepspeed_plugin", None) is not None:
            self._training.begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step that was opened."""
        self._training.end_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to what is logged beside the loss, and to the history of it."""
        if not logs or "loss" not in logs:
            return
        figures = self._training.news()
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give the model back as it was."""
        self._training.end()


def _sequences_of_a_step(args: TrainingArguments, state: TrainerState) -> int:
    """Those of all processes; a trainer that looks for a size that fits tells its state the one it tries."""
    at_once = getattr(state, "train_batch_size", None) or args.train_batch_size
    return int(at_once * args.gradient_accumulation_steps * args.world_size)
