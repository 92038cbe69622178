"""The recipes of the two torch documents run as they are written, and train as they do with torch itself."""

from __future__ import annotations

import hashlib
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples.loading import load
from tests.two_processes import run_all

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "seeds"
IMPORT = "from halfstep.compat.torch_amp.cuda import GradScaler, autocast"

# Name -> (what was changed in the document's code and what it was, sha256 of the document's code).
LOOPS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "torch_typical": (
        {"Net().to(device)": "Net().cuda()", "lr=0.01, momentum=0.9)": "...)"},
        "5f0d0ae3ea440affe29e324430d080803692a1ac2b5a55fee61a91f5e4f41c15",
    ),
    "torch_clipping": ({}, "a2f68c77a274ce97b72529c268e389c96f1fdb1c06d77d2c2ea34e75deeded9d"),
    "torch_accumulation": ({}, "31e37ae2f11d74ec28b9b943baf6f52dbf4446f0a19242cb50771873de9b7795"),
    "torch_penalty": ({}, "a9aa8234feeadcf6681718037e6beaf2a6d5f1fdf27f48bba9cffce76f43deba"),
    "torch_several": (
        {"scaler = GradScaler()": "scaler = torch.cuda.amp.GradScaler()"},
        "d5bd03f92f3f7777d2aa6f8da83baa3566f0703a0591c019dcb27e324aaeeae1",
    ),
}
SOME = [pytest.param(n, marks=pytest.mark.slow) if n in {"torch_penalty", "torch_several"} else n for n in LOOPS]


@pytest.fixture(autouse=True)
def programs_find_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python examples/seeds/NAME.py` does: they import pictures.py, which is beside them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def source(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def run_with(name: str, imports: str) -> dict[str, Any]:
    """Run a loop with other lines in place of its import; return its names."""
    text = source(name)
    assert text.count(IMPORT) == 1
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text.replace(IMPORT, imports), name, "exec"), names)
    return names


def weights(names: Mapping[str, Any]) -> dict[str, Tensor]:
    models = {name: value for name, value in names.items() if isinstance(value, nn.Module) and name.startswith("model")}
    return {f"{name}.{key}": t for name, model in models.items() for key, t in model.state_dict().items()}


def losses(names: Mapping[str, Any], when: str) -> list[float]:
    value = names[when]
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", LOOPS)
def test_the_code_is_the_documents(name: str) -> None:
    changes, digest = LOOPS[name]
    code = source(name).split("# ---- the document's code\n")[1].split("# ---- what came out")[0]
    for ours, theirs in changes.items():
        assert code.count(ours) == 1
        code = code.replace(ours, theirs)
    lines = "\n".join(line.rstrip() for line in code.splitlines() if line.strip())
    assert hashlib.sha256(lines.encode()).hexdigest() == digest
    head = source(name).split('"""')[1]
    assert "Source: the blog post" in head and "Changed: torch.cuda.amp" in head


@pytest.mark.parametrize("name", SOME)
def test_a_loop_of_the_document_trains_in_fp16_as_in_fp32(name: str) -> None:
    half = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    single = run_with(name, f"{IMPORT}\nimport functools\nautocast = functools.partial(autocast, False)")
    assert half["autocast"]().recipe.policy.dtype == "fp16"
    for before, after, wanted in zip(
        *(losses(half, w) for w in ("before", "after")), losses(single, "after"), strict=True
    ):
        assert after == pytest.approx(wanted, rel=0.25, abs=0.02)
        assert name == "torch_penalty" or after < 0.25 * before  # the penalty outweighs the loss there
    assert half["scaler"].get_scale() >= 2.0**10


@pytest.mark.parametrize("name", SOME)
def test_replacing_the_import_changes_no_bit_where_torch_has_the_units(name: str) -> None:
    """bf16 on the CPU: torch's own kernels on both sides."""
    torch_lines = (
        "import functools\n"
        "autocast = functools.partial(torch.amp.autocast, 'cpu')\n"
        "GradScaler = functools.partial(torch.amp.GradScaler, 'cpu')"
    )
    theirs = run_with(name, torch_lines)
    ours = run_with(name, "from halfstep.compat.torch_amp.cpu import GradScaler, autocast")
    assert theirs["scaler"].get_scale() == ours["scaler"].get_scale()
    assert weights(theirs).keys() == weights(ours).keys() != set()
    for key, value in weights(theirs).items():
        assert torch.equal(value, weights(ours)[key]), key


# ---------------------------------------------------------------------- parallel


def test_data_parallel_trains_with_the_region_around_the_call_and_inside_the_model() -> None:
    out = load("seeds/torch_data_parallel").main()
    for one in out.values():
        assert one["formats"] == {torch.float16}
        assert one["last"] < 0.05 * one["first"]


def test_a_region_inside_the_model_holds_in_the_threads_of_several_devices() -> None:
    out = load("seeds/torch_several_devices").main()
    assert out["formats"] == [torch.float16, torch.float16]
    assert out["last"] < 0.05 * out["first"]


@pytest.mark.dist
def test_the_processes_of_distributed_data_parallel_skip_together(monkeypatch: pytest.MonkeyPatch) -> None:
    program = load("seeds/torch_distributed")
    monkeypatch.setattr(program, "spawn", run_all)
    out = program.main()
    assert out["last"] < 0.1 * out["first"]
    assert out["scales"] == [512.0, 512.0] and out["equal"]


def test_every_example_is_tested_here() -> None:
    files = {file.stem for file in EXAMPLES.glob("torch_*.py")}
    assert files == {*LOOPS, "torch_data_parallel", "torch_several_devices", "torch_distributed"}
