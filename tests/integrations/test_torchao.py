"""torchao: linear layers in eight bits under a module rule, with all that a step does, and its quantised training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchao.float8")

import halfstep as hs
from halfstep.errors import PolicyError
from halfstep.kernels.sharded import local
from halfstep.policy.plan import is_small
from halfstep.policy.rule_kinds import RULE_KINDS
from halfstep.tasks.gpt import gpt_task
from tests.distributed.counted import Collectives
from tests.two_processes import in_processes, in_two_processes

pytestmark = [
    pytest.mark.filterwarnings("ignore:fp8.* on cpu. no eight-bit units:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

RULES = ("fp8", "fp8-rowwise", "fp8-rowwise-hp")
PRESETS = ("mixed", "O2")
LAYERS = tuple(f"blocks.*.{name}" for name in ("qkv", "out", "up", "down"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def policy(preset: str = "mixed", rule: str = "fp8", dtype: str = "bf16") -> hs.Policy:
    return hs.Policy.of(preset, dtype=dtype).with_modules({"blocks.*.up": rule, "blocks.*.down": rule})


def step_of(model: nn.Module, wanted: hs.Policy, **options: Any) -> Any:
    return hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=wanted, **options)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches(count: int, rows: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(rows, 8, generator=generator)
        yield x, x.abs().argmax(1) % 4


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_layer_rounds_to_eight_bits_and_no_more(rule: str, dtype: str) -> None:
    layer = nn.Linear(64, 48)
    exact, x = copy.deepcopy(layer).double(), torch.randn(32, 64)
    model = hs.prepare(nn.Sequential(layer), policy=hs.Policy.of("mixed", dtype=dtype).with_modules({"0": rule}))
    # e4m3 has 3 bits behind the point: each operand is off by up to 2**-4 of itself, evenly spread by a third of that
    # in the root mean square, so a product of random signs by sqrt(2) of it
    error = (model(x).double() - exact(x.double())).norm() / exact(x.double()).norm()
    assert 2**-7 < error < 2**-4 * 2**0.5


@cache
def loss_of_gpt(seed: int, rule: str = "") -> float:
    """Return the loss of the bundled GPT after 40 steps, in bf16 and under a rule for its layers."""
    torch.manual_seed(seed)
    task, policy = gpt_task(), hs.Policy.of("mixed", dtype="bf16")
    model = task.model()
    wanted = policy.with_modules(dict.fromkeys(LAYERS, rule)) if rule else policy
    step = hs.TrainStep(model, task.optimizer(model), task.loss_fn, policy=wanted)
    losses = [step(*task.batches(0, i)).host().loss for i in range(40)]
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("rule", RULES)
def test_the_bundled_gpt_trains_as_near_to_bf16_as_another_seed(rule: str) -> None:
    seeds = [loss_of_gpt(seed) for seed in range(4)]
    eight = loss_of_gpt(0, rule)
    assert abs(eight - seeds[0]) < max(seeds) - min(seeds)
    assert eight != seeds[0]


def test_no_rows_and_rows_that_fill_no_tile() -> None:
    model = hs.prepare(
        nn.Sequential(nn.Linear(32, 32)), policy=hs.Policy.of("O2", dtype="bf16").with_modules({"0": "fp8"})
    )
    for rows in (0, 1, 17):
        output = model(torch.randn(rows, 32))
        output.sum().backward()
        assert output.shape == (rows, 32) and torch.isfinite(output).all()


# ------------------------------------------------------------------ what a step does


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_resumed_run_has_the_same_bits(preset: str, rule: str) -> None:
    given = list(batches(8))
    straight = step_of(net(), policy(preset, rule))
    for batch in given:
        straight(*batch)
    first = step_of(net(), policy(preset, rule))
    for batch in given[:4]:
        first(*batch)
    state = copy.deepcopy(first.state_dict())
    second = step_of(Net(), policy(preset, rule))
    second.load_state_dict(state)
    for batch in given[4:]:
        second(*batch)
    assert same(values(straight.model), values(second.model))
    other = step_of(net(), policy(preset, "low"))
    for batch in given:
        other(*batch)
    assert not same(values(straight.model), values(other.model))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_bad_step_changes_nothing(preset: str, dtype: str) -> None:
    step = step_of(net(), policy(preset, dtype=dtype))
    for batch in batches(2):
        step(*batch)
    before = values(step.model)
    (x, y), *_ = batches(1)
    bad = x.clone()
    bad[3] = float("inf")
    result = step(bad, y).host()
    assert result.skipped and same(before, values(step.model))
    step(x, y)
    assert not same(before, values(step.model))


def test_a_window_of_two_is_a_batch_of_both() -> None:
    # each micro-batch has a scale of its own: equal up to the rounding of fp8, where the gradients themselves agree
    (x, y), *_ = batches(1, rows=32)
    whole, parts = net(), net()
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for model in (whole, parts))
    wanted, begin = policy(rule="fp8-rowwise"), values(whole)
    hs.TrainStep(whole, first, loss_fn, policy=wanted)(x, y)
    two = hs.TrainStep(parts, second, loss_fn, accumulate=2, policy=wanted)
    results = [two(x[:16], y[:16]), two(x[16:], y[16:])]
    assert [result.due for result in results] == [False, True]
    moved = torch.cat([(a - b).flatten() for a, b in zip(values(whole), begin, strict=True)])
    apart = torch.cat([(a - b).flatten() for a, b in zip(values(whole), values(parts), strict=True)])
    assert 0 < apart.norm() < 2**-4 * moved.norm()


@pytest.mark.parametrize("preset", PRESETS)
def test_unprepare_gives_back_the_layers_with_their_weights(preset: str) -> None:
    model = net()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = [*model.state_dict()]
    step = step_of(model, policy(preset))
    for batch in batches(3):
        step(*batch)
    assert [*model.state_dict()] == names
    masters = values(model)
    hs.unprepare(model)
    assert same(masters, values(model)) and all(value.dtype is torch.float32 for value in masters)
    for path, layer in layers.items():
        assert model.get_submodule(path) is layer and type(layer) is nn.Linear
    (x, y), *_ = batches(1)
    plain = net()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


def test_copies_and_pickles_compute_in_eight_bits() -> None:
    model = hs.prepare(net(), policy=policy())
    (x, _), *_ = batches(1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
    assert not torch.equal(model(x), hs.prepare(net(), policy=policy(rule="low"))(x))


def test_a_checkpointed_block_and_a_compiled_model_give_the_same_gradients() -> None:
    (x, y), *_ = batches(1)

    def gradients(model: nn.Module, call: Any = None) -> list[Tensor]:
        hs.prepare(model, policy=policy())
        loss_fn(model if call is None else call, x, y).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    eager = gradients(net())
    assert same(eager, gradients(net(checkpointed=True)))
    compiled = net()
    found = gradients(compiled, torch.compile(compiled, backend="aot_eager"))
    torch._dynamo.reset()
    assert same(eager, found)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_audit_measures_the_rounding_and_the_black_box_finds_a_nan(preset: str) -> None:
    found = hs.audit(net(), batches(2), loss_fn, policy(preset), steps=2)
    low = hs.audit(net(), batches(2), loss_fn, policy(preset, "low"), steps=2)
    errors = [
        {row.module: row.error for row in audit.rows if row.op == "linear" and row.role == "activation"}
        for audit in (found, low)
    ]
    assert errors[0]["blocks.0.up"] > 4 * errors[1]["blocks.0.up"]  # 3 bits behind the point, 7 of bf16
    step = step_of(net(), policy(preset))
    (x, y), *_ = batches(1)
    x[3] = float("inf")
    step(x, y)
    assert "batch" in str(step.explain())


# ------------------------------------------------------------------ quantisation-aware training


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_quantisation_aware_training_learns_resumes_and_converts(preset: str, bits: int) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    grid = {"granularity": "per_channel"} if bits == 8 else {"group_size": 32}
    weights = IntxFakeQuantizeConfig(getattr(torch, f"int{bits}"), **grid, is_symmetric=True)
    wanted, given = hs.Policy.of(preset, dtype="bf16"), list(batches(60, rows=64))

    def quantised() -> Net:
        model = net()
        quantize_(model.blocks, QATConfig(weight_config=weights, step="prepare"))
        return model

    step = step_of(quantised(), wanted)
    losses = [step(*batch).host().loss for batch in given[:30]]
    state = copy.deepcopy(step.state_dict())
    losses += [step(*batch).host().loss for batch in given[30:]]
    plain = step_of(net(), wanted)
    unquantised = [plain(*batch).host().loss for batch in given]
    # rounded weights learn, and the run is another one than without rounding
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]) and losses[0] != unquantised[0]
    again = step_of(quantised(), wanted)
    again.load_state_dict(state)
    for batch in given[30:]:
        again(*batch)
    assert same(values(step.model), values(again.model))
    before = values(step.model)
    bad = given[0][0].clone()
    bad[0] = float("inf")
    assert step(bad, given[0][1]).host().skipped and same(before, values(step.model))
    model = hs.unprepare(step.model)
    quantize_(model.blocks, QATConfig(step="convert"))
    assert same(before, values(model)) and type(model.get_submodule("blocks.0.up")) is nn.Linear


# ------------------------------------------------------------------ what is not converted


def test_what_stays_is_named_with_its_reason() -> None:
    model = nn.Sequential(
        nn.Linear(16, 272), nn.Linear(272, 1040), nn.Linear(1040, 24), nn.Linear(24, 1040), nn.Linear(1040, 8)
    )
    wanted = hs.Policy.of("mixed", dtype="bf16").with_modules({"*": "fp8"})
    text = str(hs.resolve(wanted, model))
    for words in (
        "the first linear layer of the model: 0",
        "24 no multiple of 16: 2, 3",
        "fp8: 8 no multiple of 16: 4",
        "  1 (Linear): fp8 because",
        "no eight-bit units, so torchao emulates",
    ):
        assert words in text
    with pytest.warns(UserWarning, match="no eight-bit units"):
        hs.prepare(model, policy=wanted)


@pytest.mark.parametrize(("rule", "recipe"), [("fp8", "tensorwise"), ("fp8-rowwise", "rowwise")])
def test_what_is_small_is_what_torchaos_filter_leaves_out(rule: str, recipe: str) -> None:
    from torchao.float8 import _auto_filter_for_recipe

    converts, sizes = _auto_filter_for_recipe(recipe, []), (16, 1024, 1040, 2048, 2064, 4096, 4112, 8192)
    for inputs in sizes:
        for outputs in sizes:
            layer = nn.Linear(inputs, outputs, device="meta")
            assert is_small(RULE_KINDS[rule].recipe, inputs, outputs) is not converts(layer, "layer")


def test_without_torchao_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from halfstep.binding.fp8 import layer_of

    layer_of.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = net()
    with pytest.raises(PolicyError, match=r"module rule 'fp8' needs torchao: pip install 'halfstep\[fp8\]'"):
        hs.prepare(model, policy=policy())
    assert hs.prepared_policy(model) is None
    layer_of.cache_clear()


# ------------------------------------------------------------------ ranks


def on_two_ranks(rank: int, how: str, preset: str) -> tuple[list[Tensor], list[bool]]:
    import warnings

    warnings.simplefilter("ignore")
    model: Any = net()
    wanted = policy(preset, "fp8-rowwise")
    if how == "shard":
        hs.shard(model, wanted)
        step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        hs.prepare(model, optimizer, policy=wanted)
        step = hs.TrainStep(DistributedDataParallel(model), optimizer, loss_fn)
    skipped = []
    for i, (x, y) in enumerate(batches(4, rows=32)):
        mine = x[rank::2].clone()
        if i == 2 and rank == 1:
            mine[0] = float("inf")
        skipped.append(step(mine, y[rank::2]).host().skipped)
    found = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in model.state_dict().values()]
    return [value.clone() for value in found], skipped


@pytest.mark.dist
@pytest.mark.parametrize(("how", "preset"), [("ddp", "mixed"), ("shard", "O2")])
def test_two_ranks_stay_equal_and_skip_together(how: str, preset: str, tmp_path: Path) -> None:
    (mine, skipped), (theirs, also) = in_two_processes(on_two_ranks, tmp_path, how, preset)
    assert skipped == also == [False, False, True, False]
    assert same(mine, theirs)
    assert not same(mine, values(net()))


# ------------------------------------------------------------------ gathered in eight bits


def asks(model: nn.Module) -> list[str]:
    """Return the names of the weights that fully_shard gathers in eight bits, whose parts are plain tensors."""
    named = [(name, local(p)) for name, p in model.named_parameters()]
    assert {type(part) for _, part in named} <= {Tensor, nn.Parameter}
    return [name for name, part in named if hasattr(part, "fsdp_pre_all_gather")]


def gathered(rank: int, preset: str, dtype: str, eight: bool) -> dict[str, Any]:
    """Return what a run gives whose weights are gathered in eight bits, or in `dtype`."""
    import warnings

    warnings.simplefilter("ignore")
    model = net()
    with nullcontext() if eight else mock.patch("halfstep.binding.shard.gather"):
        hs.shard(model, policy(preset, dtype=dtype))
    step = step_of(model, policy(preset, dtype=dtype))
    asked, given = asks(model), list(batches(6, rows=32))
    results, state = [], {}
    for number, (x, y) in enumerate(given):
        mine = x[rank::2].clone()
        if number == 2 and rank == 1:
            mine[0] = 6e4 if dtype == "fp16" else float("inf")
        with Collectives() as seen:
            results.append(step(mine, y[rank::2]).host())
        if number == 2:
            verdict = str(step.explain())
        if number == 3:
            state = copy.deepcopy(step.state_dict())
    ends = [copy.deepcopy(step.state_dict())]
    step.load_state_dict(state)
    for x, y in given[4:]:
        step(x[rank::2], y[rank::2])
    ends.append(step.state_dict())
    resumed, *_ = (str(end["model"]) == str(ends[0]["model"]) for end in ends[1:])
    loss = float(step.evaluate(*given[0]))
    sent = sum(size for name, size in seen.seen if name == "_allgather_base_")
    seen_of = [(r.loss, r.grad_norm, r.skipped) for r in results]
    return {"asked": asked, "run": str([seen_of, ends[0], loss, verdict]), "sent": sent, "resumed": resumed}


@pytest.mark.dist
@pytest.mark.parametrize(("preset", "dtype"), [("mixed", "bf16"), ("O2", "fp16"), ("pure", "bf16")])
def test_what_is_gathered_in_eight_bits_has_the_same_bits_and_half_the_bytes(
    preset: str, dtype: str, tmp_path: Path
) -> None:
    runs = []
    for name in ("low", "eight"):
        (tmp_path / name).mkdir()
        runs.append(in_two_processes(gathered, tmp_path / name, preset, dtype, name == "eight"))
    elements = 2 * 2 * 32 * 64 // 2  # a rank's part of the weights of two blocks
    for one, other in zip(*runs, strict=True):
        assert not one["asked"] and len(other["asked"]) == 4
        assert one["run"] == other["run"] and one["resumed"] and other["resumed"]
        assert one["sent"] - other["sent"] == 2 * elements  # forward and backward pass, a byte less for each


def in_other_ways(rank: int, preset: str) -> list[Any]:
    """Return what is gathered in eight bits where that cannot be, and what a model without binding gives."""
    import warnings

    from torch.distributed.fsdp import CPUOffloadPolicy

    warnings.simplefilter("ignore")
    (x, y), *_ = batches(1)
    tied = net()
    tied.blocks[1].up.weight = tied.blocks[0].up.weight  # type: ignore[union-attr]
    found: list[Any] = [len(asks(hs.shard(tied, policy(preset), units=[])))]
    found.append(len(asks(hs.shard(net(), policy(preset), offload_policy=CPUOffloadPolicy(pin_memory=False)))))
    found.append(len(asks(hs.shard(net(), policy(preset), reshard_after_forward=1))))
    found.append(len(asks(hs.shard(net(), policy(preset, "fp8-rowwise")))))
    model = hs.shard(net(), policy("mixed"))
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        losses = [float(loss_fn(hs.unprepare(model), x, y)), float(loss_fn(net(), x, y))]
    return [*found, len(asks(model)), abs(losses[0] - losses[1]) < 0.01]


@pytest.mark.dist
def test_what_cannot_be_gathered_in_eight_bits_is_gathered_as_before(tmp_path: Path) -> None:
    assert in_processes(1, in_other_ways, tmp_path, "O2") == [[2, 0, 0, 0, 0, True]]


def unevenly(rank: int) -> tuple[int, bool]:
    """Return how many of 3 ranks' weights are gathered in eight bits: none has rows that 3 divides."""
    import warnings

    warnings.simplefilter("ignore")
    model = hs.shard(net(), policy())
    (x, y), *_ = batches(1, rows=12)
    return len(asks(model)), step_of(model, policy())(x[rank::3], y[rank::3]).host().updated


