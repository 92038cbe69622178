"""Serving: a plain copy of a model whose weights are cast once (`lowered`), or a `torch.export` program (`exported`).

Neither needs halfstep to run. In a program every cast is a node of its graph.

Note [norms]: beside low inputs and fp32 statistics torch's kernels of BatchNorm take fp32 weights only. Those of
LayerNorm and GroupNorm take them on a CPU; elsewhere a policy casts the weights of these two at each call, and here
they are cast once. A norm written in Python multiplies by its weight, and an fp32 one would make its output fp32, which
the next layer refuses: its weight becomes low.

Note [regions in graphs]: torch.export records a region of autocast as a region: its casts happen at each call, weights
included, and taken apart such a graph may not run (layouts of attention differ). So regions are resolved here: within
them each operator of torch.autocast's list, `policy.operators.table("torch")`, gets its casts as nodes, and a cast of a
weight becomes a weight. Operators that halfstep's rules move have their casts in the graph already.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from halfstep.arguments import MODEL, NONE, Kind, check
from halfstep.binding.bind import binding_of
from halfstep.binding.prepare import prepare, store_of, unprepare
from halfstep.binding.wrappers import unwrap
from halfstep.errors import BindError, PolicyError, UnbuiltError, warn
from halfstep.formats import DTYPES, POLICY_DTYPES, float64_of
from halfstep.kernels.sharded import is_sharded, put
from halfstep.kernels.watched import unwatch_copies
from halfstep.policy.operators import table
from halfstep.policy.plan import Plan, resolve
from halfstep.policy.policy import Policy
from halfstep.policy.rule_kinds import RULE_KINDS
from halfstep.torch_private.compiler import codegen_of
from halfstep.torch_private.modules import NormBase
from halfstep.torch_private.operators import OpOverload, dispatch_key_for_device, has_kernel_for_dispatch_key, schema_of
from halfstep.trees import tensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ModelT = TypeVar("ModelT", bound=nn.Module)

CASTS = frozenset({"aten::to", "aten::_to_copy"})
CHECKS = frozenset({"aten::_assert_tensor_metadata"})  # of formats: what they check is computed here
Regions = Mapping[str, tuple[torch.dtype, bool]]
"""Device type -> low format and whether autocast is on."""


ARGS = Kind("a tuple of inputs", lambda args: isinstance(args, (tuple, list)))
KWARGS = Kind("a dict of inputs", lambda kwargs: isinstance(kwargs, Mapping))


def lowered(model: ModelT, *, policy: Policy | str | Path | None = None) -> ModelT:
    """Return a plain copy of `model` for serving, with its weights cast once; it needs no halfstep to run.

    The copy and all its parts are of the user's own classes; it is in evaluation mode, and its parameters take no
    gradients. Parameters have the formats of the policy's plan (``hs.resolve``), and operators compute in the formats
    of their inputs: give it low inputs, and it returns low outputs. Rules for operators (`exp` in fp32) are not
    followed; `hs.exported` follows them all. The model stays as it is.

    Args:
        model: prepared, or a plain model with `policy`.
        policy: for a model that is not prepared, or to lower a prepared one by another policy: ``"pure"`` makes norms
            low too, which is the format that libraries save and load.

    Raises:
        BindError: no policy is given and the model is not prepared, or it is sharded.
        PolicyError: the policy keeps fp32 parameters and lowers operators, which no plain module does, or has rules for
            operators, or modules in fp32.

    Examples:
        >>> served = hs.lowered(model, policy=hs.Policy.of("pure", dtype="bf16"))
        >>> served(x.bfloat16()).dtype
        torch.bfloat16
    """
    check("hs.lowered", BindError, model=(model, MODEL))
    wanted = _policy_of(model) if policy is None else Policy.of(policy)
    plan = resolve(wanted, unwrap(model))
    _refuse(plan.policy)
    made = _twin(model, policy, bound=False)
    _cast_weights(made, plan)
    return made


def _policy_of(model: nn.Module) -> Policy:
    binding = binding_of(unwrap(model))
    if binding is None:
        raise BindError("the model is not prepared: pass policy=, or the model that was given to hs.prepare")
    return binding.wanted


def _twin(model: ModelT, policy: Policy | str | Path | None, *, bound: bool) -> ModelT:
    """Return a copy of `model` in evaluation mode, with the low weights it computes with, and no gradients."""
    inner: Any = unwrap(model)
    if policy is None:
        _policy_of(model)
    if any(is_sharded(parameter) for parameter in inner.parameters()):
        raise BindError(
            "the model is sharded, and a copy for serving holds whole weights: load its state_dict into a plain model, "
            "and give that with policy="
        )
    made: Any = copy.deepcopy(inner)
    unwatch_copies(made.parameters())
    if binding_of(made) is not None and (policy is not None or not bound):
        unprepare(made)
    if policy is None:
        store = store_of(inner)
        for mine, own in zip(made.parameters(), inner.parameters(), strict=True):
            if store is not None and own in store:  # its very bits: `stochastic` does not round to nearest
                put(mine, Tensor.detach(own).clone())
    elif bound:
        prepare(made, policy=policy)
    made.eval().requires_grad_(False)
    return made  # type: ignore[no-any-return]


def _refuse(policy: Policy) -> None:
    remedy = "hs.exported(model, inputs) makes a program that does"
    if policy.params == "fp32" and policy.dtype != "fp32":
        raise PolicyError(
            f"policy {policy.name!r} keeps fp32 parameters and casts them in operators, which no plain module does; "
            f"{remedy}, and hs.lowered(model, policy='pure') makes every weight low"
        )
    modules = {pattern: rule for pattern, rule in policy.modules if rule != "low"}
    for field, what, value in (("ops", "operators", dict(policy.ops)), ("modules", "modules", modules)):
        if value:
            raise PolicyError(
                f"policy {policy.name!r} has rules for {what} ({field}={value!r}), which a plain module does not "
                f"follow; {remedy}"
            )


def _cast_weights(model: nn.Module, plan: Plan) -> None:
    """Bring the parameters of a plain model into the formats of its plan; see note [norms]."""
    kernels = (NormBase, nn.LayerNorm, nn.GroupNorm) if plan.device == "cpu" else (NormBase,)
    norms = [module for module in model.modules() if isinstance(module, kernels)]
    may = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    must = {
        id(parameter)
        for norm in norms
        if isinstance(norm, NormBase) and norm.running_mean is not None and norm.running_mean.dtype is torch.float32
        for parameter in norm.parameters(recurse=False)
    }
    low = DTYPES[plan.policy.dtype]
    for decision in plan.parameters:
        parameter = model.get_parameter(decision.name)
        value = Tensor.detach(parameter)
        if decision.low or id(parameter) not in may:
            value = value.to(low)
        if id(parameter) in must:
            value = value.float()
        if parameter.dtype is not value.dtype or value.data_ptr() != parameter.data_ptr():
            put(parameter, value)


# ------------------------------------------------------------------ a program


def exported(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    policy: Policy | str | Path | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Return `model` in evaluation under its policy as a `torch.export.ExportedProgram` that needs no halfstep.

    Every operator computes in the format that the policy gives it, so the outputs are those of the model. Weights are
    stored in the format that their operators take: no cast of a weight is left. ``program.module()`` is a plain torch
    module; ``torch.export.save``, ``torch.onnx.export(program)`` and AOTInductor take the program. The model stays as
    it is.

    Args:
        model: prepared, or a plain model with `policy`.
        args: example inputs, as `torch.export.export` takes them.
        kwargs: example inputs by name.
        policy: for a model that is not prepared, or to export a prepared one under another policy.
        dynamic_shapes: as `torch.export.export` takes them; without, shapes are those of the example.

    Warns:
        RuntimeWarning: the outputs of the program differ from those of the model on the example.

    Raises:
        BindError: no policy is given and the model is not prepared, or it is sharded.
        UnbuiltError: the graph has control flow inside a region, or an operator whose casts are not known.

    Examples:
        >>> program = hs.exported(model, (x,), policy=hs.Policy.of("mixed", dtype="bf16"))
        >>> program.module()(x).shape
        torch.Size([4, 2])
    """
    check("hs.exported", BindError, model=(model, MODEL), args=(args, ARGS), kwargs=(kwargs, KWARGS | NONE))
    args, named = tuple(args), dict(kwargs or {})
    made_from = _twin(model, policy, bound=True)
    with torch.no_grad():
        program = torch.export.export(made_from, args, named, dynamic_shapes=dynamic_shapes, strict=False)
        plain = _fold(_resolve(program.module(check_guards=False)))
        made = torch.export.export(plain, args, named, dynamic_shapes=dynamic_shapes, strict=False)
        if not _written(plain):  # else running it would change its buffers
            _compare(tensors(made_from(*args, **named)), tensors(made.module()(*args, **named)))
    return made


