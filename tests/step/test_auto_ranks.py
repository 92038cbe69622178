"""policy="auto" under DistributedDataParallel: two gloo processes choose alike, and train as with the policy given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.auto import choose
from halfstep.auto.choose import POLICIES
from halfstep.auto.trial import Team
from halfstep.timing import Unfit
from tests.two_processes import error_of, in_processes

pytestmark = pytest.mark.dist

OWN: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "fp32": ({"fp32": 1.0, "mixed": 0.1, "O2": 0.01, "pure": 0.001}, {"fp32": 0.1, "mixed": 1.0, "O2": 1.0, "pure": 2}),
    "mixed": ({"fp32": 1.0, "mixed": 0.5, "O2": 0.1, "pure": 0.05}, {"fp32": 1.0, "mixed": 0.5, "O2": 0.9, "pure": 2}),
    "O2": ({"fp32": 1.0, "mixed": 0.9, "O2": 0.3, "pure": 0.1}, {"fp32": 1.0, "mixed": 0.9, "O2": 0.3, "pure": 0.9}),
}
"""What is to be chosen -> seconds of the candidates on each rank."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(2 * number + rank)
    return torch.randn(8, 8, generator=source), torch.randint(0, 3, (8,), generator=source)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def built(policy: str, **options: Any) -> hs.TrainStep:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if policy == "auto":
        options["policy"] = policy
    else:
        hs.prepare(model, optimizer, policy=policy)
    ddp = DistributedDataParallel(model, static_graph=options.pop("static_graph", False))
    return hs.TrainStep(ddp, optimizer, loss_fn, clip_norm=1.0, **options)


def given_times(seconds: dict[str, float], failing: Callable[[str], None] = lambda name: None) -> None:
    """Let candidates really run in this process, and take as long as this gives."""

    class Timed(Team):
        def together(self, measure: Callable[[str, int], float], name: str, number: int) -> float:
            def given(name: str, number: int) -> float:
                measure(name, number)
                failing(name)
                return seconds[name]

            return super().together(given, name, number)

    vars(choose).update(Team=Timed, PAYBACK=0)  # of this process, which ends with the test


def trained(step: hs.TrainStep, rank: int) -> list[Any]:
    """Train six micro-batches; return what was computed and what is there then, as bytes."""
    results = [step(*batch(rank, n)) for n in range(6)]
    found: list[Any] = [repr((float(r.loss), float(r.grad_norm))) for r in results]  # no norm within a window
    state = step.state_dict()
    state.pop("choice", None)
    flat = {
        **state["model"],
        **{f"{k} {name}": v for k, own in state["optimizer"]["state"].items() for name, v in own.items()},
    }
    return [*found, {name: value.double().numpy().tobytes() for name, value in flat.items()}]


def chosen(rank: int, policy: str, options: dict[str, Any]) -> Any:
    given_times(OWN[policy][rank])
    step = built("auto", **options)
    found = trained(step, rank)
    assert step.choice is not None
    again = trained(built(POLICIES[policy], **options), rank)
    return step.choice.policy.name, step.choice.line.split(" rounds")[0], dict(step.choice.ratios), found, again


CASES: Sequence[tuple[str, dict[str, Any]]] = [
    ("fp32", {}),
    ("mixed", {"accumulate": 2}),
    ("O2", {}),
    ("O2", {"static_graph": True}),
]


def everything(rank: int) -> tuple[Any, ...]:
    return [chosen(rank, policy, options) for policy, options in CASES], failing(rank), loaded(rank)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return what all cases give on the two ranks of one group."""
    one, other = in_processes(2, everything, tmp_path_factory.mktemp("ranks"), patience=300.0)
    return one, other


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ranks_choose_alike_and_train_as_with_the_policy_given(case: int, both: tuple[Any, Any]) -> None:
    one, other = (found[0][case] for found in both)
    assert one[0] == hs.Policy.of(POLICIES[CASES[case][0]]).name
    assert one[:3] == other[:3]
    for found in (one, other):
        assert found[3] == found[4]
    buffers = {name for name in one[3][-1] if "running" in name}  # each rank's own until the next forward pass
    assert all(one[3][-1][name] == value for name, value in other[3][-1].items() if name not in buffers)


def failing(rank: int) -> Any:
    def on_one(name: str) -> None:
        if rank == 1 and name == "O2":
            raise Unfit("out of memory")

    given_times(OWN["O2"][0], on_one)
    step = built("auto")
    trained(step, rank)
    assert step.choice is not None

    def raising(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("of the user's")
        return loss_fn(model, x, y)

    other = built("auto")
    other.loss_fn = raising
    try:
        error = error_of(lambda: other(*batch(rank, 0)))
    except ValueError as own:
        error = str(own)
    other.loss_fn = loss_fn
    other(*batch(rank, 0))
    return step.choice.policy.name, dict(step.choice.dropped), error, other.choice is not None


def test_what_fails_in_one_process_fails_in_all(both: tuple[Any, Any]) -> None:
    one, other = (found[1] for found in both)
    assert one[0] == other[0] == "pure"
    assert one[1] == {"O2": "it cannot be chosen in another process"}
    assert other[1] == {"O2": "out of memory"}
    assert one[2] == "StepError: policy='auto': the step raises in another process; look there for the error"
    assert other[2] == "of the user's"
    assert one[3]
    assert other[3]


def loaded(rank: int) -> Any:
    given_times(OWN["O2"][rank])
    step = built("auto")
    trained(step, rank)
    again = built("auto")
    again.load_state_dict(copy.deepcopy(step.state_dict()))
    assert again.choice is not None
    refused = error_of(
        lambda: hs.TrainStep(hooked(), torch.optim.SGD([nn.Parameter(torch.ones(1))]), loss_fn, policy="auto")
    )
    return again.choice.rounds, trained(step, rank) == trained(again, rank), refused


def hooked() -> nn.Module:
    ddp = DistributedDataParallel(net())
    ddp.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    return ddp


def test_a_choice_is_loaded_on_both_ranks_and_a_hook_is_refused(both: tuple[Any, Any]) -> None:
    for rounds, same, refused in (found[2] for found in both):
        assert rounds == 0
        assert same
        assert refused.startswith("StepError: policy='auto': a communication hook is registered")
