"""What is wrong with a batch: named with input, sample and value where it is the reason, and nothing is said else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Cauchy
from torch.nn import functional as F

import halfstep as hs
from halfstep.lens.box import stepbox
from halfstep.lens.box.data import outlier, suspects
from halfstep.lens.box.diagnose import diagnose

FP16 = hs.Policy.of("mixed", dtype="fp16")
SIZE, LENGTH, WIDTH, KINDS = 8, 5, 8, 4
INF = math.inf


@pytest.fixture
def suspected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """A function that trains one step that is not finite and returns what is wrong with its batch."""

    def run(loss_fn: Callable[..., Tensor], *batch: Any, model: nn.Module | None = None) -> tuple[str, ...]:
        model = layers() if model is None else model
        step = hs.TrainStep(model, torch.optim.SGD(model.parameters(), 1e-3), loss_fn, policy=FP16)
        found: list[tuple[str, ...]] = []

        def kept(subject: Any) -> Any:
            verdict, attempt = diagnose(subject)
            found.append(suspects(subject, attempt))
            return verdict, attempt

        monkeypatch.setattr(stepbox, "diagnose", kept)
        result = step(*batch).host()
        assert result.skipped or not math.isfinite(result.loss)
        step.explain()
        return found[-1]

    return run


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, KINDS))


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (SIZE, WIDTH)), generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(SIZE) % KINDS


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def attend(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    h = model[0](x)
    weights = (h @ h.transpose(-1, -2)).masked_fill(~mask[:, None, :], -INF).softmax(-1)
    return F.cross_entropy(model[2]((weights @ h).mean(1).relu()), y)


def attend_lengths(model: Any, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    return attend(model, x, y, torch.arange(LENGTH)[None] < lengths[:, None])


def whitened(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, (x - x.mean(0)) / x.std(0), y)


def directions(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, x / x.norm(dim=1, keepdim=True), y)


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), y)


def of_logs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x).float().mean(1), torch.log1p(y))


def relative(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x).float().mean(1) - y) / y).abs().mean()  # type: ignore[no-any-return]


def of_some(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[y > KINDS].float().mean()  # type: ignore[no-any-return]


def transcribe(model: nn.Module, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    logs = model(x).float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, targets, torch.full((SIZE,), LENGTH), lengths)


def with_(tensor: Tensor, *changes: tuple[Any, float]) -> Tensor:
    """Return a copy with values put into places."""
    tensor = tensor.clone()
    for place, value in changes:
        tensor[place] = value
    return tensor


KEPT = with_(torch.ones(SIZE, LENGTH, dtype=torch.bool), ((3,), False), ((1, slice(3, None)), False))
FRAMES = rows(SIZE, LENGTH, WIDTH)

BATCHES: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], tuple[str, ...]]] = {
    "an outlier": (
        classify,
        (with_(rows(), ((2, 5), -1e9)), LABELS),
        ("input 0 holds -1e+09 in sample 2 at [5]", "the other 63 values are at most 3.331", "the step is finite"),
    ),
    "a sample of another unit": (
        classify,
        (with_(rows(), (4, 1e6)), LABELS),
        ("input 0 holds 1e+06 in sample 4 at [0] (8 such values, in sample 4)",),
    ),
    "a marker of what is missing": (
        classify,
        (with_(rows(), ((slice(1, 8), 3), -1e20)), LABELS),
        ("input 0 holds -1e+20 in sample 1 at [3] (7 such values, in samples 1, 2, 3, 4 and 3 more)",),
    ),
    "a target that is nan": (
        regress,
        (rows(), with_(rows(SIZE, KINDS), ((3, 1), math.nan))),
        ("input 1, the target of mse_loss, holds nan in sample 3 at [1]: 1 of 32 values",),
    ),
    "no label": (classify, (rows(), torch.full((SIZE,), -100)), ("all 8 labels are -100, which cross_entropy leaves",)),
    "a row masked out": (attend, (FRAMES, LABELS, KEPT), ("input 2 is False everywhere in sample 3, and in no other",)),
    "a length of 0": (
        attend_lengths,
        (FRAMES, LABELS, torch.tensor([5, 4, 3, 0, 5, 5, 2, 1])),
        ("input 2 is 0 in sample 3, and in no other sample",),
    ),
    "an empty batch": (classify, (rows()[:0], LABELS[:0]), ("input 0 is empty, its shape is [0, 8]",)),
    "nothing selected": (of_some, (rows(), LABELS), ("mean of no values: its input has the shape [0, 4]",)),
    "a blank sample": (directions, (with_(rows(), (2, 0.0)), LABELS), ("input 0 is 0.0 everywhere in sample 2, and",)),
    "a constant feature": (
        whitened,
        (with_(rows(), ((slice(None), 6), 3.0)), LABELS),
        ("input 0 is 3.0 in every sample at feature 6",),
    ),
    "one sample": (whitened, (rows()[:1], LABELS[:1]), ("std of 1 value: its input has the shape [1, 8]",)),
    "a target below the logarithm": (
        of_logs,
        (rows(), torch.tensor([1.0, 2, 3, -3, 5, 6, 7, 8])),
        ("input 1 in sample 3 leads to it without any weight: log1p has an argument of -3",),
    ),
    "an input to divide by": (
        lambda m, x, y: classify(m, 1 / x, y),
        (with_(rows(), ((2, 5), 0.0)), LABELS),
        ("input 0 in sample 2 leads to it without any weight: reciprocal has a divisor of 0",),
    ),
    "a target to divide by": (
        relative,
        (rows(), torch.tensor([1.0, 2, 0, 3, 5, 6, 7, 8])),
        ("input 1 in sample 2 leads to it without any weight: div has a divisor of 0",),
    ),
    "a text longer than its audio": (
        transcribe,
        (FRAMES, torch.tensor([[1, 1, 2, 2]] * SIZE), torch.tensor([1, 1, 4, 1, 1, 1, 1, 1])),
        ("sample 2 has 4 labels, which need 6 time steps, and has 5",),
    ),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", BATCHES)
def test_what_is_wrong_with_a_batch_is_named_with_its_sample(name: str, suspected: Any) -> None:
    loss_fn, batch, words = BATCHES[name]
    found = suspected(loss_fn, *batch)
    assert any(all(word in text for word in words) for text in found), found


def test_a_key_of_the_batch_is_named(suspected: Any) -> None:
    batch = {"pixels": with_(rows(), ((1, 1), 1e9)), "labels": LABELS}
    (text,) = suspected(lambda m, b: classify(m, b["pixels"], b["labels"]), batch)
    assert text.startswith("input 0 (pixels) holds 1e+09 in sample 1")


def test_targets_that_are_no_probabilities_are_named(suspected: Any) -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float()) * 1e39

    wrong = torch.tensor([0, 1, 255, 0, 255, 0, 1, 1])
    (text,) = suspected(loss_fn, rows(), wrong)
    assert "holds 255 in sample 2 (2 of 8 such values)" in text
    assert suspected(loss_fn, rows(), wrong.clamp(max=1)) == ()


def masked_by_the_code(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return attend(model, x, y, KEPT)


def divided_by_nothing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, x / 0.0, y)


def too_large_for_the_scale(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, x, y) * 1e4


def exploding(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return classify(model, x, y) * 1e39


def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x) * 1e5, y)


@pytest.mark.parametrize(
    ("loss_fn", "batch"),
    [
        (masked_by_the_code, (FRAMES, LABELS)),  # the mask is no data
        (divided_by_nothing, (rows(), LABELS)),
        (too_large_for_the_scale, (with_(rows(), ((2, 5), -6.5e4)) * 1e-6, LABELS)),
        (exploding, (rows(), LABELS)),
        (exploding, (with_(rows(), ((2, 5), -6.5e4)), LABELS)),  # far out, and not the reason
        (exploding, ((3 * rows()).exp(), LABELS)),
        (scaled, (rows(), LABELS)),
    ],
)
def test_a_batch_that_is_not_the_reason_is_not_suspected(loss_fn: Any, batch: Any, suspected: Any) -> None:
    assert suspected(loss_fn, *batch) == ()


# ---------------------------------------------------------------------- healthy data


def zipf(*shape: int) -> Tensor:
    return (1 / torch.rand(*shape).clamp_min(1e-7)).floor()


def columns(n: int) -> Tensor:
    """Age, income, time of day, a few normal features: as tables are."""
    return torch.cat([100 * torch.rand(n, 1), (11 + torch.randn(n, 1)).exp(), 1.7e9 + torch.rand(n, 1)], 1)


HEAVY: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda n: torch.randn(n, 16),
    "log-normal": lambda n: (2 * torch.randn(n, 16)).exp(),
    "log-normal, wide": lambda n: (3 * torch.randn(n, 16)).exp(),
    "Cauchy": lambda n: Cauchy(0.0, 1.0).sample((n, 16)),
    "Pareto of index 1/2": lambda n: torch.rand(n, 16).double().clamp_min(1e-9) ** -2,
    "counts": lambda n: zipf(n, 16),
    "counts, most of them 0": lambda n: zipf(n, 16) * (torch.rand(n, 16) < 0.05),
    "token ids": lambda n: torch.randint(0, 50000, (n, 16)).float(),
    "one-hot": lambda n: F.one_hot(torch.randint(0, 16, (n,)), 16).float(),
    "images with padding": lambda n: torch.rand(n, 3, 8, 8) * (torch.arange(8) < torch.randint(2, 8, (n, 1, 1, 1))),
    "loud and quiet clips": lambda n: torch.randn(n, 64) * (torch.randn(n, 1)).exp(),
    "columns of a table": columns,
    "a mask to add": lambda n: (torch.rand(n, 16) < 0.3) * torch.finfo(torch.float32).min,
}


@pytest.mark.parametrize("name", HEAVY)
def test_healthy_data_has_no_outliers(name: str) -> None:
    """Even if it were the reason: the threshold is stated beforehand, one in a million for each batch."""
    torch.manual_seed(0)
    for size in (1, 2, 8, 64):
        for _ in range(12):
            batch = HEAVY[name](size)
            assert outlying(batch) is None


def outlying(batch: Tensor, earlier: list[float] | None = None) -> str | None:
    found = outlier("input 0", batch, earlier or [])
    return None if found is None else found[1]


@pytest.mark.parametrize("name", ["normal", "log-normal", "Cauchy", "images with padding", "loud and quiet clips"])
def test_a_value_at_the_end_of_fp32_is_an_outlier_of_any_data(name: str) -> None:
    torch.manual_seed(0)
    for size in (4, 8, 64):
        batch = HEAVY[name](size)
        batch.flatten()[11] = torch.finfo(torch.float32).min
        assert "-3.40282e+38" in (outlying(batch) or "")


def test_earlier_batches_show_what_is_usual() -> None:
    whole = rows() * 1e7  # no sample stands out
    assert outlying(whole) is None
    text = outlying(whole, [3.1, 2.9, 3.3, 2.8, 3.0, 3.2, 3.4])
    assert text is not None and text.endswith("in 7 earlier batches the largest was 3.4")
    assert outlying(whole, [3.1, 2.9, 3.3, 2.8, 1e6, 3.2, 3.4]) is None
    alone = with_(rows(), ((2, 5), 1e9))
    assert outlying(alone) is not None and outlying(alone, [2e8]) is None
