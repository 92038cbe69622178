"""Watch: the black box of a loop that is left as it is, without a loss function of its own.

Note [what is noted]: of a loop that calls its models and computes a loss from their results, the calls of modules and
functions between the first call of a model and ``backward()`` are noted, outside of modules only: some references for
each. Those that the loss depends on are its program: with the tensors from outside as batch it is the loss function
that a replay calls, each function from the user's line. What comes before the first model (loading, noise) is data.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from halfstep.arguments import MODEL, NONE, PATH, check
from halfstep.binding.wrappers import unwrap, unwrap_optimizer
from halfstep.cast.regions.recompute import no_saved_tensor_hooks
from halfstep.errors import StepError
from halfstep.lens.box.blackbox import BlackBox, regions_here
from halfstep.lens.calls import RUNS_BACKWARD
from halfstep.lens.tracing import Sink, Tracer, user_frame
from halfstep.lens.verdict import Verdict
from halfstep.optim import stepped_by
from halfstep.scale.alarm import in_scaler
from halfstep.step.parts.record import MicroBatch, versions_of
from halfstep.torch_private.autograd import current_graph_task_id
from halfstep.torch_private.modules import global_forward_hooks_with_kwargs
from halfstep.trees import map_tensors, tensors

LONGEST = 4096  # calls noted between a model and a backward pass; of a longer loop nothing is
PRODUCTS = frozenset({"mul", "__mul__", "__rmul__"})  # by which a scaler scales a loss


@dataclass(eq=False, slots=True)
class Noted:
    """One call outside of modules."""

    func: Callable[..., Any]  # a module or a function
    args: Any
    kwargs: Any
    made: list[Tensor]  # its results
    around: list[AbstractContextManager[Any]]  # the region it was called in
    place: tuple[str, int]  # file and number of the user's line


@dataclass(eq=False, slots=True)
class Program:
    """The calls that a loss depends on, as a loss function of a model and the tensors from outside."""

    calls: list[Noted]
    loss: Tensor
    batch: list[Tensor]
    parameters: dict[str, int]  # name -> id of those that the calls use outside of modules
    watch: Watch

    def __call__(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Run the calls again."""
        now: dict[int, Any] = {id(old): new for old, new in zip(self.batch, batch, strict=True)}
        now |= {key: model.get_parameter(name) for name, key in self.parameters.items()}
        self.watch.replaying = True
        try:
            for call in self.calls:
                args, kwargs = map_tensors((call.args, call.kwargs), lambda t: now.get(id(t), t))
                with ExitStack() as stack:
                    for region in call.around:
                        stack.enter_context(region)
                    result = _from_line(call.place)(call.func, args, kwargs)
                now.update(zip(map(id, call.made), _results(call.func, args, result), strict=False))
        finally:
            self.watch.replaying = False
        loss: Tensor = now[id(self.loss)]
        return loss


