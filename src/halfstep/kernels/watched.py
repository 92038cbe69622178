"""Low parameters that behave like their fp32 values where a user reads or writes them by hand.

A low parameter has an owner (a weight store), which keeps its fp32 value. The class of such a parameter becomes
`WatchedParameter`: its in-place methods (`WRITES`) change the fp32 value, which is then rounded into the low weight.
``.data`` and `detach` give a `WeightTensor`, whose functions do the same. Functions that are no layer's (those beside
other low tensors) read fp32 values, through which gradients flow. A copy of a low parameter (`clone`, `copy.deepcopy`,
``detach().to(device)``) has its fp32 value, and averages that are computed with such a copy read fp32 values. Forward
and backward passes of prepared models, which compute in the formats of a policy, and functions that torch.compile
traces, see low tensors. A loss function is no forward pass: a penalty of weights in it reads fp32 values.

Note [by hand]: torch calls ``__torch_function__`` of a class for each function and attribute of its tensors, which
takes microseconds. So `by_hand` switches it: it is off in forward passes of models with low weights and in calls of a
training step but for its loss function, and on where a user's code is all that runs. Files in `OURS` see what is
stored.

What writes into the memory of a low parameter by another way (an operator of `torch.ops`, a kernel) changes low values;
its owner compares version counters to notice it.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from sys import _getframe
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from halfstep.formats import LOW_DTYPES
from halfstep.kernels.eager.torch_fused import is_dense
from halfstep.kernels.names import (
    CASTS,
    COPIES,
    FILLS,
    LAYERS,
    MAKERS,
    METHODS,
    NUMBERS,
    READ_TOO,
    READS,
    SHAPES,
    VIEWS,
    WRITES,
)
from halfstep.torch_private.autograd import current_graph_task_id
from halfstep.torch_private.devices import storage_key
from halfstep.torch_private.modes import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    disabled_torch_function_impl,
    is_in_torch_dispatch_mode,
)
from halfstep.torch_private.operators import OpOverload, OpOverloadPacket
from halfstep.trees import map_tensors
from halfstep.trees import tensors as tensors_in

P = ParamSpec("P")
R = TypeVar("R")
TORCH_OPS = (OpOverload, OpOverloadPacket)
NOTES = "_halfstep_notes"
COMPILED = "<eval_with_key>"  # the file of what torch.fx generates
_UTILS = Path(nn.utils.__file__).parent
OURS = (
    str(Path(__file__).parent.parent),
    COMPILED,
    *(str(_UTILS / name) for name in ("parametriz", "spectral_", "weight_")),
)
"""Where functions get what is stored: halfstep, torch's parametrizations, whose parts have one format, and graphs."""
RULES = str(Path(__file__).parent.parent / "cast" / "rules" / "dispatch.py")  # calls functions of a user
_get: Callable[[Tensor], Tensor] = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C
_set: Callable[[Tensor, Tensor], None] = Tensor.data.__set__  # type: ignore[attr-defined]
GETTER = type(_get)  # of an attribute
SET_GRADIENT = cast(Any, Tensor.grad).__set__
TURNED = frozenset({Tensor.T, Tensor.mT, Tensor.H, Tensor.mH})  # attributes that are views


