"""Watch: a loop that is left as it is; its bad step is explained, and no bit of the run changes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.lens.box.evidence import load_evidence
from halfstep.lens.box.trials import _no_optimizer_hooks
from tests.two_processes import as_script

BAD = 3  # the bad step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.norm, self.drop, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> dict[str, Tensor]:
        h = self.q(x) * factor
        return {"logits": self.head(self.drop(self.norm((h @ h.T).softmax(-1) @ x)))}


def train(fault: str, watch: Any) -> tuple[nn.Module, list[float]]:
    model, losses, criterion = Net(), [], nn.CrossEntropyLoss()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=64.0)
    generator = torch.Generator().manual_seed(1)
    with watch:
        for step in range(1, 6):
            bad = step == BAD
            x = torch.randn(8, 8, generator=generator)
            y = torch.arange(8) % 4
            with torch.autocast("cpu", torch.float16):
                out = model(x, factor=1e3 if bad and fault == "model" else 1.0)["logits"]
                loss = criterion(out, y)
                positive = out.float().square().mean() * (0.0 if bad and fault == "loss" else 1.0)
                loss = loss + 1e-3 * positive.log()
            losses.append(loss.item())
            scaler.scale(loss / 2).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model, losses


PLACES = {"model": ("matmul", "softmax(-1) @ x"), "loss": ("log", "positive.log()")}


@pytest.mark.parametrize("fault", PLACES)
def test_a_bad_step_is_explained_with_operator_and_line(fault: str, tmp_path: Path) -> None:
    watch = hs.lens.Watch(tmp_path)
    model, losses = train(fault, watch)
    (verdict,) = watch.verdicts
    op, text = PLACES[fault]
    assert verdict.op == op and text in verdict.line and verdict.step == BAD
    assert verdict.cause == {"model": "precision", "loss": "model"}[fault]
    assert (fault == "model") == any(cure.verified for cure in verdict.cures)
    content = load_evidence(tmp_path / f"halfstep-blackbox-{BAD}.pt")
    assert [tuple(t.shape) for t in content["window"][0]["batch"]] == [(8, 8), (8,)]  # as a loss function takes them
    alone, same = train(fault, nullcontext())
    assert [str(loss) for loss in losses] == [str(loss) for loss in same]
    for one, other in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_good_loops_and_what_is_no_training_give_no_verdict() -> None:
    watch = hs.lens.Watch()
    train("", watch)
    model = Net()
    with watch, torch.no_grad():
        model(torch.full((8, 8), 1e30))["logits"].sum()  # nothing runs backward
    with watch:
        model(torch.randn(8, 8))["logits"].sum().backward()
        torch.full((2,), torch.inf, requires_grad=True).sum().backward()  # no model takes part
    assert not watch.verdicts
    assert not torch.nn.modules.module._global_forward_hooks


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.head, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 1), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.part, x, use_reentrant=self.reentrant))
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_recomputes_begins_no_step(reentrant: bool) -> None:
    model, watch = Recomputed(reentrant), hs.lens.Watch()
    with watch:
        for step in range(1, 5):
            x = torch.full((4, 8), torch.inf if step == BAD else 1.0, requires_grad=True)
            model(x).sum().backward()
            model.zero_grad()
    (verdict,) = watch.verdicts
    assert (verdict.kind, verdict.step) == ("bad_batch", BAD)


def penalised(x: Tensor, factor: float) -> tuple[nn.Module, Tensor]:
    """Return a model and its loss with a penalty on the gradient of its input, which is `factor` times too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x.requires_grad_()
    value = model(x).sum()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return model, value + (slope * factor).square().sum().log()


def test_a_gradient_of_inputs_is_part_of_the_step_whose_loss_has_it() -> None:
    with hs.lens.Watch() as watch:
        penalised(torch.ones(4, 8), 1e30)[1].backward()
    (verdict,) = watch.verdicts
    assert verdict.step == 1 and verdict.op == "square" and "(slope * factor).square()" in verdict.line


def test_what_a_pipeline_runs_on_memory_without_values_is_no_step() -> None:
    """To learn shapes a stage runs forward, and takes the gradient of what came in, on a tensor from torch.empty."""
    torch.manual_seed(0)
    stage = nn.Linear(8, 8)
    with hs.lens.Watch() as watch:
        garbage = torch.full((4, 8), torch.nan, requires_grad=True)
        out = stage(garbage)
        torch.autograd.grad(out, [garbage], torch.ones_like(out), allow_unused=True)
        stage(torch.ones(4, 8)).sum().backward()
    assert not watch.verdicts


def test_a_bad_step_before_a_checkpoint_outside_of_modules_is_explained() -> None:
    part, head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 1)
    with hs.lens.Watch() as watch:
        for step in range(1, 5):
            x = torch.full((4, 8), torch.inf if step == BAD else 1.0)
            head(checkpoint(part, x, use_reentrant=False)).sum().backward()
            part.zero_grad()
    (verdict,) = watch.verdicts
    assert (verdict.kind, verdict.step) == ("bad_batch", BAD)


def test_replays_of_trials_call_no_hook_of_the_program() -> None:
    seen: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        train("model", hs.lens.Watch())
    finally:
        handle.remove()
    assert len(seen) == 4  # of five steps the bad one was left out


def test_a_hook_that_is_removed_during_a_trial_stays_removed() -> None:
    seen: list[object] = []
    gone, stays = (register_optimizer_step_post_hook(lambda *_: seen.append(1)) for _ in range(2))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with _no_optimizer_hooks():
        gone.remove()
        optimizer.step()
    assert not seen
    optimizer.step()
    stays.remove()
    assert len(seen) == 1


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(4):
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.float16):
        h = model[0](x) * (1e4 if step == 2 else 1.0)
        loss = F.cross_entropy(model[1](F.layer_norm(h @ h.T @ x, (8,))), torch.arange(8) % 4)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("options", [(), ("--policy", "torch")], ids=["alone", "under a policy"])
def test_run_explains_a_script(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = as_script(["-m", "halfstep", "run", *options, "--evidence", "box", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "halfstep run: black box: step 3: overflow of float16" in done.stderr
    assert "train.py:13 " in (tmp_path / "box" / "halfstep-blackbox-3.txt").read_text()
    assert (tmp_path / "box" / "halfstep-blackbox-3.pt").exists()


@pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")
def test_a_compiled_step_is_explained() -> None:
    model: nn.Module = Net()
    step = hs.TrainStep(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, x, y, factor: F.cross_entropy(model(x * factor)["logits"].float(), y),
        policy=hs.Policy.of("mixed", dtype="fp16", scale=1.0),
        compile={"backend": "aot_eager"},
    )
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    for factor in (1.0, 1.0, 1e3):
        result = step(x, y, torch.tensor(factor))
    assert result.host().skipped or not result.host().loss < torch.inf
    verdict = step.explain()
    assert (verdict.kind, verdict.op, verdict.module) == ("overflow", "matmul", "")
    assert "return {" in verdict.line
    assert "the step is compiled; the replay ran it eagerly" in verdict.notes


def test_no_hook_on_all_modules_is_left() -> None:
    with hs.lens.Watch():
        pass
    assert not _has_any_global_hook()
