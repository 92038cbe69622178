"""`TrainStep(..., state="host")`: the bits of state="device", and no optimizer state on the device between updates."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.advise.plan import MemoryPlan, plan_each
from halfstep.errors import StepError
from halfstep.kernels.choose import native_kernels
from halfstep.step.parts.host_state import HostState
from halfstep.testing.fake_cuda import missing as missing_cuda
from halfstep.testing.host_device import missing
from halfstep.update.fused import FusedUpdate
from halfstep.update.updater import Updater
from tests.products import sampled
from tests.step import on_host_ranks
from tests.step.on_host_state import (
    MOMENTS,
    OPTIMIZERS,
    POLICIES,
    STATES,
    batches,
    loss_fn,
    net,
    plain,
    step_of,
    trained,
)
from tests.testing.test_host_device import environment
from tests.two_processes import as_script, in_two_processes

SCRIPT = Path(__file__).parent / "on_host_state.py"
device = pytest.mark.skipif(bool(missing()), reason=missing() or "-")
cuda = pytest.mark.skipif(bool(missing_cuda()), reason=missing_cuda() or "-")
native = pytest.mark.skipif(native_kernels(torch.zeros(1)) is None, reason="no native kernels here")


def output(*words: str) -> dict[str, Any]:
    """Return the output of `on_host_state.py`."""
    path = environment()["PYTHONPATH"]
    done = as_script([SCRIPT, *words], SCRIPT.parent, PYTHONPATH=path, HALFSTEP_NATIVE="0")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The output of `on_host_state.py`."""
    return output()


# ------------------------------------------------------------------------------------------ on another device


@device
def test_optimizers_have_the_same_bits_also_over_a_skipped_step(found: dict[str, Any]) -> None:
    assert len(found["equal"]) == len(OPTIMIZERS) + len(POLICIES) - 1
    assert {case: different for case, different in found["equal"].items() if different} == {}


@pytest.mark.slow
@device
def test_every_optimizer_has_the_same_bits_under_every_preset_and_wherever_a_call_is_cut_off() -> None:
    found = output("every")
    assert len(found["equal"]) == (len(OPTIMIZERS) - 1) * (len(POLICIES) - 1)  # the other pairs are tested above
    assert {case: different for case, different in found["equal"].items() if different} == {}
    for counts in found["interrupted"]:
        assert counts["cases"] > counts["refused"] > 5 and counts["other"] == 0


@device
def test_and_with_accumulation_clipping_by_value_replay_retries_schedulers_and_auto(found: dict[str, Any]) -> None:
    assert {case: different for case, different in found["modes"].items() if different} == {}


@device
def test_a_forward_pass_has_the_memory_of_the_states(found: dict[str, Any]) -> None:
    for on_device, on_host in zip(found["held"][::2], found["held"][1::2], strict=True):
        assert on_device["states"] == on_host["states"] > 15_000
        assert on_device["held"] - on_host["held"] == on_host["states"]


@device
def test_checkpoints_are_the_same_and_are_loaded_by_both(found: dict[str, Any]) -> None:
    assert all(len(verdicts) == 6 and all(verdicts.values()) for verdicts in found["resumed"].values())


@device
def test_copies_and_states_that_were_loaded_by_hand_go_on(found: dict[str, Any]) -> None:
    assert found["copied"] == [True] * 6


@device
def test_host_memory_stays_in_its_place_and_hooks_find_states_on_the_device(found: dict[str, Any]) -> None:
    assert found["stays"] == [True, True]


@device
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exception_leaves_states_that_go_on(found: dict[str, Any], moment: str) -> None:
    """After the update has written a checkpoint is loaded; before, the states are on the host as they were."""
    where = ["npu"] if moment == "after" else ["cpu"]
    assert [found["cut"][policy][moment] for policy in ("mixed", "pure")] == [[where, True]] * 2


@device
def test_updates_wait_for_nothing_and_reading_the_state_waits_once(found: dict[str, Any]) -> None:
    assert found["waits"] == [0, 1]


@device
def test_an_optimizer_may_take_the_place_of_another(found: dict[str, Any]) -> None:
    assert found["replaced"] == [True, True]


# ------------------------------------------------------------------------------------------ on a CPU


@pytest.mark.parametrize(
    ("optimizer", "policy"), sampled(["AdamW", "SGD", "RMSprop", "dict"], POLICIES, rest=pytest.mark.slow)
)
def test_a_cpu_moves_nothing(optimizer: str, policy: str) -> None:
    steps = [step_of("cpu", optimizer, policy, state, blackbox=False) for state in STATES]
    ends = [trained(step, batches("cpu", 3)) for step in steps]
    assert str(ends[0]) == str(ends[1])
    assert sum(isinstance(part, HostState) for part in steps[0].parts) == 0 and steps[0].state == "device"
    assert sum(isinstance(part, HostState) for part in steps[1].parts) == 1 and steps[1].state == "host"
    (part,) = (part for part in steps[1].parts if isinstance(part, HostState))
    assert list(part._places()) == [] and not part._waiting


