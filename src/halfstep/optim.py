"""Several optimizers as one: what a training step is given as a list or a dict of them. halfstep's own are here too."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import StepError

NAMES, OTHERS = "optimizers", "others"
"""Keys of a state_dict of several: their names, and for each of them what its own has beside states and groups."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for kind in import_module("halfstep.kernels.optimizers").BY_TYPE:
            if kind.__name__ == name and kind.__module__.startswith("halfstep."):
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Optimizers(Optimizer):
    """Optimizers over different parameters that step together; their groups are one list, and their states one mapping.

    Attributes:
        optimizers: name -> optimizer, in the order of their steps; of a list, the names of their classes (`Muon`,
            `AdamW`, and `AdamW 2` for a second one).

    Raises:
        StepError: a parameter that two of them step.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer] | Sequence[Optimizer]) -> None:
        self.optimizers = dict(optimizers) if isinstance(optimizers, Mapping) else _named(optimizers)
        self._states = _States(self.optimizers)
        super().__init__([{"params": []}], {})
        owners: dict[int, str] = {}
        for name, optimizer in self.optimizers.items():
            for parameter in stepped_by(optimizer):
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise StepError(
                        f"optimizers: a parameter of shape {tuple(parameter.shape)} is in both {other!r} and {name!r}, "
                        "which would step it twice; give each parameter to one of them"
                    )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.optimizers,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all of them, which are the optimizers' own."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: object) -> None:
        """Keep the optimizers' own: torch assigns an empty list when it builds one."""

    @property  # type: ignore[override]
    def state(self) -> _States:
        """Return the states of all of them, by parameter."""
        return self._states

    @state.setter
    def state(self, value: object) -> None:
        """Keep the optimizers' own, as `param_groups` does."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group with parameters: one of the optimizers takes it."""
        if param_group["params"]:
            raise StepError(
                f"add_param_group: {type(self).__name__} has {len(self.optimizers)} optimizers; add the group to one "
                f"of them, such as step.optimizer.optimizers[{next(iter(self.optimizers))!r}]"
            )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them, in their order."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each of them."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all of them as of one optimizer with all groups, and their names."""
        merged: dict[str, Any] = {"state": {}, "param_groups": [], NAMES: [*self.optimizers], OTHERS: {}}
        first = 0
        for name, optimizer in self.optimizers.items():
            own = optimizer.state_dict()
            numbers = {number: first + i for i, number in enumerate(_numbers(own["param_groups"]))}
            first += len(numbers)
            merged["state"] |= {numbers.get(key, key): value for key, value in own.pop("state").items()}
            groups = own.pop("param_groups")
            merged["param_groups"] += [{**g, "params": [numbers[n] for n in g["params"]]} for g in groups]
            merged[OTHERS][name] = own
        return merged

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            StepError: it is of other optimizers; nothing was loaded.
        """
        check_names(self, state_dict)
        groups = [*state_dict["param_groups"]]
        for name, optimizer in self.optimizers.items():
            own = [groups.pop(0) for _ in optimizer.param_groups]
            state = {n: state_dict["state"][n] for n in _numbers(own) if n in state_dict["state"]}
            optimizer.load_state_dict({**state_dict[OTHERS].get(name, {}), "state": state, "param_groups": own})


class _States(Mapping[Tensor, dict[str, Any]]):
    """The states of several optimizers as one mapping."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        for optimizer in self._optimizers.values():
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(optimizer.state for optimizer in self._optimizers.values())

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers.values())


class Schedulers:
    """Learning-rate schedulers that advance together, in their order."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._schedulers = [*schedulers]  # where torch's own SequentialLR and ChainedScheduler have theirs

    def step(self) -> None:
        """Advance each of them."""
        for scheduler in self._schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all of them."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that `optimizer` consists of; it alone where it is one."""
    return (*optimizer.optimizers.values(),) if isinstance(optimizer, Optimizers) else (optimizer,)


def stepped_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def copy_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a copy of `optimizer` without its hooks, over the parameters that `memo` of deepcopy has for its own."""
    if isinstance(optimizer, Optimizers):
        return Optimizers({name: copy_of(one, memo) for name, one in optimizer.optimizers.items()})
    made = memo[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step" or name.startswith("_halfstep"):  # a scheduler's wrapper; a weight store's mark
            continue
        vars(made)[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    return made


def clipped_together(
    optimizer: Optimizer, clip_norm: float | Mapping[str, float] | None
) -> Iterator[tuple[list[nn.Parameter], float | None]]:
    """Yield the parameters whose gradients have one norm, and its limit."""
    if not isinstance(clip_norm, Mapping):
        yield stepped_by(optimizer), clip_norm
    elif isinstance(optimizer, Optimizers):
        for name, one in optimizer.optimizers.items():
            yield stepped_by(one), clip_norm.get(name)


def check_names(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a saved state of more, fewer or other optimizers than `optimizer` consists of."""
    names = [*optimizer.optimizers] if isinstance(optimizer, Optimizers) else None
    if (saved := state.get(NAMES)) != names:
        here, there = (", ".join(some) if some else "one optimizer" for some in (names, saved))
        raise StepError(
            f"the state was saved with {there}, and here there is {here}; build the optimizers with the names and in "
            "the order they were saved with; nothing was loaded"
        )


def _named(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    found: dict[str, Optimizer] = {}
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    for i, (kind, optimizer) in enumerate(zip(kinds, optimizers, strict=True)):
        number = 1 + kinds[:i].count(kind)
        found[kind if number == 1 else f"{kind} {number}"] = optimizer
    return found


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [number for group in groups for number in group["params"]]
