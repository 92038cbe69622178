"""The tracer: what it hands to a sink, with which module and line, and that it leaves nothing behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import halfstep as hs
from halfstep.cast.state import STATE
from halfstep.lens.tracing import KernelMode, file_of

SOURCE = Path(hs.__file__).parent


class Names(hs.lens.OperatorSink):
    """Notes (module, operator, which call of it in the module) of every operator."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[tuple[str, str, int]] = []
        self.lines: list[str] = []

    def operator(
        self, call: hs.lens.OperatorCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.calls.append((call.module, call.op, call.nth))
        self.lines.append(call.line)
        return func(*args, **kwargs)


class Kernels(hs.lens.Sink):
    """Notes the kernels, and the module that runs when one begins."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **kwargs)


class Shared(nn.Module):
    """One layer at two places, and a layer that is no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.two = nn.Linear(2, 2)
        self.foreign = (nn.Linear(2, 2),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foreign[0](self.two(self.one(x)))  # type: ignore[no-any-return]


def hooks() -> int:
    return len(nn.modules.module._global_forward_pre_hooks) + len(nn.modules.module._global_forward_hooks)


def state() -> tuple[Any, ...]:
    return STATE.above, len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack()), hooks()


def test_a_module_has_its_first_name_and_one_outside_the_model_that_of_its_caller() -> None:
    with hs.lens.Tracer(sink := Names(), Shared()) as tracer:
        model = tracer._model
        model(torch.ones(2))
    assert sink.calls == [("one", "linear", 0), ("one", "linear", 1), ("", "linear", 0)]
    assert all(line.startswith("test_tracing.py:") for line in sink.lines)


def test_operators_arrive_as_the_program_calls_them_or_as_the_rules_do() -> None:
    seen: dict[bool, list[torch.dtype]] = {True: [], False: []}

    class Formats(hs.lens.Sink):
        def __init__(self, above: bool) -> None:
            self.found = seen[above]

        def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if func is torch.tanh:
                self.found.append(args[0].dtype)
            return func(*args, **kwargs)

    x = torch.ones(2, 2, dtype=torch.bfloat16)
    policy = hs.Policy.of("mixed", dtype="bf16").with_ops(fp32=["tanh"])
    for above in (True, False):
        with hs.lens.Tracer(Formats(above), above=above), hs.autocast(policy=policy):
            torch.tanh(x)
    assert seen[True] == [torch.bfloat16] and seen[False] == [torch.float32]


def test_composites_are_opened_unless_they_are_closed() -> None:
    x = torch.ones(2, 2)
    with hs.lens.Tracer(opened := Names()):
        F.normalize(x)
    with hs.lens.Tracer(closed := Names(closed={"normalize"})):
        F.normalize(x)
    assert [op for _, op, _ in closed.calls] == ["normalize"]
    assert "normalize" not in [op for _, op, _ in opened.calls] and len(opened.calls) > 1


def test_kernels_arrive_in_forward_and_backward_passes() -> None:
    with hs.lens.Tracer(sink := Kernels()):
        nn.Linear(2, 1)(torch.ones(2, 2)).sum().backward()
    assert {"aten::addmm", "aten::sum", "aten::mm"} <= set(sink.names)
    with KernelMode(other := Kernels()):
        torch.ones(2).exp()
    assert "aten::exp" in other.names


@pytest.mark.parametrize("sink", [Names, Kernels, hs.lens.Sink])
def test_it_leaves_nothing_behind_and_can_be_opened_again(sink: Callable[[], hs.lens.Sink]) -> None:
    before, model = state(), nn.Sequential(nn.Linear(2, 2))
    tracer = hs.lens.Tracer(made := sink(), model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes"), tracer:
            model(torch.ones(2, 3))
        assert state() == before and not tracer.running and not hasattr(made, "tracer")


def test_a_line_is_that_of_the_program_and_leads_to_its_file() -> None:
    line = hs.lens.user_line()
    assert re.fullmatch(r"test_tracing\.py:\d+ line = hs\.lens\.user_line\(\)", line)
    assert file_of(line) == __file__ and file_of("other.py:1 x") == ""
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(torch.ones(2, 3))
    found = hs.lens.raised_at(caught.value)
    assert found is not None and found.filename == __file__


def test_no_other_part_observes_with_a_mode_of_its_own() -> None:
    """The modes of cast and compat apply rules: they do not observe."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"class \w+\((TorchDispatchMode|TorchFunctionMode)\)", path.read_text(encoding="utf-8"))
    }
    assert found == {"cast/rules/dispatch.py", "compat/apex/amp/handle.py", "lens/tracing.py"}


def test_one_file_reads_the_private_state_of_fsdp() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    assert [name for name, text in texts.items() if "_fsdp_param_group" in text] == [
        "distributed.py"
    ]  # torch_private's
    assert {name for name, text in texts.items() if "fsdp_groups" in text} == {"distributed.py", "fsdp.py"}
