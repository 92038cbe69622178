"""compile=: `loss_fn` through torch.compile, forward and backward, in the region of the training step.

Note [compiled region]: the region is opened outside the compiled function. Dynamo traces `loss_fn` under the
torch.autocast state and the function mode around it, and guards on both. So a graph break in the user's code is
harmless: the code between two graphs runs in the same region. A region opened inside would be left in the middle of a
`with`, which Dynamo cannot resume under a function mode.

Note [compiled backward]: by default torch traces a backward pass under the autocast state around the compiled
function, and a product that ran in fp32 inside, by a module rule or the user's own autocast(enabled=False), gets low
gradients (2e-3 off, relative). An eager backward pass runs in no region, so this default is switched off while anything
may be compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import StepError, did_you_mean
from halfstep.torch_private.compiler import counters, functorch_settings
from halfstep.trees import map_tensors

LOG = logging.getLogger("halfstep.step")
OPTIONS = frozenset({"backend", "dynamic", "fullgraph", "mode", "options"})
GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})  # inductor puts what it compiles into CUDA graphs


def compile_options(compile: object, *, accumulate: int, cuda_graph: bool) -> dict[str, Any] | None:
    """Return the arguments for torch.compile that `compile` asks for; None: do not compile."""
    if compile is None or compile is False:
        return None
    if compile is True:
        return {}
    if not isinstance(compile, Mapping):
        raise StepError(f"compile must be True, False or a dict of arguments for torch.compile and is {compile!r}")
    for name in compile:
        if name not in OPTIONS:
            near = did_you_mean(str(name), OPTIONS)
            raise StepError(f"compile={{{name!r}: ...}}: torch.compile takes {', '.join(sorted(OPTIONS))}{near}")
    options = dict(compile)
    backend = options.get("backend", "")
    if not isinstance(backend, str) and not callable(backend):
        raise StepError(f"compile={{'backend': {backend!r}}}: a backend is a name or a function")
    if accumulate > 1 and uses_graphs(options):
        raise StepError(
            f"compile={compile!r} with accumulate={accumulate}: torch's own CUDA graphs overwrite the gradients of "
            "one micro-batch with those of the next; use mode='max-autotune-no-cudagraphs', or cuda_graph=True"
        )
    if cuda_graph and uses_graphs(options):
        raise StepError(
            f"compile={compile!r} makes CUDA graphs of its own, which cuda_graph=True cannot capture; leave one of "
            "them out, or use mode='max-autotune-no-cudagraphs'"
        )
    return options


def uses_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether torch.compile with `options` makes CUDA graphs, whose results the next run overwrites."""
    return options.get("mode") in GRAPH_MODES or bool((options.get("options") or {}).get("triton.cudagraphs"))


def _twin(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `loss_fn` with a code object of its own: a plain function stays the frame that Dynamo can resume."""
    if type(loss_fn) is FunctionType:
        code, names = loss_fn.__code__.replace(), loss_fn.__globals__
        twin = FunctionType(code, names, loss_fn.__name__, loss_fn.__defaults__, loss_fn.__closure__)
        twin.__kwdefaults__ = loss_fn.__kwdefaults__
        vars(twin).update(vars(loss_fn))
        return twin

    def run(*args: Any, **named: Any) -> Any:
        return loss_fn(*args, **named)

    run.__code__ = run.__code__.replace()
    return run


class CompiledLoss:
    """A loss function compiled by torch.compile, to be called in an open region.

    Each has a code object of its own, by which Dynamo counts recompilations, so each has their limit for itself.
    """

    def __init__(self, loss_fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        try:
            self._run = torch.compile(_twin(loss_fn), **options)
        except Exception as error:  # of several kinds: an unknown backend, mode or option
            raise StepError(
                f"compile={dict(options)!r} is refused by torch.compile: {str(error).strip()} (backends: "
                f"{', '.join(torch.compiler.list_backends())})"
            ) from error
        self._overwritten = uses_graphs(options)
        self.breaks: tuple[str, ...] = ()  # why Dynamo broke the graph, each reason once
        self.guarded: list[Any] = []  # what Dynamo's guards refer to, kept alive while the model is not prepared

    def __call__(self, model: Any, *batch: Any, **named: Any) -> Any:
        """Return what the loss function returns."""
        if self._overwritten:
            torch.compiler.cudagraph_mark_step_begin()
        counted = counters()
        frames, before = counted["frames"]["total"], dict(counted["graph_break"])
        settings = functorch_settings()
        around, settings.backward_pass_autocast = settings.backward_pass_autocast, "off"  # note [compiled backward]
        try:
            returned = self._run(model, *batch, **named)
        finally:
            settings.backward_pass_autocast = around
        if counted["frames"]["total"] != frames:  # something was compiled
            self._note([reason for reason, n in counted["graph_break"].items() if n > before.get(reason, 0)])
        return map_tensors(returned, Tensor.clone) if self._overwritten else returned

    def _note(self, reasons: list[str]) -> None:
        new = [reason for reason in reasons if reason not in self.breaks]
        self.breaks += tuple(new)
        for reason in new:
            LOG.warning(
                "TrainStep(compile=...): loss_fn is not one graph, and what lies between its graphs runs eagerly; "
                "compile={'fullgraph': True} makes this an error. Dynamo says: %s",
                reason.strip().partition("\n")[0],
            )
