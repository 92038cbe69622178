"""Trace: follow the memory of training steps that run on fake tensors.

`MemorySink` is the sink of a tracer above torch's fake tensors. It receives every kernel, notes the memory of what the
kernel returns in a `Ledger`, with phase and module, and answers the few reads of values that a step itself makes. An
operator costs 0.3 ms of the processor, nearly all of it in torch's fake tensors.

Note [modules in backward]: an operator of the backward pass belongs to the module whose forward made its autograd node.
Nodes are numbered in the order of their creation; the number is noted when an operator runs forward. The backward pass
runs in the calling thread (`set_multithreading_enabled(False)`), so that numbers are unique.

Note [gathered]: fully_shard gathers a group's parameters into storages that it fills by `resize_` and empties by
`resize_(0)`, which no operator shows. Those that are full are looked at before every operator, so that a block ends
before the next begins.

Note [values]: fake tensors have no values, and models read some: whether a mask has padding, how long the longest
sequence is. The batch of a plan is real, so what follows from it and from constants alone is computed beside the trace,
on the CPU. Whatever depends on weights, on random numbers or on large floating inputs has no value.

Note [workspaces]: a CPU's kernels allocate more than the results that fake tensors show. oneDNN copies what a
convolution reads into layouts of its own, reductions of low numbers make fp32 copies, recurrent layers keep what their
backward pass reads. A kernel is run on zeros, once for each combination of shapes, strides and formats, while torch's
allocator is followed. Those of a GPU are chosen by cuDNN and cuBLAS while they run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.advise.plan.ledger import Block, Ledger, PlanError, collective
from halfstep.lens import Sink, user_line
from halfstep.torch_private.autograd import (
    current_autograd_node,
    current_graph_task_id,
    get_sequence_nr,
    profiler_enabled,
)
from halfstep.torch_private.devices import cpu_allocations, storage_key
from halfstep.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from halfstep.torch_private.operators import schema_of
from halfstep.torch_private.trees import tree_map_only
from halfstep.trees import tensors

LARGEST_KERNEL = 1 << 25
"""Bytes of arguments and results up to which a kernel is run: matrix products then take half a second on two cores.
A larger convolution is run on a half, a quarter, ... of its samples; other larger kernels count no workspace."""

CONVOLUTIONS = {"aten::convolution": 1, "aten::convolution_backward": 2}
"""Operator -> how many of its first arguments have a dimension of samples."""


Workspace = tuple[int, tuple[int, ...]]
"""Bytes that a kernel allocates: at one time, results included; for each result in the order of `trees.tensors`."""


def workspace(func: Any, args: Any, kwargs: Any, result: Any, bytes_of: Callable[[Tensor], int]) -> Workspace | None:
    """Return the workspace of a call on fake tensors, None if it is not counted; `bytes_of`: memory of an argument."""
    name = schema_of(func).name
    given, made = tensors((args, kwargs)), tensors(result)
    if (
        not given
        or not name.startswith("aten::")
        or func.is_view
        or torch.Tag.nondeterministic_seeded in func.tags
        or not all(type(t) is FakeTensor and t.layout is torch.strided for t in (*given, *made))
        or profiler_enabled()
    ):
        return None
    share = 1
    while sum(t.nbytes for t in (*given, *made)) > share * LARGEST_KERNEL:
        share *= 2
    if share > 1:
        batched = CONVOLUTIONS.get(name, 0)
        samples = args[0].shape[0] // share if batched else 0
        if not samples:
            return None
        args = (*(t[:samples] for t in args[:batched]), *args[batched:])
    shapes = [(t.shape, t.stride(), t.dtype, bytes_of(t)) for t in tensors((args, kwargs))]
    key = repr((func, shapes, tree_map_only(Tensor, lambda _: None, (args, kwargs))))
    if key not in _KNOWN:
        _KNOWN[key] = _run(func, args, kwargs, bytes_of)
    known = _KNOWN[key]
    return known if known is None or share == 1 else (known[0] * share, ())


_KNOWN: dict[str, Workspace | None] = {}  # call, without values -> its workspace on this machine


def _run(func: Any, args: Any, kwargs: Any, bytes_of: Callable[[Tensor], int]) -> Workspace | None:
    def zeros(fake: Tensor) -> Tensor:
        if fake.numel() == 0 and (hidden := bytes_of(fake)):  # what a kernel keeps for its backward pass
            return torch.zeros(hidden // fake.element_size(), dtype=fake.dtype)
        extent = 1 + sum((n - 1) * step for n, step in zip(fake.shape, fake.stride(), strict=True))
        return torch.zeros(max(extent, 0), dtype=fake.dtype).as_strided(fake.shape, fake.stride())

    shapes = tree_map_only(Tensor, lambda t: t, (args, kwargs))
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(Tensor, zeros, shapes)
        results: list[Tensor] = []
        try:
            found = cpu_allocations(lambda: results.extend(tensors(func(*args, **kwargs))))
        except Exception:  # a kernel that refuses zeros, such as for lengths
            return None
        return max(accumulate(found, initial=0)), tuple(t.untyped_storage().nbytes() for t in results)


LARGEST = 1 << 22  # elements of integers
LARGEST_FLOAT = 1 << 12  # elements of floating tensors: lengths and counts, no pictures
NAME = "_halfstep_value"  # attribute of a fake tensor; goes with it
READ = "aten::_local_scalar_dense"
DEVICE = torch.ops.prim.device.default
CAST = "aten::_to_copy"
COPIES = frozenset({"aten::clone", CAST})
RANKS = frozenset({"fsdp", "c10d", "_c10d_functional"})  # namespaces of operators that only sharded models run


class Values:
    """Values of fake tensors, see note [values]."""

    def __init__(self) -> None:
        self._lost: set[int] = set()  # storages of values that were overwritten by unknown ones

    def give(self, tensor: Tensor, value: Tensor) -> None:
        """Note what a fake tensor holds."""
        if value.numel() <= (LARGEST_FLOAT if value.is_floating_point() or value.is_complex() else LARGEST):
            setattr(tensor, NAME, value)

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor holds, None if it is unknown."""
        if type(tensor) is not FakeTensor:
            return tensor
        value: Tensor | None = getattr(tensor, NAME, None)
        return None if value is None or storage_key(value.untyped_storage()) in self._lost else value

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on values; None if one is unknown or the result is random."""
        unknown = any(self.of(tensor) is None for tensor in tensors([args, *kwargs.values()]))
        if unknown or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        except Exception:  # what a CPU does not do: unknown, and an error only if it is read
            return None

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the results of an operator that ran on fake tensors their values, if they have any."""
        made, changed = tensors(result), schema_of(func).is_mutable
        most = LARGEST_FLOAT if any(t.is_floating_point() for t in made) else LARGEST
        if not made or (sum(t.numel() for t in made) > most and not changed):
            return
        values = tensors(self.compute(func, args, kwargs))
        for tensor, value in zip(made, values, strict=False):
            self.give(tensor, value)
        for tensor in made if changed and not values else ():
            if (old := getattr(tensor, NAME, None)) is not None:
                self._lost.add(storage_key(old.untyped_storage()))  # of all tensors that share its memory

    def dense_index(self, args: Any) -> Any:
        """Return arguments of `aten::index` with masks of known values as lists of places; None if one is unknown."""
        places: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            value = self.of(index)
            if value is None:
                return None
            with unset_fake_temporarily():
                found = value.nonzero().unbind(1)
            places += [torch.empty(len(rows), dtype=torch.int64, device=index.device) for rows in found]
        return args[0], places