class Owner(ABC):
    """What keeps the fp32 values of low parameters.

    `records` returns whether the forward pass of a model that runs in this thread began with gradients recorded, None
    where none runs.
    """

    def __init__(self, records: Callable[[], bool | None]) -> None:
        self.records = records
        self.loading = False  # whether parameters are being filled: see `loaded`
        self.names: dict[int, str] = {}
        self.versions: dict[int, int] = {}  # of low weights when they were last known to be what their owner wrote
        self.warned: set[str] = set()  # kinds of warnings given, each once

    @abstractmethod
    def __contains__(self, parameter: object) -> bool:
        """Return whether the fp32 value of `parameter` is kept, or can be made."""

    @abstractmethod
    def value(self, parameter: Any) -> Tensor:
        """Return the fp32 value of `parameter`, to be read: it may be the memory that keeps it."""

    @abstractmethod
    def writing(self, parameter: Any, *, fills: bool, counted: bool) -> AbstractContextManager[Tensor]:
        """Give the fp32 value of `parameter` to be changed in place; at the end it is rounded into the low weight.

        `fills`: nothing of earlier values will be left. `counted`: the change counts in the version of `parameter`.
        """

    @abstractmethod
    def replaced(self, parameter: Any, name: str, value: Tensor, *, converted: bool) -> Tensor:
        """Return what becomes the data of `parameter` where a user sets it to `value`.

        `converted`: `value` is the parameter's own in another format, as ``module.float()`` makes it.
        """

    def moved(self, parameter: Any) -> bool:
        """Return whether frozen `parameter` has an fp32 value behind it, since it was changed by hand."""
        return False

    def rounded(self, parameter: Any, value: Tensor) -> None:  # noqa: B027  # may be left as it is
        """Note that `parameter` is about to be given the low `value`, which others have computed."""

    def data_read(self) -> None:  # noqa: B027  # may be left as it is
        """Note that the ``.data`` of a parameter was given out: views of it may be written."""

    def computes(self) -> bool:
        """Return whether operators run in formats of a policy: in a forward or backward pass.

        What a backward pass computes again for a checkpoint records gradients, in a forward pass if it was in one.
        """
        return self.records() is not None or (current_graph_task_id() != -1 and not torch.is_grad_enabled())

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Let parameters be filled by ``copy_`` in the block: frozen ones stay frozen."""
        before, self.loading = self.loading, True
        try:
            yield
        finally:
            self.loading = before

    def written_unseen(self, parameter: Any) -> bool:
        """Return whether low values were written by no method of `parameter`."""
        return low_written(parameter) or parameter._version != self.versions[id(parameter)]

    def warn_once(self, kind: str, text: str) -> None:
        """Give each kind of warning once."""
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(text, stacklevel=2)


class _Notes:
    """What is known of one low parameter: `owner` returns what keeps its fp32 value, None if that is gone."""

    __slots__ = ("alias", "given", "name", "owner", "replaced", "seen")

    def __init__(self, owner: Callable[[], Owner | None], name: str) -> None:
        self.owner, self.name = owner, name
        self.alias: Tensor | None = None  # what every ``.data`` is an alias of: its version counts writes of low values
        self.given: list[weakref.ref[Any]] = []  # the ``.data`` that users hold
        self.seen, self.replaced = 0, False  # its version last read; whether it counted writes when last replaced


class WatchedParameter(Tensor):
    """A low parameter, or the copy of such a parameter in fp32; it is a Parameter for torch, see `_is_param`."""

    on: ClassVar[bool] = True  # see `by_hand`

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling():
            with DisableTorchFunction():  # under a mode, whose turn is over, Dynamo would come here again
                return func(*args, **kwargs)
        plain = type(func) is GETTER and getattr(func, "__self__", None) not in TURNED
        file = "" if plain else _getframe(1).f_code.co_filename
        if func == SET_GRADIENT and isinstance(args[1], Tensor):  # computed with what `MAKERS` have made
            args = (args[0], _plain(args[1]).to(getattr(args[0], "grad_dtype", args[0].dtype) or args[1].dtype))
        if plain or (file.startswith(OURS) and file != RULES):
            return disabled_torch_function_impl(func, types, args, *([kwargs] if kwargs else ()))
        with DisableTorchFunctionSubclass():
            if _is_by_hand(func, types, args, kwargs):
                return _call(func, args, kwargs)
        try:
            by_hand(False)  # and other classes of tensors have their say
            return func(*args, **kwargs)
        finally:
            by_hand(True)

    @property
    def data(self) -> Tensor:
        """Return an alias of the values that autograd does not see: a `WeightTensor`."""
        if is_dynamo_compiling():  # as it is traced for other parameters; writes into it count in `_version`
            return Tensor.detach(self)
        notes = self.__dict__.get(NOTES)
        if is_in_torch_dispatch_mode():  # whose modes know plain tensors
            return _get(self)
        if notes is None or torch.is_inference_mode_enabled():  # where tensors have no version
            return _derived(_get(self), source=self, counted=False)
        if notes.alias is None:
            notes.alias, notes.seen = _get(self), 0
            if (owner := notes.owner()) is not None:
                owner.data_read()
        made = _derived(notes.alias.detach(), source=self, counted=False)  # all share one version counter
        notes.given = [*(known for known in notes.given if known() is not None), weakref.ref(made)]
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        notes = self.__dict__.get(NOTES)
        plain = value.as_subclass(Tensor) if type(value) is WeightTensor else value
        if notes is not None:
            # in ``p.data += x`` the alias is written, and then given back as the data
            notes.replaced = notes.replaced or (notes.alias is not None and notes.alias._version != notes.seen)
            if (owner := notes.owner()) is not None:
                held = [] if plain.data_ptr() == self.data_ptr() or plain.shape != self.shape else notes.given
                for made in [made for known in held if (made := known()) is not None]:  # keeps values that it had
                    _release_alias(made, self)
                converted = plain is not value and value.__dict__.get("converted") is self
                plain = owner.replaced(self, notes.name, plain, converted=converted)
            notes.alias, notes.seen = None, 0
        _set(self, plain)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Take the values of `source`, as ``.data = source`` does."""
        if args or kwargs or not isinstance(source, Tensor) or source.shape != self.shape:
            return Tensor.set_(self, *(() if source is None else (source, *args)), **kwargs)
        self.data = source
        return self

    def detach(self) -> Tensor:
        """Return an alias that autograd does not see: a `WeightTensor`, which an embedding's max_norm writes."""
        if _is_compiled() or is_in_torch_dispatch_mode():
            return Tensor.detach(self)
        return _derived(Tensor.detach(self), source=self, counted=True, direct=True)

    @property
    def _is_param(self) -> bool:
        return "watched" in self.__dict__

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # `nn.Parameter(p)` sets it on a new alias of p
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            found: nn.Parameter = memo[id(self)]
            return found
        made = nn.Parameter(_read(self), self.requires_grad)
        made.__class__ = WatchedParameter  # type: ignore[assignment]
        vars(made)["watched"] = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(_read(self), self.requires_grad)
        hidden = (NOTES, "watched")
        plain.__dict__.update({name: value for name, value in self.__dict__.items() if name not in hidden})
        return plain.__reduce_ex__(protocol)


