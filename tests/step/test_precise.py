"""What a bound module shows of its weights: copies, pickles and files that a library saves."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import halfstep as hs
from tests.step.cutting import is_instant

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
FORMS = [("mixed", "auto"), ("O2", "master"), ("O2", "split"), ("O2", "kahan"), ("pure", "stochastic"), ("O3", "none")]


def policy(name: str, master: str = "auto") -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16", master=master)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return self.gain * weight


def doubled(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Double())
    return parametrize.register_parametrization(layer, "bias", Double())


def learned(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Learned())
    return parametrize.register_parametrization(layer, "weight", Double())


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class BuildsItself(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = BuildsItself(8, 8)
        twin.load_state_dict(self.state_dict())
        return twin


class Reduces(nn.Linear):
    def __reduce__(self) -> Any:
        return _reduced, (self.in_features, self.state_dict())


def _reduced(width: int, state: dict[str, Tensor]) -> nn.Module:
    made = Reduces(width, width)
    made.load_state_dict(state)
    return made


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(8, 8),
    "weight_norm": lambda: weight_norm(nn.Linear(8, 8)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: orthogonal(nn.Linear(8, 8)),
    "doubled": lambda: doubled(nn.Linear(8, 8)),
    "learned": lambda: learned(nn.Linear(8, 8)),
    "copies itself": lambda: CopiesItself(8, 8),
    "builds itself": lambda: BuildsItself(8, 8),
    "reduces": lambda: Reduces(8, 8),
}


def trained(layer: str, name: str, master: str) -> nn.Module:
    """Return a model whose fp32 weights are no low numbers, in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = hs.TrainStep(
        model, optimizer, lambda m, x: m(x).float().square().mean(), policy=policy(name, master), blackbox=False
    )
    for _ in range(3):
        step(X)
    return model.eval()


def assert_precise(twin: nn.Module, model: nn.Module, name: str) -> None:
    weights, copied = model.state_dict(), twin.state_dict()
    assert list(weights) == list(copied)
    for key, value in weights.items():
        assert copied[key].dtype is torch.float32 and torch.equal(copied[key], value.float()), key
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    mine = {p.data_ptr() for p in model.parameters()}
    assert not any(p.data_ptr() in mine for p in twin.parameters())
    assert [hs.prepared_policy(m) for m in twin.modules()] == [hs.prepared_policy(m) for m in model.modules()]


# under O3 the weights themselves are low, and layers that build themselves anew do so in fp32
CASES = [(layer, *form) for layer in LAYERS for form in FORMS if form[0] != "O3" or layer in {"plain", "weight_norm"}]


@pytest.mark.parametrize(("layer", "name", "master"), CASES)
def test_a_deep_copy_has_the_fp32_weights_of_every_kind_of_module(layer: str, name: str, master: str) -> None:
    model = trained(layer, name, master)
    assert_precise(copy.deepcopy(model), model, name)
    assert_precise(copy.deepcopy(copy.deepcopy(model)), model, name)
    assert_precise(torch.optim.swa_utils.AveragedModel(model).module, model, name)
    assert_precise(copy.deepcopy(model[0]), model[0], name)  # type: ignore[index]


ALONE = {"plain", "copies itself", "builds itself", "reduces"}


@pytest.mark.parametrize(("layer", "name", "master"), [case for case in CASES if case[0] in ALONE])
def test_a_pickle_too(layer: str, name: str, master: str) -> None:
    model = trained(layer, name, master)
    twin = pickle.loads(pickle.dumps(model))
    assert_precise(twin, model, name)
    assert type(twin[0]) is type(model[0])  # type: ignore[index]


@pytest.mark.parametrize("layer", ["weight_norm", "doubled"])
def test_a_parametrized_module_is_pickled_no_more_than_without_halfstep(layer: str) -> None:
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(trained(layer, "O2", "master"))


@pytest.mark.parametrize("layer", LAYERS)
def test_after_unprepare_a_copy_is_a_plain_one(layer: str) -> None:
    model = hs.unprepare(trained(layer, "O2", "split"))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    assert not any("_halfstep" in module.__dict__ for module in twin.modules())


@pytest.mark.parametrize("name", ["mixed", "O2"])
def test_a_parametrization_of_a_bound_module(name: str) -> None:
    model = trained("plain", name, "auto" if name == "mixed" else "master")
    want = model.state_dict()["0.weight"]
    parametrize.register_parametrization(model[0], "weight", Double())  # type: ignore[index]
    assert torch.equal(model.state_dict()["0.parametrizations.weight.original"], want)
    assert_precise(copy.deepcopy(model), model, name)
    copy.deepcopy(hs.unprepare(model))(X)
    assert type(model[0]).__mro__[1] is nn.Linear  # type: ignore[index]


def test_a_parametrization_of_a_bound_module_loads_fp32_weights() -> None:
    model = trained("plain", "O2", "master")
    parametrize.register_parametrization(model[0], "weight", Double())  # type: ignore[index]
    want = {key: value + 2**-20 for key, value in model.state_dict().items()}
    twin = trained("plain", "O2", "master")
    parametrize.register_parametrization(twin[0], "weight", Double())  # type: ignore[index]
    twin.load_state_dict(want)
    assert all(torch.equal(value, want[key]) for key, value in twin.state_dict().items())