class Moves(hs.step.Part):
    """Moves states as `HostState` does, on a CPU, and overwrites what they were: a stale address gives nan."""

    def __init__(self, step: hs.TrainStep) -> None:
        self.step = step

    def begin_window(self) -> None:
        for state in self.step.optimizer.state.values():
            for name, value in state.items():
                if value.numel() > 1:
                    state[name] = value.clone()
                    value.fill_(torch.nan)
        self.step._updater.forget_tables()

    before_update = begin_window


def moved(optimizer: str, policy: str) -> list[Any]:
    """Return the results of a step whose states move, and of one whose states stay."""
    steps = [step_of("cpu", optimizer, policy, "device", blackbox=False) for _ in range(2)]
    steps[0].add_part(Moves(steps[0]))
    return [trained(step, batches("cpu", 4)) for step in steps]


@native
@pytest.mark.parametrize("policy", ["mixed", "O2", "pure", "lean"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "NAdam", "Lion", "list"])
def test_kernels_take_the_addresses_of_states_that_moved(optimizer: str, policy: str) -> None:
    one, other = moved(optimizer, policy)
    assert str(one) == str(other) and "nan" not in str(one)


@native
def test_the_test_of_addresses_can_fail() -> None:
    def fits(fused: FusedUpdate, parameters: Any, gradients: Any) -> bool:
        return fused._columns.take(gradients)

    with mock.patch.object(Updater, "forget_tables"), mock.patch.object(FusedUpdate, "fits", fits):
        one, other = moved("Lion", "mixed")
    assert str(one) != str(other)


class Brought(HostState):
    """Brings states as `HostState` does, on a CPU, and fills what they were with nan; sent, they become nan as well."""

    def bring(self, parameters: Any = None) -> None:
        for parameter in self._updater.optimizer.state if parameters is None else parameters:
            state = self._updater.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, tuple):
                    state[name] = value[0]

    def send(self, parameters: Any = None) -> None:
        for parameter in self._updater.optimizer.state if parameters is None else parameters:
            state = self._updater.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    state[name] = (value.clone(),)
                    value.fill_(torch.nan)


@native
@pytest.mark.parametrize("way", [True, "two passes"])
@pytest.mark.parametrize("policy", ["mixed", "pure", "lean"])
def test_updates_in_backward_have_the_states_of_what_they_update(policy: str, way: bool | str) -> None:
    """Between their updates the states are out of reach."""
    given: Any = {"clip_norm": None, "blackbox": False, "update_in_backward": way}
    twin = step_of("cpu", "AdamW", policy, "device", **given)
    with (
        mock.patch("halfstep.step.settings.HostState", Brought),
        mock.patch("halfstep.step.parts.in_backward.TOGETHER", 1),
    ):
        step = step_of("cpu", "AdamW", policy, "host", **given)
    data = batches("cpu", 4, bad=2)
    for batch in data:
        assert str(step(*batch).host()) == str(twin(*batch).host())
        assert {type(s["exp_avg"]) for s in step.optimizer.state.values()} == {tuple}
    for part in step.parts:
        if isinstance(part, HostState):
            part.bring()
    assert plain(step.state_dict()) == plain(twin.state_dict())


# ------------------------------------------------------------------------------------------ sharded


def over_ranks(folder: Path, pairs: list[tuple[str, str]], device: str = on_host_ranks.NAME) -> None:
    """Train on two ranks; each has its part of the states on the host, and the bits of states on the device."""
    given, shared = folder / "given", folder / "shared"
    given.mkdir()
    shared.mkdir()
    for found in in_two_processes(on_host_ranks.run, given, str(shared), pairs, device):
        here = ["cpu cpu"], [f"{device} {device}"]
        end = found.pop("resumed")
        assert end == [True, here[0], True, here[0], True, here[1], True, here[1]]
        assert found == {f"{o} {p}": {"equal": True, "skipped": True, "places": [*here[::-1]]} for o, p in pairs}


@device
@pytest.mark.slow
def test_each_rank_keeps_its_part_of_the_states_on_the_host(tmp_path: Path) -> None:
    over_ranks(tmp_path, [("AdamW", name) for name in on_host_ranks.POLICIES] + [("RMSprop", "pure:bf16")])


@pytest.mark.slow
def test_ranks_on_a_cpu_move_nothing(tmp_path: Path) -> None:
    over_ranks(tmp_path, [("AdamW", name) for name in on_host_ranks.POLICIES], "cpu")


# ------------------------------------------------------------------------------------------ planned