class WeightTensor(Tensor):
    """An alias of a low parameter (``.data``, `detach`), or a copy of its fp32 value.

    Attributes, in the `__dict__`:
        source: the parameter of an alias; a copy has none.
        counted: whether the version of the parameter counts writes into the alias.
        direct: whether ``detach`` of the parameter made the alias.
        converted: the parameter that a copy is, in another format that was asked for.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, (cls, WatchedParameter, nn.Parameter)) or kind is Tensor for kind in types):
            # another class of tensors has its say
            return func(*map_tensors(args, _plain), **map_tensors(kwargs, _plain))
        with DisableTorchFunctionSubclass():
            return _call(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """Return an alias of the same values."""
        source = self.__dict__.get("source")
        return self.detach() if source is None or source.shape != self.shape else source.data

    @data.setter
    def data(self, value: Tensor) -> None:
        with DisableTorchFunctionSubclass():
            _set(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Make it a leaf: `nn.Parameter(p)` needs ``p.detach().requires_grad_()`` to have the class of p."""
        with DisableTorchFunctionSubclass():
            if "direct" in self.__dict__:
                self.__dict__.clear()
                self.__class__ = WatchedParameter  # type: ignore[assignment]
            return Tensor.requires_grad_(self, requires_grad)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # `nn.Parameter(p.data)` and `nn.Parameter(p.data.clone())` set it
        copied = "source" not in self.__dict__
        self.__dict__.clear()
        self.__class__ = WatchedParameter if copied else nn.Parameter  # type: ignore[assignment]
        if copied:
            self.__dict__["watched"] = True


