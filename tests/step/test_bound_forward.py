"""A bound forward as other libraries read it: signature, torch.fx, torch.jit, torch.export."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import halfstep as hs
from halfstep.errors import BindError

POLICIES = ["O0", "torch", "mixed", "O1", "O2", "pure", "O3"]
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def policy(name: str) -> hs.Policy:
    return hs.Policy.of(name) if name == "O0" else hs.Policy.of(name, dtype="bf16")


def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    wrapper.note = "kept"  # type: ignore[attr-defined]
    return wrapper


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """What it computes."""
        h = torch.matmul(torch.nn.functional.gelu(self.a(x)), self.b.weight) * scale
        return h if mask is None else h * mask


class Inherited(Plain):
    pass


class Decorated(Plain):
    @noted
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Another docstring."""
        return super().forward(x, mask, scale=scale)


class Catchall(Plain):
    def forward(self, x: Tensor, *rest: Tensor, **named: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, *rest, **named)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", [Plain, Inherited, Decorated, Catchall])
def test_what_is_read_of_a_bound_forward_is_the_users(kind: type[nn.Module], name: str) -> None:
    plain, model = kind(), hs.prepare(kind(), policy=policy(name))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(kind.forward)
    if kind is not Decorated:  # it does not look through decorators
        assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(plain.forward)
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(model.forward, attribute) == getattr(plain.forward, attribute), attribute
    assert inspect.unwrap(model.forward) is inspect.unwrap(kind.forward)
    assert getattr(model.forward, "note", None) == getattr(plain.forward, "note", None)


def test_a_parametrized_modules_forward_too() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    hs.prepare(model, policy=policy("O2"))
    assert inspect.signature(model[0].forward) == inspect.signature(nn.Linear(4, 4).forward)


def test_what_torch_compile_noted_on_a_forward_is_not_taken_over() -> None:
    """It would be run in the place of the bound forward."""

    class Compiled(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = hs.prepare(Compiled(4, 4), policy=policy("torch").replace(outputs="keep"))
    assert not any("dynamo" in name or "compile" in name for name in vars(cast(Any, model.forward).__func__))
    assert model(X).dtype is torch.bfloat16
    assert torch.compile(model, backend="eager")(X).dtype is torch.bfloat16


def test_the_bound_forwards_of_two_classes_have_a_code_object_each() -> None:
    """Dynamo counts recompilations by code object."""
    first, second = hs.prepare(Plain(), policy=policy("mixed")), hs.prepare(Inherited(), policy=policy("mixed"))
    assert first.forward.__code__ is not second.forward.__code__


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x @ x.T


class Builtin(nn.Module):
    forward = torch.relu


class Partial(nn.Module):
    def run(self, x: Tensor, *, twice: bool) -> Tensor:
        return x @ x.T * (2 if twice else 1)

    forward = functools.partialmethod(run, twice=True)


@pytest.mark.parametrize("kind", [Static, Builtin, Partial])
def test_forwards_that_are_no_plain_functions(kind: type[nn.Module]) -> None:
    want = kind()(X)
    model = hs.prepare(kind(), policy=policy("torch").replace(outputs="keep"))
    got = model(X)
    assert got.dtype is (torch.float32 if kind is Builtin else torch.bfloat16)
    assert torch.allclose(got.float(), want, atol=0.1)
    assert type(hs.unprepare(model)) is kind


# ------------------------------------------------------------------ tools that trace


TOOLS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "make_fx": lambda model: make_fx(model)(X),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", POLICIES)
def test_tools_that_see_casts_take_a_prepared_model(tool: str, name: str) -> None:
    torch._dynamo.reset()
    model = hs.prepare(Plain(), policy=policy(name))
    want = model(X)
    got = TOOLS[tool](model)(X)
    assert got.dtype is want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("name", [p for p in POLICIES if p != "O0"])
def test_torch_fx_is_refused_in_words(name: str) -> None:
    model = hs.prepare(nn.Sequential(Plain()), policy=policy(name))
    for root in (model, model[0]):
        with pytest.raises(BindError, match=r"torch\.fx\.symbolic_trace records operators.*hs\.unprepare"):
            torch.fx.symbolic_trace(root)
    assert model(X).isfinite().all()


def test_torch_fx_of_a_region_that_does_nothing_gives_the_graph_of_the_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(self.layer(x)) + y

    model = hs.prepare(Two(), policy="O0")
    graph = torch.fx.symbolic_trace(model)
    assert [node.name for node in graph.graph.nodes if node.op == "placeholder"] == ["x", "y"]
    assert torch.equal(graph(X, X), model(X, X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", POLICIES)
def test_torch_jit_script_is_refused_in_words(name: str) -> None:
    model = hs.prepare(nn.Sequential(nn.Linear(4, 4)), policy=policy(name))
    with pytest.raises(BindError, match=r"torch\.jit\.script compiles the source.*hs\.unprepare"):
        torch.jit.script(model)
    scripted = torch.jit.script(hs.unprepare(copy.deepcopy(model)))
    assert scripted(X).dtype is torch.float32


@pytest.mark.parametrize("name", ["torch", "mixed", "O2", "pure"])
def test_a_graph_module_is_prepared_recompiled_and_copied_as_any_other(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(torch.nn.functional.gelu(self.a(x)), self.b.weight)

    plain = Net()
    want = hs.prepare(copy.deepcopy(plain), policy=policy(name))(X)
    graph = torch.fx.symbolic_trace(plain)
    hs.prepare(graph, policy=policy(name))
    state = graph.state_dict()
    assert torch.equal(graph(X), want)
    for twin in (copy.deepcopy(graph), copy.copy(graph)):
        assert twin(X).dtype is want.dtype and torch.equal(twin(X), want)
        assert all(torch.equal(value, state[key]) for key, value in twin.state_dict().items())
    graph.recompile()
    assert torch.equal(graph(X), want)
    assert hs.unprepare(graph)(X).dtype is torch.float32