class Watch(Sink):
    """Explains bad steps of a loop that is left as it is: what `hs.BlackBox` does, without its call.

    Open it around the loop. It finds the model that is called first, its optimizer, and what the loop computes from
    results of models to the loss that runs backward. A bad step is explained before the next one begins.

    Args:
        evidence: a folder for evidence files; None for none.
        model: names of modules are those in it; None: in the model that is called first.

    Attributes:
        verdicts: one for each model with a bad step that was explained, the last one.

    Raises:
        StepError: an argument of the wrong kind.

    Examples:
        >>> with hs.lens.Watch() as watch:
        ...     for x, y in batches:
        ...         loss = model(x).float().square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> watch.verdicts
        []
    """

    def __init__(self, evidence: str | Path | None = None, model: nn.Module | None = None) -> None:
        check("Watch", StepError, evidence=(evidence, PATH | NONE), model=(model, MODEL | NONE))
        self._evidence, self._model = evidence, model
        self._boxes: dict[int, BlackBox] = {}  # by the id of its model, which it keeps alive
        self._box: BlackBox | None = None  # of the step that is under way, from its first model to its backward pass
        self._kept: MicroBatch | None = None  # of that step
        self._calls: list[Noted] = []
        self._scaled: dict[int, Tensor] = {}  # id of a scaled loss -> the loss
        self.replaying = False
        self._tracer = Tracer(self)
        self._exits = ExitStack()

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the last verdict on each model that has one."""
        return [box.verdict for box in self._boxes.values() if box.verdict is not None]

    def __enter__(self) -> Watch:
        """Begin to watch the loop of this thread."""
        self._exits.enter_context(self._tracer)
        hook = register_module_forward_hook(self._note, with_kwargs=True)
        self._exits.callback(global_forward_hooks_with_kwargs.pop, hook.id, None)  # torch 2.13's `remove` leaves it
        self._exits.callback(hook.remove)
        return self

    def __exit__(self, *exception: object) -> None:
        """Report the last step, and leave the loop alone."""
        self._exits.close()
        self._calls, self._kept = [], None
        for box in self._boxes.values():
            box.read()

    def entering(self, module: nn.Module) -> None:
        """Begin a step where a model with parameters to train is called first."""
        if torch.compiler.is_compiling() or self._box is not None or self._tracer.running or self.replaying:
            return
        if current_graph_task_id() != -1:  # a checkpoint recomputes in a backward pass
            return
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            box = self._box_of(unwrap(module))
            with no_saved_tensor_hooks():  # a checkpoint around must not count what a replay saves
                box.read()
            self._kept = box.begin((), {})
            box._around = []  # each call has its own
            self._box = box

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, and note it; a backward pass to parameters ends the step."""
        if torch.compiler.is_compiling() or self._box is None or self._tracer.running or self.replaying:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        inputs = kwargs.get("inputs", args[1:2]) if name == "grad" else ()  # a penalty's, or a pipeline's of its shapes
        if name in RUNS_BACKWARD and (name != "grad" or any(isinstance(i, nn.Parameter) for i in tensors(inputs))):
            self._end(next(iter(tensors((args, kwargs))), None))
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or self._box is None or self._tracer.running:
            return
        if self.replaying or not torch.is_grad_enabled():
            return
        func = unwrap(func) if isinstance(func, nn.Module) else func
        made = _results(func, args, result)
        if not made or len(self._calls) > LONGEST:
            return
        frame = user_frame(sys._getframe())
        place = ("", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self._calls.append(Noted(func, args, kwargs, made, regions_here(), place))
        if getattr(func, "__name__", "") in PRODUCTS and in_scaler(sys._getframe()):
            self._scaled[id(result)] = tensors(args)[0]

    def _box_of(self, called: nn.Module) -> BlackBox:
        whole = self._model
        model = whole if whole is not None and any(called is part for part in whole.modules()) else called
        if id(model) not in self._boxes:
            self._boxes[id(model)] = box = BlackBox(model, lambda model: None, evidence=self._evidence)
            box.spelled = "watch.verdicts[-1]"
        return self._boxes[id(model)]

    def _end(self, root: Tensor | None) -> None:
        """Give the box its step, whose backward pass is about to begin from `root`."""
        box, kept, calls, scaled = self._box, self._kept, self._calls, self._scaled
        self._box, self._kept, self._calls, self._scaled = None, None, [], {}
        if box is None or kept is None or root is None or len(calls) > LONGEST:
            return
        loss = scaled.get(id(root), root)
        program = self._program(box.model, calls, loss)
        if not program.calls:  # it was not computed here
            return
        kept.batch = tuple(program.batch)
        kept.versions = versions_of(kept.batch)
        box.loss_fn = program
        if box.optimizer is None:
            box.follow(_optimizer_of(box.model))
        box.attach(kept, loss)

    def _program(self, model: nn.Module, calls: list[Noted], loss: Tensor) -> Program:
        needed, used = {id(loss)}, list[Noted]()
        for call in reversed(calls):
            if not needed.isdisjoint(map(id, call.made)):
                used.append(call)
                needed.update(map(id, tensors((call.args, call.kwargs))))
        used.reverse()
        made = {id(tensor) for call in used for tensor in call.made}
        own = {id(p): name for name, p in model.named_parameters()}
        outside: dict[int, Tensor] = {}
        first = sorted(used, key=lambda call: not isinstance(call.func, nn.Module))  # what models are given comes first
        for tensor in tensors([(call.args, call.kwargs) for call in first]):
            if id(tensor) not in made and not isinstance(tensor, nn.Parameter):
                outside[id(tensor)] = tensor
        return Program(used, loss, [*outside.values()], {own[key]: key for key in own.keys() & needed}, self)


def _results(func: Callable[..., Any], args: Any, result: Any) -> list[Tensor]:
    return tensors(args[0] if getattr(func, "__name__", "") == "__setitem__" else result)


def _from_line(place: tuple[str, int]) -> Callable[..., Any]:
    """Return a function that calls another from a line of the user's, where instruments find it."""
    run: Any = lambda func, args, kwargs: func(*args, **kwargs)  # noqa: E731  # its code is one line
    return FunctionType(run.__code__.replace(co_filename=place[0], co_firstlineno=place[1]), {})


def _optimizer_of(model: nn.Module) -> Optimizer | None:
    """Return the optimizer that steps parameters of `model`, the last one made."""
    own = {id(p) for p in model.parameters()}
    alive: Iterable[Any] = gc.get_objects()
    found = [one for one in alive if issubclass(type(one), Optimizer) and "param_groups" in vars(one)]
    fitting = [one for one in found if any(id(p) in own for p in stepped_by(one))]
    return unwrap_optimizer(fitting[-1]) if fitting else None
