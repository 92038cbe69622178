"""Fabric under a policy: set up, backward, clipping, windows, several models, checkpoints, two processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", minversion="2.5")

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import IntegrationError, WeightsError
from halfstep.integrations.lightning import Fabric, HalfstepPrecision
from halfstep.integrations.shared import checking
from tests.examples.loading import load
from tests.integrations.ranks import as_torchrun
from tests.two_processes import in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore:gradients are not finite under the static loss scale 1.0")

POLICIES = [hs.Policy.of(name, dtype=dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.dtype}")
FP16 = hs.Policy.of("mixed", dtype="fp16")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(count: int = 6, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator))] * count
    return [(x * math.inf if i == bad else x, y) for i, (x, y) in enumerate(made)]


def fabric_of(policy: hs.Policy | str, **options: Any) -> Fabric:
    return Fabric(policy=policy, accelerator="cpu", devices=1, **options)


def train(fabric: Any, model: Any, optimizer: Any, data: list[tuple[Tensor, Tensor]], *, clip: float = 0.0) -> None:
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(policy: hs.Policy, data: list[tuple[Tensor, Tensor]], *, clip: float = 0.0) -> nn.Module:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _, _, scaler = hs.prepare(model, optimizer, policy=policy)
    scaler = checking(scaler)
    for x, y in data:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return hs.unprepare(model)


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def set_up(policy: hs.Policy, *, plain: bool = False, apart: bool = False) -> tuple[Any, Any, Any, nn.Module]:
    """Return fabric, model, optimizer as set up, and the model inside.

    Args:
        policy: the policy.
        plain: take lightning's own Fabric with the plugin.
        apart: make and set up the optimizer after the model.
    """
    fabric: Any = fabric_of(policy)
    if plain:
        fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=[HalfstepPrecision(policy)])
    inner = network()
    if apart:
        model = fabric.setup_module(inner)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
    return fabric, model, optimizer, inner


@every_policy
@pytest.mark.parametrize("plain", [False, True], ids=["Fabric", "plugin"])
@pytest.mark.parametrize("apart", [False, True], ids=["setup", "setup_module"])
def test_training_ends_with_the_bits_of_the_same_loop_by_hand(policy: hs.Policy, plain: bool, apart: bool) -> None:
    fabric, model, optimizer, inner = set_up(policy, plain=plain, apart=apart)
    train(fabric, model, optimizer, batches(), clip=0.1)
    wanted = by_hand(policy, batches(), clip=0.1)
    assert same(model, wanted) and not same(wanted, by_hand(policy, batches()))
    assert same(hs.unprepare(inner), wanted)


@every_policy
def test_a_skipped_step_changes_nothing_and_clipping_it_raises_nothing(policy: hs.Policy) -> None:
    fabric, model, optimizer, _ = set_up(policy)
    train(fabric, model, optimizer, batches(1))
    before = model.state_dict()
    train(fabric, model, optimizer, batches(1, bad=0), clip=0.1)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    plugin = fabric.precision
    assert plugin.skipped(optimizer) and plugin.skipped_steps == 1 and plugin.culprits
    train(fabric, model, optimizer, batches(1))
    assert not plugin.skipped(optimizer)


@every_policy
def test_a_resumed_run_ends_with_the_same_bits(policy: hs.Policy, tmp_path: Path) -> None:
    policy = policy.replace(scale=hs.ScaleRule(init=1024.0, interval=2)) if policy.dtype == "fp16" else policy
    fabric, model, optimizer, _ = set_up(policy)
    state = {"model": model, "optimizer": optimizer, "precision": fabric.precision, "step": 3}
    train(fabric, model, optimizer, batches(3, bad=1))
    fabric.save(tmp_path / "c.ckpt", state)
    train(fabric, model, optimizer, batches(3, bad=0))
    saved = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert {v.dtype for v in saved["model"].values()} == {torch.float32}
    for apart in (False, True):
        fabric2, again, optimizer2, _ = set_up(policy, apart=apart)
        state = {"model": again, "optimizer": optimizer2, "precision": fabric2.precision, "step": 0}
        fabric2.load(tmp_path / "c.ckpt", state)
        assert state["step"] == 3
        train(fabric2, again, optimizer2, batches(3, bad=0))
        assert same(again, model) and fabric2.precision.state_dict() == fabric.precision.state_dict()


def test_in_lightnings_own_fabric_a_state_cannot_be_loaded_before_the_first_step(tmp_path: Path) -> None:
    """Fabric does not show a plugin its optimizers, and torch rounds what it loads for low parameters."""
    policy = hs.Policy.of("O2", dtype="bf16")
    fabric, model, optimizer, _ = set_up(policy, plain=True)
    train(fabric, model, optimizer, batches(2))
    fabric.save(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer, _ = set_up(policy, plain=True)
    fabric.load(tmp_path / "c.ckpt", {"model": model, "optimizer": optimizer})
    with pytest.raises(WeightsError, match="was rounded to torch.bfloat16"):
        train(fabric, model, optimizer, batches(2))


def test_in_lightnings_own_fabric_a_model_that_is_moved_after_it_was_prepared_is_refused() -> None:
    _, model, _, inner = set_up(POLICIES[0], plain=True)
    inner.to("meta")
    with pytest.raises(IntegrationError, match=r"prepared on cpu and then moved to meta.*fabric.to_device\(model\)"):
        model(batches()[0][0])


@every_policy
def test_windows_of_micro_batches(policy: hs.Policy) -> None:
    fabric, model, optimizer, _ = set_up(policy)
    for i, (x, y) in enumerate(batches(6)):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            fabric.backward(F.cross_entropy(model(x), y) / 2)
        if i % 2:
            fabric.clip_gradients(model, optimizer, clip_val=1e-3)
            optimizer.step()
            optimizer.zero_grad()
    hand = network()
    stepped = torch.optim.AdamW(hand.parameters(), lr=1e-2)
    _, _, scaler = hs.prepare(hand, stepped, policy=policy)
    scaler = checking(scaler)
    for i, (x, y) in enumerate(batches(6)):
        scaler.scale(F.cross_entropy(hand(x), y) / 2).backward()
        if i % 2:
            scaler.unscale_(stepped)
            nn.utils.clip_grad_value_(hand.parameters(), 1e-3)
            scaler.step(stepped)
            scaler.update()
            stepped.zero_grad()
    assert same(model, hand)


@every_policy
def test_several_models_and_optimizers_are_unscaled_by_one_scale(policy: hs.Policy) -> None:
    if policy.dtype == "fp16":
        policy = policy.replace(scale=hs.ScaleRule(init=256.0, interval=1))
    fabric = fabric_of(policy)
    ends = []
    for low in (True, False):
        torch.manual_seed(0)
        pair = [nn.Linear(16, 8), nn.Linear(8, 4)]
        stepped = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
        (a, b), (opt_a, opt_b) = pair, stepped
        if low:
            (a, opt_a), (b, opt_b) = (fabric.setup(m, o) for m, o in zip(pair, stepped, strict=True))
        for x, y in batches(4):
            loss_b = F.cross_entropy(b(a(x).detach()), y)
            loss_a = a(x).square().mean()
            for loss in (loss_a, loss_b):
                fabric.backward(loss) if low else loss.backward()
            for optimizer in (opt_a, opt_b):
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p for model in (a, b) for p in model.state_dict().values()])
    assert max(float((p - q).abs().max()) for p, q in zip(*ends, strict=True)) < 2e-3


def test_one_optimizer_over_two_models() -> None:
    policy = hs.Policy.of("O2", dtype="bf16")
    fabric = fabric_of(policy)
    a, b = nn.Linear(16, 8), nn.Linear(8, 4)
    first, second = fabric.setup_module(a), fabric.setup_module(b)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1))
    before = a.state_dict()["weight"].clone()
    for x, y in batches(2):
        fabric.backward(F.cross_entropy(second(first(x)), y))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, a.state_dict()["weight"])


def test_autocast_is_the_region_and_needs_a_model() -> None:
    fabric = fabric_of("mixed")
    with pytest.raises(IntegrationError, match="no model was set up yet"):
        fabric.autocast()
    with pytest.raises(IntegrationError, match="no model was set up yet"):
        fabric.backward(torch.ones((), requires_grad=True))
    fabric.setup(network())
    a = torch.ones(4, 4)
    with fabric.autocast():
        assert (a @ a).dtype is torch.bfloat16
    assert (a @ a).dtype is torch.float32


def test_losses_go_through_fabric() -> None:
    fabric, model, _, _ = set_up(FP16)
    with pytest.raises(RuntimeError, match="fabric.backward"):
        model(batches()[0][0]).sum().backward()


def test_fabrics_own_precision_beside_a_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"16-mixed.*HalfstepPrecision\('O2'\)"):
        Fabric(policy="O2", accelerator="cpu", precision="16-mixed")


def test_a_lightning_module_in_fabric() -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    for policy in POLICIES[:4]:
        fabric, inner = fabric_of(policy), Module()
        model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
        for batch in batches():
            with fabric.autocast():
                loss = model.training_step(batch)
            assert loss.dtype is torch.float32
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        wanted = by_hand(policy, batches())
        found = {k.removeprefix("net."): v for k, v in model.state_dict().items()}
        assert max(float((v - found[k]).abs().max()) for k, v in wanted.state_dict().items()) < 1e-2


FP32: list[dict[str, float]] = []


@every_policy
def test_the_example_trains_within_the_noise_of_fp32_and_goes_on_bit_for_bit(policy: hs.Policy, tmp_path: Path) -> None:
    main = load("frameworks/fabric_loop").main
    FP32.extend([] if FP32 else [main("O0", seed=seed) for seed in range(3)])
    noise = [run["validation"] for run in FP32]
    found = main(policy)
    assert abs(found["validation"] - noise[0]) <= max(noise) - min(noise) and found["right"] > 0.95
    if policy.name == "O2":
        main(policy, epochs=2, folder=tmp_path)
        assert found == main(policy, folder=tmp_path)


def _two(rank: int, policy: hs.Policy) -> Any:
    as_torchrun(rank)
    fabric = Fabric(policy=policy, accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    inner = network()
    if rank:
        nn.init.ones_(next(inner.parameters()))  # DDP takes the weights of rank 0
    model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
    skipped, before = [], {}
    wanted = network().state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in inner.state_dict().items()), "rounded, or of this rank"
    for i, (x, y) in enumerate(batches(5)):
        x = x * math.inf if (i, rank) == (2, 1) else x + rank  # bad on one rank
        with fabric.no_backward_sync(model, enabled=i == 0):
            fabric.backward(F.cross_entropy(model(x), y))
        if i == 0:
            continue
        if i == 2:
            before = {key: value.clone() for key, value in inner.state_dict().items()}
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if i == 2:
            assert all(torch.equal(value, before[key]) for key, value in inner.state_dict().items())
        skipped.append(fabric.precision.skipped(optimizer))
    return skipped, {key: value.clone() for key, value in inner.state_dict().items()}


def _sharded(policy: hs.Policy, file: str) -> None:
    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        for module in (model[0], model[3], model):  # type: ignore[index]
            fully_shard(module, mesh=mesh["data_parallel"])
        return model

    def made() -> tuple[Fabric, dict[str, Any]]:
        strategy = ModelParallelStrategy(sharded, 2, 1, save_distributed_checkpoint=False)
        fabric = Fabric(policy=policy, accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(network())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        return fabric, {"model": model, "optimizer": optimizer, "precision": fabric.precision}

    (one, first), (two, second) = made(), made()
    train(one, first["model"], first["optimizer"], batches(2), clip=1.0)
    one.save(file, first)
    two.load(file, second)
    ends = []
    for fabric, state in ((one, first), (two, second)):
        train(fabric, state["model"], state["optimizer"], batches(2), clip=1.0)
        ends.append([value.full_tensor() for value in state["model"].state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def _both(rank: int, folder: str) -> Any:
    done = [_two(rank, policy) for policy in POLICIES[1:3]]
    for policy in POLICIES[1:3]:
        _sharded(policy, f"{folder}/{policy.name}.ckpt")
    return done


@pytest.mark.dist
def test_two_processes_skip_together_and_stay_equal(tmp_path: Path) -> None:
    for (skipped, first), (also, second) in zip(*in_two_processes(_both, tmp_path, str(tmp_path)), strict=True):
        assert skipped == also == [False, True, False, False]
        assert all(torch.equal(first[key], second[key]) for key in first)
