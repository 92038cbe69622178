"""hs.shard in a group of one process: groups, formats, weights behind parts, refusals. `tests/distributed`: ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.binding.prepare import store_of
from halfstep.errors import BindError, UnbuiltError
from halfstep.kernels.choose import norms_for
from halfstep.kernels.sharded import local
from halfstep.policy.resolve import device_types_of
from tests.distributed.strategies import Net, batches, loss_of, policy

LOW = ("O2:bf16:master=master", "pure:bf16:master=split", "pure:bf16:master=kahan", "pure:fp16", "pure:bf16:state=low")
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not"),
]


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(device: str = "cpu") -> Net:
    torch.manual_seed(0)
    with torch.device(device):
        return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, updates: int = 4, **options: Any) -> hs.TrainStep:
    step = hs.TrainStep(model, adamw(model), loss_of, **options)
    for number in range(updates):
        for batch in batches(number, 0):
            step(*batch)
    return step


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: cast(Any, value).full_tensor() for name, value in model.state_dict().items()}


def groups(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.dtype | None, torch.dtype | None]]:
    """Return name -> (stored, gathered, summed) of every parameter."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for module in model.modules():
        if hasattr(module, "unshard"):
            for group in _groups(module):
                for parameter in group.fsdp_params:
                    own = parameter.sharded_param
                    formats = getattr(parameter, "mp_policy", None) or group.mp_policy
                    found[names[id(own)]] = (own.dtype, formats.param_dtype, formats.reduce_dtype)
    return found


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    return list(getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])


@pytest.mark.parametrize("name", LOW)
def test_sharded_over_one_rank_it_trains_as_the_model_alone_bit_for_bit(name: str) -> None:
    alone = net()
    hs.prepare(alone, policy=policy(name))
    trained(alone)
    sharded = hs.shard(net(), policy(name))
    step = trained(sharded)
    assert step.policy.master != "auto"
    wanted = alone.state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in whole(sharded).items())


@pytest.mark.parametrize(("fields", "size"), [("master=split", 8), ("master=stochastic", 6), ("master=master", 10)])
def test_weights_and_states_take_so_many_bytes_a_parameter(fields: str, size: int) -> None:
    model = hs.shard(net(), policy(f"pure:bf16:{fields},state=low"))
    step = trained(model, 1)
    store = store_of(model)
    assert store is not None
    states = [value for state in step.optimizer.state.values() for name, value in state.items() if name != "step"]
    stored = [local(tensor) for tensor in (*model.parameters(), *states, *store.kept())]
    assert sum(part.nbytes for part in stored) == size * sum(p.numel() for p in model.parameters())


def test_any_optimizer_steps_the_values_behind_parts() -> None:
    wanted = policy("pure:bf16:master=kahan")
    ways = []
    for sharded in (False, True):
        model: nn.Module = net()
        hs.shard(model, wanted) if sharded else hs.prepare(model, policy=wanted)
        step = hs.TrainStep(model, torch.optim.RMSprop(model.parameters(), lr=1e-3), loss_of)
        for batch in batches(0, 0, 3):
            step(*batch)
        ways.append(whole(model) if sharded else model.state_dict())
    assert all(torch.equal(value, ways[0][key]) for key, value in ways[1].items())


def test_mixed_gathers_what_operators_read_low_and_keeps_the_rest() -> None:
    model = hs.shard(net(), policy("mixed:bf16"))
    found = groups(model)
    assert found["blocks.0.up.weight"] == (torch.float32, torch.bfloat16, torch.float32)
    assert found["head.bias"] == (torch.float32, torch.bfloat16, torch.float32)
    assert found["rows.weight"] == (torch.float32, None, None)
    wide = hs.shard(net(), policy("mixed:bf16").with_modules({"blocks.0.up": "fp32"}))
    assert groups(wide)["blocks.0.up.weight"] == (torch.float32, None, None)
    assert groups(wide)["blocks.0.down.weight"] == (torch.float32, torch.bfloat16, torch.float32)


