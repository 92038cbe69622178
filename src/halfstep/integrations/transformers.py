"""Hugging Face Trainer under a policy: ``Trainer(..., policy="O2")`` in the place of ``transformers.Trainer(...)``.

Note [moments]: Trainer gives model and optimizer to ``accelerator.prepare`` after the optimizer was created, from
default or custom code, and before a wrapper is put around the model; there they are prepared. Two moments are earlier:
weights of a checkpoint are loaded before the optimizer is there, where a model that comes in a low format would round
them; and DataParallel, which Trainer takes for several GPUs in one process, wraps the model without accelerate.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import halfstep as hs
from halfstep.integrations.shared import forward_in_class, need

need("transformers", "4.57.1", extra="transformers")
need("accelerate", "1.10", extra="transformers")

import transformers  # noqa: E402  # its version is checked first
from transformers.trainer_callback import ExportableState, TrainerCallback  # noqa: E402

from halfstep.integrations.accelerate import follow  # noqa: E402

__all__ = ["PolicyMixin", "Seq2SeqTrainer", "Trainer"]

if TYPE_CHECKING:
    from transformers import Trainer as Mixed  # what it is mixed into has
else:
    Mixed = object

LOG = logging.getLogger("halfstep")

PRECISION = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
"""Arguments that set a precision of Trainer's own."""


