"""Model: train, evaluate and predict with a network, its loss and its optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.compat.mindspore import checks
from halfstep.compat.mindspore.amp import auto_mixed_precision, build_train_network
from halfstep.compat.mindspore.checks import MindSporeTypeError, MindSporeValueError
from halfstep.compat.mindspore.nn.loss import WithEvalCell
from halfstep.compat.mindspore.nn.step import TrainOneStepWithLossScaleCell


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The argument of a callback, after a step.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of the step in all, from 1.
        outputs: what the training cell returned.
    """

    epoch: int
    step: int
    outputs: Any


class Model:
    """A network with its loss and optimizer, trained at an amp level.

    Args:
        network: a Cell or torch module.
        loss_fn: called as ``loss_fn(output, label)``; None if the network returns its loss.
        optimizer: a torch optimizer; None for a model that only evaluates and predicts.
        metrics: name -> function of (output, label) that returns a number or a tensor, averaged over batches; "loss"
            is always there when there is a loss, and the set {"accuracy"} or {"acc"} stands for the usual one.
        eval_network: called as ``eval_network(data, label)`` -> (loss, output, label) instead of the network.
        eval_indexes: where (loss, output, label) are among what `eval_network` returns; None: in this order.
        amp_level: as for `build_train_network`.
        boost_level: as for `build_train_network`.
        **kwargs: ``keep_batchnorm_fp32`` and ``loss_scale_manager``, as for `build_train_network`.

    Attributes:
        train_network, eval_network, predict_network: what `train`, `eval` and `predict` call, or None.
    """

    def __init__(
        self, network: nn.Module, loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Mapping[str, Callable[..., Any]] | set[str] | None = None, eval_network: nn.Module | None = None,
        eval_indexes: Sequence[int] | None = None, amp_level: str = "O0", boost_level: str = "O0", **kwargs: Any,
    ) -> None:  # fmt: skip
        checks.check_network("Model", network)
        self._metrics = _named(metrics)
        checks.check_names("Model", kwargs, ("keep_batchnorm_fp32", "loss_scale_manager"))
        if optimizer is None and amp_level != "O0":
            raise MindSporeValueError(
                f"Model(amp_level={amp_level!r}) without an optimizer trains nothing; pass one, or convert the network "
                "for inference with amp.auto_mixed_precision(network, level)"
            )
        three = eval_indexes is None or (isinstance(eval_indexes, (list, tuple)) and len(eval_indexes) == 3)
        checks.check_value("Model: eval_indexes", eval_indexes, three, "the places of loss, output and label")
        self._indexes = [0, 1, 2] if eval_indexes is None else [int(index) for index in eval_indexes]
        self.predict_network, self._manager = network, kwargs.get("loss_scale_manager")
        self.train_network: nn.Module | None = None
        if optimizer is not None:
            self.train_network = build_train_network(network, optimizer, loss_fn, amp_level, boost_level, **kwargs)
        else:
            auto_mixed_precision(network, amp_level)
        self.eval_network = eval_network
        if eval_network is None and loss_fn is not None:
            self.eval_network = WithEvalCell(network, loss_fn, add_cast_fp32=True)

    def train(
        self, epoch: int, train_dataset: Iterable[Any],
        callbacks: Callable[[Progress], None] | list[Callable[[Progress], None]] | None = None,
        dataset_sink_mode: bool = False, sink_size: int = -1, initial_epoch: int = 0,
    ) -> None:  # fmt: skip
        """Train for some epochs.

        Args:
            epoch: how often to go through the data.
            train_dataset: batches: tuples or lists of the training cell's arguments.
            callbacks: functions called with a `Progress` after each step.
            dataset_sink_mode: must be False: data is not sunk into a device's queue.
            sink_size: must be -1; it belongs to sink mode.
            initial_epoch: epochs that were trained before; training goes on up to `epoch`.
        """
        checks.check_whole("Model.train: epoch", epoch)
        fits = type(initial_epoch) is int and 0 <= initial_epoch < epoch
        checks.check_value("Model.train: initial_epoch", initial_epoch, fits, f"an int from 0 and below {epoch=}")
        called = _callbacks("Model.train", train_dataset, callbacks, dataset_sink_mode, sink_size)
        if self.train_network is None:
            raise MindSporeValueError("Model: no optimizer was given; Model(network, loss_fn, optimizer) can train")
        cell = self.train_network.train()
        count = 0
        for number in range(initial_epoch + 1, epoch + 1):
            before = count
            for batch in _batches(train_dataset):
                outputs = cell(*batch)
                count += 1
                if self._manager is not None and isinstance(cell, TrainOneStepWithLossScaleCell):
                    self._manager.update_loss_scale(bool(outputs[1]))  # as MindSpore, a manager on the host counts too
                for callback in called:
                    callback(Progress(epoch=number, step=count, outputs=outputs))
            if count == before:
                raise MindSporeValueError(
                    f"Model.train: epoch {number} had no batch; an iterator is used up after one epoch, pass a list or "
                    "a DataLoader"
                )

    @torch.no_grad()
    def eval(
        self, valid_dataset: Iterable[Any], callbacks: Any = None, dataset_sink_mode: bool = False
    ) -> dict[str, float]:
        """Return the mean of the loss and of every metric over batches of (data, label), in evaluation mode.

        Args:
            valid_dataset: batches.
            callbacks: functions called with a `Progress` after each batch.
            dataset_sink_mode: must be False.
        """
        called = _callbacks("Model.eval", valid_dataset, callbacks, dataset_sink_mode, -1)
        if (cell := self.eval_network) is None:
            raise MindSporeValueError("Model: eval needs a loss_fn or an eval_network; give one to Model")
        totals: dict[str, float] = {}
        count = 0
        with _evaluating(cell):
            for batch in _batches(valid_dataset):
                returned = cell(*batch)
                loss, output, label = (returned[i] for i in self._indexes)
                values = {} if loss is None else {"loss": loss}
                values |= {name: metric(output, label) for name, metric in self._metrics.items()}
                for name, value in values.items():
                    number = value.float().mean() if isinstance(value, Tensor) else value
                    totals[name] = totals.get(name, 0.0) + float(number)
                count += 1
                for callback in called:
                    callback(Progress(epoch=1, step=count, outputs=returned))
        if count == 0:
            raise MindSporeValueError("Model.eval: the dataset has no batch")
        return {name: total / count for name, total in sorted(totals.items())}

    @torch.no_grad()
    def predict(self, *predict_data: Any, backend: str | None = None, config: Any = None) -> Any:
        """Return the network's outputs, in evaluation mode and fp32.

        Args:
            *predict_data: the network's arguments.
            backend: must be None: torch runs the network.
            config: must be None; it belongs to another backend.
        """
        if backend is not None or config is not None:
            raise MindSporeValueError(f"Model.predict: backend={backend!r}, config={config!r}; torch runs the network")
        with _evaluating(self.predict_network):
            return self.predict_network(*predict_data)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _callbacks(
    where: str, data: object, callbacks: Any, dataset_sink_mode: object, sink_size: object
) -> list[Callable[[Progress], None]]:
    if dataset_sink_mode is not False or sink_size != -1:
        raise MindSporeValueError(
            f"{where}: dataset_sink_mode={dataset_sink_mode!r}, sink_size={sink_size!r}: data is not sunk into a queue "
            "of the device here; leave both out and use a torch DataLoader with pin_memory=True"
        )
    listed = [] if callbacks is None else list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in listed:
        if not callable(callback):
            raise MindSporeTypeError(
                f"{where}: callback {callback!r} is not callable; pass functions of a Progress (epoch, step, outputs)"
            )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise MindSporeTypeError(f"{where}: the data is {data!r}; expected batches: a list of tuples or a DataLoader")
    return listed


def _batches(data: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each batch; then begin again with data that has a `reset`, as MindSpore's datasets."""
    for batch in data:
        yield tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if callable(reset := getattr(data, "reset", None)):
        reset()


def _named(metrics: Any) -> dict[str, Callable[..., Any]]:
    if metrics is None:
        return {}
    if isinstance(metrics, (set, frozenset)):
        for name in metrics - {"loss", "accuracy", "acc"}:
            raise MindSporeValueError(
                f"Model: metric {name!r} is not known by name; known are accuracy, acc and loss, others as a dict "
                "{name: function of (output, label)}"
            )
        return dict.fromkeys(metrics - {"loss"}, _accuracy)
    if not isinstance(metrics, Mapping) or not all(callable(metric) for metric in metrics.values()):
        expected = "a dict name -> function of (output, label), or a set of names"
        raise MindSporeTypeError(f"Model: metrics={metrics!r}; expected {expected}")
    return dict(metrics)


def _accuracy(output: Tensor, label: Tensor) -> Tensor:
    """Return the share of rows whose largest output is at the label (a class number, or a row like the output)."""
    wanted = label.argmax(-1) if label.shape == output.shape else label
    return (output.argmax(-1) == wanted).float().mean()