def _compare(expected: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    """Warn where a program computes something else than the model it was made from."""
    for a, b in zip(expected, got, strict=True):
        if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            wide = float64_of(a)
            far = float((wide - float64_of(b)).norm() / wide.norm())
            warn(
                f"hs.exported: an output of the program differs from the model's by {far:.2g} (relative) on the "
                "example; torch has chosen other kernels, or the model computes something random in evaluation",
                RuntimeWarning,
            )
            return


# ------------------------------------------------------------------ note [regions in graphs]


def _resolve(source: GraphModule) -> GraphModule:
    """Return `source` without regions of autocast and gradient mode: their casts are nodes."""
    graph = Graph()
    inputs = [graph.node_copy(node) for node in source.graph.nodes if node.op == "placeholder"]
    graph.output(_emit(source, inputs, {}, graph))
    graph.set_codegen(codegen_of(source.graph))
    graph.eliminate_dead_code()
    return GraphModule(source, graph)


def _emit(source: GraphModule, inputs: Sequence[Any], regions: Regions, graph: Graph) -> Any:
    """Copy the nodes of `source` into `graph`, as operators in `regions`; return its outputs."""
    given = iter(inputs)
    known: dict[Node, Any] = {}
    for node in source.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
        name = getattr(node.target, "__name__", "")
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.op == "output":
            return args[0]
        elif node.op == "get_attr" and isinstance(body := operator.attrgetter(node.target)(source), nn.Module):
            known[node] = body
        elif name == "wrap_with_autocast":
            device, dtype, on, _, body, *operands = args
            known[node] = _emit(body, operands, {**regions, device: (dtype, on)}, graph)
        elif name == "wrap_with_set_grad_enabled":
            _, body, *operands = args
            known[node] = _emit(body, operands, regions, graph)
        elif node.target is operator.getitem and not isinstance(args[0], Node):
            known[node] = args[0][args[1]]
        elif any(isinstance(arg, nn.Module) for arg in args):
            raise UnbuiltError(
                f"hs.exported: the model has control flow ({name}), whose branches are graphs of their own; export the "
                "parts of the model around it"
            )
        elif not _named(node, CHECKS):
            if isinstance(node.target, OpOverload):
                args, kwargs = _cast(node, args, kwargs, regions, graph)
            made = graph.create_node(node.op, node.target, tuple(args), dict(kwargs), node.name)
            made.meta = dict(node.meta)
            known[node] = made
    raise AssertionError("a graph without an output")


def _cast(node: Node, args: Any, kwargs: Any, regions: Regions, graph: Graph) -> tuple[Any, Any]:
    """Return the arguments of an operator as torch.autocast casts them in `regions`, by nodes added to `graph`."""
    nodes: list[Node] = []
    map_arg((args, kwargs), nodes.append)
    found = [n for n in nodes if isinstance(v := n.meta.get("val"), Tensor) and v.dtype in POLICY_DTYPES]
    device = next((n.meta["val"].device.type for n in found), "")
    low, on = regions.get(device, (torch.float32, False))
    if not on:
        return args, kwargs
    full = schema_of(node.target).name  # of an OpOverload
    rules = {name.replace(".", "_"): row.rule for name, row in table("torch", device).items()}  # by dispatcher's name
    row = rules.get(full.partition("::")[2])
    if row is None:
        overload = schema_of(node.target).overload_name
        key = f"Autocast{dispatch_key_for_device(device)}"
        if has_kernel_for_dispatch_key(f"{full}.{overload}".rstrip("."), key):
            raise UnbuiltError(f"hs.exported: torch.autocast casts {full} on {device}, and how is not known here")
        return args, kwargs
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return args, kwargs  # an explicit dtype wins
    kind = RULE_KINDS[row]
    target = low if kind.format == "low" else kind.cast_to(device, [n.meta["val"] for n in found])
    if target is None:
        return args, kwargs

    def one(n: Node) -> Node:
        if n not in found or n.meta["val"].dtype is target:
            return n
        cast = graph.call_function(torch.ops.aten.to.dtype, (n, target))
        cast.meta = {**n.meta, "val": n.meta["val"].to(target)}
        return cast

    return map_arg((args, kwargs), one)


# ------------------------------------------------------------------ weights


def _fold(module: GraphModule) -> GraphModule:
    """Make weights of casts of weights, in place, until none is left; a weight that is not used any more goes."""
    graph = module.graph
    while groups := _weight_casts(module):
        for (source, _), casts in groups.items():
            path = str(source.target)
            weight = Tensor.detach(operator.attrgetter(path)(module))
            value = casts[0].target(weight, *casts[0].args[1:], **casts[0].kwargs)  # type: ignore[operator]  # an OpOverload
            if len(source.users) > len(casts):
                path = f"{path}_{str(value.dtype).removeprefix('torch.')}"
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, nn.Parameter(value, requires_grad=False))
            with graph.inserting_before(source):
                node = graph.get_attr(path)
            node.meta = dict(casts[0].meta)
            for cast in casts:
                cast.replace_all_uses_with(node)
                graph.erase_node(cast)
            if not source.users:
                graph.erase_node(source)
    module.recompile()
    return module


def _weight_casts(module: GraphModule) -> dict[tuple[Node, str], list[Node]]:
    """Return the casts of weights and buffers that nothing writes into, by what is cast and how."""
    written = _written(module)
    groups: dict[tuple[Node, str], list[Node]] = {}
    for source in module.graph.nodes:
        if source.op != "get_attr":
            continue
        for user in source.users:
            others: list[Node] = []
            map_arg((user.args[1:], user.kwargs), others.append)
            if source.target not in written and _named(user, CASTS) and not others:
                groups.setdefault((source, f"{user.args[1:]} {user.kwargs}"), []).append(user)
    return groups


def _written(module: GraphModule) -> set[Any]:
    """Return the names of the weights and buffers that the graph writes into."""
    read = (node for node in module.graph.nodes if node.op == "get_attr")
    return {
        node.target
        for node in read
        for user in node.users
        if isinstance(user.target, OpOverload) and schema_of(user.target).is_mutable
    }


def _named(node: Node, names: frozenset[str]) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).name in names