class SkippedSteps(TrainerCallback, ExportableState):
    """Counts skipped steps for the log; saved in trainer_state.json, so that a resumed run goes on counting."""

    def __init__(self) -> None:
        self.count = 0
        self.culprits: list[str] = []  # whose gradients were not finite at the last one, until they are logged

    def state(self) -> dict[str, Any]:
        """Return what Trainer saves."""
        return {"args": {}, "attributes": {"count": self.count, "culprits": self.culprits}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or go on counting from a checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        attributes = (saved[-1] if isinstance(saved, list) else saved).get("attributes", {})
        self.count = attributes.get("count", 0)
        self.culprits = attributes.get("culprits", [])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at an update while its gradients are there."""
        optimizer = kwargs["optimizer"]
        if optimizer.step_was_skipped:
            self.count += 1
            self.culprits = list(optimizer.scaler.culprits(optimizer.optimizer))


class PolicyMixin(Mixed):
    """Makes a subclass of transformers' Trainer follow a policy; it comes first among the bases.

    Examples:
        >>> class MyTrainer(hs.integrations.transformers.PolicyMixin, trl.SFTTrainer):
        ...     pass
        >>> trainer = MyTrainer(..., policy="O2")

    Records of the log with the training loss have also ``skipped_steps``, how many steps were skipped so far;
    ``culprits`` after one was, the names of parameters whose gradients were not finite; and ``loss_scale``, where it
    can move.

    Args:
        *args: as the Trainer's.
        policy: a preset's name, the path of a TOML file or a `Policy`.
        black_box: whether steps that are not finite are explained: `hs.BlackBox` around `compute_loss`.
        evidence: a folder for evidence files of such steps; None for none.
        **kwargs: as the Trainer's.

    Attributes:
        policy: the policy.
        black_box: the box of the present run, once it has begun, or None.

    Raises:
        IntegrationError: arguments set a precision too (bf16, fp16), or an engine that carries out no policy.
        PolicyError, UnbuiltError, BindError: as `hs.prepare`; some when training begins.
    """

    policy: hs.policy.Policy
    black_box: hs.BlackBox | None

    def __init__(
        self, *args: Any, policy: hs.policy.Policy | str | Path = "mixed", black_box: bool = True,
        evidence: str | Path | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.policy = hs.policy.Policy.of(policy)
        self.black_box = None
        self._explains, self._evidence = black_box, evidence
        super().__init__(*args, **kwargs)
        self.add_callback(SkippedSteps())

    # ------------------------------------------------------------------ preparing

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, and make it follow the policy."""
        for name in PRECISION:
            if getattr(self.args, name, False):
                raise hs.errors.IntegrationError(
                    f"TrainingArguments({name}=True) beside policy {self.policy.name!r} would set the precision twice: "
                    f"leave out {name}; policy=hs.Policy.of({self.policy.name!r}, dtype={name[:4]!r}) has the format"
                )
        super().create_accelerator_and_postprocess()
        follow(self.accelerator, self.policy)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer; one that updates weights in the backward pass is refused."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if type(optimizer).__name__ == "LayerWiseDummyOptimizer":
            raise hs.errors.IntegrationError(
                f"TrainingArguments(optim={str(self.args.optim)!r}) updates each layer in the backward pass, before "
                "gradients can be checked or unscaled; take the optimizer without '_layerwise'"
            )
        return optimizer

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.n_gpu > 1:  # note [moments]
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return super()._wrap_model(model, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_fsdp_enabled:
            forward_in_class(self.model)
            hs.prepare(self.model, policy=self.policy)  # note [moments]
        with hs.edit_weights(self.model):  # DCP and PEFT cast what they load as the parameters are: fp32 here
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with hs.edit_weights(self.model):
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # under FSDP torch makes the optimizer's state by a step of zero gradients, before any loss was scaled
        self.accelerator.scaler.scale_on(self.args.device)
        super()._load_optimizer_and_scheduler(checkpoint)
        self.accelerator.scaler.forget()

    def _save_scaler(self, output_dir: str) -> None:
        if not self.accelerator.scaler.rule.is_static:  # a run in another format would go on with a scale that is fixed
            super()._save_scaler(output_dir)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self.accelerator.scaler.rule.is_static:
            super()._load_scaler(checkpoint)

    # ------------------------------------------------------------------ training

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Count labels, in a format that no policy casts: as an input of the model fp16 ends at 65504 of them."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        if isinstance(count, Tensor) and count.is_floating_point():
            shared = getattr(self.accelerator, "parallelism_config", None) is not None  # then it may be a fraction
            count = count.to(hs.formats.widest_dtype(count.device)) if shared else count.long()
        return count

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Do the forward and backward pass of a batch, with the black box around `compute_loss`."""
        with self._boxed(model):
            return super().training_step(model, *args, **kwargs)

    @contextmanager
    def _boxed(self, model: Any) -> Iterator[None]:
        """Put the box in the place of `compute_loss` for one batch, also of one that a subclass defines."""
        if self._explains and (self.black_box is None or self.black_box.model is not model):
            self.black_box = self._box(model)
        box = self.black_box
        if box is None:
            yield
            return
        self.__dict__["compute_loss"] = lambda _, *args, **kwargs: box(*args, **kwargs)
        try:
            yield
        finally:
            del self.__dict__["compute_loss"]

    def _box(self, model: Any) -> hs.BlackBox | None:
        """Return the box of `model`, or None where its replays could not end."""
        own = self.compute_loss

        def loss_fn(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return own(model, copy.copy(inputs), *args, **kwargs)  # label smoothing takes the labels out of it

        if self.args.world_size > 1 and type(self).compute_loss is not transformers.Trainer.compute_loss:
            LOG.info("no black box: compute_loss of %s may wait for other ranks, which replay nothing", type(self))
            self._explains = False
            return None
        return hs.BlackBox(model, loss_fn, self.optimizer, evidence=self._evidence)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log `logs`, those of training with skipped steps, culprits and the loss scale."""
        callbacks = self.callback_handler.callbacks
        skipped = next((c for c in callbacks if isinstance(c, SkippedSteps)), None)
        if skipped is not None and not logs.keys().isdisjoint(("loss", "train_loss")):
            logs["skipped_steps"] = skipped.count
            if not self.accelerator.scaler.rule.is_static:
                logs["loss_scale"] = self.accelerator.scaler.get_scale()
            if skipped.culprits:
                logs["culprits"] = ", ".join(skipped.culprits)
                skipped.culprits = []
        super().log(logs, *args, **kwargs)


class Trainer(PolicyMixin, transformers.Trainer):
    """transformers.Trainer under a policy: see `PolicyMixin`."""


class Seq2SeqTrainer(PolicyMixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer under a policy: see `PolicyMixin`."""
