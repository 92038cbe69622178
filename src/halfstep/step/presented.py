"""What a bound forward looks like to a library that reads it instead of calling it.

transformers chooses a model's arguments by the names in its signature, torch.fx makes the placeholders of a graph from
them: a bound forward has name, docstring, annotations and signature of the user's. Two tools read in a way that loses
the region, and are refused: `torch.jit.script` compiles the source of the user's forward, and `torch.fx` records the
operators of a region and not the region. `torch.compile`, `torch.export`, `torch.jit.trace` and `make_fx` see casts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils._pytree import tree_leaves

from halfstep.cast.rules.recipe import Recipe
from halfstep.errors import BindError
from halfstep.weights import WeightStore

__all__ = ["graph_methods", "meet_fx", "plain_forward", "presented_as", "refuse_script"]

DYNAMO = "_torchdynamo"  # what torch.compile notes on a function: it would run that in the place of ours


def presented_as(forward: Callable[..., Any], original: type[nn.Module]) -> Callable[..., Any]:
    """Give `forward` the name, docstring, annotations, signature and attributes of the forward of `original`."""
    own = original.forward
    functools.update_wrapper(forward, own, updated=())
    noted = getattr(own, "__dict__", {})
    if not any(name.startswith(DYNAMO) for name in noted):
        for name, value in noted.items():
            forward.__dict__.setdefault(name, value)
    with suppress(ValueError, TypeError):  # a builtin function may have none
        forward.__dict__["__signature__"] = inspect.signature(own)  # inspect.getfullargspec does not look further
    return forward


def plain_forward(original: type[nn.Module], bound: Callable[[], type[nn.Module]]) -> Any:
    """Return what has the forward of `original` as a function of (module, ...): `original`, unless it is no function.

    A static method or a callable object takes no module; its twin here leaves the module out.

    Args:
        original: the user's class.
        bound: returns its bound class.
    """
    if isinstance(inspect.getattr_static(original, "forward"), FunctionType):
        return original  # looked up at each call: a forward that its class is given later counts

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(bound(), module), "forward")(*args, **kwargs)  # noqa: B009  # no attribute of Module

    return SimpleNamespace(forward=forward)


def graph_methods(original: type[nn.Module]) -> dict[str, Any]:
    """Return what a bound torch.fx.GraphModule needs: it compiles its forward into its own class."""
    if not issubclass(original, GraphModule):
        return {}

    def recompile(self: GraphModule) -> Any:
        kind = type(self)
        self.__class__ = original  # where the bound forward looks for it
        try:
            return original.recompile(self)
        finally:
            self.__class__ = kind

    return {"recompile": recompile}


def meet_fx(recipe: Recipe, store: WeightStore | None, tree: Any) -> None:
    """Refuse to be traced by torch.fx in the region of `recipe`, unless that does nothing, or by tensors, as `make_fx`.

    Args:
        recipe: what is about to be opened.
        store: the precise weights behind low parameters, or None. `make_fx` takes parameters of torch's own class only.
        tree: the inputs; `make_fx` traces with tensors, and sees the casts.

    Raises:
        BindError: the graph would lack the region.
    """
    if not is_fx_symbolic_tracing():
        return
    if not any(isinstance(leaf, Proxy) for leaf in tree_leaves(tree)):
        if store is not None:
            store.unwatch()
        return
    if recipe.mode is not None or any(on for _, _, on in recipe.devices):
        raise BindError(
            f"torch.fx.symbolic_trace records operators and not the region of policy {recipe.policy.name!r}, so the "
            "graph would compute in other formats; hs.unprepare(model), trace it, then hs.prepare the graph "
            "(torch.export and torch.compile take a prepared model as it is)"
        )


def refuse_script(self: nn.Module) -> nn.Module:
    """Refuse `torch.jit.script`, which calls this.

    Raises:
        BindError: the compiled source of forward would lack the region.
    """
    binding = self.__dict__.get("_halfstep")
    if binding is not None:
        raise BindError(
            f"torch.jit.script compiles the source of forward, without the region of policy {binding.policy.name!r}; "
            "script a copy that is not prepared, hs.unprepare(copy.deepcopy(model)), or use torch.jit.trace or "
            "torch.export, which see the casts of a prepared model"
        )
    return self