def test_a_parametrization_that_makes_parameters_of_a_low_one() -> None:
    model = hs.prepare(nn.Sequential(nn.Linear(8, 8)), policy=policy("O2"))
    weight_norm(model[0])
    assert type(model[0].parametrizations.weight.original1) is nn.Parameter  # type: ignore[union-attr]
    assert model(X).shape == (4, 8)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_copy_that_is_trained_has_plain_parameters(prepared: bool) -> None:
    twin = hs.unprepare(copy.deepcopy(trained("plain", "O2", "split")))
    if prepared:
        hs.prepare(twin, policy=policy("mixed"))
    assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}


def test_a_shallow_copy_shares_the_weights_and_leaves_them_low() -> None:
    model = trained("plain", "O2", "split")
    for module in (model, model[0]):  # type: ignore[index]
        twin = copy.copy(module)
        assert all(a is b for a, b in zip(twin.parameters(), module.parameters(), strict=True))
        assert torch.equal(twin(X), module(X))
    assert model[0].weight.dtype is torch.bfloat16  # type: ignore[index]
    assert all(torch.equal(a, b) for a, b in zip(copy.copy(model).parameters(), model.parameters(), strict=True))


# ------------------------------------------------------------------ files


def load_again(saved: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


class Cyclic(nn.Module):
    """Holds itself, as a module with a hook that is a method of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held = [self]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "master"), FORMS)
def test_a_whole_model_loads_with_the_safe_globals_of_its_script(name: str, master: str) -> None:
    model = trained("plain", name, master)
    for saved in (model, copy.deepcopy(model)):
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.GELU]):
            again = load_again(saved, weights_only=True)
        assert_precise(again, model, name)
        assert type(again) is type(model) and torch.equal(again(X), copy.deepcopy(model)(X))


def test_a_model_that_holds_itself_too() -> None:
    model = hs.prepare(Cyclic(), policy=policy("O2"))
    with torch.serialization.safe_globals([Cyclic, nn.Linear]):
        again = load_again(model, weights_only=True)
    assert again.held[0] is again and torch.equal(again(X), model(X))


def test_what_a_script_has_not_allowed_stays_forbidden() -> None:
    with pytest.raises(pickle.UnpicklingError, match="Cyclic was not an allowed global"):
        load_again(hs.prepare(Cyclic(), policy=policy("O2")), weights_only=True)


def test_policies_models_and_optimizers_in_one_file() -> None:
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    hs.prepare(model, optimizer, policy=policy("O2").replace(scale=hs.ScaleRule(init=8.0)))
    model(X).sum().backward()
    optimizer.step()
    with torch.serialization.safe_globals([nn.Linear]):
        found, state, wanted = load_again((model, optimizer.state_dict(), hs.prepared_policy(model)), weights_only=True)
    assert wanted == hs.prepared_policy(model) == hs.prepared_policy(found)
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


class Config:
    dtype: str = ""


class Library(nn.Module):
    """What transformers' PreTrainedModel does when it saves: it records the format of the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.config = Config()

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        self.config.seen = self.dtype  # type: ignore[attr-defined]
        return self.head(self.embedding(x))  # type: ignore[no-any-return]

    def save_pretrained(self, state_dict: dict[str, Tensor] | None = None, *, fail: bool = False) -> dict[str, Tensor]:
        """Save."""
        self.config.dtype = str(self.dtype)
        assert self.head.weight is self.embedding.weight
        if fail:
            raise OSError("no space")
        return self.state_dict() if state_dict is None else state_dict


@pytest.mark.parametrize(("name", "master"), FORMS)
def test_a_library_records_the_format_that_it_writes(name: str, master: str) -> None:
    model = hs.prepare(Library(), policy=policy(name, master))
    parameters = dict(model.named_parameters())
    want = model.state_dict()
    for saver in (model, nn.ModuleList([model])[0]):
        saved = cast(Library, saver).save_pretrained()
        assert {str(value.dtype) for value in saved.values()} == {model.config.dtype}
        assert all(torch.equal(value, want[key]) for key, value in saved.items())
    assert all(p is parameters[n] for n, p in model.named_parameters())
    model(torch.arange(4))
    assert model.config.seen is parameters["embedding.weight"].dtype  # type: ignore[attr-defined]
    assert model.save_pretrained.__doc__ == "Save."


def test_a_save_that_fails_leaves_the_low_parameters_in_place() -> None:
    model = hs.prepare(Library(), policy=policy("O2"))
    before = [(p, p._version) for p in model.parameters()]
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(fail=True)
    assert [(p, p._version) for p in model.parameters()] == before


def test_a_save_between_forward_and_backward_changes_no_weight() -> None:
    model = hs.prepare(Library(), policy=policy("O2", "split"))
    loss = model(torch.arange(4)).sum()
    model.save_pretrained()
    loss.backward()
    assert model.head.weight.grad is not None


class Cut:
    """Raises at the n-th line of the code that shows fp32 weights in the place of low ones."""

    FILES = ("/binding/precise.py", "/binding/prepare.py")

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "call" or (event == "line" and not is_instant(frame)):
            self.seen += 1
            if self.seen == self.at + 1:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("how", ["save", "edit"])
def test_after_any_line_the_low_parameters_are_in_place(how: str) -> None:
    for at in range(10_000):
        model = hs.prepare(Library(), policy=policy("O2", "split"))
        before, cut = list(model.parameters()), Cut(at)
        sys.settrace(cut)
        try:
            if how == "save":
                model.save_pretrained()
            else:
                with hs.edit_weights(model):
                    pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert all(p is own for p, own in zip(model.parameters(), before, strict=True)), at
        if cut.seen <= at:
            break
    assert at > 20
