"""What can be bound: checks of models and optimizers, made before anything is changed; the module rules of a plan."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from halfstep.binding.bind import binding_of
from halfstep.binding.fsdp import check_groups, reshard
from halfstep.binding.precise import KEY
from halfstep.binding.wrappers import cuts_hooks, is_called, refuse_flat, unwrap
from halfstep.errors import BindError
from halfstep.formats import DTYPES
from halfstep.kernels.sharded import local
from halfstep.policy.plan import Plan, resolve
from halfstep.policy.policy import Policy
from halfstep.torch_private.compiler import detect_fake_mode
from halfstep.torch_private.fake import is_fake
from halfstep.weights import WeightStore
from halfstep.weights.attachment import refuse_wrapper
from halfstep.weights.store import beyond

RuledModule = tuple[str, nn.Module, str, bool]
"""Path, module, its rule or "", and whether it is the outermost one that has the rule."""


def is_stateless(module: nn.Module) -> bool:
    """Return whether `module` has no parameters, no buffers and no children."""
    kept = [*module._parameters.values(), *module._buffers.values()]
    return not module._modules and all(value is None for value in kept)


def ruled(model: nn.Module, plan: Plan) -> Iterator[RuledModule]:
    """Iterate over the modules of `model` with the rules of its `plan`."""
    rules = {m.path: m.rule for m in plan.modules}
    for path, module in list(model.named_modules()):
        rule = rules.get(path, "")
        parent = rules.get(path.rpartition(".")[0], "") if path else ""
        yield path, module, rule, bool(rule) and rule != parent


def _refuse_other_rules(model: nn.Module, policy: Policy, modules: Iterable[RuledModule]) -> None:
    """Refuse rules for guests (see note [guests] of bind.py) that serve another prepared model under other rules."""
    for path, module, rule, entrance in modules:
        known = binding_of(module)
        if known is None or known.home is None or not any(holder is not model for holder in known.holders):
            continue
        mine, theirs = rule if entrance else "", known.rule if known.entrance else ""
        if mine != theirs if known.wanted == policy else mine and theirs:
            raise BindError(
                f"module {path!r} serves another prepared model too, whose policy {known.wanted.name!r} has the rule "
                f"{theirs or 'none'!r} for it, and this one has {mine or 'none'!r}; give each model a "
                f"{type(module).__name__} of its own (copy.deepcopy), or both the same policy"
            )


def check_model(model: nn.Module, wanted: Policy, devices: tuple[str, ...], *, one_pass: bool) -> Plan:
    """Refuse a model that `wanted` cannot be bound to; return what the policy means for it."""
    inner = unwrap(model)
    refuse_flat(inner)
    _refuse_other_policies(inner, wanted)
    _refuse_foreign(inner)
    reshard(inner)
    plan = resolve(wanted, inner, devices[0], one_pass=one_pass)
    if cuts_hooks(model) and binding_of(inner) is None and plan.policy.params == "low":
        raise BindError(
            f"{type(model).__name__} was wrapped around the model before hs.prepare, and lowering its parameters now "
            "would cut the wrapper's gradient hooks; call hs.prepare(model, ...) first, then wrap"
        )
    _refuse_own_forwards(ruled(inner, plan))
    _refuse_other_rules(inner, wanted, ruled(inner, plan))
    low = {p.name for p in plan.parameters if p.low}
    if not is_done(model, wanted, plan.policy):
        dtypes = {id(inner.get_parameter(p.name)): DTYPES[p.format] for p in plan.parameters}
        check_groups(inner, dtypes, [p.name for p in plan.parameters if p.low])
        for name, parameter in inner.named_parameters():
            if name in low and WeightStore.behind(parameter) is not None:
                raise BindError(
                    f"parameter {name} is low already and has its fp32 values behind it: a part of the model, or one "
                    "it shares the parameter with, was prepared before; hs.unprepare that first, and prepare both in "
                    "one call: hs.prepare([a, b], ...)"
                )
    _check_values(inner, low, DTYPES.get(plan.policy.dtype, torch.float32))
    return plan


def _refuse_other_policies(model: nn.Module, wanted: Policy) -> None:
    own = binding_of(model)
    if own is not None and own.wanted == wanted:
        return
    for path, module in model.named_modules():
        part = binding_of(module)
        if part is not None and part.wanted != wanted and part.home is None:
            what = f"module {path!r}" if path else "the model"
            raise BindError(
                f"{what} is already prepared with policy {part.wanted.name!r} and was given {wanted.name!r}; "
                f"hs.unprepare it first. They differ:\n{part.wanted.diff(wanted)}"
            )


def _check_values(model: nn.Module, low: set[str], dtype: torch.dtype) -> None:
    """Refuse parameters that are not finite, or to be lowered without values or with some too large; waits once."""
    pretending = detect_fake_mode() is not None
    flags: dict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        fake = is_fake(parameter)
        if is_lazy(parameter) or parameter.is_meta or fake:
            if name in low and not (fake and pretending):
                remedy = "run one batch" if is_lazy(parameter) else "materialise the model (to_empty, load_state_dict)"
                raise BindError(f"parameter {name} has no values yet and is to be lowered; {remedy} before hs.prepare")
        elif parameter.is_floating_point() and (parameter.requires_grad or name in low):  # a frozen mask may hold -inf
            values = local(Tensor.detach(parameter))
            finite = torch.isfinite(values.to(dtype) if name in low else values).all()
            flags.setdefault(parameter.device, []).append((name, values, finite))
    for known in flags.values():
        for (name, values, _), finite in zip(known, torch.stack([flag for *_, flag in known]).tolist(), strict=True):
            if not finite and not torch.isfinite(values).all():
                raise BindError(f"parameter {name} holds nan or inf before the first step; load or initialise it again")
            if not finite:
                raise BindError(
                    f"{beyond(name, values, dtype)}; give its module the rule 'fp32'"
                    f"{', use dtype=' + repr('bf16') if dtype is torch.float16 else ''}, or clamp it before hs.prepare"
                )


def check_optimizers(models: list[nn.Module], optimizers: list[Optimizer], *, low: bool) -> None:
    """Refuse optimizers of other models' parameters, or with nan in a state; where some become `low`, wrapped ones."""
    known = {id(p): name for m in models for name, p in unwrap(m).named_parameters()}
    states: list[tuple[str, Tensor]] = []
    for optimizer in optimizers:
        if low:
            refuse_wrapper(optimizer)
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise BindError(
                        f"parameter {i} of group {g} of {type(optimizer).__name__}, shape {tuple(parameter.shape)}, is "
                        "not a parameter of the model; build the optimizer from model.parameters() and prepare every "
                        "model it steps in one call: hs.prepare([a, b], optimizer)"
                    )
                state = optimizer.state.get(parameter, {})
                entries = state.items() if isinstance(state, dict) else ()
                states += [(f"{k} of {known[id(parameter)]}", v) for k, v in entries if isinstance(v, Tensor)]
    if wrong := first_wrong(states, infinities=True):
        raise BindError(
            f"the optimizer's state {wrong} holds nan before the first step, and its update writes nan into weights; "
            "load a state from before that, or begin with a new optimizer"
        )


