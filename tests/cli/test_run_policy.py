"""`halfstep run --policy`: an unmodified script of torch.amp follows a policy, with the processes that it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cpu.amp
import torch.cuda.amp
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli import app
from halfstep.cli.run import run_under_policy
from halfstep.compat.torch_amp import install as torch_amp
from halfstep.errors import PolicyError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "frameworks" / "torch_amp_script.py"
DDP = ROOT / "examples" / "frameworks" / "torch_amp_ddp.py"
NAMES = [
    (torch, "autocast"),
    *[(m, n) for m in (torch.amp, torch.cuda.amp) for n in ("autocast", "GradScaler", "custom_fwd", "custom_bwd")],
    *[(torch.cpu.amp, n) for n in ("autocast", "GradScaler")],
]
cpu_amp: Any = torch.cpu.amp  # which does not export its names explicitly
TORCHS = [getattr(module, name) for module, name in NAMES]


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)  # another test imported it, and it has names of torch.amp
    yield
    torch_amp.uninstall()
    assert [getattr(module, name) for module, name in NAMES] == TORCHS


def run(label: str, script: Path, *args: str) -> int:
    return run_under_policy(label, script, args)


def by_hand(policy: hs.Policy | None, *, dtype: torch.dtype, steps: int, bad: int) -> list[str]:
    """Train as SCRIPT does, with the names of halfstep instead of torch's; return its lines."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    scaler = hs.GradScaler("cpu", init_scale=2.0**12)
    data = torch.Generator().manual_seed(1)
    lines = []
    for step in range(steps):
        inputs = torch.randn(32, 8, generator=data)
        targets = inputs[:, :4].argmax(dim=1)
        if step == bad:
            inputs[0] = float("inf")
        region = torch.autocast("cpu", dtype=dtype) if policy is None else hs.autocast("cpu", dtype, policy=policy)
        with region:
            outputs = net(inputs)
            loss = F.cross_entropy(outputs, targets)
        accuracy = (outputs.float().argmax(dim=1) == targets).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.skipped(optimizer):
            scheduler.step()
        optimizer.zero_grad()
        lines.append(f"{step} {float(loss.item()).hex()} {scaler.get_scale():g} {accuracy.item():.3f}")
    return lines


