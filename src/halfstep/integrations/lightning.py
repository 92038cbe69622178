"""Lightning and Fabric: `HalfstepPrecision`, a precision plugin that trains under a policy, and a `Fabric` with it.

The model is prepared when the Trainer sets it up, before a wrapper or an optimizer refers to its parameters. Steps of
the LightningModule run in the policy's region; gradients are unscaled before hooks and clipping; a step whose gradients
are not finite is skipped, logged with its culprits, and advances no scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking, need, region
from halfstep.torch_private.compiler import optimized

need("lightning", "2.5", extra="lightning")

from lightning.fabric import Fabric as LightningFabric  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy  # noqa: E402
from lightning.pytorch import LightningModule  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402
from lightning.pytorch.utilities import rank_zero_info  # noqa: E402
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled  # noqa: E402
from lightning.pytorch.utilities.types import LRSchedulerConfig  # noqa: E402

__all__ = ["Fabric", "HalfstepPrecision"]

AVERAGES = frozenset({"StochasticWeightAveraging", "WeightAveraging"})
"""Lightning's callbacks that average weights; the second came with 2.6."""


class HalfstepPrecision(Precision):
    """Train under a policy in a Lightning Trainer or in Fabric.

    Examples:
        >>> trainer = Trainer(plugins=[HalfstepPrecision("O2")])

    Args:
        policy: a preset's name, the path of a TOML file or a `Policy`.
        evidence: a folder: steps that are not finite are explained (`hs.lens.Watch`), and written there; not under a
            Trainer's DDP, which runs the steps inside its wrapper.

    Attributes:
        policy: it, as a `Policy`.
        scaler: the loss scale; None until optimizers were set up. It has the scale 1 where the policy has no loss scale
            (bf16), and skips steps whose gradients are not finite in every format.
        skipped_steps: how many steps were skipped so far.
        culprits: the parameters whose gradients were not finite in the last skipped step, as `GradScaler.culprits`
            names them.

    Raises:
        PolicyError: the policy is wrong.
    """

    def __init__(self, policy: hs.Policy | str | Path = "mixed", evidence: str | Path | None = None) -> None:
        self.policy = hs.Policy.of(policy)
        self._evidence = evidence
        self._watch = ExitStack()  # what explains steps that are not finite
        self.scaler: hs.GradScaler | None = None
        self.skipped_steps = 0
        self.culprits: tuple[str, ...] = ()
        self.shards_later = False  # set by `Fabric`: the strategy replaces parameters after `convert_module`
        self._modules: list[nn.Module] = []
        self._models: list[nn.Module] = []  # the same, wrapped
        self._own: list[nn.Module] = []  # those that were not prepared before
        self._places: list[tuple[nn.Module, str]] = []  # modules and the devices that they were prepared on
        self._region: AbstractContextManager[Any] | None = None
        self._attached = WeakSet[Optimizer]()
        self._bad = WeakKeyDictionary[Optimizer, bool]()  # whether the step of an unscaled optimizer is skipped
        self._stepped = WeakSet[Optimizer]()  # since the scale was last updated

    def __repr__(self) -> str:
        return f"HalfstepPrecision({self.policy.name or self.policy!r})"

    # ------------------------------------------------------------------ models and optimizers

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare `module` in place: called before it is wrapped, and before optimizers are made in a Trainer."""
        if self.shards_later:
            return module
        if (trainer := _trainer(module)) is not None:
            module.to(trainer.strategy.root_device)  # where the Trainer moves it next: rules depend on it
            self._refuse_averages(trainer, module)
        own = hs.prepared_policy(module) is None
        with _class_methods(module):
            hs.prepare(module, policy=self.policy)
        self._own += [module] if own else []
        self._modules.append(module)
        # steps by hand run inside the region, and torch's low copies of weights would outlive them
        by_hand = isinstance(module, LightningModule) and not module.automatic_optimization
        self._region = region(self.policy, cache_enabled=False if by_hand else None)
        self._models.append(module)
        if self._evidence is not None and len(self._models) == 1:
            self._watch.enter_context(hs.lens.Watch(self._evidence, module))
        self._places.append((module, _device_type(module)))
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Attach the Trainer's optimizers, and let schedulers of interval "step" wait for steps that are applied."""
        self.wrapped(model)
        self.attach(*optimizers)
        waiting = [_Waiting(config, self) if config.interval == "step" else config for config in lr_schedulers]
        return model, optimizers, waiting

    def wrapped(self, model: nn.Module) -> None:
        """Note what was put around the model that was set up last: `attach` makes weights of ranks equal through it."""
        self._models[-1] = getattr(model, "_forward_module", model)  # Fabric's

    def attach(self, *optimizers: Optimizer) -> None:
        """Let optimizers step the precise weights of the models that were set up; those attached before stay so."""
        fresh = [optimizer for each in optimizers if (optimizer := _inner(each)) not in self._attached]
        for module in self._modules if fresh else ():  # not before: DTensors with weak references cannot move
            self._the_scaler().name_parameters(module.named_parameters())
        for optimizer in fresh:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            models = [model for model in self._models if any(id(p) in held for p in model.parameters())]
            if models:
                hs.prepare(models, optimizer, policy=self.policy)
            self._attached.add(optimizer)

    def teardown(self) -> None:
        """Take the policy off the Trainer's model, whose weights are fp32 again; not if sharded or prepared before."""
        self._watch.close()
        for model in self._own:
            if not _is_sharded(model):
                with _class_methods(model):
                    hs.unprepare(model)
        self._modules, self._models, self._own = [], [], []
        if self.scaler is not None:
            self.scaler.forget()  # of a step that an error ended
        self._attached.clear()
        self._stepped.clear()

    def _refuse_averages(self, trainer: Any, module: nn.Module) -> None:
        if trainer.state.fn != "fit" or hs.resolve(self.policy, module).policy.params != "low":
            return
        for callback in trainer.callbacks:
            if any(kind.__name__ in AVERAGES for kind in type(callback).__mro__):
                name = type(callback).__name__
                raise IntegrationError(
                    f"{name} averages the weights that a model computes with, which are low under policy "
                    f"{self.policy.name!r}, and would miss updates below their last bit; train under a policy with "
                    "params='fp32' ('mixed'), or average in a callback of your own, inside hs.edit_weights(model)"
                )

    # ------------------------------------------------------------------ forward

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the policy's region, in which steps of a LightningModule and forward passes in Fabric run."""
        if self._region is None:
            raise IntegrationError(
                f"{self!r}: no model was set up yet; give it to Trainer.fit, or to fabric.setup before fabric.autocast"
            )
        while self._places:
            module, place = self._places.pop()
            if _device_type(module) != place:
                raise IntegrationError(
                    f"{self!r}: {type(module).__name__} was prepared on {place} and then moved to "
                    f"{_device_type(module)}, where other rules hold; use hs.integrations.lightning.Fabric, or call "
                    "fabric.to_device(model) before fabric.setup"
                )
        return self._region

    # ------------------------------------------------------------------ backward

    def pre_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Scale the loss of a Trainer, then call its hooks."""
        if _trainer(module) is not None:
            return super().pre_backward(self._scaled(tensor), module)
        return None

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass: in Fabric, whose hook above cannot return the loss, of the scaled one."""
        if _trainer(model) is not None:
            super().backward(tensor, model, *args, **kwargs)
        else:
            self._scaled(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        """Call the Trainer's hooks."""
        return None if _trainer(module) is None else super().post_backward(tensor, module)

    def _scaled(self, loss: Tensor) -> Tensor:
        self._settle()
        return self._the_scaler().scale(loss)

    def _the_scaler(self) -> hs.GradScaler:
        if self.scaler is None:
            if not self._models:
                raise IntegrationError(f"{self!r}: no model was set up yet; call fabric.setup(model, optimizer) first")
            _, _, scaler = hs.prepare(self._models, [], policy=self.policy)
            self.scaler = checking(scaler)
        return self.scaler

    # ------------------------------------------------------------------ step

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule | None = None, closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Run `closure` (forward and backward), unscale, let the Trainer clip, and step unless gradients are bad.

        Fabric gives no `model`. Without a `closure` the gradients are there. Return what `closure` returned.

        Raises:
            ScaleError: an optimizer that calls the closure itself (LBFGS) under a loss scale.
        """
        scaler = self._the_scaler()
        if isinstance(optimizer, LBFGS) and closure is not None:
            if not _is_one(scaler):
                return scaler.step(optimizer, closure=closure)  # its error names what to do
            return optimizer.step(closure if model is None else lambda: self._wrap_closure(model, optimizer, closure))
        result = None if closure is None else closure()
        due = _has_gradients(optimizer)
        if due:
            self.unscale_gradients(optimizer)
        else:
            self._bad[optimizer] = False
        if model is not None:
            self._after_closure(model, optimizer)
        if due:
            scaler.step(optimizer, **kwargs)
            self._stepped.add(optimizer)
            self._settle()
        if model is not None and model.trainer.loggers:
            scale = scaler.scale_on(model.device).clone()
            model.log_dict({"halfstep/scale": scale, "halfstep/skipped": float(self.skipped_steps)})
        return result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, once for a step, and log them if they are not finite."""
        scaler = self._the_scaler()
        if scaler.is_unscaled(optimizer):
            return
        self.attach(optimizer)  # made after fabric.setup_module
        if optimizer in self._stepped:  # while another one still has gradients of the present scale
            scaler.forget()
            self._stepped.clear()
        if _is_one(scaler):  # a backward pass beside this plugin is as good
            scaler.scale_on(next(p.device for group in optimizer.param_groups for p in group["params"]))
        scaler.unscale_(optimizer)
        self._bad[optimizer] = bool(scaler.skipped(optimizer))
        if self._bad[optimizer]:
            self.skipped_steps += 1
            self.culprits = scaler.culprits(optimizer)
            rank_zero_info(
                f"halfstep: a step of {type(optimizer).__name__} is skipped ({self.skipped_steps} so far): gradients "
                f"are not finite in {', '.join(self.culprits)}; loss scale {scaler.get_scale():g}"
            )

    def skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of `optimizer` was skipped: in manual optimization, ask it before a scheduler.

        Args:
            optimizer: as ``self.optimizers()`` or ``fabric.setup`` returned it, or the one inside.
        """
        return self._bad.get(_inner(optimizer), False)

    def _settle(self) -> None:
        """Update the scale after a step, unless gradients of another optimizer have the present one in them.

        Losses of several optimizers can run backward before the first of them steps; they are unscaled by one scale.
        """
        if self._stepped and not any(_has_gradients(o) for o in self._attached if o not in self._stepped):
            self._the_scaler().update()
            self._stepped.clear()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the number of skipped steps as plain numbers."""
        if self.scaler is None:
            return {}
        self._settle()
        return {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the model was set up."""
        self._the_scaler().load_state_dict(state_dict["scaler"])
        self.skipped_steps = state_dict["skipped_steps"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the loss scale of Lightning's own ``precision="16-mixed"``; load sharded weights unrounded."""
        scaler = self._the_scaler()
        if type(self).__qualname__ not in checkpoint and "MixedPrecision" in checkpoint and not scaler.rule.is_static:
            scaler.load_state_dict(checkpoint["MixedPrecision"])
        for module in self._modules:
            if (trainer := _trainer(module)) is not None and trainer.ckpt_path is not None:
                _load_precise(module, Path(trainer.ckpt_path), "state_dict")


class _Waiting(LRSchedulerConfig):
    """A scheduler of interval "step" whose turn does not come after a skipped step."""

    def __init__(self, config: LRSchedulerConfig, plugin: HalfstepPrecision) -> None:
        self.__dict__.update(vars(config), plugin=plugin, every=config.frequency)

    @property
    def frequency(self) -> float:
        """How many steps apart its turns are: without end after a skipped step."""
        return math.inf if self.plugin.skipped(self.scheduler.optimizer) else self.every

    @frequency.setter
    def frequency(self, value: int) -> None:
        self.every = value


class Fabric(LightningFabric):
    """Fabric under a policy: `lightning.Fabric` with the plugin, and what a plugin alone cannot do.

    Models are moved to their device before they are prepared, and optimizers are attached when they are set up, so that
    a checkpoint can be loaded into them at once.

    Examples:
        >>> fabric = Fabric(policy="O2", accelerator="cuda", devices=2)
        >>> model, optimizer = fabric.setup(model, optimizer)

    Args:
        *args: as for `lightning.Fabric`.
        policy: a preset's name, the path of a TOML file or a `Policy`.
        evidence: as for `HalfstepPrecision`; until the process ends.
        plugins: as for `lightning.Fabric`, beside the precision plugin.
        **kwargs: as for `lightning.Fabric`.

    Attributes:
        precision: the `HalfstepPrecision`; save and load it beside model and optimizer.
    """

    def __init__(
        self, *args: Any, policy: hs.Policy | str | Path = "mixed", evidence: str | Path | None = None,
        plugins: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.precision = HalfstepPrecision(policy, evidence)
        others = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        super().__init__(*args, plugins=[self.precision, *others], **kwargs)

    def setup(self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool = True, **kwargs: Any) -> Any:
        """Set up a model and its optimizers, as `lightning.Fabric.setup`."""
        if move_to_device:
            self.to_device(module)
        result = super().setup(module, *optimizers, move_to_device=move_to_device, **kwargs)
        self.precision.wrapped(result[0] if optimizers else result)
        self.precision.attach(*optimizers)
        return result

    def setup_module(self, module: nn.Module, move_to_device: bool = True, **kwargs: Any) -> Any:
        """Set up a model, as `lightning.Fabric.setup_module`."""
        if move_to_device:
            self.to_device(module)
        self.precision.shards_later = isinstance(self.strategy, ModelParallelStrategy)
        model = super().setup_module(module, move_to_device=move_to_device, **kwargs)
        if self.precision.shards_later:
            self.precision.shards_later = False
            self.precision.convert_module(model._forward_module)
        self.precision.wrapped(model)
        return model

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Set up optimizers, as `lightning.Fabric.setup_optimizers`."""
        result = super().setup_optimizers(*optimizers)
        self.precision.attach(*optimizers)
        return result

    def load(self, path: str | Path, state: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, as `lightning.Fabric.load`."""
        rest: dict[str, Any] = super().load(path, state, *args, **kwargs)
        for key, value in (state or {}).items():
            if isinstance(value, nn.Module):
                _load_precise(getattr(value, "_forward_module", value), Path(path), key)
        return rest

    def clip_gradients(self, *args: Any, error_if_nonfinite: bool = False, **kwargs: Any) -> Tensor | None:
        """Clip gradients, as `lightning.Fabric.clip_gradients`; those of a step that will be skipped raise nothing."""
        clipped: Tensor | None = super().clip_gradients(*args, error_if_nonfinite=error_if_nonfinite, **kwargs)
        return clipped


def _trainer(module: nn.Module | None) -> Any:
    """Return the Trainer that runs `module`; None in Fabric, which takes LightningModules too."""
    alone = isinstance(module, LightningModule) and module.fabric is None
    return module._trainer if alone else None  # type: ignore[union-attr]


def _inner(optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrappers of Lightning and Fabric, whose classes pose as its own."""
    inner = vars(optimizer).get("_optimizer") if "_strategy" in vars(optimizer) else None
    return _inner(inner) if isinstance(inner, Optimizer) else optimizer


@contextmanager
def _class_methods(module: nn.Module) -> Iterator[None]:
    """Give `module` the forward of its class meanwhile, where compilation or a wrapper (DDP) has set one on it."""
    context = getattr(module, "_compiler_ctx", None)
    if context is not None:
        to_uncompiled(module)
    if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
        del module.forward
    try:
        yield
    finally:
        if context is not None:
            from_compiled(optimized(module, context["dynamo_ctx"]))


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def _load_precise(module: nn.Module, file: Path, key: str) -> None:
    """Load sharded weights again from a checkpoint of one file: torch has loaded them into the low ones, rounded.

    Collective: every rank must reach this call.
    """
    if _is_sharded(module) and file.is_file():
        # weights_only: Lightning has just loaded the same file, with the user's choice of it
        saved = torch.load(file, mmap=True, map_location="cpu", weights_only=False)[key]
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        with hs.edit_weights(module):
            set_model_state_dict(module, saved, options=options)


def _is_one(scaler: hs.GradScaler) -> bool:
    """Return whether `scaler` has the scale 1 and keeps it."""
    return scaler.rule.is_static and scaler.rule.init == 1.0


def _device_type(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
