"""evidence=: a bad step in the loop of another library is explained and written, with operator, module and line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import halfstep as hs

pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale")

FP16 = hs.Policy.of("mixed", dtype="fp16", scale=64.0)
BAD = 3  # the bad step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.drop = nn.Linear(16, 16), nn.Linear(16, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor, *, factor: Tensor) -> Any:
        h = self.first(x) * factor
        return self.last(self.drop((h @ h.T).softmax(-1) @ x))


def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        x, factor = torch.randn(8, 16, generator=generator), torch.tensor(1e3 if step == BAD else 0.1)
        yield x, torch.arange(8) % 4, factor


def accelerated(folder: Path | None) -> nn.Module:
    pytest.importorskip("accelerate", minversion="1.10")
    from halfstep.integrations.accelerate import Accelerator

    accelerator = Accelerator(policy=FP16, cpu=True, evidence=folder)
    model, optimizer = accelerator.prepare(Net(), torch.optim.AdamW(Net().parameters()))
    optimizer.param_groups[0]["params"][:] = [*model.parameters()]
    for x, y, factor in batches():
        loss = F.cross_entropy(model(x, factor=factor), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return model  # type: ignore[no-any-return]


def with_fabric(folder: Path | None) -> nn.Module:
    pytest.importorskip("lightning", minversion="2.5")
    from halfstep.integrations.lightning import Fabric

    fabric = Fabric(policy=FP16, accelerator="cpu", evidence=folder)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for x, y, factor in batches():
        loss = F.cross_entropy(model(x, factor=factor).float(), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.precision.teardown()
    return net


def trained(folder: Path | None) -> nn.Module:
    lightning = pytest.importorskip("lightning", minversion="2.5")
    from halfstep.integrations.lightning import HalfstepPrecision

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y, factor = batch
            loss = F.cross_entropy(self.net(x, factor=factor).float(), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", plugins=[HalfstepPrecision(FP16, folder)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([*batches()], batch_size=None))  # type: ignore[arg-type]
    return module.net


@pytest.mark.parametrize("loop", [accelerated, with_fabric, trained])
def test_a_bad_step_is_explained_and_written(loop: Callable[[Path | None], nn.Module], tmp_path: Path) -> None:
    module = "net" if loop is trained else "the model"
    watched = loop(tmp_path / "box")
    report = (tmp_path / "box" / f"halfstep-blackbox-{BAD}.txt").read_text()
    assert f"step {BAD}: overflow of float16" in report
    assert f"matmul in {module}, forward" in report
    assert "return self.last(self.drop((h @ h.T).softmax(-1) @ x))" in report
    assert "matmul in fp32" in report and "verified: trained 12 steps" in report
    assert [path.name for path in (tmp_path / "box").glob("*.pt")] == [f"halfstep-blackbox-{BAD}.pt"]
    for one, other in zip(watched.parameters(), loop(None).parameters(), strict=True):
        assert torch.equal(one, other)  # no bit of the run is another one
