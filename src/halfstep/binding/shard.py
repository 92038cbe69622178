"""shard: `fully_shard` (FSDP2), which replaces parameters, and then `prepare`, which lowers them, in one call.

fully_shard gathers the parameters of a group in one format: low where parameters are stored low, or where every
operator that reads them casts them to the low format anyway; then half of the bytes are sent and the region has nothing
left to cast. All others are gathered as they are stored. So a unit, a transformer block say, has one group or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from halfstep.arguments import CALLABLE, MODEL, NONE, check
from halfstep.binding.bind import binding_of
from halfstep.binding.bindable import check_model
from halfstep.binding.fp8 import gather
from halfstep.binding.fsdp import is_fsdp
from halfstep.binding.prepare import prepare
from halfstep.errors import BindError
from halfstep.formats import DTYPES
from halfstep.policy.match import matches
from halfstep.policy.plan import Plan, resolve
from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import RULE_KINDS

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ModelT = TypeVar("ModelT", bound=nn.Module)

OPERATORS = {
    **{name: name.lower() for name in ("Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "Embedding")},
    **{f"ConvTranspose{n}d": f"conv_transpose{n}d" for n in (1, 2, 3)},
    "MultiheadAttention": "linear",
    "Conv1D": "addmm",  # of transformers
}
"""Class of a module -> the operator that reads all of its own parameters."""


def shard(
    model: ModelT,
    policy: Policy | str | Path = "mixed",
    *,
    units: Iterable[str | nn.Module] | None = None,
    init: Callable[[ModelT], object] | None = None,
    **options: Any,
) -> ModelT:
    """Shard `model` by torch's fully_shard and bind `policy` to it, in place; build the optimizer afterwards.

    Low parameters are sharded low: an all-gather sends 2 bytes an element and casts nothing, and what keeps the fp32
    values (`master`, `split`, `kahan`, `stochastic`) and the optimizer's state exist for this rank's part only. Under
    params="fp32" the parameters that the policy's operators read in the low format are gathered in it; weights of
    layers under the rule "fp8" in eight bits.

    Args:
        model: on the device of the mesh, or on the meta device; tensor parallel already, if it is to be.
        policy: a preset's name, the path of a TOML file or a `Policy`.
        units: the modules gathered one after the other, as modules or patterns ("layers.*", "class:Block"); default:
            the items of the model's outermost `nn.ModuleList`s.
        init: gives a model on the meta device its values, when it has memory; default: ``reset_parameters`` of every
            module with parameters.
        options: arguments of fully_shard but mp_policy: ``mesh=``, ``reshard_after_forward=``, ``offload_policy=`` ...

    Returns:
        The same object.

    Raises:
        BindError: it is prepared or sharded already, a pattern matches nothing, or parameters that fully_shard must
            gather together need two formats.
        PolicyError, UnbuiltError: as `prepare`.

    Examples:
        >>> torch.distributed.init_process_group("gloo")  # the script runs under torchrun
        >>> model = hs.shard(model, policy="pure", units=["0", "2"])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> step = hs.TrainStep(model, optimizer, loss_fn)
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check("hs.shard", BindError, model=(model, MODEL), init=(init, CALLABLE | NONE))
    wanted = Policy.of(policy)
    for path, module in model.named_modules():
        if is_fsdp(module) or binding_of(module) is not None:
            done = "sharded" if is_fsdp(module) else "prepared"
            raise BindError(f"hs.shard: module {path or '<root>'!r} is {done} already; give hs.shard the plain model, "
                            "or call fully_shard yourself and then hs.prepare")  # fmt: skip
    if "mp_policy" in options:
        raise BindError("hs.shard: mp_policy follows from the policy; change its fields (params, reduce), or call "
                        "fully_shard yourself and then hs.prepare")  # fmt: skip
    if not torch.distributed.is_initialized():
        raise BindError("hs.shard: there is no process group; call torch.distributed.init_process_group() first, in a "
                        "program started by torchrun")  # fmt: skip
    mesh = options.get("mesh")
    if mesh is None:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = next((p.device for p in model.parameters() if not p.is_meta), here or torch.device("cpu"))
        mesh = options["mesh"] = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    meta = any(p.is_meta for p in model.parameters())
    if meta:  # without values that could be refused
        plan = resolve(wanted, model, mesh.device_type)
    else:
        plan = check_model(model, wanted, (mesh.device_type,), one_pass=False)
    grouping = _Grouping(model, plan, _units(model, units))
    eight = [] if options.get("offload_policy") or type(options.get("reshard_after_forward")) is int else grouping.eight
    for modules, mp_policy in list(grouping.groups()):  # all, before parameters are replaced
        fully_shard(modules if len(modules) > 1 else modules[0], mp_policy=mp_policy, **options)
    if meta:
        model.to_empty(device=mesh.device_type)
        (_reset if init is None else init)(model)
    prepare(model, policy=wanted)
    for module in eight:
        gather(module.weight, DTYPES[plan.policy.dtype])
    return model


