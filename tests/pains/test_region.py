"""Where a region holds: it ends where it should, and goes with the model to threads, recomputation, compilers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from tests.pains.pain import pain

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
X, W = torch.randn(4, 8), torch.randn(8, 8)


def product() -> torch.dtype:
    return F.linear(X, W).dtype


@pain(12, torch_fails_with=AssertionError, saying="left the region on")
def test_an_object_entered_twice_ends_what_it_began(amp: Any) -> None:
    region = amp.autocast("cpu", dtype=BF16)
    with region:
        with region:
            assert product() is BF16
    assert product() is FP32, "entering one object twice left the region on for the whole thread"


@pain(12, torch_fails_with=AssertionError, saying="left the region on")
def test_a_recursive_function_can_be_decorated(amp: Any) -> None:
    @amp.autocast("cpu", dtype=BF16)
    def down(depth: int) -> torch.dtype:
        return down(depth - 1) if depth else product()

    assert down(3) is BF16
    assert product() is FP32, "a decorated recursive function left the region on for the whole thread"


@pain(12, torch_fails_with=AssertionError, saying="left the region on")
def test_suspended_generators_end_what_they_began(amp: Any) -> None:
    def batches() -> Iterator[int]:
        with amp.autocast("cpu", dtype=BF16):
            yield 1

    first, second = batches(), batches()
    next(first), next(second)
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]
    assert product() is FP32, "two suspended generators left the region on for the whole thread"


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Recompute(Function):
    """Call a model in the forward pass and again in the backward pass, as re-entrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module, seen: list[torch.dtype]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.model, ctx.seen = model, seen
        out: Tensor = model(x)
        seen.append(out.dtype)
        return out.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            again = ctx.model(x)
            ctx.seen.append(again.dtype)
            return torch.autograd.grad(again, x, grads[0].to(again.dtype))[0], None, None


@pain(14, torch_fails_with=AssertionError, saying="backward in torch.float32")
def test_a_backward_pass_in_another_thread_recomputes_in_the_forwards_format(amp: Any) -> None:
    """Autograd's device threads, which a CPU does not have, stand aside for a thread of our own."""
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(8, 8))
    amp.bind(model, "fp16")
    with amp.around("fp16"):
        out = Recompute.apply(X.clone().requires_grad_(), model, seen)  # type: ignore[no-untyped-call]
    in_a_thread(out.sum().backward)
    assert seen[0] is HALF
    assert seen[1] is HALF, f"the model ran forward in {seen[0]} and backward in {seen[1]}"


@pain(15, torch_fails_with=AssertionError, saying="replicas ran in .*bfloat16")
def test_replicas_in_threads_run_in_the_format_asked_for(amp: Any) -> None:
    """A CPU has no DataParallel: its threads are started here, with what torch's parallel_apply hands them."""
    model = nn.Sequential(nn.Linear(8, 8))
    amp.bind(model, "fp16")
    found: list[torch.dtype] = []

    def run(replica: nn.Module, enabled: bool) -> None:
        with torch.autocast("cpu", enabled=enabled):  # parallel_apply passes on whether, not in which format
            found.append(replica(X).dtype)

    with amp.around("fp16"):
        for _ in range(2):
            in_a_thread(partial(run, model._replicate_for_data_parallel(), torch.is_autocast_enabled("cpu")))
    assert found == [HALF, HALF], f"the region is fp16 and its replicas ran in {found}"


class Island(nn.Module):
    """A part of a user's model that switches autocast off for itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.inner(x.float())
            return out


@pain(16, torch_fails_with=AssertionError, saying="gradients of the compiled model differ")
def test_a_compiled_backward_keeps_the_fp32_part_in_fp32(amp: Any) -> None:
    torch._dynamo.reset()
    head = nn.Linear(16, 16, bias=False)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), Island(head))
    amp.bind(model, "bf16")
    x, weights = torch.randn(8, 16), torch.linspace(0, 1, 16)
    gradients: list[Tensor] = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        head.zero_grad()
        with amp.around("bf16"):
            out = run(x)
        (out.float() * weights).sum().backward()
        assert head.weight.grad is not None
        gradients.append(head.weight.grad.clone())
    error = float((gradients[0] - gradients[1]).abs().max())
    assert error == 0.0, f"gradients of the compiled model differ by {error:.1e} where the region is off"


@pain(42, torch_fails_with=AssertionError, saying="nothing was cast")
def test_a_region_is_for_the_device_that_is_there(amp: Any) -> None:
    with amp.region_for_any_device():
        assert product() is BF16, "the region was made for CUDA and nothing was cast"


@pain(42, torch_fails_with=AssertionError, saying="loss was scaled by 1")
def test_a_scaler_works_where_the_loss_is(amp: Any) -> None:
    scale = amp.GradScaler().scale(torch.ones(())).item()
    assert scale == 2.0**16, f"the loss was scaled by {scale:g}"