def test_o2_keeps_norms_in_groups_of_their_own_and_pure_has_one_format() -> None:
    model = hs.shard(net(), policy("O2:bf16"))
    found = groups(model)
    assert found["blocks.1.norm.weight"] == (torch.float32, None, None)
    assert found["blocks.1.up.weight"] == (torch.bfloat16, None, None)
    pure = groups(hs.shard(net(), policy("pure:bf16")))
    assert set(pure.values()) == {(torch.bfloat16, None, None)}
    summed = groups(hs.shard(net(), policy("pure:bf16:reduce=fp32")))
    assert set(summed.values()) == {(torch.bfloat16, None, torch.float32)}


class Casts(TorchDispatchMode):
    """Counts elements of parameters' shapes that are cast to bf16."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.count += tuple(args[0].shape) in self.shapes
        return result


def test_the_region_casts_no_weight_that_was_gathered_low() -> None:
    counts = []
    for sharded in (False, True):
        model: nn.Module = net()
        shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}
        hs.shard(model, "mixed" if not sharded else policy("mixed:bf16")) if sharded else hs.prepare(
            model, policy=policy("mixed:bf16")
        )
        with Casts(shapes) as casts:
            loss_of(model, *next(batches(0, 0)))
        counts.append(casts.count)
    assert counts == [5, 0]


def test_a_model_on_the_meta_device_gets_memory_and_values() -> None:
    model = hs.shard(net("meta"), policy("pure:bf16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    seen: list[nn.Module] = []

    def fill(made: Net) -> None:
        seen.append(made)
        for parameter in made.parameters():
            nn.init.constant_(parameter, 0.25)

    filled = hs.shard(net("meta"), policy("pure:bf16"), init=fill)
    assert seen == [filled]
    assert all((value == 0.25).all() for value in whole(filled).values())
    trained(model)


@pytest.mark.parametrize("name", ["mixed:bf16", *LOW, "pure:bf16:master=stochastic"])
def test_a_state_loaded_goes_on_bit_for_bit(name: str) -> None:
    model = hs.shard(net(), policy(name))
    step = trained(model)
    saved = copy.deepcopy(step.state_dict())
    assert {value.dtype for value in saved["model"].values()} == {torch.float32}
    runs = []
    for again in (False, True):
        if again:
            step.load_state_dict(saved)
        runs.append([float(step(*batch).loss) for batch in batches(9, 0, 3)])
    assert runs[0] == runs[1]


def test_weights_are_edited_in_fp32() -> None:
    model = hs.shard(net(), policy("pure:bf16:master=split"))
    before = whole(model)
    with hs.edit_weights(model), torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype is torch.float32
            parameter.mul_(1 + 2.0**-12)
        del parameter
    after = whole(model)
    assert all(torch.equal(after[name], before[name] * (1 + 2.0**-12)) for name in before)
    trained(model, 1)


def test_the_weights_of_a_sharded_model_that_has_not_run_come_back_in_fp32() -> None:
    model = net()
    wanted = copy.deepcopy(model.state_dict())
    hs.unprepare(hs.shard(model, policy("pure:bf16:master=split")))
    assert all(torch.equal(value, wanted[name]) for name, value in whole(model).items())
    trained(hs.prepare(model, policy=policy("pure:bf16")), 1)
    with pytest.raises(BindError, match="fixed the low format of the parameters"):
        hs.unprepare(model)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = net()
    with pytest.raises(BindError, match=r"units: 'class:Blok' is no module of the model"):
        hs.shard(model, "pure", units=["class:Blok"])
    with pytest.raises(BindError, match="mp_policy follows from the policy"):
        hs.shard(model, "pure", mp_policy=None)
    assert type(model) is Net
    cast(Any, model.blocks[1]).up.bias = cast(Any, model.blocks[0]).up.bias
    with pytest.raises(BindError, match=r"blocks\.1\.bias|blocks\.1\.up\.bias is shared"):
        hs.shard(model, "pure")
    with pytest.raises(BindError, match="is prepared already"):
        hs.shard(hs.prepare(net(), policy="mixed"), "mixed")
    with pytest.raises(BindError, match="is sharded already"):
        hs.shard(hs.shard(net(), "mixed"), "mixed")
    large = net()
    with torch.no_grad():
        large.head.weight[0, 0] = 1e6
    with pytest.raises(BindError, match=r"head\.weight holds a weight of magnitude 1000000, and float16 ends at 65504"):
        hs.shard(large, policy("pure:fp16"))
    assert type(large) is Net and type(large.head.weight) is nn.Parameter
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    with pytest.raises(BindError, match="has no reset_parameters"):
        hs.shard(bare, "pure")


def test_fully_shard_by_hand_goes_first_and_its_groups_must_fit() -> None:
    model = net()
    fully_shard(model)
    with pytest.raises(BindError, match=r"gathers parameters of one format together.*hs\.shard"):
        hs.prepare(model, policy=policy("O2:bf16"))
    trained(hs.prepare(model, policy=policy("pure:bf16")), 1)
    late = hs.prepare(net(), policy=policy("pure:bf16"))
    fully_shard(late)
    with pytest.raises(BindError, match="sharded after hs.prepare"):
        late(next(batches(0, 0))[0])
    ran = net()
    fully_shard(ran)
    ran(next(batches(0, 0))[0])
    with pytest.raises(BindError, match="has fixed its format in the first forward pass"):
        hs.prepare(ran, policy=policy("pure:bf16"))
    hs.prepare(ran, policy=policy("mixed:bf16"))


def test_another_format_of_sums_than_the_policys_is_refused() -> None:
    model = net()
    fully_shard(model)
    with pytest.raises(UnbuiltError, match=r"reduce='fp32'.*fully_shard sums gradients in bfloat16.*hs\.shard"):
        trained(hs.prepare(model, policy=policy("pure:bf16:reduce=fp32")), 1)
    with pytest.raises(UnbuiltError, match="grads='fp32' over low parameters"):
        trained(hs.shard(net(), policy("pure:bf16:grads=fp32")), 1)
    trained(hs.shard(net(), policy("pure:bf16:reduce=fp32")), 1)


def test_norms_of_parts_on_the_host_are_added_on_the_device_that_the_group_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With CPUOffloadPolicy parts and gradients are on the host, and nccl takes none of its tensors."""
    parameters = [p.detach() for p in hs.shard(net(), "mixed").parameters()]
    expected = norms_for(parameters)
    sent: list[str] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, **named: Any) -> None:
        sent.append(tensor.device.type)
        if tensor.device.type == "cpu":
            reduce(tensor, **named)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    assert torch.equal(norms_for(parameters), expected) and sent == ["cpu"]
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    monkeypatch.setattr(type(cast(Any, parameters[0]).device_mesh), "device_type", "cuda")
    moved = Tensor.to

    def to(tensor: Tensor, *where: Any, **named: Any) -> Tensor:
        return moved(tensor, "meta") if where == ("cuda",) else moved(tensor, *where, **named)

    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(NotImplementedError, match="copy out of meta"):  # which has no values to bring back
        norms_for(parameters)
    assert sent == ["cpu", "meta"]


def test_a_model_whose_parts_are_on_the_host_computes_where_its_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hs.shard(net(), "mixed")
    assert device_types_of([model]) == ("cpu",)
    parameter: Any = next(model.parameters())
    monkeypatch.setattr(type(parameter.device_mesh), "device_type", "cuda")
    assert device_types_of([model]) == ("cuda", "cpu")


def test_a_checkpoint_of_several_optimizers_is_loaded(tmp_path: Path) -> None:
    def made() -> hs.TrainStep:
        model = hs.shard(net(), policy("O2:bf16:master=master"))
        parameters = [*model.parameters()]
        several = [torch.optim.AdamW(parameters[:1], lr=1e-2), torch.optim.SGD(parameters[1:], lr=1e-2)]
        return hs.TrainStep(model, several, loss_of)

    first, second = made(), made()
    first(*next(batches(0, 0)))
    hs.save(first, tmp_path / "run")
    hs.load(second, tmp_path / "run")
    for step in (first, second):
        step(*next(batches(1, 0)))
    states = [whole(step.model) for step in (first, second)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