@pytest.mark.dist
def test_weights_that_ranks_have_unequal_parts_of(tmp_path: Path) -> None:
    assert in_processes(3, unevenly, tmp_path) == [(0, True)] * 3


def in_two_groups(rank: int) -> list[Any]:
    """Return what is gathered in eight bits on 2 x 2 ranks: by two replicas, and beside tensor parallel layers."""
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.simplefilter("ignore")
    mesh, found, ends = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), [], []
    for eight in (True, False):
        with nullcontext() if eight else mock.patch("halfstep.binding.shard.gather"):
            model = hs.shard(net(), policy("pure"), mesh=mesh)
        found.append(len(asks(model)))
        step = step_of(model, policy("pure"))
        ends.append(str([step(x[rank::4], y[rank::4]).host().loss for x, y in batches(3, rows=32)]))
    parallel = net()
    for block in parallel.blocks:
        parallelize_module(block, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return [*found, ends[0] == ends[1], len(asks(hs.shard(parallel, policy(), mesh=mesh["outer"])))]


@pytest.mark.dist
def test_replicas_gather_in_eight_bits_and_tensor_parallel_layers_do_not(tmp_path: Path) -> None:
    assert in_processes(4, in_two_groups, tmp_path) == [[4, 0, True, 0]] * 4


def test_a_plan_counts_what_is_sent() -> None:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    given: Any = {"batch": next(batches(1)), "loss_fn": loss_fn, "optimizer": adamw, "devices": 2, "shard": "fsdp2"}
    put_in = []
    for rule in ("fp8-rowwise", "fp8"):
        sent = hs.plan(Net, policy=policy("pure", rule), **given).sent
        put_in += [one.put_in for one in sent if one.collective == "all-gather"]
    assert put_in[0] - put_in[1] == 2 * 2 * 2 * 32 * 64 // 2