class MemorySink(Sink):
    """Follows memory while its tracer is open."""

    def __init__(self, ledger: Ledger, device: str) -> None:
        self.ledger, self.device = ledger, device
        self.values = Values()
        self.phase, self.step = "setup", -1  # `begin` sets the phase; "backward" is found without it
        self.seen: dict[int, list[tuple[str, int]]] = {}  # step -> (operator, bytes put in) of every collective
        self.after_backward: Callable[[], object] = lambda: None  # called between a backward pass and its update
        self._gathered: list[Tensor] = []  # full ones, see note [gathered]
        self._copies: dict[int, str] = {}  # id of a block of the model -> the part that a copy of it is of
        self._parameters: list[nn.Parameter] = []
        self._made_by: dict[int, str] = {}  # number of an autograd node -> name of its module
        self._cast_from: dict[int, Block] = {}  # id of the block of a gradient -> that of the low one it was cast from
        self._made: list[Block] = []  # blocks made since the outermost module that runs again in backward began

    def watch(self, model: nn.Module) -> None:
        """Take the names, parameters and buffers of `model`; again after any have been replaced."""
        self.tracer.follow(model)
        self._parameters = list(model.parameters())
        copies = {id(self.ledger.of(local(buffer))): "buffers" for buffer in model.buffers()}
        self._copies = copies | {id(self.ledger.of(local(p))): "low copies" for p in self._parameters}
        self._copies.pop(id(None), None)  # of what is in memory that was not noted

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Follow a forward pass; what it made and is alive at its end is saved for backward."""
        self.begin("forward")
        first = len(self.ledger.blocks)
        yield
        _saved(self.ledger.blocks[first:])
        self.phase = "update"

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.ledger.mark(self.step, phase)

    def entering(self, module: nn.Module) -> None:
        """Begin to note what the outermost module makes."""
        if not self.tracer.running:
            self._made = []

    def left(self, module: nn.Module) -> None:
        """Name what the outermost module has made and keeps: it ran again in the backward pass."""
        if not self.tracer.running and self._made:
            _saved(self._made)
            self._made = []

    def kernel(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note the memory it leaves."""
        if func is DEVICE and type(args[0]) is FakeTensor:  # two of three calls: autograd asks for devices
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor out of others: its operators on these come here
        ledger = self.ledger
        for tensor in self._gathered:
            ledger.resized(tensor)
        self._gathered = [tensor for tensor in self._gathered if tensor.untyped_storage().nbytes()]
        ledger.operators += 1
        backward, running = current_graph_task_id() >= 0, self.tracer.running
        module = self.tracer.module
        if backward:
            if self.phase != "backward":
                self.begin("backward")
            if not running:
                node = current_autograd_node()
                module = "" if node is None else self._made_by.get(node._sequence_nr(), "")
        else:
            if self.phase == "backward":
                self.begin("update")
                self.after_backward()
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        self._is_gradient(parameter.grad)
            if module:
                self._made_by.setdefault(get_sequence_nr() - 1, module)
        name = schema_of(func).name
        for place in _gradients(func):
            for tensor in args[place] if len(args) > place else ():
                self._is_gradient(tensor)
        if name == READ:
            return self._read(func, args[0])
        result = self._run(func, name, args, kwargs)
        taken = workspace(func, args, kwargs, result, self._bytes_of) if self.device == "cpu" else None
        kept = () if taken is None else taken[1]
        if taken is not None:
            ledger.passing(taken[0], tensors((args, kwargs))[0].dtype, module, name, self.phase)
        for number, item in enumerate(tensors(result)):
            block = self._note(item, module, name, args, backward)
            if block is not None and number < len(kept):
                block.bytes = max(block.bytes, kept[number])
        if func.namespace in RANKS:
            self._shared(func, name, args, kwargs, result)
        if name.startswith("aten::resize") or name == "aten::set_":
            ledger.resized(args[0])
        return result

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self.phase == "forward"
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            found = self._from_values(func, args, kwargs) if forward else None
            if found is None:
                raise PlanError(
                    f"the result of {name} needs values that depend on the weights ({user_line() or 'in torch'}), "
                    "and a plan has none; use an operator whose result has a fixed shape, such as torch.where, or plan "
                    "without it"
                ) from error
            return found
        if forward:
            self.values.follow(func, args, kwargs, result)
        return result

    def _from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.index.Tensor and self.values.of(args[0]) is None:
            dense = self.values.dense_index(args)
            return None if dense is None else func(*dense)
        value = self.values.compute(func, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        result = torch.empty_like(value, device=self.device)
        self.values.give(result, value)
        return result

    def _note(self, tensor: Tensor, module: str, name: str, args: tuple[Any, ...], backward: bool) -> Block | None:
        ledger = self.ledger
        if tensor.device.type != self.device:  # what is on the host while a GPU is planned
            return None
        block = ledger.note(tensor, module, name, self.phase)
        if block is None:
            return None
        if name == CAST and args[0].device.type != self.device and self.phase == "update":
            block.part = "optimizer state"  # from the host, where `state="host"` keeps it
        if backward and self.tracer.running:
            self._made.append(block)
        elif backward and name == CAST and (source := ledger.of(args[0])) is not None:
            self._cast_from[id(block)] = source
        if name in COPIES and isinstance(args[0], Tensor) and self.step >= 0:
            block.part = self._copies.get(id(ledger.of(args[0])), "")
        return block

    def _bytes_of(self, tensor: Tensor) -> int:
        block = self.ledger.of(tensor)
        return tensor.nbytes if block is None else block.bytes

    def _shared(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Name the blocks of an operator of a sharded model, see note [gathered]."""
        sent = collective(func, args)
        if sent is not None:
            self.seen.setdefault(self.step, []).append(sent)
            if sent[0] == "_reduce_scatter_base_":
                self._name(args[0], "gradients")
        elif name == "fsdp::all_gather_copy_in":
            for tensor in (*args[0], *result):
                self._name(tensor, "communication")
        elif name == "fsdp::chunk_cat":
            self._name(kwargs["out"], "communication")
        elif name == "fsdp::split_with_sizes_copy":
            for tensor in kwargs["out"]:
                self.ledger.resized(tensor)
                self._name(tensor, "gathered parameters", anew=True)
                self._gathered.append(tensor)

    def _name(self, tensor: Tensor, part: str, *, anew: bool = False) -> None:
        block = self.ledger.of(tensor)
        if block is not None and (anew or not block.part):
            block.part = part

    def _is_gradient(self, tensor: Tensor) -> None:
        block = self.ledger.of(local(tensor))
        while block is not None and block.part == "":
            block.part = "gradients"
            block = self._cast_from.get(id(block))

    def _read(self, func: Any, tensor: Tensor) -> Any:
        """Answer a read of a value: of a known one, or of the step's flags and counters what a good step has."""
        value = self.values.of(tensor) if self.phase == "forward" else None
        if value is not None and type(value) is not FakeTensor:
            with unset_fake_temporarily():
                return func(value)
        try:
            return func(tensor)
        except DataDependentOutputException as error:
            if self.phase == "forward":
                raise PlanError(
                    f"the model reads a value that depends on weights or random numbers ({user_line() or 'in torch'}), "
                    "and a plan has none; compute with tensors instead, such as torch.where for `if`"
                ) from error
        return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1


def _saved(blocks: list[Block]) -> None:
    for block in blocks:
        if block.alive and not block.part:
            block.part = "saved for backward"


@cache
def _gradients(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that are lists of gradients: of an update that is fused into one operator."""
    return tuple(n for n, argument in enumerate(schema_of(func).arguments) if argument.name in ("gradients", "grads"))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other as it is."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part
