"""The state of the process, and what `initialize` adds to an optimizer: a stash with its state, steps that are skipped.

Optimizers keep the state they were initialised with. The instance's class is swapped for a cached subclass; none of its
functions is replaced. Pickle and deepcopy see the original class. torch's schedulers replace ``optimizer.step`` by a
function that counts; one made before `initialize` is taken off, because the subclass's step tells schedulers itself.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import halfstep as hs
from halfstep.compat.apex.amp.scaler import LossScaler
from halfstep.compat.shared import LOW_NAMES
from halfstep.torch_private.foreach import foreach_add_
from halfstep.torch_private.modules import STEPPED, WRAPPED

OWN_STEP = "_amp_own_step"
ADDED = ("_amp_stash", "_lazy_init_maybe_master_weights", "_prepare_amp_backward", "_post_amp_backward")
TRIES = 64  # of step(closure) after overflows: each halves the scale, and 2**24 is 38 halvings above the floor


class AmpState:
    """What code in the wild reads and writes."""

    def __init__(self) -> None:
        self.hard_override = False  # conflicting options are printed as warnings and go through
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1  # 0 prints nothing, 2 prints every cast
        self.opt_properties: Any = None  # the options of the last `initialize`; None before it
        self.handle: Any = None  # of the last `init`, or of an `initialize` with O1
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = 2.0**24
        self.loaded: dict[str, Any] = {}  # a state_dict loaded while amp was off; `state_dict` gives it back
        self._sessions: list[weakref.ref[Session]] = []  # held by their optimizers
        self._without: list[LossScaler] = []  # of a call without optimizers

    @property
    def sessions(self) -> list[Session]:
        """The calls of `initialize` whose optimizers are in use, the last one first."""
        return [session for made in self._sessions if (session := made()) is not None and session.in_use]

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scalers of `sessions`; where there is none, those of a call without optimizers."""
        return [scaler for session in self.sessions for scaler in session.loss_scalers] or self._without

    def begin(self, properties: Any, session: Session | None, scalers: list[LossScaler]) -> None:
        """Note a call of `initialize`; it takes the place of calls for the same models, or of all if amp is off."""
        self.opt_properties, self.loaded, self._without = properties, {}, scalers
        for other in self.sessions:
            if not properties.enabled or (session is not None and other.models and other.models <= session.models):
                other.in_use = False
        if session is not None:
            session.earlier.update(other for other in self.sessions if other.trained)
            for other in session.earlier:
                other.trained = False
            self._sessions = [weakref.ref(session), *(made for made in self._sessions if made() is not None)]


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or print `msg` if `AmpState.hard_override` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print(f"Warning:  {msg}")


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with `rank0`, on the first process only."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    other_rank = several and torch.distributed.get_rank() != 0
    if _amp_state.verbosity > 0 and not (rank0 and other_rank):
        print(msg)


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Iterate over what `optimizer` steps: fp32 masters where its parameters are low, else the parameters.

    After a `scale_loss` block their ``.grad`` is the unscaled fp32 gradient: clip these.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"amp.master_params takes an optimizer and got {type(optimizer).__name__}")
    stash = getattr(optimizer, "_amp_stash", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter if stash is None else stash.master(parameter)


class Session:
    """What one call of `initialize` made.

    The scales of a session that is not `in_use` are not saved. What ends the use: a call for the same models, amp
    switched off, a loaded state without them, and a later call whose models train alone. The next `scale_loss` begins
    it again.
    """

    def __init__(self, properties: Any, loss_scalers: list[LossScaler], models: Iterable[nn.Module] = ()) -> None:
        self.properties = properties
        self.loss_scalers = loss_scalers  # one for each loss
        self.models = weakref.WeakSet(models)
        self.in_use = True
        self.trained = False  # whether its models have trained since the last call
        self.earlier = weakref.WeakSet[Session]()  # had trained when this was made; until its own first `scale_loss`
        self.masters: dict[int, tuple[Tensor, Tensor]] = {}  # id of a low parameter -> (it, its fp32 master)
        self.casts_off: Callable[[], AbstractContextManager[Any]] = nullcontext  # O1's casts
        self.casts_on: Callable[[], AbstractContextManager[Any]] = nullcontext

    def train(self) -> None:
        """Note a `scale_loss`."""
        self.in_use = self.trained = True
        for other in self.earlier:
            other.in_use = other.trained
        self.earlier.clear()


class StateOfMasters(defaultdict[Any, Any]):
    """An optimizer's state, which a master finds too: ``optimizer.state[master]`` is that of its low parameter.

    Between steps the keys are the model's parameters, in a step their masters. Copies and pickles are plain.
    """

    def __init__(self, session: Session, state: Any) -> None:
        super().__init__(dict, state)
        self._session = session
        self._lows: dict[int, Tensor] = {}

    def _low(self, key: Any) -> Any:
        masters = self._session.masters
        if len(self._lows) != len(masters):
            self._lows = {id(master): low for low, master in masters.values()}
        return self._lows.get(id(key))

    def __missing__(self, key: Any) -> Any:
        low = self._low(key)
        return self[low] if low is not None and dict.__contains__(self, low) else super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or dict.__contains__(self, self._low(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter or master, or `default`."""
        return self[key] if key in self else default

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


class AmpOptimizerState:
    """amp's state of one optimizer (``optimizer._amp_stash``)."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self._optimizer = weakref.ref(optimizer)  # no cycle: a session ends with its last optimizer
        self.session = session
        self.params_have_scaled_gradients = False  # by a pass with delay_unscale=True
        self.scaled_with: Tensor | None = None  # the scale; None: the flag was set by hand
        self.lazy_init_called = True  # masters exist from the beginning
        self.overflow = ""  # why the next step is to be skipped
        self.skipped = False  # whether the last step was
        self.scaling = False  # whether a `scale_loss` block with this optimizer is open
        self.hook: RemovableHandle | None = None  # makes a loaded ``optimizer.state`` accept masters as keys
        self._kept: list[tuple[Tensor, Tensor]] = []

    # ------------------------------------------------------------------ parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, which hold the model's own parameters."""
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the model's parameters that the optimizer holds."""
        for group in self.param_groups:
            yield from group["params"]

    def master(self, parameter: Tensor) -> Tensor:
        """Return what is stepped for `parameter`: its fp32 master, or itself."""
        found = self.session.masters.get(id(parameter))
        return found[1] if found is not None and parameter.dtype in hs.formats.LOW_DTYPES else parameter

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return (low parameter, its master) for all that have one."""
        both = ((p, self.master(p)) for p in self.parameters())
        return [(parameter, master) for parameter, master in both if master is not parameter]

    has_masters = property(lambda self: bool(getattr(self.session.properties, "master_weights", False)))
    already_patched = property(lambda self: bool(self.overflow), doc="Whether the next step will be skipped.")

    def _groups_with(self, *, masters: bool) -> list[list[Tensor]]:
        return [[p for p in g["params"] if (self.master(p) is not p) == masters] for g in self.param_groups]

    # Low parameters with a master, their masters, and parameters that are their own masters: by group, and flat.
    fp16_groups = property(lambda self: self._groups_with(masters=True))
    fp32_from_fp16_groups = property(lambda self: [[self.master(p) for p in g] for g in self.fp16_groups])
    fp32_from_fp32_groups = property(lambda self: self._groups_with(masters=False))
    all_fp16_params = property(lambda self: [p for g in self.fp16_groups for p in g])
    all_fp32_from_fp16_params = property(lambda self: [p for g in self.fp32_from_fp16_groups for p in g])
    all_fp32_from_fp32_params = property(lambda self: [p for g in self.fp32_from_fp32_groups for p in g])
    # Gradients set aside during a `scale_loss` block.
    all_fp16_grad_stash = property(lambda self: self._stashed(self.all_fp16_params))
    all_fp32_from_fp32_grad_stash = property(lambda self: self._stashed(self.all_fp32_from_fp32_params))

    def _stashed(self, parameters: list[Tensor]) -> list[Tensor | None]:
        kept = {id(parameter): gradient for parameter, gradient in self._kept}
        return [kept.get(id(parameter)) for parameter in parameters]

    # ------------------------------------------------------------------ one backward pass

    @torch.no_grad()
    def rescale(self, scaler: LossScaler) -> None:
        """Bring gradients that an earlier pass left scaled to the scale of `scaler`, which may be another by now."""
        if not self.params_have_scaled_gradients or self.scaled_with is None:
            return
        scale = scaler.mark(self.scaled_with.device)
        factor = scale / self.scaled_with
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
        self.scaled_with = scale

    def prepare(self) -> None:
        """Set aside gradients that are unscaled already, so that scaled ones are not added to them."""
        if self.params_have_scaled_gradients:
            return
        self._take_master_grads()
        self._kept = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        for parameter, _ in self._kept:
            parameter.grad = None

    def restore(self) -> None:
        """Restore the gradients set aside and drop those of a backward pass that raised."""
        if self.params_have_scaled_gradients:
            return  # they accumulate in place, as in plain PyTorch
        for parameter in self.parameters():
            parameter.grad = None
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []
        self._show_master_grads()

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients set aside to the new, unscaled ones."""
        old, new = [], []
        for parameter, gradient in self._kept:
            fresh = parameter.grad
            if fresh is None:
                parameter.grad = gradient
            elif gradient.layout is torch.strided and fresh.layout is torch.strided and gradient.dtype is fresh.dtype:
                old.append(gradient)
                new.append(fresh)
                parameter.grad = gradient  # the same tensor as before, as autograd accumulates
            else:
                parameter.grad = fresh + gradient.to(fresh.dtype)
        if old:
            foreach_add_(old, new)
        self._kept = []
        self.params_have_scaled_gradients = False
        self.scaled_with = None
        self._show_master_grads()

    def _show_master_grads(self) -> None:
        """Let masters carry the fp32 gradients of their low parameters, for clipping by `master_params`."""
        for parameter, master in self.pairs():
            gradient = parameter.grad
            master.grad = gradient if gradient is None or gradient.dtype is torch.float32 else gradient.float()

    def _take_master_grads(self) -> None:
        for parameter, master in self.pairs():
            gradient = master.grad
            if gradient is not None and gradient is not parameter.grad and parameter.grad is not None:
                parameter.grad = None
                parameter.grad_dtype = None
                parameter.grad = gradient

    def _drop_master_grads(self) -> None:
        for _, master in self.pairs():
            master.grad = None

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the optimizer's own step, or skip it after an overflow."""
        kind = type(optimizer).__name__
        if self.scaling:
            raise RuntimeError(
                f"{kind}.step() was called inside `with amp.scale_loss(...)`, where gradients are still scaled; "
                "call it after the block"
            )
        if self.params_have_scaled_gradients:
            raise RuntimeError(
                f"{kind}.step() was called while gradients are still scaled: the last amp.scale_loss block had "
                "delay_unscale=True. Use delay_unscale=False for the last backward pass before the step"
            )
        setattr(optimizer, STEPPED, True)
        args, kwargs = self._with_closure(kind, args, kwargs)
        self.skipped = bool(self.overflow)
        if self.skipped:
            maybe_print(self.overflow)
            self.overflow = ""
            self._drop_master_grads()
            return None
        self._take_master_grads()
        with self.session.casts_off():
            result = run(*args, **kwargs)
        self._drop_master_grads()
        return result

    def _with_closure(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = args[0] if args else kwargs.get("closure")
        if not callable(closure):
            return args, kwargs
        if self.has_masters:
            raise RuntimeError(
                f"amp does not support {kind}.step(closure) with master weights: the closure would run backward while "
                "the optimizer holds fp32 masters. Run forward and backward before step(), or use opt_level='O1' or "
                "'O0', whose optimizers may take a closure"
            )
        again = functools.partial(self._evaluate, kind, closure)
        return ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": again})

    def _evaluate(self, kind: str, closure: Callable[[], Any]) -> Any:
        """Run a closure with O1's casts on, again with a smaller scale as long as gradients overflow."""
        for _ in range(TRIES):
            with self.session.casts_on():
                loss = closure()
            if not self.overflow:
                return loss
            maybe_print(self.overflow.replace("Skipping step", "Evaluating the closure again"))
            self.overflow = ""
        raise RuntimeError(
            f"{kind}.step(closure): gradients are not finite at any loss scale; look for inf or NaN in the batch, the "
            "loss and the parameters"
        )

    def zeroed(self) -> None:
        """Forget what belonged to gradients that `zero_grad` has cleared."""
        self.params_have_scaled_gradients = False
        self.scaled_with = None
        self.overflow = ""
        self._kept = []
        self._drop_master_grads()


@contextmanager
def backward_pass(loss: Tensor, scaler: LossScaler, stashes: list[AmpOptimizerState]) -> Iterator[Tensor]:
    """Yield the scaled loss; unscaled gradients are set aside, and restored if the block raises."""
    for stash in stashes:
        stash.rescale(scaler)
        stash.prepare()
        stash.scaling = True
    try:
        yield scaler.scale(loss)
    except BaseException:
        for stash in stashes:
            stash.restore()
        raise
    finally:
        for stash in stashes:
            stash.scaling = False


def process_optimizer(optimizer: Optimizer, session: Session) -> None:
    """Give `optimizer` its stash, and a class whose steps are skipped after an overflow."""
    own = optimizer.__dict__.pop("step", None)
    if own is not None and not hasattr(own, WRAPPED):
        optimizer.__dict__[OWN_STEP] = own
    kind: Any = type(optimizer)  # mypy takes Optimizer for unhashable
    optimizer.__class__ = amp_class(kind)
    optimizer._amp_stash = AmpOptimizerState(optimizer, session)  # type: ignore[attr-defined]
    if session.properties.master_weights:
        hook = optimizer.register_load_state_dict_post_hook(_accept_masters)
        optimizer._amp_stash.hook = hook  # type: ignore[attr-defined]
        _accept_masters(optimizer)


def _accept_masters(optimizer: Optimizer) -> None:
    """Make ``optimizer.state`` accept masters as keys; loading a state replaces it."""
    optimizer.state = StateOfMasters(optimizer._amp_stash.session, optimizer.state)  # type: ignore[attr-defined]


def release_optimizer(optimizer: Optimizer) -> None:
    """Take off what `process_optimizer` did."""
    optimizer.__class__ = type(optimizer).__mro__[1]
    stash = optimizer.__dict__.pop("_amp_stash", None)
    if stash is not None and stash.hook is not None:
        stash.hook.remove()
        optimizer.state = defaultdict(dict, optimizer.state)
    if OWN_STEP in optimizer.__dict__:
        optimizer.__dict__["step"] = optimizer.__dict__.pop(OWN_STEP)


@functools.cache
def amp_class(original: Any) -> type[Optimizer]:
    """Return the subclass of `original` that initialised optimizers get; one for each class."""

    @functools.wraps(original.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = self.__dict__.get(OWN_STEP) or functools.partial(original.step, self)
        return self._amp_stash.step(self, run, args, kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # the original's step runs the hooks already
    setattr(step, WRAPPED, True)  # it sets STEPPED itself

    @functools.wraps(original.zero_grad)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        original.zero_grad(self, *args, **kwargs)
        self._amp_stash.zeroed()

    @functools.wraps(original.add_param_group)
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        original.add_param_group(self, param_group)
        adopt(self, self._amp_stash.session, self.param_groups[-1]["params"])

    def reduce_ex(self: Any, protocol: Any) -> Any:
        made: Any = original.__reduce_ex__(self, max(int(protocol), 2))
        return (_bare, (original,), *made[2:])

    def post_amp_backward(self: Any, loss_scaler: LossScaler) -> None:
        stash = self._amp_stash
        loss_scaler.unscale_and_check(self.param_groups, masters=stash.has_masters)
        stash.add_up()

    def lazy_init(self: Any) -> None:
        self._amp_stash.lazy_init_called = True  # masters are made by initialize

    @torch.no_grad()
    def to_model(self: Any) -> None:
        for parameter, master in self._amp_stash.pairs():
            parameter.copy_(master)

    body = {
        "step": step, "zero_grad": zero_grad, "add_param_group": add_param_group, "__reduce_ex__": reduce_ex,
        "_prepare_amp_backward": lambda self: self._amp_stash.prepare(), "_post_amp_backward": post_amp_backward,
        "_amp_lazy_init": lazy_init, "_lazy_init_maybe_master_weights": lazy_init,
        "_master_params_to_model_params": to_model, "__module__": original.__module__,
        "__qualname__": original.__qualname__, "__doc__": original.__doc__,
    }  # fmt: skip
    return type(original.__name__, (original,), body)


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)  # for pickle and deepcopy to fill


def adopt(optimizer: Optimizer, session: Session, parameters: list[Tensor]) -> None:
    """Give low parameters of no prepared model fp32 masters, if wanted, as the parameters of a module of their own."""
    if not session.properties.master_weights:
        return
    for low, name in LOW_NAMES.items():
        new = [p for p in parameters if p.dtype is low and p.requires_grad and id(p) not in session.masters]
        if not new:
            continue
        holder = nn.Module()
        for index, parameter in enumerate(new):
            holder.register_parameter(f"p{index}", cast(nn.Parameter, parameter))
        policy = hs.Policy(name="apex masters", dtype=name, params="low", table="none", scale="none")
        attach(holder, [optimizer], policy)
        session.masters |= masters_of(holder, {f"p{index}": parameter for index, parameter in enumerate(new)})


def attach(model: nn.Module, optimizers: list[Optimizer], policy: hs.Policy) -> None:
    """Prepare `model` and those of its parameters that `optimizers` hold; what else they hold stays as it is."""
    mine = {id(p) for p in model.parameters()}
    groups = [(group, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
    for group, params in groups:
        group["params"] = [p for p in params if id(p) in mine]
    try:
        hs.prepare(model, optimizers, policy=policy)
    finally:
        for group, params in groups:
            group["params"] = params


def masters_of(model: nn.Module, parameters: dict[str, Any]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return id -> (low parameter, master) of a prepared model."""
    with hs.edit_weights(model):
        wide = dict(model.named_parameters())
    return {id(p): (p, wide[name]) for name, p in parameters.items() if wide[name] is not p}
