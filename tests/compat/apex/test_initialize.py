"""amp.initialize: levels, overrides and their conflicts, shapes, what is cast, what is printed, what is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.compat.apex import amp, fp16_utils
from halfstep.compat.apex.amp import _amp_state
from halfstep.compat.apex.amp.frontend import O0, O1, O2, O3, Properties, opt_levels
from halfstep.compat.apex.parallel import LARC

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = ("O0", "O1", "O2", "O3")


def small() -> nn.Sequential:
    """Return a model with every kind of layer that levels tell apart."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 3),
        nn.BatchNorm1d(3, affine=False),
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def started(level: str = "O2", **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = small()
    found = amp.initialize(model, sgd(model), opt_level=level, verbosity=0, **options)
    return found  # type: ignore[no-any-return]


def formats(model: nn.Sequential) -> dict[str, torch.dtype]:
    return {type(m).__name__: m.weight.dtype for m in model if getattr(m, "weight", None) is not None}  # type: ignore[misc]


X = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))

# ---------------------------------------------------------------------- levels


def test_each_level_has_apexs_defaults() -> None:
    names = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
    table = {
        "O0": (FP32, False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": (HALF, False, True, True, "dynamic"),
        "O3": (HALF, False, False, False, 1.0),
    }
    for level, values in table.items():
        started(level)
        assert _amp_state.opt_properties is not None
        assert {name: getattr(_amp_state.opt_properties, name) for name in names} == dict(
            zip(names, values, strict=True)
        )
        assert level == _amp_state.opt_properties.opt_level
    assert opt_levels == {"O0": O0, "O1": O1, "O2": O2, "O3": O3}


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("O0", {}, (FP32, FP32, FP32, FP32)),
        ("O1", {}, (FP32, FP32, FP32, FP32)),
        ("O2", {}, (HALF, FP32, HALF, HALF)),
        ("O2", {"keep_batchnorm_fp32": "False"}, (HALF, HALF, HALF, HALF)),
        ("O3", {}, (HALF, HALF, HALF, HALF)),
        ("O3", {"keep_batchnorm_fp32": True}, (HALF, FP32, HALF, HALF)),
        ("O3", {"master_weights": True}, (HALF, HALF, HALF, HALF)),
        ("O2", {"cast_model_type": BF16}, (BF16, FP32, BF16, BF16)),
        ("O3", {"cast_model_type": BF16}, (BF16, BF16, BF16, BF16)),
        ("O0", {"cast_model_type": HALF}, (HALF, HALF, HALF, HALF)),
        ("O2", {"cast_model_type": FP32}, (FP32, FP32, FP32, FP32)),
        ("O2", {"cast_model_type": False}, (FP32, FP32, FP32, FP32)),
    ],
)
def test_each_level_casts_what_apex_casts_and_trains(level: str, options: Any, expected: Any) -> None:
    model, optimizer = started(level, **options)
    assert formats(model) == dict(zip(("Conv2d", "BatchNorm2d", "LayerNorm", "Linear"), expected, strict=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for x in (X, X.half(), X.bfloat16()) if options.get("cast_model_type") is not False else (X,):
        output = model(x)
        assert output.dtype is FP32 or level == "O1" or options.get("cast_model_type") is False
        with amp.scale_loss(F.cross_entropy(output, torch.tensor([0, 1, 2, 0])), optimizer) as scaled:
            assert scaled.dtype is FP32
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    assert {value.dtype for value in after.values()} == {FP32, torch.int64}
    assert not torch.equal(after["4.weight"], before["4.weight"])


def test_outputs_take_the_format_asked_for_at_every_level() -> None:
    for level, dtype in itertools.product(LEVELS, (HALF, BF16, FP32)):
        model, _ = started(level, cast_model_outputs=dtype)
        assert model(X).dtype is dtype


def test_o1_casts_outside_of_models_and_the_levels_after_it_do_not() -> None:
    started("O1")
    assert (X[0, 0] @ X[0, 0]).dtype is HALF
    started("O1", cast_model_type=BF16)
    assert (X[0, 0] @ X[0, 0]).dtype is BF16
    for level in ("O0", "O2", "O3"):
        started("O1")
        model, _ = started(level)
        assert (X[0, 0] @ X[0, 0]).dtype is FP32
        assert model(X).dtype is FP32


def test_models_of_an_earlier_o1_keep_casting() -> None:
    first, _ = started("O1")
    started("O0")
    assert first[4](torch.rand(2, 16)).dtype is HALF  # a layer called by itself, too
    assert first(X).dtype is HALF


# ---------------------------------------------------------------------- shapes


def test_what_comes_back_is_what_came_in() -> None:
    for level in LEVELS:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        a, b = sgd(one), sgd(two)
        models, optimizers = [one, two], [a, b]
        found = amp.initialize(models, optimizers, opt_level=level, verbosity=0, num_losses=2)
        assert found[0] is models and found[1] is optimizers
        assert models[0] is one and optimizers[1] is b and isinstance(b, torch.optim.SGD)
        model = nn.Linear(2, 2)
        assert amp.initialize(model, opt_level=level, verbosity=0) is model
        assert amp.initialize([nn.Linear(2, 2)], [], opt_level=level, verbosity=0)[0].weight is not None
        model = nn.Linear(2, 2)
        assert amp.initialize(model, optimizers=[sgd(model)], opt_level=level, verbosity=0)[0] is model


def test_disabled_touches_nothing_and_scales_nothing() -> None:
    model = small()
    optimizer = sgd(model)
    kind = type(optimizer)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize([model], enabled=False) == [model]
    assert type(optimizer) is kind and {p.dtype for p in model.parameters()} == {FP32}
    loss = model(X).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    with amp.disable_casts():
        pass
    assert list(amp.master_params(optimizer)) == list(model.parameters())


# ---------------------------------------------------------------------- overrides and conflicts


def test_options_come_as_text_from_argparse() -> None:
    started("O2", keep_batchnorm_fp32="True", loss_scale="128.0")
    assert _amp_state.opt_properties is not None
    assert _amp_state.opt_properties.keep_batchnorm_fp32 is True and _amp_state.opt_properties.loss_scale == 128.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0
    started("O3", loss_scale="dynamic")
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16


@pytest.mark.parametrize(
    ("options", "error", "saying"),
    [
        ({"opt_level": "02"}, RuntimeError, "'02'.*letter O.*not the digit zero"),
        ({"opt_level": "O1", "cast_model_type": HALF}, RuntimeError, "casts around functions.*'O2' or 'O3'.*float16"),
        ({"opt_level": "O2", "patch_torch_functions": True}, RuntimeError, "comes with opt_level='O1'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, RuntimeError, "should be None.*was True"),
        ({"opt_level": "O1", "master_weights": False}, RuntimeError, "no sense with opt_level='O1'.*was False"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, AssertionError, "'yes'; expected True, False"),
        ({"opt_level": "O2", "loss_scale": "much"}, ValueError, "expected 'dynamic', or a number"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, ValueError, "torch.int8; expected torch.float16"),
    ],
)
def test_options_that_contradict_each_other_are_refused_and_nothing_changes(
    options: dict[str, Any], error: type[Exception], saying: str
) -> None:
    model = small()
    optimizer = sgd(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error, match=saying):
        amp.initialize(model, optimizer, verbosity=0, **options)
    assert [type(module) for module in model.modules()] == kinds and type(optimizer) is torch.optim.SGD
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert _amp_state.opt_properties is None


def test_hard_override_turns_conflicts_into_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    _amp_state.hard_override = True
    started("O1", keep_batchnorm_fp32=False)
    assert "Warning:  with opt_level='O1' batchnorm" in capsys.readouterr().out


def test_options_have_names() -> None:
    properties = Properties()
    with pytest.raises(AttributeError, match="no option 'loss_scaling'"):
        properties.loss_scaling = 1.0
    with pytest.raises(AttributeError, match="no option 'levle'"):
        _ = properties.levle
    with pytest.raises(ValueError, match="unexpected option levle"):
        properties._update_options_dict({"levle": 1})
    assert copy.deepcopy(properties).options == properties.options


# ---------------------------------------------------------------------- what is refused


def test_tuples_dicts_and_other_things_are_refused_with_the_remedy() -> None:
    model = small()
    with pytest.raises(TypeError, match=r"either a single model or a list of models.*list\(models\)"):
        amp.initialize((model,), sgd(model))
    with pytest.raises(TypeError, match=r"either a single optimizer or a list.*list\(optimizers\)"):
        amp.initialize(model, (sgd(model),))
    with pytest.raises(TypeError, match=r"list\(optimizers.values\(\)\)"):
        amp.initialize(model, {"a": sgd(model)})
    with pytest.raises(TypeError, match="a list of Linear, int"):
        amp.initialize([nn.Linear(1, 1), 3], None)
    with pytest.raises(RuntimeError, match="FP16_Optimizer.*bare"):
        amp.initialize(model, [fp16_utils.FP16_Optimizer(sgd(model))])


def test_parallel_wrappers_come_afterwards() -> None:
    with pytest.raises(RuntimeError, match="DataParallel: parallel wrappers come AFTER amp.initialize"):
        amp.initialize(nn.DataParallel(small()))


def test_a_low_model_is_refused_unless_allowed() -> None:
    for level in LEVELS:
        with pytest.raises(RuntimeError, match=r"Found param 0.weight with type torch.HalfTensor.*leave out .half\(\)"):
            amp.initialize(small().half(), opt_level=level)
        with pytest.raises(RuntimeError, match="Found buffer 1.running_mean"):
            model = small()
            model[1].running_mean = torch.zeros(4).half()
            amp.initialize(model, opt_level=level)
    _amp_state.allow_incoming_model_not_fp32 = True
    for level in LEVELS:
        model = nn.Sequential(nn.Linear(16, 4).half(), nn.Linear(4, 2))
        model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        with amp.scale_loss(model(torch.rand(3, 16)).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_half_and_fp32_parameters_stay_as_they_are_with_cast_model_type_false() -> None:
    _amp_state.allow_incoming_model_not_fp32 = True
    for level in ("O2", "O3"):
        model = nn.ParameterList([nn.Parameter(torch.ones(3).half()), nn.Parameter(torch.ones(3))])
        model, optimizer = amp.initialize(model, sgd(model), opt_level=level, cast_model_type=False, verbosity=0)
        low, wide = model
        assert (low.dtype, wide.dtype) == (HALF, FP32)
        masters = list(amp.master_params(optimizer))
        assert [m.dtype for m in masters] == ([FP32, FP32] if level == "O2" else [HALF, FP32])
        for _ in range(3):
            with amp.scale_loss((low.float() * wide).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(low.float(), wide, atol=1e-3) and float(wide.detach()[0]) < 1.0
        if level == "O2":
            assert torch.equal(masters[0].half(), low) and masters[1] is wide


def test_an_optimizer_goes_through_once() -> None:
    model, optimizer = started("O1")
    with pytest.raises(RuntimeError, match="SGD was passed through amp.initialize before.*make a new one"):
        amp.initialize(model, optimizer, opt_level="O2")
    again = sgd(model)
    with pytest.raises(RuntimeError, match="passed through amp.initialize before"):
        amp.initialize(model, [again, again], opt_level="O2")
    assert type(again) is torch.optim.SGD
    again._post_amp_backward = None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="already has an attribute _post_amp_backward"):
        amp.initialize(model, again)


def test_casts_cannot_start_inside_a_region() -> None:
    model = small()
    with torch.autocast("cpu", dtype=BF16), pytest.raises(RuntimeError, match="outside of `with torch.autocast"):
        amp.initialize(model, sgd(model), opt_level="O1", verbosity=0)
    assert type(model) is nn.Sequential
    with torch.device("cpu"):  # a mode that ends after the casts began
        started("O1")
    assert (X[0, 0] @ X[0, 0]).dtype is HALF


def test_an_initialize_that_fails_half_way_leaves_everything_as_it_was() -> None:
    good, bad = small(), nn.Linear(2, 2)
    with torch.no_grad():
        bad.weight[0, 0] = float("nan")
    optimizers = [sgd(good), sgd(bad)]
    weights = copy.deepcopy(good.state_dict())
    for level in ("O1", "O2"):
        with pytest.raises(RuntimeError, match="nan or inf"):
            amp.initialize([good, bad], optimizers, opt_level=level, verbosity=0)
        assert type(good) is nn.Sequential and all(type(o) is torch.optim.SGD for o in optimizers)
        assert not any(hasattr(o, "_amp_stash") for o in optimizers)
        assert {p.dtype for p in good.parameters()} == {FP32}
        assert all(torch.equal(a, b) for a, b in zip(good.state_dict().values(), weights.values(), strict=True))
        assert (X[0, 0] @ X[0, 0]).dtype is FP32


# ---------------------------------------------------------------------- odds


def test_parameters_that_are_no_models_are_stepped_as_they_are() -> None:
    for level in LEVELS:
        model, extra = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.scale_loss((model(torch.ones(1, 2)).float() * 0).sum() + extra.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert extra.tolist() == [0.5, 0.5]


def test_larc_goes_through_initialize() -> None:
    for level in LEVELS:
        model = nn.Linear(2, 2)
        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
        model, found = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert found is optimizer
        before = model.state_dict()["weight"].clone()
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * 0.1, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert not torch.equal(model.state_dict()["weight"], before)


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    amp.initialize(model, sgd(model), opt_level="O2", loss_scale="128.0")
    out = capsys.readouterr().out
    assert "Selected optimization level O2" in out
    assert "loss_scale             : dynamic\n" in out and "loss_scale             : 128.0\n" in out
    assert out.count("keep_batchnorm_fp32    : True\n") == 2
    started("O1")
    assert capsys.readouterr().out == ""


def test_verbosity_2_prints_every_cast(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    model, _ = amp.initialize(model, sgd(model), opt_level="O1", verbosity=2)
    capsys.readouterr()
    assert model(torch.rand(2, 4)).dtype is FP32
    assert capsys.readouterr().out.splitlines() == ["Float->Half (linear)"] * 3 + ["Half->Float (softmax)"]
    _ = torch.rand(2).half() + torch.rand(2)
    assert capsys.readouterr().out == "Half->Float (add)\n"
    with amp.disable_casts():
        assert model(torch.rand(2, 4)).dtype is FP32
    assert capsys.readouterr().out == ""


def test_cudnn_must_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    with pytest.raises(RuntimeError, match="torch.backends.cudnn.enabled = True"):
        started()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_losses": 0}, r"num_losses=0; expected a whole number from 1"),
        ({"num_losses": -1}, r"num_losses=-1; expected"),
        ({"num_losses": "2"}, r"num_losses='2'; expected"),
        ({"num_losses": True}, r"num_losses=True; expected"),
        ({"cast_model_outputs": "fp16"}, r"cast_model_outputs='fp16'; expected None or a floating format"),
        ({"cast_model_outputs": torch.int32}, r"cast_model_outputs=torch.int32; expected"),
        ({"loss_scale": "much"}, r"loss_scale='much'; expected 'dynamic', or a number or text of one"),
        ({"opt_level": "O2", "master_weights": "yes"}, r"master_weights='yes'; expected True, False"),
        ({"patch_torch_functions": 2}, r"patch_torch_functions=2; expected True, False"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, r"min_loss_scale=8.0 is above max_loss_scale=4.0; change"),
    ],
)
def test_arguments_that_would_fail_later_are_refused_by_name_and_change_nothing(
    arguments: dict[str, Any], message: str
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        amp.initialize(model, optimizer, verbosity=0, **arguments)
    assert type(optimizer) is torch.optim.SGD and type(model) is nn.Linear and amp._amp_state.opt_properties is None


def test_flags_may_come_as_text_from_a_command_line() -> None:
    for text, wanted in (("True", True), ("False", False)):
        amp.initialize(nn.Linear(3, 3), opt_level="O2", verbosity=0, master_weights=text)  # type: ignore[arg-type]
        assert amp._amp_state.opt_properties is not None
        assert amp._amp_state.opt_properties.master_weights is wanted


def test_a_policy_of_the_user_is_not_overwritten_without_a_word() -> None:
    model = hs.prepare(small(), policy="mixed")
    with pytest.raises(RuntimeError, match=r"Sequential was given to hs.prepare with policy 'mixed'; use one way"):
        amp.initialize(model, opt_level="O2", verbosity=0)
    policy = hs.prepared_policy(model)
    assert policy is not None and policy.name == "mixed"
    amp.initialize(hs.unprepare(model), opt_level="O2", verbosity=0)
