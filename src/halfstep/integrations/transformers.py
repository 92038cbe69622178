"""Hugging Face Trainer under a policy: ``Trainer(..., policy="O2")`` in the place of ``transformers.Trainer(...)``.

The loop stays Trainer's. `PolicyMixin` makes its Accelerator follow the policy, prepares the model before a checkpoint
is loaded into it, gives `compute_loss` a black box, and writes skipped steps, their culprits and the loss scale into
the log.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import halfstep as hs
from halfstep.errors import PolicyError
from halfstep.integrations.shared import checking, need
from halfstep.policy import Policy

need("transformers", "4.57", extra="transformers")
need("accelerate", "1.10", extra="transformers")

import accelerate  # noqa: E402
import transformers  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

__all__ = ["PolicyMixin", "Seq2SeqTrainer", "Trainer"]


class _Optimizer(AcceleratedOptimizer):
    @property
    def step_was_skipped(self):
        return bool(self.scaler.skipped(self.optimizer))


class _Accelerator(accelerate.Accelerator):
    def unscale_gradients(self, optimizer=None):
        for opt in self._optimizers if optimizer is None else [optimizer]:
            while isinstance(opt, AcceleratedOptimizer):
                opt = opt.optimizer
            self.scaler.unscale_(opt)

    def prepare(self, *args, **kwargs):
        model = next((a for a in args if isinstance(a, hs.step.prepare.__globals__["nn"].Module)), None)
        opt = next((a for a in args if isinstance(a, hs.step.prepare.__globals__["Optimizer"])), None)
        if model is not None and opt is not None and not isinstance(opt, AcceleratedOptimizer):
            *_, scaler = hs.prepare(model, opt, policy=self.policy)
            self.scaler = checking(scaler)
        result = super().prepare(*args, **kwargs)
        for opt in self._optimizers:
            opt.__class__ = _Optimizer
        return result

    def prepare_model(self, model, **kwargs):
        hs.prepare(model, policy=self.policy)
        return super().prepare_model(model, **kwargs)


def follow(accelerator, policy):
    accelerator.__class__ = _Accelerator
    accelerator.policy = policy


class SkippedSteps(transformers.TrainerCallback):
    """Counts the updates that were skipped, and keeps the culprits of the last one for the next record of the log."""

    def __init__(self) -> None:
        self.count = 0
        self.culprits: tuple[str, ...] = ()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at an update, while the gradients are still there."""
        optimizer = kwargs["optimizer"]
        if optimizer.step_was_skipped:
            self.count += 1
            self.culprits = optimizer.scaler.culprits(optimizer.optimizer)


class PolicyMixin:
    """Makes a Trainer follow a policy; for subclasses of `transformers.Trainer`."""

    def __init__(self, *args: Any, policy: Any = "mixed", black_box: bool = True, **kwargs: Any) -> None:
        self.policy = Policy.of(policy)
        self.black_box: hs.BlackBox | None = None
        self._boxed = black_box
        self._skipped_steps = SkippedSteps()
        super().__init__(*args, **kwargs)
        self.add_callback(self._skipped_steps)

    def create_accelerator_and_postprocess(self) -> None:
        for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
            if getattr(self.args, name, False):
                raise PolicyError(
                    f"TrainingArguments({name}=True) and policy={self.policy.name!r} both set the precision; leave "
                    f"out {name}, and choose the format by the policy: hs.Policy.of({self.policy.name!r}, dtype='bf16')"
                )
        super().create_accelerator_and_postprocess()
        follow(self.accelerator, self.policy)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_fsdp_enabled:
            hs.prepare(self.model, policy=self.policy)  # before: a low model would round the fp32 weights of the file
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's `compute_loss`, in training by way of the black box."""
        if not (self._boxed and model.training):
            return super().compute_loss(model, inputs, *args, **kwargs)
        if self.black_box is None or self.black_box.model is not model:
            own = super().compute_loss

            def loss_fn(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return own(model, copy.copy(inputs), *args, **kwargs)  # label smoothing takes the labels out

            self.black_box = hs.BlackBox(model, loss_fn, self.optimizer.optimizer)
        return self.black_box(inputs, *args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs["skipped_steps"] = self._skipped_steps.count
            if not self.accelerator.scaler.rule.is_static:
                logs["loss_scale"] = self.accelerator.scaler.get_scale()
            if self._skipped_steps.culprits:
                logs["culprits"] = ", ".join(self._skipped_steps.culprits)
                self._skipped_steps.culprits = ()
        super().log(logs, *args, **kwargs)


class Trainer(PolicyMixin, transformers.Trainer):
    """`transformers.Trainer` under a policy."""


class Seq2SeqTrainer(PolicyMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` under a policy."""