@pytest.mark.parametrize(
    ("label", "dtype"),
    [("mixed", "bfloat16"), ("mixed", "float16"), ("mixed:fp16", "bfloat16"), ("O1", "bfloat16")],
)
def test_a_script_trains_bit_for_bit_as_with_regions_of_the_policy(
    label: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(label, SCRIPT, "--steps", "12", "--dtype", dtype) == 0
    said = capsys.readouterr()
    preset, _, named = label.partition(":")
    format = torch.float16 if named == "fp16" else getattr(torch, dtype)
    assert said.out.splitlines() == by_hand(hs.Policy.of(preset), dtype=format, steps=12, bad=5)
    counts = "12 steps, 1 of them skipped; replaced: 24 regions of autocast (12 off), 1 GradScaler, scale 2048"
    assert said.err == f"halfstep run: policy {label}: {counts}\n"


def test_torchs_preset_has_the_bits_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("torch", SCRIPT, "--steps", "12") == 0
    assert capsys.readouterr().out.splitlines() == by_hand(None, dtype=torch.bfloat16, steps=12, bad=5)


def test_a_policy_file_changes_one_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = hs.Policy.of("mixed").with_ops(fp32=["linear"])
    file = tmp_path / "precision.toml"
    file.write_text(policy.to_toml())
    assert run(str(file), SCRIPT, "--steps", "6") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == by_hand(policy, dtype=torch.bfloat16, steps=6, bad=5)
    assert lines != by_hand(hs.Policy.of("mixed"), dtype=torch.bfloat16, steps=6, bad=5)


@pytest.mark.parametrize("label", ["O2", "pure", "O3"])
def test_a_policy_that_needs_a_model_is_an_error_with_the_remedy(
    label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(label, SCRIPT) == 2
    said = capsys.readouterr()
    assert not said.out and f"policy '{label}' lowers parameters (params='low')" in said.err
    assert f"model, optimizer, scaler = hs.prepare(model, optimizer, policy='{label}')" in said.err


def test_an_unknown_policy_a_file_that_is_not_there_and_fp32_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mixt", SCRIPT) == run("mixed", Path("missing.py")) == run("fp32", SCRIPT) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "did you mean 'mixed'?" in said[0]
    assert "no file and no program 'missing.py'" in said[1] and "preset 'O0' keeps everything in fp32" in said[2]


# ---------------------------------------------------------------------- names


def script(folder: Path, text: str) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    return file


def test_every_public_name_is_replaced_and_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["import torch, torch.cpu.amp, torch.cuda.amp"]
    lines += [f"print({module.__name__}.{name}.__module__)" for module, name in NAMES if "custom" not in name]
    lines += ["from torch.cuda.amp import GradScaler, autocast", "from torch import autocast as another"]
    lines += ["assert issubclass(GradScaler, torch.amp.GradScaler) and issubclass(autocast, another)"]
    assert run("mixed", script(tmp_path, "\n".join(lines))) == 0
    said = capsys.readouterr()
    assert all(module.startswith("halfstep.compat.torch_amp.") for module in said.out.split())
    assert "nothing was replaced, because neither autocast nor GradScaler of torch.amp was used" in said.err


def test_the_status_and_an_error_of_the_script_come_through_after_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        run("mixed", script(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(3)"), "--policy", "x")
    assert raised.value.code == 3
    with pytest.raises(ZeroDivisionError):
        run("mixed", script(tmp_path, "1 / 0"))
    said = capsys.readouterr()
    assert said.out == "['--policy', 'x']\n" and said.err.count("0 steps") == 2
    assert "HALFSTEP_RUN_POLICY" not in os.environ


def test_an_error_of_halfstep_in_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import halfstep as hs\nraise hs.HalfstepError('mine')\n")
    done = CliRunner().invoke(app, ["run", "--policy", "O1", str(script)])
    assert isinstance(done.exception, hs.HalfstepError) and "error: mine" not in done.stderr


def test_what_is_imported_from_where_torch_defines_it_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inner_names.py").write_text("from torch.cuda.amp.grad_scaler import GradScaler\n")
    assert run("mixed", script(tmp_path, "import inner_names")) == 0
    del sys.modules["inner_names"]
    assert "not replaced, imported from where torch defines them: inner_names.GradScaler" in capsys.readouterr().err


def test_fp16_without_a_scaler_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch\nwith torch.autocast('cpu', torch.bfloat16): torch.ones(2, 2) @ torch.ones(2, 2)"
    assert run("mixed", script(tmp_path, text)) == 0
    assert "without a GradScaler" not in capsys.readouterr().err
    assert run("mixed:fp16", script(tmp_path, text)) == 0
    assert "fp16 without a GradScaler: small gradients become 0" in capsys.readouterr().err


# ---------------------------------------------------------------------- regions


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_a_format_is_the_policys_or_else_the_scripts_and_off_is_off() -> None:
    torch_amp.install(hs.Policy.of("mixed"))
    with torch.autocast("cpu", torch.float16):
        assert product() is torch.float16
        with torch.autocast("cpu", enabled=False):
            assert product() is torch.float32
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            assert product() is torch.bfloat16
    with cpu_amp.autocast():
        assert product() is torch.bfloat16
    with torch.autocast("cpu", torch.float32):
        assert product() is torch.float32
    torch_amp.install(hs.Policy.of("mixed", dtype="fp16"))
    with torch.autocast("cpu", torch.bfloat16):
        assert product() is torch.float16
    torch_amp.install(hs.Policy.of("O0"))
    with torch.autocast("cpu", torch.bfloat16):
        assert product() is torch.float32


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_scale_is_the_policys_or_else_the_scripts() -> None:
    served = torch_amp.install(hs.Policy.of("mixed"))
    assert torch.amp.GradScaler("cpu", 8.0).get_scale() == 8.0
    assert torch.cuda.amp.GradScaler().get_scale() == 2.0**16
    assert not torch.amp.GradScaler("cpu", enabled=False).is_enabled()
    assert len(served.scalers) == 2
    for scale, first in ((4.0, 4.0), ("none", 1.0), (hs.ScaleRule.static(2.0), 2.0)):
        torch_amp.install(hs.Policy.of("mixed", scale=scale))
        assert torch.amp.GradScaler("cpu", 8.0).get_scale() == cpu_amp.GradScaler(8.0).get_scale() == first
        assert not torch.amp.GradScaler("cpu", enabled=False).is_enabled()


def test_a_checkpoint_computes_again_in_the_policys_region() -> None:
    policy = hs.Policy.of("mixed").with_ops(fp32=["linear"])
    torch_amp.install(policy)
    layer, formats = nn.Linear(4, 4), []

    def part(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer(x)
        formats.append((y.dtype, (y @ y).dtype))
        return y @ y

    with torch.autocast("cpu", torch.bfloat16):
        out = checkpoint(part, torch.ones(4, 4), use_reentrant=False)
    out.float().sum().backward()
    assert formats == [(torch.float32, torch.bfloat16)] * 2


def test_the_backward_of_a_function_runs_in_the_policys_region() -> None:
    torch_amp.install(hs.Policy.of("mixed").with_ops(fp32=["linear"]))
    formats: list[torch.dtype] = []

    class Twice(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            formats.extend([F.linear(gradient, gradient).dtype, (gradient @ gradient).dtype])
            return 2 * gradient

    apply: Any = Twice.apply
    with torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = apply(torch.ones(2, 2, requires_grad=True))
    out.sum().backward()
    assert formats == [torch.float32, torch.bfloat16]


def test_code_of_torch_gets_torchs_class_and_data_parallel_the_policys() -> None:
    torch_amp.install(hs.Policy.of("mixed"))
    made: dict[str, Any] = {}
    for caller in ("torch.utils.checkpoint", "torch.nn.parallel.parallel_apply", "torchvision.models", "train"):
        exec("import torch; region = torch.autocast('cpu', torch.bfloat16)", where := {"__name__": caller})
        made[caller] = isinstance(where["region"], hs.autocast)
    assert made == {
        "torch.utils.checkpoint": False,
        "torch.nn.parallel.parallel_apply": True,
        "torchvision.models": True,
        "train": True,
    }


def test_install_refuses_what_a_region_cannot_carry_out_and_changes_nothing() -> None:
    with pytest.raises(PolicyError, match="has module rules"):
        torch_amp.install(hs.Policy.of("mixed").with_modules({"head": "fp32"}))
    assert [getattr(module, name) for module, name in NAMES] == TORCHS


# ---------------------------------------------------------------------- processes

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
RUN = [sys.executable, "-m", "halfstep", "run", "--policy", "mixed"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def command(*words: str) -> tuple[str, str]:
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_processes_that_a_script_starts_follow_the_policy_too(tmp_path: Path) -> None:
    text = """
import json, multiprocessing, subprocess, sys
import torch
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        assert autocast.__module__ == "halfstep.compat.torch_amp.autocast_mode"
        with autocast("cpu"): return (torch.ones(2, 2) @ torch.ones(2, 2)).float()

def work(scaler):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with autocast("cpu"):
        loss = model(torch.ones(1, 2)).sum()
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()

if __name__ == "__main__":
    for method in ("spawn", "fork"):
        process = multiprocessing.get_context(method).Process(target=work, args=(GradScaler("cpu"),))
        process.start(); process.join(); assert process.exitcode == 0
    print(json.dumps([float(x.sum()) for x in DataLoader(Data(), num_workers=1)]))
    for module in ("halfstep", "torch"):
        code = f"import sys, {module}; import torch; print(torch.autocast.__module__, sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, "x"], check=True)
    subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], check=True)
"""
    out, err = command(*RUN, str(script(tmp_path, text)))
    lines = out.splitlines()
    assert json.loads(lines[0]) == [8.0, 8.0]
    assert lines[1:] == ["halfstep.compat.torch_amp.autocast_mode x"] * 2 + ["False"]
    worked = "halfstep run: policy mixed: 1 steps, 0 of them skipped; replaced: 1 regions of autocast (0 off), 1 Grad"
    assert len(re.findall(re.escape(worked), err)) == 2


def test_the_sitecustomize_of_the_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.from_the_environment = 7\n")
    own = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])}
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(sys.from_the_environment)'])"
    )
    done = subprocess.run([*RUN, str(script(tmp_path, code))], capture_output=True, text=True, env=own, check=True)
    assert done.stdout == "7\n"


@pytest.mark.dist
@pytest.mark.hours
@pytest.mark.parametrize("outside", [True, False], ids=["around torchrun", "inside torchrun"])
def test_torchruns_ranks_skip_together(outside: bool) -> None:
    python = [sys.executable, *TORCHRUN]
    words = [*RUN, "--", *python, str(DDP)] if outside else [*python, *RUN[1:], str(DDP)]
    out, err = command(*words)
    weights = re.findall(r"rank \d: weights (\S+), scale 512", out)
    assert len(weights) == 2 and weights[0] == weights[1] and "nan" not in weights[0]
    for rank in (0, 1):
        counts = "4 steps, 1 of them skipped; replaced: 4 regions of autocast (0 off), 1 GradScaler, scale 512"
        assert f"halfstep run (rank {rank}): policy mixed: {counts}" in err