def first_wrong(given: Iterable[tuple[str, Tensor]], *, infinities: bool) -> str:
    """Return the first name whose tensor holds nan or, unless `infinities` may be there, inf; one wait for a device."""
    flags: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in given:
        part = local(tensor).detach()
        if part.is_sparse:
            part = part.coalesce()._values()
        if type(part).dequantize is not Tensor.dequantize:  # values stored another way, as torchao's 8-bit states
            part = part.dequantize()
        if (part.is_floating_point() or part.is_complex()) and not (part.is_meta or is_fake(part)):
            wrong = part.isnan().any() if infinities else ~part.isfinite().all()
            flags.setdefault(part.device, []).append((name, wrong))
    for known in flags.values():
        for (name, _), wrong in zip(known, torch.stack([flag for _, flag in known]).tolist(), strict=True):
            if wrong:
                return name
    return ""


def is_done(model: nn.Module, wanted: Policy, concrete: Policy) -> bool:
    """Return whether `model` is prepared with `wanted`; the copy of a prepared model still lacks its low parameters."""
    known = binding_of(unwrap(model))
    if known is None or (known.home is not None and known.wanted != wanted):
        return False
    return known.store is not None or concrete.params != "low"


def _refuse_foreign(model: nn.Module) -> None:
    for path, module in model.named_modules():
        what = f"module {path or '<root>'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise BindError(
                f"{what} is a {type(module).__name__}: its compiled code looks at no rules; give hs.prepare the "
                "torch Module that it was made from"
            )
        if is_called(module, "DeepSpeedEngine") and KEY not in module.__dict__:
            raise BindError(
                f"{what} is already run by DeepSpeed, which casts weights and scales losses itself; give hs.prepare "
                "the model without it"
            )


def _refuse_own_forwards(modules: Iterable[tuple[str, nn.Module, str, bool]]) -> None:
    """Refuse a forward that is set on an instance, where a region would have to be opened: it hides the class' own."""
    for path, module, _, entrance in modules:
        if "forward" in module.__dict__ and KEY not in module.__dict__ and (entrance or not path):
            raise BindError(
                f"{f'module {path!r}' if path else 'the model'} has a forward of its own, set on the instance, which "
                "would run outside the policy's region (accelerate's mixed precision and device hooks set one, and "
                "model.forward = ...); call hs.prepare first, or undo it (del model.forward, "
                'Accelerator(mixed_precision="no"), accelerate.hooks.remove_hook_from_module(model, recurse=True))'
            )