def _units(model: nn.Module, units: Iterable[str | nn.Module] | None) -> list[nn.Module]:
    """Return the modules to be gathered one after the other, those inside of others first."""
    named = {module: path for path, module in model.named_modules()}
    if units is None:
        found = [item for chosen in _lists(model) for item in chosen]
    else:
        found = []
        for unit in [units] if isinstance(units, (str, nn.Module)) else units:
            if isinstance(unit, nn.Module):
                some = [unit] if unit in named else []
            else:
                pattern = unit
                some = [module for module, path in named.items() if path and matches(pattern, path, module)]
            if not some:
                what = repr(unit) if isinstance(unit, str) else f"a {type(unit).__name__}"
                raise BindError(f"hs.shard: units: {what} is no module of the model; name its blocks, for instance "
                                "units=['class:Block']")  # fmt: skip
            found += some
    chosen = {module for module in found if next(module.parameters(), None) is not None and module is not model}
    return [module for module in reversed(list(named)) if module in chosen]


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


class _Grouping:
    """Which modules' parameters are gathered together, and in which format; of the units those inside others first."""

    def __init__(self, model: nn.Module, plan: Plan, units: list[nn.Module]) -> None:
        self._model, self._plan, self._units = model, plan, [*units, model]
        self._paths: dict[Any, str] = {module: path for path, module in model.named_modules()}
        self._rules = {m.path: m.rule for m in plan.modules}
        self._operators = {name: decision.rule for name, decision in plan.operators}
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        self.eight = [m for m in self._paths if self._rules.get(self._paths[m]) == "fp8" and owners[id(m.weight)] == 1]
        stored = {id(model.get_parameter(p.name)): DTYPES[p.format] for p in plan.parameters}
        low = DTYPES.get(plan.policy.dtype, torch.float32)
        # by id of a parameter: its format, and that in which it is gathered; of a shared one, what suits all owners
        self._kinds: dict[int, tuple[torch.dtype, torch.dtype]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                own = stored.get(id(parameter), parameter.dtype)
                wanted = low if own is torch.float32 and self._reads_low(module) else own
                _, known = self._kinds.get(id(parameter), (own, wanted))
                self._kinds[id(parameter)] = own, wanted if wanted is known else own

    def _reads_low(self, module: nn.Module) -> bool:
        """Return whether every operator that reads the parameters of `module` itself reads them in the low format."""
        rule = self._rules.get(self._paths[module], "")
        rule = "low" if rule and RULE_KINDS[rule].recipe else rule  # torchao makes fp8 of these numbers
        kind = next((c for c in type(module).__mro__ if c.__name__ in OPERATORS), None)
        if kind is None or type(module).forward is not kind.forward:  # type: ignore[attr-defined]
            return False
        return (rule or self._operators.get(OPERATORS[kind.__name__])) == "low"

    def groups(self) -> Iterator[tuple[list[nn.Module], MixedPrecisionPolicy]]:
        """Iterate over (modules, formats) for fully_shard, in order: what comes later takes what is left."""
        done = set[int]()
        self._refuse_shared()
        for unit in self._units:
            yield from self._of(unit, done)

    def _of(self, unit: nn.Module, done: set[int]) -> Iterator[tuple[list[nn.Module], MixedPrecisionPolicy]]:
        """Return the groups of one unit, without the parameters in `done`, to which those of the unit are added."""
        owners: dict[tuple[torch.dtype, torch.dtype], list[nn.Module]] = {}
        for module in unit.modules():
            left = [p for p in module.parameters(recurse=False) if id(p) not in done]
            kinds = {self._kinds[id(p)] for p in left}
            if len(kinds) > 1:
                names = ", ".join(str(dtype).removeprefix("torch.") for _, dtype in sorted(kinds, key=str))
                raise BindError(f"hs.shard: module {self._paths[module] or '<root>'!r} has parameters of its own that "
                                f"policy {self._plan.policy.name!r} needs in {names}, and fully_shard gathers those of "
                                "one module together; give it one rule, for instance policy.with_modules({...: "
                                "'fp32'})")  # fmt: skip
            for kind in kinds:
                owners.setdefault(kind, []).append(module)
        own = next((self._kinds[id(p)] for p in unit.parameters(recurse=False) if id(p) not in done), None)
        if own is None and owners:  # the format that most of the unit has
            own = max(
                owners, key=lambda kind: sum(p.numel() for m in owners[kind] for p in m.parameters(recurse=False))
            )
        for kind, modules in owners.items():
            if kind == own:
                continue
            for module in modules:  # it would take all parameters below it
                inside = {self._kinds[id(p)] for p in module.parameters() if id(p) not in done}
                if len(inside) > 1:
                    yield from self._of(module, done)
            modules = [m for m in modules if any(id(p) not in done for p in m.parameters(recurse=False))]
            if modules:
                done.update(id(p) for m in modules for p in m.parameters())
                yield modules, self._formats_of(kind)
        done.update(id(p) for p in unit.parameters())
        yield [unit], self._formats_of(own or (torch.float32, torch.float32))

    def _formats_of(self, kind: tuple[torch.dtype, torch.dtype]) -> MixedPrecisionPolicy:
        """Return the formats of a group. Inputs and outputs are the region's to cast."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        stored, gathered = kind
        policy = self._plan.policy
        sums = stored if policy.reduce == "grad" else torch.float32 if policy.reduce == "fp32" else DTYPES[policy.dtype]
        return MixedPrecisionPolicy(
            param_dtype=None if gathered is stored else gathered,
            reduce_dtype=None if sums is gathered else sums,
            output_dtype=None,
            cast_forward_inputs=False,
        )

    def _refuse_shared(self) -> None:
        """Refuse a parameter that two units share: each would get a part of its own."""
        homes: dict[int, nn.Module] = {}
        inside: dict[nn.Module, nn.Module] = {}
        for unit in reversed(self._units):  # the innermost unit of a module comes last
            inside.update(dict.fromkeys(unit.modules(), unit))
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                home = homes.setdefault(id(parameter), inside[module])
                if home is not inside[module]:
                    path = self._paths[inside[module]] or "<root>"
                    raise BindError(f"hs.shard: parameter {self._paths[module]}.{name} is shared with a module outside "
                                    f"of the unit {path!r}, and both are gathered at different times; leave one of "
                                    "them out of units")  # fmt: skip


def _reset(model: nn.Module) -> None:
    """Give parameters their values as the constructors of their modules do."""
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None and next(module.buffers(recurse=False), None) is None:
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise BindError(f"hs.shard: the model is on the meta device, and {type(module).__name__} "
                            f"{path or '<root>'!r} has no reset_parameters; pass init=, a function of the model that "
                            "gives its parameters and buffers values")  # fmt: skip
        reset()
