"""Callback for the ``Trainer`` of Hugging Face transformers and the trainers of TRL.

::

    from tba_offload.integrations.transformers import OffloadCallback

    Trainer(model, arguments, train_dataset=dataset, callbacks=[OffloadCallback("fit")]).train()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tba_offload.errors import required
from tba_offload.integrations.training import Training

with required("transformers", "OffloadCallback", extra="transformers"):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    import os

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tba_offload.config import ConfigLike
    from tba_offload.session import Session


class OffloadCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that attaches offloading to the model of a ``Trainer`` during training.

    The callback adds two figures of the last step to the trainer's log: the activation peak in GiB, and the
    stall in seconds.

    Args:
        config: The policy, such as ``"fit"`` or a placement; see :func:`tba_offload.attach`. If the policy
            has ``states``, the states of the trainer's optimizer are also offloaded.
        run_log: Path of the run log; see :func:`tba_offload.attach`.
        options: More arguments for :func:`tba_offload.attach`.
    """

    def __init__(
        self, config: ConfigLike = None, *, run_log: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._training = Training(config, run_log, options)

    @property
    def session(self) -> Session | None:
        """The session of the current or last training; ``None`` before the first training."""
        return self._training.session

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the model after the trainer has moved and wrapped the model."""
        self._come_first(sys._getframe(1).f_locals.get("self"))
        optimizer = kwargs.get("optimizer")
        self._training.begin(
            kwargs["model"],
            optimizers=() if optimizer is None else (optimizer,),
            batch_size=_sequences_of_a_step(args, state),
        )

    def _come_first(self, handler: object) -> None:
        """Move this callback before reporting callbacks, which must see the added figures.

        Args:
            handler: The trainer's ``CallbackHandler``, read from the frame of the hook's caller because the
                hook does not receive the handler.
        """
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open a step if the trainer uses DeepSpeed, whose optimizer updates copies of the parameters."""
        if getattr(args, "deepspeed_plugin", None) is not None:
            self._training.begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the step if :meth:`on_step_begin` opened a step."""
        self._training.end_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the activation peak and the stall to a log entry that has a loss, and to the log history."""
        if not logs or "loss" not in logs:
            return
        figures = self._training.news()
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the session and restore the model."""
        self._training.end()


def _sequences_of_a_step(args: TrainingArguments, state: TrainerState) -> int:
    """Return the number of sequences in a step of all processes.

    The trainer may change the batch size with ``auto_find_batch_size``, so the current batch size is used.
    """
    at_once = getattr(state, "train_batch_size", None) or args.train_batch_size
    return int(at_once * args.gradient_accumulation_steps * args.world_size)
