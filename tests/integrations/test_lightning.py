"""Lightning's Trainer under a policy: the bits of a loop by hand, skipped steps, clipping, windows, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", minversion="2.5")

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.errors import BindError, IntegrationError, ScaleError, WeightsError
from halfstep.integrations.lightning import HalfstepPrecision
from halfstep.integrations.shared import checking, region
from tests.examples.loading import load
from tests.integrations.ranks import as_torchrun
from tests.two_processes import in_two_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale 1.0"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]

POLICIES = [hs.Policy.of(name, dtype=dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.dtype}")
low_and_mixed = pytest.mark.parametrize("policy", POLICIES[:4], ids=lambda policy: f"{policy.name}-{policy.dtype}")

FP16 = hs.Policy.of("mixed", dtype="fp16")
BAD = math.inf


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence what Lightning prints about devices."""
    before = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


class Plain(LightningModule):
    """A classifier; `lr_interval` adds a scheduler."""

    def __init__(self, lr_interval: str = "", make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.net = network()
        self.lr_interval = lr_interval
        self.make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.formats: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        scores = self.net(x)
        self.formats.add(scores.dtype)
        loss = F.cross_entropy(scores, y)
        if not torch.compiler.is_compiling():  # torch 2.13 cannot trace Lightning's log
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.formats.add(scores.dtype)
        self.log("validation", F.cross_entropy(scores, batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if not self.lr_interval:
            return optimizer
        scheduler = LinearLR(optimizer, 1.0, 0.1, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.lr_interval}}


def examples(bad: int | None = None, count: int = 40) -> TensorDataset:
    """Return examples of 4 classes; those of batch `bad` (of 8) hold inf."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 16, generator=generator)
    y = x[:, :4].argmax(1)
    if bad is not None:
        x[8 * bad] = BAD
    return TensorDataset(x, y)


def batches(bad: int | None = None, count: int = 40) -> DataLoader[Any]:
    return DataLoader(examples(bad, count), batch_size=8)


def trainer_of(policy: hs.Policy | str | None, **options: Any) -> tuple[Trainer, HalfstepPrecision]:
    """Return a quiet Trainer on the CPU and its plugin."""
    plugin = HalfstepPrecision(policy or "mixed")
    given: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "plugins": [plugin] if policy is not None else [],
        **options,
    }
    return Trainer(**given), plugin


def by_hand(
    policy: hs.Policy, data: DataLoader[Any], clip: Callable[[Any], object], window: int = 1, model: Plain | None = None
) -> nn.Module:
    """Train `model`, by default a `Plain`, as a Trainer does, in a loop written by hand; a short last window steps."""
    model = model or Plain()
    optimizer = model.make(model.parameters())
    hs.prepare(model, optimizer, policy=policy)
    scaler = checking(hs.GradScaler.from_policy(policy.scale, policy.dtype))
    loaded = list(data)
    for i, (x, y) in enumerate(loaded, 1):
        with region(policy):
            loss = F.cross_entropy(model.net(x), y) / window
        scaler.scale(loss).backward()
        if i % window and i < len(loaded):
            continue
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return hs.unprepare(model)


def nothing(model: Any) -> None:
    """Clip nothing."""


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@torch.no_grad()
def distance(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ---------------------------------------------------------------------- the loop


@every_policy
def test_a_trainer_ends_with_the_bits_of_the_same_loop_by_hand(policy: hs.Policy) -> None:
    trainer, plugin = trainer_of(policy)
    model = Plain()
    trainer.fit(model, batches())
    assert same_weights(model, by_hand(policy, batches(), nothing))
    assert model.formats == {hs.formats.DTYPES[policy.dtype]}
    assert plugin.scaler is not None and plugin.scaler.get_scale() == (65536.0 if policy.dtype == "fp16" else 1.0)


@low_and_mixed
def test_the_loss_stays_near_that_of_fp32(policy: hs.Policy) -> None:
    losses = []
    for chosen in (None, policy):
        trainer, _ = trainer_of(chosen, max_epochs=4)
        trainer.fit(Plain(), batches())
        losses.append(float(trainer.callback_metrics["loss"]))
    assert abs(losses[0] - losses[1]) < 0.02 and losses[0] < 1.2


@low_and_mixed
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipping_sees_unscaled_gradients(policy: hs.Policy, kind: str) -> None:
    trainer, _ = trainer_of(policy, gradient_clip_val=0.01, gradient_clip_algorithm=kind)
    model, hand, loose = (Plain(make=lambda parameters: torch.optim.SGD(parameters, lr=0.5)) for _ in range(3))
    trainer.fit(model, batches())

    def clip(model: nn.Module) -> None:
        clipping: Any = nn.utils.clip_grad_norm_ if kind == "norm" else nn.utils.clip_grad_value_
        clipping(model.parameters(), 0.01)

    by_hand(policy, batches(), clip, model=hand)
    assert same_weights(model, hand) and not same_weights(hand, by_hand(policy, batches(), nothing, model=loose))


@low_and_mixed
def test_gradient_hooks_and_own_clipping_see_unscaled_gradients(policy: hs.Policy) -> None:
    seen: list[float] = []

    class Own(Plain):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(float(list(self.net.parameters())[-2].grad.norm()))  # type: ignore[union-attr]

        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
            seen.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    trainer, _ = trainer_of(policy, limit_train_batches=1)
    trainer.fit(Own(), batches())
    assert 1e-3 < seen[0] < 10 and seen[1] == pytest.approx(1e-3, rel=1e-3)


@every_policy
def test_windows_of_micro_batches_with_a_short_last_one(policy: hs.Policy) -> None:
    trainer, _ = trainer_of(policy, accumulate_grad_batches=2)
    model = Plain()
    trainer.fit(model, batches())
    assert trainer.global_step == 3
    assert same_weights(model, by_hand(policy, batches(), nothing, window=2))


def test_a_window_whose_last_training_step_returns_none_is_stepped_with_what_is_there() -> None:
    class Absent(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    model, alone = Absent(make=sgd), Absent(make=sgd)
    before = [p.detach().clone() for p in model.parameters()]
    trainer, _ = trainer_of(FP16, limit_train_batches=1)
    trainer.fit(model, batches())  # nothing but None
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    for policy, module in ((FP16, model), (None, alone)):
        trainer, _ = trainer_of(policy, accumulate_grad_batches=2, limit_train_batches=4)
        trainer.fit(module, batches())
    assert distance(model, alone) < 1e-3 < 1e-2 < distance(model, Plain())


# ---------------------------------------------------------------------- skipped steps


@every_policy
def test_a_skipped_step_moves_nothing_and_no_scheduler(policy: hs.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain("step")
    weights: list[list[Tensor]] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            weights.append([v.clone() for v in pl_module.state_dict().values()])

    trainer, plugin = trainer_of(policy, callbacks=[Watch()])
    with monkeypatch.context() as patch:
        said: list[str] = []
        patch.setattr("halfstep.integrations.lightning.rank_zero_info", said.append)
        trainer.fit(model, batches(bad=2))
    assert all(torch.equal(p, q) for p, q in zip(weights[1], weights[2], strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(weights[2], weights[3], strict=True))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4 and trainer.global_step == 5
    assert plugin.skipped_steps == 1 and plugin.culprits[0] == "net.0.weight (512 of 512 values)"
    assert len(said) == 1 and said[0].startswith("halfstep: a step of AdamW is skipped (1 so far): gradients are not ")
    assert "net.0.weight (512 of 512 values)" in said[0]
    assert not plugin.skipped(trainer.optimizers[0])  # the last step was good


def test_culprits_are_named_before_clipping_spreads_them() -> None:
    class OneBad(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if batch_idx == 1:
                list(self.net.parameters())[-1].register_hook(lambda gradient: gradient * BAD)
            return super().training_step(batch, batch_idx)

    trainer, plugin = trainer_of(FP16, gradient_clip_val=1.0, limit_train_batches=2)
    trainer.fit(OneBad(), batches())
    assert plugin.culprits == ("net.3.bias (4 of 4 values)",)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_black_box_of_the_users_explains_a_skipped_step() -> None:
    class Boxed(Plain):
        box: hs.BlackBox

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.box = hs.BlackBox(self.net, lambda net, x, y: F.cross_entropy(net(x), y), optimizer)
            return optimizer

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return self.box(*batch)

    found = []
    for bad in (None, 0):
        model = Boxed()
        trainer, plugin = trainer_of(FP16)
        trainer.fit(model, batches(bad))
        found.append((plugin.skipped_steps, model.box.verdict))
        if bad is None:
            assert same_weights(model, by_hand(FP16, batches(), nothing))
    assert found[0] == (0, None) and found[1][0] == 1
    assert found[1][1] is not None and "bad batch" in str(found[1][1])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_several_schedulers(interval: str) -> None:
    class Two(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            warm, decay = LinearLR(optimizer, 0.5, 1.0, 3), StepLR(optimizer, 2)
            return [optimizer], [{"scheduler": warm, "interval": "step"}, {"scheduler": decay, "interval": interval}]

    trainer, _ = trainer_of(FP16, max_epochs=2)
    trainer.fit(Two(), batches(bad=0))
    steps = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert steps == ([8, 8] if interval == "step" else [8, 2])


def test_a_scheduler_of_every_second_step_is_read_as_before() -> None:
    class Second(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = {"scheduler": LinearLR(optimizer, 0.5, 1.0, 3), "interval": "step", "frequency": 2}
            return [optimizer], [scheduler]

    trainer, _ = trainer_of(FP16)
    trainer.fit(Second(), batches(bad=0))
    config = trainer.lr_scheduler_configs[0]
    assert config.scheduler.last_epoch == 2 and config.frequency == 2 and config.interval == "step"


def test_skipped_steps_and_scale_are_in_the_log(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer, _ = trainer_of(FP16, logger=logger, log_every_n_steps=1)
    trainer.fit(Plain(), batches(bad=1))
    text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    header = text[0].split(",")
    rows = [dict(zip(header, line.split(","), strict=True)) for line in text[1:]]
    assert [float(row["halfstep/skipped"]) for row in rows] == [0, 1, 1, 1, 1]
    assert [float(row["halfstep/scale"]) for row in rows] == [65536.0, *[32768.0] * 4]


# ---------------------------------------------------------------------- manual optimization


class Gan(LightningModule):
    """Two networks, two optimizers, steps by hand."""

    outputs: list[Tensor]

    def __init__(self, *, together: bool = False, scheduled: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.together, self.scheduled = together, scheduled

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.generator, self.judge)]
        return optimizers, [LinearLR(optimizers[0], 0.5, 1.0, 10)]

    def losses(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        fake = self.generator(x[:, :4])
        ones = torch.ones(len(x), 1)
        judged = self.judge(fake)
        loss_g = F.binary_cross_entropy_with_logits(judged, ones)
        real, made = self.judge(x), self.judge(fake.detach())
        loss_j = F.binary_cross_entropy_with_logits(torch.cat([real, made]), torch.cat([ones, 0 * ones]))
        return loss_g, loss_j

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0]
        opt_g, opt_j = self.optimizers()
        if self.together:
            loss_g, loss_j = self.losses(x, batch_idx)
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_j.zero_grad()
            self.manual_backward(loss_j)
            opt_g.step()
            opt_j.step()
            return
        self.toggle_optimizer(opt_g)
        loss_g, _ = self.losses(x, batch_idx)
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        if self.scheduled and not self.trainer.precision_plugin.skipped(opt_g):
            self.lr_schedulers().step()
        self.toggle_optimizer(opt_j)
        _, loss_j = self.losses(x, batch_idx)
        opt_j.zero_grad()
        self.manual_backward(loss_j)
        opt_j.step()
        self.untoggle_optimizer(opt_j)


def _gan(
    policy: hs.Policy | None, together: bool = False, *, scheduled: bool = False, bad: int | None = None
) -> tuple[Gan, HalfstepPrecision, Trainer]:
    trainer, plugin = trainer_of(policy)
    model = Gan(together=together, scheduled=scheduled)
    trainer.fit(model, batches(bad))
    return model, plugin, trainer


@low_and_mixed
@pytest.mark.parametrize("together", [False, True])
def test_several_optimizers_by_hand(policy: hs.Policy, together: bool) -> None:
    model, _, trainer = _gan(policy.replace(scale=hs.ScaleRule(init=256.0, interval=2)), together)
    plain, _, _ = _gan(None, together)
    assert trainer.global_step == 10
    assert distance(model, plain) < 3e-3 < distance(plain, Gan())


def test_losses_that_run_backward_together_are_unscaled_by_one_scale() -> None:
    """The scale doubles after each step: updated between the two steps it would halve the second's gradients."""
    policy = FP16.replace(scale=hs.ScaleRule(init=256.0, interval=1))
    model, plugin, _ = _gan(policy, together=True)
    plain, _, _ = _gan(None, together=True)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 256.0 * 2**5  # one update for both steps
    assert distance(model, plain) < 3e-3


@low_and_mixed
def test_a_step_by_hand_changes_what_the_next_forward_pass_computes_with(policy: hs.Policy) -> None:
    """Torch's autocast keeps low copies of weights within a region, and the whole training_step is in one."""

    class Twice(Gan):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer, _ = self.optimizers()
            for _ in range(2):
                made = self.generator(batch[0][:, :4])
                self.outputs.append(made.detach().float())
                optimizer.zero_grad()
                self.manual_backward(made.square().mean())
                optimizer.step()

    model = Twice()
    model.outputs = []
    trainer, _ = trainer_of(policy, limit_train_batches=1)
    trainer.fit(model, batches())
    assert not torch.equal(*model.outputs)


def test_gradients_that_wait_for_their_window_are_unscaled_by_their_scale(tmp_path: Path) -> None:
    """The judge steps at every batch and the generator at every second one; each step would double the scale."""

    class Uneven(Gan):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            (opt_g, opt_j), losses = self.optimizers(), self.losses(batch[0], batch_idx)
            for optimizer, loss in ((opt_g, losses[0]), (opt_j, losses[1])):
                self.toggle_optimizer(optimizer)
                self.manual_backward(loss)
                self.untoggle_optimizer(optimizer)
            opt_j.step()
            opt_j.zero_grad()
            if batch_idx % 2:
                opt_g.step()
                opt_g.zero_grad()

    ends: list[Gan] = []
    for policy in (FP16.replace(scale=hs.ScaleRule(init=256.0, interval=1)), None):
        model = Uneven()
        trainer, plugin = trainer_of(policy, limit_train_batches=4, logger=CSVLogger(tmp_path), log_every_n_steps=1)
        trainer.fit(model, batches())
        ends.append(model)
        scale = plugin.state_dict().get("scaler", {"scale": 256.0 * 2**2})["scale"]
        assert scale == 256.0 * 2**2  # it moves when nothing waits
    assert distance(*ends) < 3e-3 < distance(ends[1], Gan())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_fused_optimizer(dtype: str) -> None:
    policy = hs.Policy.of("mixed", dtype=dtype)
    ends: list[Plain] = []
    for fused in (True, False):
        model = Plain("step", make=lambda p, fused=fused: torch.optim.AdamW(p, lr=1e-2, fused=fused))  # type: ignore[misc]
        trainer, plugin = trainer_of(policy, gradient_clip_val=0.1)
        trainer.fit(model, batches(bad=1))
        assert plugin.skipped_steps == 1 and trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4
        ends.append(model)
    assert distance(*ends) < 1e-4


def test_manual_schedulers_can_ask_whether_a_step_was_skipped() -> None:
    _, plugin, trainer = _gan(FP16, scheduled=True, bad=1)
    assert plugin.skipped_steps == 2 and trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


def test_a_closure_in_manual_optimization() -> None:
    class Closed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(self.net(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            assert optimizer.step(closure=closure) is not None

    for policy in POLICIES:
        trainer, _ = trainer_of(policy)
        model = Closed()
        trainer.fit(model, batches())
        assert same_weights(model, by_hand(policy, batches(), nothing))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_backward_pass_beside_lightning(dtype: str) -> None:
    class Beside(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            F.cross_entropy(self.net(batch[0]), batch[1]).backward()
            self.optimizers().step()

    trainer, _ = trainer_of(hs.Policy.of("mixed", dtype=dtype))
    if dtype == "bf16":
        trainer.fit(Beside(), batches())
    else:
        with pytest.raises(ScaleError, match="no loss has been scaled yet"):
            trainer.fit(Beside(), batches())


def test_lbfgs_works_without_a_loss_scale_over_fp32_weights() -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model = Plain(make=lbfgs)
    trainer_of(hs.Policy.of("mixed", dtype="bf16"))[0].fit(model, batches())
    assert not same_weights(model, Plain())
    with pytest.raises(ScaleError, match="LBFGS"):
        trainer_of(FP16)[0].fit(Plain(make=lbfgs), batches())
    with pytest.raises(WeightsError, match="LBFGS"):
        trainer_of(hs.Policy.of("O2", dtype="bf16"))[0].fit(Plain(make=lbfgs), batches())


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "policy",
    [*POLICIES, *(hs.Policy.of("pure", dtype="bf16", master=kind) for kind in ("split", "kahan"))],
    ids=lambda policy: f"{policy.name}-{policy.dtype}-{policy.master}",
)
def test_a_resumed_run_ends_with_the_same_bits(policy: hs.Policy, tmp_path: Path) -> None:
    policy = policy.replace(scale=hs.ScaleRule(init=1024.0, interval=4)) if policy.dtype == "fp16" else policy
    whole, cut = Plain("step"), Plain("step")
    trainer, plugin = trainer_of(policy, max_epochs=3)
    trainer.fit(whole, batches(bad=1))
    keep = ModelCheckpoint(tmp_path, filename="last")
    trainer, _ = trainer_of(policy, max_epochs=1, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(cut, batches(bad=1))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert {key: value.dtype for key, value in saved["state_dict"].items()} == dict.fromkeys(
        Plain().state_dict(), torch.float32
    )
    again = Plain("step")
    trainer, resumed = trainer_of(policy, max_epochs=3)
    trainer.fit(again, batches(bad=1), ckpt_path=tmp_path / "last.ckpt")
    assert same_weights(again, whole) and not same_weights(again, cut)
    assert resumed.state_dict() == plugin.state_dict() and resumed.skipped_steps == 3


@low_and_mixed
def test_a_checkpoint_in_the_middle_of_an_epoch_and_one_after_fit(policy: hs.Policy, tmp_path: Path) -> None:
    whole = Plain("step")
    trainer, _ = trainer_of(policy, max_epochs=2)
    trainer.fit(whole, batches())
    half = Plain("step")
    trainer, _ = trainer_of(policy, max_epochs=1)
    trainer.fit(half, batches())
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # the model is a plain one again by now
    again = Plain("step")
    trainer, _ = trainer_of(policy, max_epochs=2)
    trainer.fit(again, batches(), ckpt_path=tmp_path / "after.ckpt")
    assert same_weights(again, whole)


def test_a_checkpoint_of_lightnings_own_mixed_precision_gives_its_scale(tmp_path: Path) -> None:
    trainer, _ = trainer_of(None)
    trainer.fit(Plain(), batches())
    trainer.save_checkpoint(tmp_path / "amp.ckpt")
    saved = torch.load(tmp_path / "amp.ckpt", weights_only=False)
    saved["MixedPrecision"] = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()
    torch.save(saved, tmp_path / "amp.ckpt")
    trainer, plugin = trainer_of(FP16, max_epochs=2)
    trainer.fit(Plain(), batches(), ckpt_path=tmp_path / "amp.ckpt")
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 512.0


def test_weights_load_into_a_plain_model(tmp_path: Path) -> None:
    trainer, _ = trainer_of(hs.Policy.of("O2", dtype="bf16"))
    model = Plain()
    trainer.fit(model, batches())
    trainer.save_checkpoint(tmp_path / "o2.ckpt")
    loaded = Plain.load_from_checkpoint(tmp_path / "o2.ckpt")
    assert type(loaded) is Plain and same_weights(loaded, model)


# ---------------------------------------------------------------------- around the loop


@low_and_mixed
def test_evaluation_runs_under_the_policy_and_predictions_are_fp32(policy: hs.Policy) -> None:
    low = hs.formats.DTYPES[policy.dtype]
    for inference_mode in (True, False):
        model = Plain()
        trainer, _ = trainer_of(policy, inference_mode=inference_mode)
        trainer.validate(model, batches(), verbose=False)
        trainer.test(model, batches(), verbose=False)
        assert model.formats == {low}
        (first, *_) = trainer.predict(model, batches())
        assert first.dtype is torch.float32
        with torch.no_grad():
            assert not torch.equal(first, model(next(iter(batches()))[0]))  # that is fp32 again
        trainer.fit(model, batches(), batches())  # inference tensors left behind would fail here


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"overfit_batches": 2}], ids=str)
def test_short_runs(options: dict[str, Any]) -> None:
    model = Plain("step")
    trainer, _ = trainer_of(hs.Policy.of("O2", dtype="bf16"), **options)
    trainer.fit(model, batches(), batches())
    assert trainer.global_step == (1 if "fast_dev_run" in options else 2)


def test_after_a_run_the_model_is_plain_and_another_policy_can_train_it() -> None:
    model = Plain()
    for policy in POLICIES:
        trainer, _ = trainer_of(policy)
        trainer.fit(model, batches())
        assert type(model) is Plain and hs.prepared_policy(model) is None
        assert all(p.dtype is torch.float32 for p in model.parameters())
    assert "forward" not in vars(model)


def test_after_an_error_the_model_is_plain() -> None:
    class Broken(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            raise RuntimeError("broken")

    model = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        trainer_of("O2")[0].fit(model, batches())
    assert type(model) is Broken and next(model.parameters()).dtype is torch.float32


def test_one_trainer_fits_and_tests_again_with_its_scale() -> None:
    trainer, plugin = trainer_of(FP16)
    model = Plain()
    trainer.fit(model, batches(bad=0))
    trainer.test(model, batches(), verbose=False)
    assert plugin.scaler is not None and plugin.scaler.get_scale() == 32768.0


@low_and_mixed
def test_a_model_that_hs_prepare_has_prepared(policy: hs.Policy) -> None:
    model = Plain()
    hs.prepare(model, policy=policy)
    trainer, _ = trainer_of(policy)
    trainer.fit(model, batches())
    assert hs.prepared_policy(model) == policy  # as it came
    assert same_weights(hs.unprepare(model), by_hand(policy, batches(), nothing))
    other = Plain()
    hs.prepare(other, policy="O0")
    with pytest.raises(BindError, match="already prepared with policy 'O0'"):
        trainer_of(policy)[0].fit(other, batches())


def test_lightnings_own_precision_beside_the_plugin_is_refused() -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=r"bf16-mixed.*HalfstepPrecision\('O2'\)"):
        Trainer(precision="bf16-mixed", plugins=[HalfstepPrecision("O2")])


def test_fsdp_is_refused_by_lightning() -> None:
    with pytest.raises(TypeError, match="FSDP strategy can only work with .*HalfstepPrecision"):
        FSDPStrategy(precision_plugin=HalfstepPrecision("O2"))


def test_averages_of_weights_need_fp32_parameters() -> None:
    average = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
    with pytest.raises(IntegrationError, match="StochasticWeightAveraging .*'O2'.*'mixed'"):
        trainer_of("O2", max_epochs=3, callbacks=[average])[0].fit(Plain(), batches())
    trainer, _ = trainer_of(FP16, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])
    trainer.fit(Plain(), batches())


def test_no_optimizer() -> None:
    class Bare(Plain):
        def configure_optimizers(self) -> None:
            return None

    with pytest.warns(UserWarning, match="returned `None`"):
        trainer_of("O2")[0].fit(Bare(), batches())


# ---------------------------------------------------------------------- torch.compile


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@low_and_mixed
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(policy: hs.Policy, whole: bool) -> None:
    model: Any = Plain()
    if whole:
        model = torch.compile(model, backend="aot_eager")
    else:
        model.net = torch.compile(model.net, backend="aot_eager")
    trainer, _ = trainer_of(policy)
    trainer.fit(model, batches())
    trained = model._orig_mod if whole else model
    eager = by_hand(policy, batches(), nothing)
    assert distance(trained, eager) < 2e-2
    assert hs.formats.DTYPES[policy.dtype] in trained.formats


# ---------------------------------------------------------------------- the example

FP32: list[dict[str, float]] = []


@every_policy
def test_the_example_trains_within_the_noise_of_fp32(policy: hs.Policy) -> None:
    main = load("frameworks/lightning_module").main
    FP32.extend([] if FP32 else [main("", seed=seed) for seed in range(3)])
    found = main(policy)
    for name in found:
        noise = [run[name] for run in FP32]
        assert abs(found[name] - noise[0]) <= max(noise) - min(noise), name


# ---------------------------------------------------------------------- two processes


def _ddp(rank: int, policy: hs.Policy, folder: str) -> Any:
    as_torchrun(rank)
    loader = DataLoader(examples(), batch_size=4, shuffle=False)

    class Ranked(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if (batch_idx, rank) == (3, 1):
                batch = [batch[0] * BAD, batch[1]]
            return super().training_step(batch, batch_idx)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    file = Path(folder, f"{policy.name}.ckpt")
    model, whole = Ranked("step"), Ranked("step")
    for module in (model, whole) if rank else ():
        nn.init.ones_(next(module.parameters()))  # DDP takes the weights of rank 0
    trainer, _ = trainer_of(policy, **options)
    trainer.fit(model, loader, loader)
    trainer.save_checkpoint(file)
    trainer, plugin = trainer_of(policy, max_epochs=2, **options)
    trainer.fit(model, loader, ckpt_path=file)  # it goes on with the model that was trained
    steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    trainer_of(policy, max_epochs=2, **options)[0].fit(whole, loader)
    assert same_weights(model, whole) and type(model) is Ranked
    return plugin.skipped_steps, trainer.global_step, steps, {k: v.clone() for k, v in model.state_dict().items()}


class Sharded(Plain):
    """`Plain`, sharded by fully_shard; with a bad batch on rank 1."""

    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            mesh = self.device_mesh["data_parallel"]
            for module in (self.net[0], self.net[3], self.net):
                fully_shard(module, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        bad = (batch_idx, torch.distributed.get_rank()) == (2, 1)
        return super().training_step([batch[0] * BAD, batch[1]] if bad else batch, batch_idx)


def _sharded(policy: hs.Policy, file: str, *, pieces: bool) -> Any:
    loader = DataLoader(examples(), batch_size=4, shuffle=False)

    def trained(epochs: int, resumed: bool = False) -> tuple[Any, HalfstepPrecision, Trainer]:
        model = Sharded("step")
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=pieces)
        trainer, plugin = trainer_of(policy, max_epochs=epochs, strategy=strategy, devices=2, gradient_clip_val=1.0)
        trainer.fit(model, loader, loader, ckpt_path=file if resumed else None)
        return model, plugin, trainer

    _, _, trainer = trained(1)
    trainer.save_checkpoint(file)
    (again, plugin, trainer), (whole, _, _) = trained(2, resumed=True), trained(2)
    states = [[v.full_tensor() for v in m.state_dict().values()] for m in (again, whole)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert again.net[0].weight.dtype is (torch.float32 if policy.params == "fp32" else torch.bfloat16)
    return plugin.skipped_steps, trainer.global_step, trainer.lr_scheduler_configs[0].scheduler.last_epoch


def _in_both(rank: int, folder: str) -> Any:
    done = [_ddp(rank, policy, folder) for policy in POLICIES[1:3]]
    return done, [_sharded(POLICIES[2], f"{folder}/sharded-{pieces}", pieces=pieces) for pieces in (False, True)]


@pytest.mark.dist
def test_ddp_and_sharded_models(tmp_path: Path) -> None:
    """A batch is bad on rank 1 in each of two epochs, after 5 batches each; under DDP windows have two."""
    (first, sharded), (second, too) = in_two_processes(_in_both, tmp_path, str(tmp_path))
    for one, other in zip(first, second, strict=True):
        assert one[:3] == other[:3] == (2, 6, 4)
        assert all(torch.equal(one[3][key], other[3][key]) for key in one[3])
    assert sharded == too == [(2, 10, 8)] * 2