class StateTensor(WeightTensor):
    """The fp32 value of a low parameter in a ``state_dict()``, or a view of it.

    Writes into the state_dict of a plain model change its weights. So do writes into this: the value is read anew, and
    what a function has written there the parameter gets.
    """

    parameter: Tensor  # the low one
    whole: Tensor  # its value, in whose memory this tensor is

    @classmethod
    def of(cls, parameter: Tensor, whole: Tensor, view: Tensor | None = None) -> Tensor:
        """Return `whole`, the value of `parameter`, or a `view` of it; of a DTensor as it is."""
        if type(whole) is not Tensor:
            return whole
        made = (whole if view is None else view).as_subclass(cls)
        made.__dict__.update(parameter=parameter, whole=whole)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        with DisableTorchFunctionSubclass():
            places = {_memory(v): (v.parameter, v.whole) for v in tensors_in(given) if isinstance(v, cls)}
            written = {_memory(v) for v in tensors_in(_written(func, *given)) if isinstance(v, cls)}
            for parameter, whole in map(places.__getitem__, written):
                whole.copy_(_read(parameter))
            args, kwargs = map_tensors(given, lambda v: v.as_subclass(Tensor) if isinstance(v, cls) else v)
        found = func(*args, **kwargs)  # another class of tensors has its say
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for parameter, whole in map(places.__getitem__, written):
                parameter.copy_(whole)
            return map_tensors(found, lambda v: cls.of(*places[_memory(v)], v) if _memory(v) in places else v)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = memo.setdefault(id(self), self.clone())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__dict__.clear()
        self.__class__ = nn.Parameter  # type: ignore[assignment]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def owner_of(tensor: Tensor) -> Owner | None:
    """Return what a low parameter is watched for, None for a copy."""
    notes = tensor.__dict__.get(NOTES)
    return None if notes is None else notes.owner()


def _owner(tensor: Tensor) -> Owner | None:
    """Return what keeps the fp32 value of a low parameter now, None for a copy."""
    owner = owner_of(tensor)
    return owner if owner is not None and tensor in owner else None


def _source(value: Any) -> Tensor | None:
    """Return the low parameter that `value` is, or is an alias of, if its fp32 value is kept."""
    if type(value) is WeightTensor:
        value = value.__dict__.get("source")
    return value if type(value) is WatchedParameter and _owner(value) is not None else None


def _sources(tensors: Iterable[Any]) -> list[Tensor]:
    return [source for value in tensors if (source := _source(value)) is not None]


def _read(parameter: Any) -> Tensor:
    """Return the fp32 value of a low parameter, or the values of a copy, as a new tensor."""
    owner = _owner(parameter)
    values: Tensor = _get(parameter) if owner is None else owner.value(parameter).detach()
    return values.clone(memory_format=torch.preserve_format)


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if type(value) is WeightTensor else value


def _fp32(value: Any) -> Any:
    """Return the fp32 value of a low parameter or alias, from which gradients flow to it; other low tensors widened."""
    source = _source(value)
    if source is None:
        return value.float() if _is_low(value) else value
    owner: Any = _owner(source)
    wide = _part(owner.value(source).detach(), value, source)
    if not (value.requires_grad and torch.is_grad_enabled()):
        return wide
    linked = Tensor.float(value)
    with torch.no_grad():
        linked.copy_(wide)
    return linked


def _release_alias(made: Any, source: Any) -> None:
    """Make an alias a tensor of its own, with the fp32 value that it has."""
    made.__dict__.clear()
    with DisableTorchFunctionSubclass():
        _set(made, _read(source))


def _part(whole: Tensor, alias: Tensor, source: Tensor) -> Tensor:
    """Return what `alias` is of `source` of another tensor in the same layout."""
    if alias.shape == source.shape and alias.stride() == source.stride():
        return whole
    begin = whole.storage_offset() + alias.storage_offset() - source.storage_offset()
    return whole.as_strided(alias.shape, alias.stride(), begin)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__.removeprefix("_foreach_")
    if name == "__set__" or name in SHAPES:
        return func(*args, **kwargs)
    if name in {"__deepcopy__", "__reduce_ex__"}:
        return _taken_along(args, kwargs, pickled=name == "__reduce_ex__")
    if name == "__format__" and not args[0].shape:  # as of the number
        return func(_fp32(args[0]).detach().as_subclass(Tensor), *args[1:])
    written = _written(func, args, kwargs)
    if written is not None:
        return _write(func, args, kwargs, written, fills=name in FILLS)
    first = args[0] if args else None
    if name == "detach" and type(first) is WeightTensor:
        return _derived(func(first), source=first.__dict__.get("source"), counted=first.__dict__.get("counted"))
    tensors = tensors_in((args, kwargs))
    sources = _sources(tensors)
    copies = not all("source" in value.__dict__ for value in tensors if type(value) is WeightTensor)
    if not copies:
        if not sources or not all(_reads_fp32(source, name, tensors) for source in sources):
            return func(*args, **kwargs)
        if name in VIEWS or name == "__get__":
            found = map_tensors(func(*args, **kwargs), lambda made: _alias(made, first))
            if name == "__get__" or any(type(made) is WeightTensor for made in tensors_in(found)):
                return found
        if not (name in READS | COPIES or _reads_only(name, tensors)) or _meets_layers(tensors):
            return func(*args, **kwargs)
    if name in MAKERS and kwargs.get("dtype") is None:
        found = func(*args, **{**kwargs, "dtype": torch.float32})
        return found if found.requires_grad else _derived(found)
    if name not in COPIES:
        found = func(*map_tensors(args, _fp32), **map_tensors(kwargs, _fp32))
        if sources and name in {"__array__", "numpy"}:
            found.flags.writeable = False  # a write would not reach the weight
        if copies or name in READS | NUMBERS or tensors_in(found):
            return found
        return func(*args, **kwargs)  # what it says of the low tensor itself: size, address, text
    if name in CASTS and _is_low(found := func(*args, **kwargs)) and _names_format(args, kwargs):
        return found
    found = func(_fresh(first), *args[1:], **kwargs)
    if not isinstance(found, Tensor):
        return found  # the name of its type
    return _derived(found, converted=_source(first) if name in CASTS and _names_format(args, kwargs) else None)


