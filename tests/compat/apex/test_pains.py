"""What hurt users of Apex, by the numbers of docs/compat_apex.md: each is cured here."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.compat.apex import amp
from halfstep.compat.apex.amp import _amp_state

FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = ("O0", "O1", "O2", "O3")
X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))


def started(level: str, model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=1e-4)  # O3 keeps it in fp16, where 1e-8 is 0
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)  # type: ignore[no-any-return]


def update(model: Any, optimizer: Any, x: Tensor = X) -> None:
    output = model(x)
    with amp.scale_loss(output.float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_p1_a_weight_used_twice_before_backward_and_recurrent_layers_work_on_this_torch() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.rnn = nn.LSTM(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.rnn(self.layer(self.layer(x))[None])[0]
            return output

    for level in LEVELS:
        model, optimizer = started(level, Twice())
        before = [p.detach().clone() for p in model.parameters()]
        update(model, optimizer)
        assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_p2_o2_holds_half_the_bytes_in_the_model() -> None:
    model, _ = started("O2")
    assert sum(p.nbytes for p in model.parameters()) * 2 == sum(4 * p.numel() for p in model.parameters())


def test_p3_what_is_saved_under_o2_is_fp32_and_loading_it_is_not_undone_by_the_next_step() -> None:
    model, optimizer = started("O2", lr=1e-5)
    update(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(not torch.equal(v, v.half().float()) for v in saved.values())  # not the rounded weights
    moments = optimizer.state_dict()["state"][0]
    assert moments["exp_avg_sq"].dtype is FP32 and float(moments["exp_avg_sq"].max()) > 0
    model, optimizer = started("O2", lr=1e-5)
    update(model, optimizer)
    model.load_state_dict(saved)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_p4_initialize_may_be_called_again_and_again() -> None:
    depth = []
    for level in ("O1", "O1", "O2", "O1", "O0", "O3", "O1", "O0"):
        model, optimizer = started(level)
        update(model, optimizer)
        depth.append(len(torch.overrides._get_current_function_mode_stack()))
        assert (X @ X.T).dtype is (HALF if level == "O1" else FP32)
        with amp.disable_casts():
            assert (X @ X.T).dtype is FP32
    assert set(depth) == {0, 2}


def test_p4_an_earlier_optimizer_keeps_its_own_scale() -> None:
    first, first_optimizer = started("O2", loss_scale=64.0)
    second, second_optimizer = started("O1", num_losses=2)
    for _ in range(2):
        update(first, first_optimizer)
        update(second, second_optimizer)
    assert first_optimizer._amp_stash.session.loss_scalers[0].loss_scale() == 64.0
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 2


def test_p4_the_saved_state_has_the_scales_of_all_models_in_use() -> None:
    def scales() -> list[float]:
        return [scaler["loss_scale"] for scaler in amp.state_dict().values()]

    first = started("O2", loss_scale=64.0)
    second = started("O1", loss_scale=32.0, num_losses=2)
    assert scales() == [32.0, 32.0, 64.0]
    _ = amp.initialize(nn.Linear(6, 3), opt_level="O0", verbosity=0)  # a teacher: nothing is scaled for it
    saved = amp.state_dict()
    saved["loss_scaler1"]["loss_scale"], saved["loss_scaler2"]["loss_scale"] = 8.0, 16.0
    amp.load_state_dict(saved)
    assert second[1]._amp_stash.session.loss_scalers[1].loss_scale() == 8.0
    assert first[1]._amp_stash.session.loss_scalers[0].loss_scale() == 16.0
    _ = amp.initialize(nn.Linear(6, 3), enabled=False)
    assert scales() == []
    update(*first)
    assert scales() == [16.0]  # amp was not off for it
    update(*second)
    again = torch.optim.SGD(first[0].parameters(), lr=0.1)
    _ = amp.initialize(first[0], again, opt_level="O0", loss_scale=4.0, verbosity=0)
    assert scales() == [4.0, 32.0, 8.0]  # the model's earlier call is over, although its optimizer is still there
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    assert scales() == [2.0]
    update(*second)
    assert scales() == [2.0, 32.0, 8.0]
    del second
    assert scales() == [2.0]


def test_p4_a_model_that_trained_before_another_is_initialised_is_saved_until_that_trains_alone() -> None:
    first = started("O2", loss_scale=64.0)
    update(*first)
    second = started("O2", loss_scale=32.0)
    assert len(amp.state_dict()) == 2
    update(*second)
    assert len(amp.state_dict()) == 1  # an earlier run in this process
    for _ in range(2):
        update(*first)
        update(*second)
        assert [scaler["loss_scale"] for scaler in amp.state_dict().values()] == [32.0, 64.0]


def test_p4_the_same_model_may_be_initialised_again_and_loses_no_bit() -> None:
    model, optimizer = started("O2", lr=1e-5)
    update(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for level in ("O1", "O3", "O0", "O2"):
        again = torch.optim.Adam(model.parameters(), lr=1e-5, eps=1e-4)
        model, again = amp.initialize(model, again, opt_level=level, verbosity=0)
        found = model.state_dict()
        if level == "O3":  # no masters: the values are rounded, once
            saved = {name: value.half().float() for name, value in saved.items()}
        assert all(torch.equal(saved[name], value) for name, value in found.items())
        assert model(X).dtype is (HALF if level == "O1" else FP32)
        assert len(model._state_dict_hooks) == (level in ("O2", "O3")) and len(model._forward_hooks) == (level == "O0")
        update(model, again)
        saved = {name: value.clone() for name, value in model.state_dict().items()}


def test_p4_torch_itself_is_not_patched() -> None:
    before = {name: getattr(torch, name) for name in ("mm", "exp", "cat", "add")}
    started("O1")
    assert all(getattr(torch, name) is function for name, function in before.items())
    found = []

    def elsewhere() -> None:
        found.append((X @ X.T).dtype)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [FP32]


@pytest.mark.parametrize("level", LEVELS)
def test_p5_a_copy_has_its_own_weights_and_averages_in_fp32(level: str) -> None:
    model, optimizer = started(level)
    average = copy.deepcopy(model)
    assert all(p.dtype is FP32 for p in average.parameters())
    before = average(X)
    update(model, optimizer)
    assert torch.equal(average(X), before) and not torch.equal(model(X), before)
    assert average(X).dtype is model(X).dtype


@pytest.mark.parametrize("level", LEVELS)
def test_p5_models_and_optimizers_can_be_pickled(level: str) -> None:
    model, optimizer = started(level)
    update(model, optimizer)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(X), model(X))
    plain = pickle.loads(pickle.dumps(optimizer))
    assert type(plain) is torch.optim.Adam and not hasattr(plain, "_amp_stash")
    assert type(copy.deepcopy(optimizer)) is torch.optim.Adam


@pytest.mark.parametrize("level", LEVELS[1:])
def test_p5_replicas_in_threads_cast_too(level: str) -> None:
    model, _ = started(level, nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 3)))
    expected, found = model(X), []
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)

    def work() -> None:
        found.append(replica(X))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected) and found[0].dtype is expected.dtype


def test_p6_orders_of_calls_are_explained() -> None:
    """See test_training.test_what_is_called_too_early_or_with_the_wrong_thing_is_explained, test_initialize."""
    model, optimizer = started("O2")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # before any scale_loss: there is nothing to step
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    update(model, optimizer)
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_p7_the_scale_has_a_floor_and_a_message() -> None:
    model, optimizer = started("O2")
    with pytest.warns(UserWarning, match=r"floor 6.1035\d*e-05.*Not finite: 0.weight") as caught:
        for _ in range(60):
            with amp.scale_loss(model(X).sum() * float("nan"), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(caught) == 1 and amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**-14


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("early", [True, False])
def test_p8_schedulers_do_not_warn_whenever_they_are_made_and_whatever_overflows(level: str, early: bool) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if early:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    if not early:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with amp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        (scaled * float("inf")).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        if not amp.step_was_skipped(optimizer):
            scheduler.step()
        optimizer.zero_grad()
        update(model, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_p9_steps_and_zero_grad_keep_their_signatures_and_hooks_run_once() -> None:
    calls: list[str] = []
    for level in LEVELS:
        model, optimizer = started(level)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.load_state_dict(optimizer.state_dict())  # torch looks at the step function again here
        update(model, optimizer)
        assert calls == ["before", "after"]
        calls.clear()
        optimizer.zero_grad(set_to_none=True)
        optimizer.step(None)
        optimizer.step(closure=None)
        calls.clear()
        assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"


@pytest.mark.parametrize("level", LEVELS)
def test_p10_a_gradient_penalty_can_be_taken_from_the_unscaled_output(level: str) -> None:
    def penalised(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x).float()
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        total: Tensor = (gradient.norm(dim=1) - 1).square().mean() + output.square().mean()
        return total

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = started(level, copy.deepcopy(plain), loss_scale=128.0)
    with amp.disable_casts():
        penalised(plain, X).backward()
    with amp.scale_loss(penalised(model, X), optimizer) as scaled:
        scaled.backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            continue
        torch.testing.assert_close(parameter.grad.float(), other.grad, atol=5e-3, rtol=3e-2)


def test_p11_bf16_works_double_stays_and_newer_operators_have_rules() -> None:
    for level in LEVELS[1:]:
        model, optimizer = started(level, cast_model_type=BF16)
        update(model, optimizer)
    started("O1")
    half, wide = torch.rand(3, 3).half(), torch.rand(3, 3)
    assert torch.einsum("ij,jk->ik", wide, wide).dtype is HALF
    x = torch.rand(1, 2, 4, 8)
    assert F.scaled_dot_product_attention(x, x, x).dtype is HALF
    assert half.softmax(-1).dtype is torch.softmax(half, -1).dtype is torch.logsumexp(half, -1).dtype is FP32
    assert torch.linalg.norm(half).dtype is F.huber_loss(half, half).dtype is torch.cdist(half, half).dtype is FP32
    assert F.rms_norm(half, (3,)).dtype is FP32
    double = torch.rand(3, 3, dtype=torch.float64)
    assert (double @ double).dtype is (double * wide).dtype is torch.float64


Pair = namedtuple("Pair", "logits number")


class Output(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, kind: str, steps: Any = ()) -> Any:
        y = self.layer(x)
        return {"named": Pair(y, 3), "output": Output(logits=y), "list": [y, (y, "text")]}[kind]

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 1}


@pytest.mark.parametrize("level", LEVELS)
def test_p12_outputs_keep_their_types_and_anything_may_be_an_argument(level: str) -> None:
    model, _ = started(level, Container())
    dtype = HALF if level == "O1" else FP32
    named = model(X, "named", steps=range(3))
    assert type(named) is Pair and named.logits.dtype is dtype and named.number == 3
    output = model(X, kind="output", steps={"a": [None]})
    assert type(output) is Output and output.logits.dtype is dtype
    listed = model(X, "list", object())
    assert type(listed) is list and type(listed[1]) is tuple and listed[1][0].dtype is dtype
    state = model.state_dict()
    assert state["_extra_state"] == {"version": 1}
    model.load_state_dict(state)


def test_p13_everything_here_runs_on_cpu_tensors() -> None:
    assert not any(p.is_cuda for p in started("O2")[0].parameters())


def test_p14_a_tuple_of_optimizers_is_a_list_and_exceptions_lose_nothing() -> None:
    """See test_training: exceptions in the block, a step that raises, lists and tuples."""
    model, optimizer = started("O1")
    with pytest.raises(ValueError), amp.disable_casts():
        raise ValueError
    assert (X @ X.T).dtype is HALF
    with amp.scale_loss(model(X).float().sum() * 1e-3, (optimizer,)) as scaled:
        scaled.backward()
    first = model[0].weight.grad.clone()
    with amp.scale_loss(model(X).float().sum() * 1e-3, (optimizer,)) as scaled:
        scaled.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * first)


def test_p15_a_checkpoint_survives_a_run_without_amp() -> None:
    model, optimizer = started("O2", num_losses=2)
    update(model, optimizer)
    saved = amp.state_dict()
    plain = nn.Linear(6, 3)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    amp.initialize(plain, plain_optimizer, enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict(saved)
    update(plain, plain_optimizer)
    assert amp.state_dict() == saved
    started("O2", num_losses=2)
    assert amp.state_dict() != saved
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved


@pytest.mark.parametrize("dtype", [None, BF16])
def test_p16_weights_edited_by_hand_between_forwards_are_never_stale(dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {} if dtype is None else {"cast_model_type": dtype}
    for level in LEVELS[1:]:
        if level == "O1" or dtype is None:
            model, _ = started(level, **options)
            model.eval()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for edit in (lambda p: p.data.zero_(), lambda p: p.data.add_(1.0)):
                    with torch.no_grad():
                        before = model(X).clone()
                        edit(model[2].weight)  # type: ignore[no-untyped-call]
                        assert not torch.equal(model(X), before), level
            assert not said, level
    started("O1", **options)
    weight = nn.Parameter(torch.rand(6, 6))
    before = X @ weight
    weight.data.add_(1.0)
    assert not torch.equal(X @ weight, before)


def test_p16_nothing_of_a_model_that_is_gone_is_kept_alive() -> None:
    import gc
    import weakref

    started("O1")
    model = nn.Linear(6, 3)
    model(X).sum().backward()
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None


def test_p17_scripts_and_compiled_functions_still_work_under_o1() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, dim=-1) + 1

    started("O1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted: Any = torch.jit.script(function)
    assert torch.allclose(scripted(X[:, :4]).float(), function(X[:, :4]), atol=1e-2)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X[:, :4]), function(X[:, :4])) and compiled(X[:, :4]).dtype is FP32
    torch._dynamo.reset()


def test_p17_a_compiled_model_trains_under_every_level() -> None:
    for level in LEVELS:
        torch._dynamo.reset()
        model, optimizer = started(level)
        expected = model(X)
        compiled: Any = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(X), expected)
        update(compiled, optimizer)
    torch._dynamo.reset()


def test_p18_the_check_reads_one_flag_a_pass() -> None:
    model, optimizer = started("O2")
    scaler = _amp_state.loss_scalers[0]._scaler
    for number in range(1, 4):
        update(model, optimizer)
        assert scaler.host_reads == number


def test_p19_a_static_scale_skips_bad_steps_and_says_so_once() -> None:
    for level in ("O1", "O2", "O3"):
        model, optimizer = started(level, loss_scale=128.0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.warns(UserWarning, match="static loss scale 128.0.*0.weight") as caught:
            for _ in range(3):
                with amp.scale_loss(model(X).float().sum() * float("inf"), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(caught) == 1
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