def layers() -> nn.Module:
    """Two layers, whose sizes are multiples of what the allocator rounds to."""
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters())


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters())


WAYS: dict[str, dict[str, Any]] = {
    "sharded": {"devices": 2, "shard": "fsdp2"},
    "hybrid": {"devices": 4, "shard": "fsdp2", "replicas": 2},
    "in backward": {"update_in_backward": True},
}


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str, str], MemoryPlan]:
    """Plans for a GPU, made in one process: (optimizer, policy, state) -> plan."""
    keys = [(o.__name__, p, s) for o in (adamw, rmsprop, adagrad) for p in ("mixed", "pure", "lean") for s in STATES]
    keys += [(way, p, s) for way in WAYS for p in ("mixed", "pure") for s in STATES]
    given = {"what": layers, "batch": (torch.zeros(4096, 256),), "loss_fn": square, "device": "cuda"}
    made = plan_each([
        {**given, "optimizer": globals().get(o, adamw), "policy": p, "state": s, **WAYS.get(o, {})} for o, p, s in keys
    ])  # fmt: skip
    return dict(zip(keys, made, strict=True))  # type: ignore[arg-type]  # errors are compared too


@cuda
@pytest.mark.parametrize(("policy", "bytes_of_a_state"), [("mixed", 4), ("pure", 4), ("lean", 2)])
@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("rmsprop", 1), ("adagrad", 1)])
def test_a_planned_gpu_lacks_the_states_between_updates(
    plans: dict[tuple[str, str, str], MemoryPlan], optimizer: str, states: int, policy: str, bytes_of_a_state: int
) -> None:
    there, here = (plans[optimizer, policy, state] for state in STATES)
    saved = states * bytes_of_a_state * 2 * (256 * 256 + 256)
    assert there.persistent_bytes - here.persistent_bytes == saved
    assert there.peak_bytes - here.peak_bytes == saved  # the peak is in the backward pass
    for phase in ("forward", "backward"):
        assert there.phase_peaks()[phase] - here.phase_peaks()[phase] == saved
    assert there.phase_peaks()["update"] == here.phase_peaks()["update"]


@cuda
@pytest.mark.parametrize("policy", ["mixed", "pure"])
@pytest.mark.parametrize(("way", "parts"), [("sharded", 2), ("hybrid", 2), ("in backward", 1)])
def test_also_of_parts_and_with_updates_in_backward(
    plans: dict[tuple[str, str, str], MemoryPlan], way: str, parts: int, policy: str
) -> None:
    there, here = (plans[way, policy, state] for state in STATES)
    saved = 8 * 2 * (256 * 256 + 256) // parts
    assert there.persistent_bytes - here.persistent_bytes == saved
    assert there.phase_peaks()["forward"] - here.phase_peaks()["forward"] == saved
    assert 0 < there.peak_bytes - here.peak_bytes <= saved


def test_a_plan_for_a_cpu_says_that_nothing_is_moved() -> None:
    given: Any = layers, (torch.zeros(8, 256),), square, adamw
    there, here = (hs.plan(*given, state=state) for state in STATES)
    assert there.peak_bytes == here.peak_bytes
    assert set(here.notes) - set(there.notes) == {
        "state='host' moves nothing on a CPU, and device='cuda' plans what it saves"
    }


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"state": "disk"}, "TrainStep: state must be one of 'device', 'host' and is 'disk'"),
        ({"state": None}, "TrainStep: state must be one of 'device', 'host' and is None"),
        (
            {"state": "host", "cuda_graph": True},
            "state='host': cuda_graph=True has the addresses of one update; leave out one of the two",
        ),
    ],
)
def test_what_is_refused(named: dict[str, Any], message: str) -> None:
    model = net("cpu")
    with pytest.raises(StepError) as caught:
        hs.TrainStep(model, torch.optim.AdamW(model.parameters()), loss_fn, **named)
    assert str(caught.value) == message


def test_an_optimizer_that_steps_through_another_one_is_refused() -> None:
    class Through(torch.optim.SGD):
        optim = torch.optim.SGD([torch.zeros(1)])

    model = net("cpu")
    with pytest.raises(StepError, match="state='host': Through steps through another optimizer, which has the states"):
        hs.TrainStep(model, Through(model.parameters()), loss_fn, state="host")
    assert hs.prepared_policy(model) is None


def test_a_setting_that_is_fixed_and_copied() -> None:
    step = step_of("cpu", "SGD", "mixed", "host")
    with pytest.raises(StepError, match=r"TrainStep\.state is fixed"):
        step.state = "device"
    step(*batches("cpu", 1)[0])
    twin = copy.deepcopy(step)
    assert twin.state == "host" and plain(twin.state_dict()) == plain(step.state_dict())
