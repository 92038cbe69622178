"""accelerate: a policy in a loop with `accelerate.Accelerator`.

`Accelerator` takes the place of accelerate's own and has one argument more, `policy`. Its `prepare` binds the policy
to models, lets optimizers step precise weights, and gives them a scaler that skips steps whose gradients are not
finite. `follow` makes an Accelerator that exists already, such as that of transformers' Trainer, follow a policy.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking, forward_in_class, need, region, was_skipped
from halfstep.policy import Policy, resolve
from halfstep.torch_private.compiler import original_of

need("accelerate", "1.10", extra="accelerate")

import accelerate  # noqa: E402  # its version is checked first
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import AutocastKwargs, DistributedType  # noqa: E402

__all__ = ["AcceleratedScaler", "Accelerator", "PolicyOptimizer", "follow"]

OTHER_ENGINES = {
    DistributedType.DEEPSPEED: "DeepSpeed casts weights and scales losses; set bf16 or fp16 in its configuration",
    DistributedType.MEGATRON_LM: "Megatron-LM has a precision of its own: set bf16 or fp16 in its configuration",
    DistributedType.XLA: "torch_xla compiles the whole step, where a policy's casts and skips are not carried out",
}
"""What carries out no policy, and what to do."""


class AcceleratedScaler(hs.GradScaler):
    """A scaler for several optimizers of one loss, where `update` is called after the step of each.

    The gradients of the others still have the scale of the loss. So `update` takes effect when the next loss is scaled,
    or the scale is read: once for all optimizers that have been stepped.
    """

    _due = False

    def __init__(self, rule: hs.ScaleRule) -> None:
        super().__init__(rule=rule)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale by its rule before the next loss is scaled; set it at once to `new_scale`."""
        self._due = new_scale is None
        if new_scale is not None:
            super().update(new_scale)

    def settle(self) -> None:
        """Carry out an `update` that waits."""
        if self._due:
            self._due = False
            super().update()

    def scale(self, outputs: Any) -> Any:
        """Do what `hs.GradScaler.scale` does."""
        self.settle()
        return super().scale(outputs)

    def get_scale(self) -> float:
        """Return the scale of the next loss; waits for the device."""
        self.settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after all updates: `hs.GradScaler.state_dict`."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state in the place of updates that wait: `hs.GradScaler.load_state_dict`."""
        self.forget()
        super().load_state_dict(state_dict)

    def forget(self) -> None:
        """Discard what has been unscaled or stepped since the last update."""
        self._due = False
        super().forget()

    def _lazy_init_scale_growth_tracker(self, device: torch.device | str | None) -> None:
        """Make the tensors before the first loss: accelerate calls torch's method of this name under FSDP2."""
        self.scale_on(device or "cpu")


class PolicyOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around an optimizer, with the verdict of the scaler.

    accelerate takes a step for skipped if ``optimizer.step`` was not called, but torch's fused optimizers are called
    and skip on the device.

    Attributes:
        step_was_skipped: whether the last `step` was skipped.
    """

    step_was_skipped = False

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step the optimizer at the end of an accumulation window, unless a gradient is not finite."""
        if not self.gradient_state.sync_gradients:
            return
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.step_was_skipped = was_skipped(self.scaler, self.optimizer)

    # `hs.BlackBox` registers hooks, which belong to the optimizer inside
    register_step_pre_hook = property(lambda self: self.optimizer.register_step_pre_hook)
    register_step_post_hook = property(lambda self: self.optimizer.register_step_post_hook)


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator, with models, optimizers and scaler that follow a policy.

    Examples:
        >>> accelerator = hs.integrations.accelerate.Accelerator(policy="O2", gradient_accumulation_steps=2)
        >>> model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    Args:
        *args: as accelerate's.
        policy: a preset's name, the path of a TOML file or a `Policy`.
        evidence: a folder: steps that are not finite are explained (`hs.lens.Watch`, until `end_training`), and
            written there.
        **kwargs: as accelerate's; `mixed_precision` and handlers for autocast and GradScaler are refused.

    Attributes:
        policy: the policy.
        scaler: skips steps whose gradients are not finite, also where the policy has no loss scale (then it is 1).

    Raises:
        IntegrationError: accelerate's mixed precision is set too, or an engine is asked for that carries out no policy.
        PolicyError, UnbuiltError: as `hs.prepare`.
    """

    _clipped: list[Tensor] | None = None  # inside a method that clips

    def __init__(
        self, *args: Any, policy: Policy | str | Path = "mixed", evidence: str | Path | None = None, **kwargs: Any
    ) -> None:
        wanted = Policy.of(policy)
        given = inspect.signature(accelerate.Accelerator.__init__).bind_partial(self, *args, **kwargs).arguments
        chosen = given.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        _refuse_precision(str(chosen), wanted)
        super().__init__(*args, **kwargs)
        self._follow(wanted)
        if evidence is not None:
            self._watch.enter_context(hs.lens.Watch(evidence))

    def _follow(self, policy: Policy) -> None:
        if self._models or self._optimizers:
            raise IntegrationError(
                f"this Accelerator has prepared {len(self._models)} models and {len(self._optimizers)} optimizers "
                "without a policy; call follow(accelerator, policy) before accelerator.prepare"
            )
        _refuse_precision(self.mixed_precision, policy)
        engine = OTHER_ENGINES.get(self.distributed_type)
        if self.distributed_type == DistributedType.FSDP and not self.is_fsdp2:
            engine = (
                "FSDP1 makes parameters pieces of one flat tensor, which have no norms and no precise weights of their "
                "own: pass FullyShardedDataParallelPlugin(fsdp_version=2)"
            )
        if engine:
            raise IntegrationError(f"hs.integrations.accelerate, policy {policy.name!r}: {engine}")
        for name, remedy in (("scaler_handler", "scale="), ("autocast_handler", "its rules")):
            if (handler := getattr(self, name, None)) is not None:
                raise IntegrationError(
                    f"Accelerator(kwargs_handlers=[{type(handler).__name__}(...)]) beside policy {policy.name!r} has "
                    f"no effect: leave it out, and change the policy ({remedy})"
                )
        if self.is_fsdp2 and self.state.fsdp_plugin.mixed_precision_policy is not None:
            raise IntegrationError(
                f"FullyShardedDataParallelPlugin(mixed_precision_policy=...) beside policy {policy.name!r}: leave it "
                "out; formats follow from the policy"
            )
        concrete = resolve(policy.replace(modules=()), nn.Identity(), self.device.type).policy
        rule = checking(hs.GradScaler.from_policy(concrete.scale, concrete.dtype)).rule
        self.policy, self.scaler = policy, AcceleratedScaler(rule)
        self._waiting: list[Optimizer] = []
        self._watch = ExitStack()  # what explains steps that are not finite

    # ------------------------------------------------------------------ preparing

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Do what accelerate's `prepare` does, and bind the policy to models and optimizers, in any order of `args`.

        Models and optimizers that `hs.prepare` was given before, with the same policy, stay as they are. If it raises,
        nothing was prepared, but under FSDP2 the model is sharded.
        """
        models = [a for a in args if isinstance(a, nn.Module)]
        optimizers = [a for a in args if isinstance(a, Optimizer)]
        if not self.is_fsdp2:
            for value, where in zip(args, device_placement or [None] * len(args), strict=False):
                if isinstance(value, nn.Module):
                    self._place(value, where)
            self._bind(models, optimizers)
            return super().prepare(*args, device_placement=device_placement)
        # fully_shard replaces parameters, and low ones must be sharded before they are lowered
        sharded = any(hasattr(p, "device_mesh") for model in models for p in model.parameters())  # by hs.shard
        if self.policy.params == "low" and not sharded and any(map(hs.prepared_policy, models)):
            raise IntegrationError(
                f"the model was given to hs.prepare with policy {self.policy.name!r} and is to be sharded, which "
                "replaces its low parameters; leave hs.prepare out, or call hs.shard(model, policy) in its place"
            )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if sharded]
        kept = [list(group["params"]) for group in groups]
        result = super().prepare(*args, device_placement=device_placement)
        for group, parameters in zip(groups, kept, strict=True):
            group["params"][:] = parameters  # accelerate exchanges them by address, and a rank without a part has none
        self._bind(models, optimizers)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Do what accelerate's `prepare_model` does, and bind the policy."""
        self._place(model, device_placement)
        self._bind([model], [])
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        wrapped = original_of(prepared) or prepared
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            # ranks get the fp32 values of the first one here: a first forward pass under no_sync would round them
            hs.prepare(wrapped, policy=self.policy)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Do what accelerate's `prepare_optimizer` does, with precise weights and the verdict of the scaler."""
        if any(kind.__name__ in ("Lomo", "AdaLomo") for kind in type(optimizer).__mro__):
            raise IntegrationError(
                f"{type(optimizer).__name__} updates weights inside the backward pass, before gradients can be checked "
                "or unscaled; train it without a policy"
            )
        if not self.is_fsdp2:
            self._bind([], [optimizer])
        if isinstance(optimizer, AcceleratedOptimizer):
            if type(optimizer) is AcceleratedOptimizer:
                raise IntegrationError(
                    "prepare() was given an optimizer that another Accelerator has prepared, and that steps with the "
                    "scaler of that one; give it the optimizer itself (optimizer.optimizer)"
                )
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            prepared: Optimizer = optimizer
            return prepared
        place = self.device_placement if device_placement is None else device_placement
        wrapped = PolicyOptimizer(optimizer, device_placement=place, scaler=self.scaler)
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def _place(self, model: nn.Module, wanted: bool | None) -> None:
        """Move a model where accelerate will, before the policy is resolved for its device."""
        placed = getattr(model, "_is_accelerate_prepared", False) or hasattr(model, "hf_device_map")
        if wanted is None:
            wanted = self.device_placement and not self.is_fsdp2
        if wanted and not placed:
            model.to(self.device)

    def _bind(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Bind the policy to models, and let optimizers step precise weights as soon as all their models are known."""
        for model in models:
            forward_in_class(model)
        if models:
            hs.prepare(models, policy=self.policy)
        for model in models:
            self.scaler.name_parameters(self.unwrap_model(model).named_parameters())
        known = {id(p): m for m in [*self._models, *models] for p in m.parameters()}
        waiting = []
        for optimizer in dict.fromkeys([*self._waiting, *optimizers]):
            stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
            if all(p in known for p in stepped):
                hs.prepare(list(dict.fromkeys(known[p] for p in stepped)), optimizer, policy=self.policy)
            else:
                waiting.append(optimizer)
        self._waiting = waiting

    # ------------------------------------------------------------------ the loop

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of ``loss / gradient_accumulation_steps``, scaled."""
        if self._waiting:
            self._bind([], [])
            for optimizer in self._waiting:
                hs.prepare(list(self._models), optimizer, policy=self.policy)  # raises: it has other parameters
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, once before each step; gradients of low weights become fp32.

        Without `optimizer`, one or several, those of all; inside a method that clips, those of its parameters.
        """
        if optimizer is None:
            chosen = list(self._optimizers)
            if self._clipped is not None:
                clipped = {id(p) for p in self._clipped}
                chosen = [o for o in chosen if any(id(p) in clipped for g in o.param_groups for p in g["params"])]
        else:
            chosen = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in chosen:
            inner = one.optimizer if isinstance(one, AcceleratedOptimizer) else one
            if not self.scaler.is_unscaled(inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale the gradients of `parameters`, clip their norm, and return it."""
        with self._clipping(parameters) as listed:
            norm: Tensor = super().clip_grad_norm_(listed, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Unscale the gradients of `parameters` and clip their values."""
        with self._clipping(parameters) as listed:
            super().clip_grad_value_(listed, clip_value)

    @contextmanager
    def _clipping(self, parameters: Tensor | Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Let methods that clip unscale the optimizers of `parameters`: gradients of others may still be added to."""
        self._clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        try:
            yield self._clipped
        finally:
            self._clipped = None

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Open a region of the policy for operators outside of models, or with ``enabled=False`` one without casts."""
        handler = autocast_handler or AutocastKwargs()
        with region(self.policy, enabled=handler.enabled, cache_enabled=handler.cache_enabled):
            yield

    def _refuse_whole_states(self) -> None:
        """Refuse FULL_STATE_DICT for low weights: torch rounds what it broadcasts, before the model is given it."""
        low = self.policy.params == "low" and self.is_fsdp2
        if low and "FULL_STATE_DICT" in str(self.state.fsdp_plugin.state_dict_type):
            raise IntegrationError(
                "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT') and the low weights of policy "
                f"{self.policy.name!r}: torch would round the fp32 weights that it loads; use 'SHARDED_STATE_DICT'; "
                "accelerator.get_state_dict(model) returns whole fp32 weights"
            )

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Do what accelerate's `save_state` does; low weights and FULL_STATE_DICT under FSDP2 are refused."""
        self._refuse_whole_states()
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Do what accelerate's `load_state` does; low weights and FULL_STATE_DICT under FSDP2 are refused."""
        self._refuse_whole_states()
        super().load_state(*args, **kwargs)
        self.scaler.forget()  # under FSDP2 torch steps an optimizer without state, with zeros, before it loads one

    def end_training(self) -> None:
        """End trackers as accelerate's `end_training`, and the explanation of steps."""
        self._watch.close()
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Release models, optimizers and what the scaler refers to: accelerate's `free_memory`."""
        self.scaler.forget()
        self._waiting = []
        return super().free_memory(*objects)


def follow(accelerator: accelerate.Accelerator, policy: Policy | str | Path = "mixed") -> Accelerator:
    """Make an Accelerator follow a policy, in place; call it before `prepare`.

    The class of `accelerator` becomes `Accelerator`, or a class derived from it and from the present one.

    Args:
        accelerator: one that has prepared no model and no optimizer, such as that of a Trainer.
        policy: a preset's name, the path of a TOML file or a `Policy`.

    Returns:
        The same object.

    Raises:
        IntegrationError: it has prepared something, follows another policy, or is set up as `Accelerator` refuses it;
            it is as it was before.
        PolicyError, UnbuiltError: as `hs.prepare`.
    """
    wanted = Policy.of(policy)
    if isinstance(accelerator, Accelerator):
        if accelerator.policy != wanted:
            raise IntegrationError(
                f"this Accelerator follows policy {accelerator.policy.name!r} already and was given {wanted.name!r}; "
                f"they differ:\n{accelerator.policy.diff(wanted)}"
            )
        return accelerator
    before: Any = type(accelerator)
    plain = before is accelerate.Accelerator
    accelerator.__class__ = Accelerator if plain else type(before.__name__, (Accelerator, before), {})
    try:
        accelerator._follow(wanted)
    except BaseException:
        accelerator.__class__ = before
        raise
    followed: Accelerator = accelerator
    return followed


def _refuse_precision(chosen: str, policy: Policy) -> None:
    if chosen.lower() != "no":
        raise IntegrationError(
            f"accelerate's mixed precision is {chosen!r} (by mixed_precision=, `accelerate launch` or an Accelerator "
            f"made before) beside policy {policy.name!r}: set mixed_precision='no'; the policy states the formats"
        )
