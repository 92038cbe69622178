"""torch's private names stand in one package, and the installed torch has them all."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep.torch_private import autograd, compiler, devices, distributed, fake, modes, modules, operators
from tests.torch_private.private_names import EVERYWHERE, PACKAGE, dotted, missing, uses

ROOT = Path(halfstep.__file__).parent

MOST = 12
"""Files outside the package that may use private names: each of them names what only it needs."""


def test_files_import_private_names_from_the_package() -> None:
    assert len(found := uses(ROOT)) <= MOST, found


@pytest.mark.parametrize(("file", "name"), list(dotted(ROOT)))
def test_the_installed_torch_has(file: str, name: str) -> None:
    """A failure is a name that this version of torch lacks: `file` is the only place to change."""
    assert missing(name) == ""


def test_a_missing_name_is_found() -> None:
    assert missing("torch._C._a_name_of_tomorrow") == "torch._C._a_name_of_tomorrow"
    assert missing("torch._no_such_module.x") == "torch._no_such_module"
    assert missing("torch.overrides._push_mode") == ""


EXAMPLES: dict[Callable[[Any], Any], Callable[[], Any]] = {
    autograd.backward_hooks: lambda: torch.ones(1),
    autograd.base_of: lambda: torch.ones(1),
    compiler.codegen_of: lambda: torch.fx.symbolic_trace(nn.ReLU()).graph,
    devices.storage_key: lambda: torch.ones(1).untyped_storage(),
    modules.check_input_dim: lambda: nn.BatchNorm1d(1),
    modules.check_non_zero_input_channels: lambda: nn.SyncBatchNorm(1),
    modules.forward_hooks: lambda: nn.ReLU(),
    modules.forward_pre_hooks: lambda: nn.ReLU(),
    modules.apply_of: lambda: nn.ReLU,
    modules.get_name_of: lambda: nn.ReLU,
    modules.load_state_of: lambda: nn.ReLU,
    modules.non_persistent_buffers: lambda: nn.ReLU(),
    modules.replicate_of: lambda: nn.ReLU,
    modules.save_state_of: lambda: nn.ReLU,
    modules.state_dict_hooks: lambda: nn.ReLU(),
    modules.step_post_hooks: lambda: torch.optim.SGD([torch.ones(1)]),
    modules.step_pre_hooks: lambda: torch.optim.SGD([torch.ones(1)]),
    operators.schema_of: lambda: torch.ops.aten.add.Tensor,
}
"""Reader of a private attribute -> an object that has it."""

OF_PROCESSES = {
    distributed.comm_hooks: "needs a process group: tests/weights/test_ranks.py",
    distributed.has_recorded_static_graph: "needs a process group: tests/step/test_two_ranks.py",
    distributed.is_joining: "needs a process group: tests/step/test_two_ranks.py",
    distributed.is_root: "needs a process group: tests/step/test_shard.py",
    distributed.local_of: "needs a process group: tests/step/test_shard.py",
    distributed.spec_of: "needs a process group: tests/step/test_shard.py",
}
"""Readers whose objects need a process group, and where they are tested."""


@pytest.mark.parametrize("read", EXAMPLES, ids=repr)
def test_an_attribute_is_there(read: Callable[[Any], Any]) -> None:
    read(EXAMPLES[read]())


def test_every_attribute_has_an_example() -> None:
    files = [path.stem for path in (ROOT / PACKAGE).glob("*.py") if path.stem != "__init__"]
    parts = [importlib.import_module(f"halfstep.{PACKAGE}.{file}") for file in files]
    readers = {value for part in parts for value in vars(part).values() if isinstance(value, attrgetter)}
    assert readers == {*EXAMPLES, *OF_PROCESSES}


def test_functions_find_what_they_read() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert len(autograd.post_accumulate_grad_hooks(parameter)) == 1
    assert autograd.post_accumulate_grad_hooks(torch.ones(1)) == {}
    assert modules.conv_forward(nn.Conv1d) is not None and modules.conv_forward(nn.Linear) is None
    optimizer = torch.optim.SGD([parameter])
    assert not hasattr(optimizer.step, modules.WRAPPED)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert hasattr(optimizer.step, modules.WRAPPED)
    assert all(hasattr(nn.Module, name) for name in (modules.SAVE_STATE, modules.LOAD_STATE))
    module = nn.ReLU()
    assert compiler.original_of(module) is None and not compiler.is_compiled(module)
    assert autograd.forward_ad_level() == -1 and autograd.current_autograd_node() is None
    assert autograd.get_sequence_nr() >= 0
    with fake.FakeTensorMode(), modes.disable_current_modes():
        assert not fake.is_fake(torch.ones(1))
    assert distributed.spec_of is not distributed.local_of
    assert {type(value) for value in devices.cpu_instructions().values()} == {bool}


def test_attributes_that_all_files_may_read_are_there() -> None:
    has = {*vars(nn.ReLU()), *dir(torch.ones(1))}
    assert has >= EVERYWHERE


def test_uses_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nfrom torch._C import _push\nfrom torch.nn import Linear\n"
        "torch._foreach_add_\nx._base\nx._parameters\nx._own\nself._own = 1\ngetattr(x, '_orig_mod')\nlist._fields\n"
    )
    assert uses(tmp_path) == {"a.py": ["2 torch._C._push", "4 torch._foreach_add_", "5 _base", "9 _orig_mod"]}


def test_halfstep_imports_where_torch_lacks_names_of_later_versions() -> None:
    """These two are not in every version of torch that halfstep supports; what needs them does without."""
    script = (
        "import torch\nfrom torch._C._dynamo import eval_frame\n"
        "del torch._grouped_mm, eval_frame.set_code_exec_strategy, eval_frame._FrameAction\n"
        "import halfstep as hs\nwith hs.autocast('cpu', policy='mixed'):\n    torch.ones(2, 2).softmax(1)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