BY_HAND = WatchedParameter.__dict__["__torch_function__"]


def by_hand(on: bool) -> None:
    """Let functions of torch read and write fp32 values of low parameters, or the low tensors that are stored.

    For all threads: while one is in a forward pass, others see what is stored. See note [by hand].
    """
    WatchedParameter.on = on
    WatchedParameter.__torch_function__ = BY_HAND if on else disabled_torch_function_impl  # type: ignore[assignment]


def as_stored(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` such that functions of torch in it read and write low parameters as they are stored."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = WatchedParameter.on
        try:
            by_hand(False)
            return function(*args, **kwargs)
        finally:
            by_hand(before)

    return run


def _is_by_hand(func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `func` of low parameters reads or writes their fp32 values.

    Not a method that says of the low tensor itself, what `torch.ops` has, nor what a layer computes: the function of a
    low parameter and of other low tensors that is no arithmetic.
    """
    if isinstance(func, TORCH_OPS) or not OWN.issuperset(types):
        return False
    tensors = tensors_in((args, kwargs))
    sources = _sources(tensors)
    if not sources or any(_owner(source).computes() for source in sources):  # type: ignore[union-attr]
        return False
    if _written(func, args, kwargs) is not None:
        return True
    if torch.is_grad_enabled() and _is_for_torch():
        return False
    name = func.__name__.removeprefix("_foreach_")
    if args and type(args[0]) is WatchedParameter and getattr(Tensor, name, None) is func and name not in READ_TOO:
        return False
    return (name in READS and not _meets_layers(tensors)) or _reads_only(name, tensors)


def _meets_layers(tensors: list[Tensor]) -> bool:
    """Return whether weights meet what layers have made: with gradients, low tensors of no weight's shape.

    Those of a weight's shape are what moves it: its gradient, another weight.
    """
    if not torch.is_grad_enabled():
        return False
    shapes = {value.shape for value in tensors if _source(value) is not None}
    return any(_is_low(value) and value.shape not in shapes for value in tensors)


def _is_for_torch() -> bool:
    """Return whether a mode computes, which knows plain tensors, or a parametrization, which keeps formats."""
    frame: Any = _getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS[1:]):
        frame = frame.f_back
    return frame is not None or is_in_torch_dispatch_mode()


OWN = frozenset({Tensor, nn.Parameter, WatchedParameter, WeightTensor})


def _alias(made: Tensor, of: Any) -> Tensor:
    """Return `made` as an alias of the parameter that `of` is, or is an alias of, if it is in its memory."""
    source: Any = _source(of)
    if source is None or type(made) is not Tensor or type(local := _get(source)) is not Tensor or not is_dense(local):
        return made
    if storage_key(made.untyped_storage()) != storage_key(local.untyped_storage()):
        return made
    return _derived(made, source=source, counted=of is source or of.__dict__["counted"])


def _reads_only(name: str, tensors: list[Tensor]) -> bool:
    """Return whether a function only reads: no layer's, with other low tensors, and no ``empty_like``."""
    if name in LAYERS or name.startswith("is_") or name.endswith(("empty_like", "type_as", "_type")):
        return False
    return not any(_is_low(value) and _source(value) is None for value in tensors)


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensors that a function writes, None for none."""
    name = func.__name__.removeprefix("_foreach_")
    if kwargs.get("out") is None and (name in WRITES or (name.endswith("_") and not name.endswith("__"))):
        return args[0] if args else next(iter(kwargs.values()))
    return args[0] if kwargs.get("inplace") and args else kwargs.get("out")


def _derived(values: Tensor, **attributes: Any) -> Tensor:
    if values.grad_fn is None:
        made: Tensor = values.as_subclass(WeightTensor)
    else:  # a view that a user has made: its node stays the last, which some follow to `AccumulateGrad`
        made = values
        made.__class__ = WeightTensor
    made.__dict__.update({name: value for name, value in attributes.items() if value is not None})
    return made


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES


def _reads_fp32(source: Any, name: str, values: Iterable[Any]) -> bool:
    """Return whether the function `name` of `values` reads the fp32 value of `source`, which is among them.

    In forward and backward passes: what moves a weight by hand, of such weights and numbers alone, or arithmetic with
    tensors that have its shape or are expanded to it. That is what takes its ``.data`` or `detach`, and code without
    gradients in a forward pass that records them, or that moves a frozen weight.
    """
    owner: Any = _owner(source)
    if not owner.computes():
        return True
    if not any(type(value) is WeightTensor for value in values):
        if torch.is_grad_enabled() or not (owner.records() or (not source.requires_grad and owner.moved(source))):
            return False
    others = [value for value in tensors_in(tuple(values)) if _source(value) is None and value.dim()]
    return all(name in READS and _expands(value.shape, source.shape) for value in others)


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(
        size in {1, wanted} for size, wanted in zip(shape[::-1], to[::-1], strict=False)
    )


def _fresh(value: Any) -> Any:
    return value if _source(value) is None else _fp32(value).clone()


def _names_format(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cast with these arguments is one to a format: ``x.float()``, and not ``x.to("cuda")``."""
    given = (*args[1:], *kwargs.values())
    return not given or any(isinstance(value, (torch.dtype, Tensor)) for value in given)


def _taken_along(args: tuple[Any, ...], kwargs: dict[str, Any], *, pickled: bool) -> Any:
    """Pickle or deepcopy an alias or a copy: what comes out has fp32 values and is no alias."""
    value = _fresh(args[0]).detach()
    if pickled:
        return value.as_subclass(Tensor).__reduce_ex__(*args[1:], **kwargs)
    return args[1].setdefault(id(args[0]), _derived(value.clone()))


def _write(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Any, *, fills: bool
) -> Any:
    """Call a function that writes `written`: where that is low weights, it writes their fp32 values."""
    hidden = [value for value in tensors_in(written) if _source(value) is not None and not value.requires_grad]
    recorded = () if hidden or not torch.is_grad_enabled() else tensors_in((args, kwargs))
    if any(value.requires_grad for value in recorded):
        return func(*args, **kwargs)  # torch refuses to write into leaves, and differentiates other writes
    with torch.no_grad(), ExitStack() as writing:
        wide: dict[int, Tensor] = {}
        whole: dict[int, Tensor] = {}  # by the id of the parameter, of which several parts may be written
        for value in tensors_in(written):
            if (source := _source(value)) is not None:
                if func is Tensor.copy_ and len(args) > 1 and _is_low(args[1]) and _source(args[1]) is None:
                    _owner(source).rounded(source, args[1])  # type: ignore[union-attr]  # a source has one
                owner: Any = _owner(source)
                if id(source) not in whole:
                    counted = value is source or value.__dict__["counted"]
                    anew = fills and value.shape == source.shape
                    whole[id(source)] = writing.enter_context(owner.writing(source, fills=anew, counted=counted))
                wide[id(value)] = _part(whole[id(source)], value, source)

        into_low = not wide and all(map(_is_low, tensors_in(written)))

        def exchanged(value: Any) -> Any:
            return value if into_low else wide[id(value)] if id(value) in wide else _fp32(value)

        found = func(*map_tensors(args, exchanged), **map_tensors(kwargs, exchanged))
    return found if found is None else written


@contextmanager
def written(*values: Any) -> Iterator[list[Any]]:
    """Give the fp32 values of low parameters among `values` for a kernel that writes them; other values as they are."""
    with ExitStack() as writing:
        yield [
            value
            if (source := _source(value)) is None
            else writing.enter_context(_owner(source).writing(source, fills=False, counted=True))  # type: ignore[union-attr]  # a source has one
            for value in values
        ]


def _is_compiled() -> bool:
    """Return whether torch.compile traces, or runs, what called the method that asks."""
    return is_dynamo_compiling() or _getframe(2).f_code.co_filename.startswith(COMPILED)


def _method(name: str) -> Any:
    plain = getattr(Tensor, name)

    @wraps(plain)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return plain(self, *args, **kwargs)
        with DisableTorchFunctionSubclass():
            return _write(plain, (self, *args), kwargs, self, fills=name in FILLS)

    @wraps(plain)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled() and name != "clone"
        if _is_compiled() or ((owner := _owner(self)) is None and (recorded or NOTES in self.__dict__)):
            return plain(self, *args, **kwargs)
        if recorded and owner is not None:  # what modules compute
            if owner.computes() or _is_for_torch() or _meets_layers(tensors_in((self, args, kwargs))):
                return plain(self, *args, **kwargs)
        if name in CASTS or (owner is not None and not _reads_fp32(self, name, (self, *args, *kwargs.values()))):
            found = plain(self, *args, **kwargs)
            if name not in CASTS or owner is None or not isinstance(found, Tensor) or _is_low(found):
                return found
            if owner.computes():  # its module may be cast in a forward pass
                return _derived(found, converted=self)
        with DisableTorchFunctionSubclass():
            found = plain(_fp32(self), *map_tensors(args, _fp32), **map_tensors(kwargs, _fp32))
            if name not in COPIES or recorded:
                return found
            return _derived(found.clone() if found.is_leaf else found, converted=None if name == "clone" else self)

    @wraps(plain)
    def view(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled() and name not in NUMBERS
        if _is_compiled() or (owner := _owner(self)) is None or (recorded and _is_for_torch()):
            return plain(self, *args, **kwargs)
        if owner.computes() and (torch.is_grad_enabled() or not owner.records()):
            return plain(self, *args, **kwargs)
        with DisableTorchFunctionSubclass():
            return _call(plain, (self, *args), kwargs)

    return write if name in WRITES else view if name in VIEWS | NUMBERS else read


for _name in (WRITES | METHODS | VIEWS | NUMBERS | CASTS - frozenset("cpu cuda xpu".split())) & frozenset(dir(Tensor)):
    if _name != "detach":
        setattr(WatchedParameter, _name, _method(_name))


def watch(parameter: Tensor, owner: Owner, name: str, *, held: bool = False) -> None:
    """Let a parameter of torch's own class use the fp32 value that `owner` keeps; `held`: it keeps `owner` alive."""
    if type(parameter) in {nn.Parameter, WatchedParameter}:
        parameter.__class__ = WatchedParameter
        refer: Callable[[], Owner | None] = (lambda: owner) if held else weakref.ref(owner)
        parameter.__dict__.update({NOTES: _Notes(refer, name), "watched": True})


def low_written(parameter: Tensor) -> bool:
    """Return whether low values were written through ``data`` of `parameter` since this was last called."""
    notes = parameter.__dict__.get(NOTES) if type(parameter) is WatchedParameter else None
    if notes is None or (notes.alias is None and not notes.replaced):
        return False
    version = 0 if notes.alias is None else notes.alias._version
    found: bool = notes.replaced or version != notes.seen
    notes.replaced, notes.seen = False, version
    return found


def unwatch(parameter: Tensor, owner: Owner) -> None:
    """Make `parameter` a plain one again if it is watched for `owner`, or for one that is gone."""
    if type(parameter) is WatchedParameter and (notes := parameter.__dict__.get(NOTES)) is not None:
        if notes.owner() in {owner, None}:
            _release(parameter)


def unwatch_copies(parameters: Iterable[Tensor]) -> None:
    """Make copies of low parameters plain ones: they are trained from now on."""
    for parameter in parameters:
        if type(parameter) is WatchedParameter and NOTES not in parameter.__dict__:
            _release(parameter)


def _release(parameter: Tensor) -> None:
    for name in (NOTES, "watched"):
        parameter.__dict__.pop(name, None)
    parameter.__class__ = nn.Parameter
