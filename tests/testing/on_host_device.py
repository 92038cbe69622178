"""What `test_host_device` runs in a process with the host device: the same programs there and on the CPU."""

from __future__ import annotations

import copy
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import halfstep as hs
from halfstep.accelerators import Landing
from halfstep.cli import doctor as command
from halfstep.compat.apex import amp
from halfstep.scale.alarm import DelayedFlag
from halfstep.tasks.speed import Sizes
from halfstep.testing import host_device
from halfstep.testing.host_device import HostDeviceError

NAME = "npu"
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "Lion": lambda p: hs.Lion(p, lr=1e-3),
}
"""With a form chosen: which one torch takes by itself, and TrainStep for it, depends on the device."""

WIDE_NORMS = {"fp32": ["layer_norm", "batch_norm"]}
"""torch's CPU kernels take low inputs with fp32 weights, which those of other devices do not: norms run in fp32."""

HERE = {"cpu": "bf16", NAME: "fp16"}
"""What dtype="auto" means on two devices."""

POLICIES = {
    "O0": hs.Policy.of("O0"),
    "mixed": hs.Policy.of("mixed", dtype="bf16").with_ops(**WIDE_NORMS),
    "O1": hs.Policy.of("O1", dtype="bf16"),
    "pure": hs.Policy.of("pure", dtype="bf16"),
    "split": hs.Policy.of("pure", dtype="bf16", master="split"),
    "lean": hs.Policy.of("lean", dtype="bf16"),
    "O2 in fp16": hs.Policy.of("O2", dtype="fp16", emulate="always").with_ops(**WIDE_NORMS),
    "fp8": hs.Policy.of("mixed", dtype="fp8_e4m3").with_ops(**WIDE_NORMS),
}
"""Policies whose arithmetic is the same on every device: no format or rule of theirs is chosen by one."""


def net(device: Any) -> nn.Sequential:
    """A model whose parameters have the same bits on every device."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.LayerNorm(32))
    made = nn.Sequential(*layers, nn.GELU(), nn.Linear(32, 10))
    return made.to(device)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def batches(device: Any, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(count)]
    return [(x.to(device), y.to(device)) for x, y in made]


def bits(model: nn.Module) -> list[Any]:
    """Return all values of a model, as lists."""
    return [value.cpu().float().tolist() for value in model.state_dict().values()]


def by_step(device: Any, policy: hs.Policy, optimizer: str) -> Any:
    model = net(device)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    step = hs.TrainStep(model, stepped, loss_fn, policy=policy, clip_norm=1.0, accumulate=2)
    results = [step(x, y).host() for x, y in batches(device)]
    return [(r.loss, r.scale, r.skipped) for r in results], bits(model)


def by_prepare(device: Any, policy: hs.Policy, optimizer: str) -> Any:
    model: nn.Module = net(device)
    model, stepped, scaler = hs.prepare(model, OPTIMIZERS[optimizer](model.parameters()), policy=policy)
    losses = []
    for x, y in batches(device):
        loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(stepped)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(stepped)
        scaler.update()
        stepped.zero_grad()
        losses.append((loss.item(), scaler.get_scale()))
    return losses, bits(model)


def by_region(device: Any, policy: hs.Policy, optimizer: str) -> Any:
    """Two regions nested, and a scaler that meets a bad gradient in its second step."""
    model = net(device)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    scaler = hs.GradScaler(torch.device(device).type, init_scale=2.0**12)
    weight: Any = model[4].weight
    found = []
    for index, (x, y) in enumerate(batches(device)):
        with hs.autocast(policy=policy):
            loss = loss_fn(model, x, y)
            with hs.autocast(torch.device(device).type, enabled=False):
                loss = loss + weight.square().mean()
        scaler.scale(loss).backward()
        if index == 1:
            weight.grad[0, 0] = torch.inf
        scaler.step(stepped)
        scaler.update()
        stepped.zero_grad()
        found.append((loss.item(), scaler.get_scale()))
    return found, bits(model)


def equal(device: torch.device) -> dict[str, Any]:
    """Return for each case "" where both devices gave the same, else what differs."""
    verdicts = {}
    for name, policy in POLICIES.items():
        optimizer = {"pure": "SGD", "lean": "Lion"}.get(name, "AdamW")
        ways: list[Callable[..., Any]] = [by_step, by_prepare]
        ways += [by_region] if policy.params == "fp32" else []
        for way in ways:
            there, here = way(device, policy, optimizer), way("cpu", policy, optimizer)
            same = "" if there == here else f"{there[0]} instead of {here[0]}"
            verdicts[f"{way.__name__} {name} {optimizer}"] = same
    return verdicts


def training_on(device: Any) -> dict[str, Any]:
    """A step on the device: a bad one is skipped, metrics arrive, a checkpoint goes on with the same bits."""
    model = nn.Sequential(net("cpu"), nn.Dropout(0.5), nn.Linear(10, 10)).to(device)
    policy = hs.Policy.of("O2", dtype="fp16")
    step = hs.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, policy=policy, clip_norm=1.0)
    metrics = step.metrics(every=1)
    good = batches(device)
    bad = (torch.full_like(good[0][0], torch.inf), good[0][1])
    skipped = [step(*batch).host().skipped for batch in (good[0], bad, good[1])]
    verdict = step.explain()
    assert verdict is not None
    with tempfile.TemporaryDirectory() as folder:
        hs.save(step, folder)
        first = [step(*batch).host().loss for batch in good]
        after = bits(model)
        other = nn.Sequential(net("cpu"), nn.Dropout(0.5), nn.Linear(10, 10)).to(device)
        again = hs.TrainStep(other, torch.optim.AdamW(other.parameters()), loss_fn, policy=policy, clip_norm=1.0)
        torch.randn(3, device=device)  # the generator is elsewhere
        hs.load(again, folder)
        second = [again(*batch).host().loss for batch in good]
        same = first == second and after == bits(other)
    return {
        "skipped": skipped,
        "resumed": same,
        "metrics": [record.skipped for record in metrics.flush()],
        "verdict": [verdict.kind, verdict.cause, verdict.op, verdict.module, verdict.phase, verdict.line],
    }


def instruments(device: torch.device) -> dict[str, Any]:
    model = nn.Sequential(*net(device), nn.Dropout(0.5))
    before = torch.npu.get_rng_state(), torch.get_rng_state()  # type: ignore[attr-defined]
    audit = hs.audit(model, batches(device, 2), loss_fn, policy=hs.Policy.of("mixed", dtype="fp16"), steps=2)
    after = torch.npu.get_rng_state(), torch.get_rng_state()  # type: ignore[attr-defined]
    plan = hs.resolve(hs.Policy.of("mixed"), model)
    monitored = hs.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, policy=POLICIES["mixed"])
    monitor = hs.Monitor(monitored, every=1)
    seen = []
    for x, y in batches(device):
        monitored(x, y)
        seen += [record.step for record in monitor.flush()]
    return {
        "audited": len(audit.rows) > 5,
        "as before": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "auto": [plan.device, plan.policy.dtype, hs.policy.units(NAME).reason],
        "monitored": seen,
    }


def rules() -> dict[str, Any]:
    """Autocast is torch's own there, and a rule of the user's holds in it."""

    @hs.operator("fp32", name="tests::energy")
    def energy(x: Tensor) -> Tensor:
        return x.square().sum(-1)

    x = torch.ones(4, 4, device=NAME)
    with torch.autocast(NAME, torch.float16):
        kinds = [x @ x, F.softmax(x.half(), -1), F.layer_norm(x.half(), (4,)), torch.cat([x, x.half()]), x.half().sum()]
        custom = energy(x.half())
    with hs.autocast(NAME, dtype=torch.float16):
        region = [x @ x, F.softmax(x.half(), -1)]
    return {
        "torch": [str(kind.dtype) for kind in kinds],
        "custom": str(custom.dtype),
        "region": [str(kind.dtype) for kind in region],
    }


def device_itself(device: torch.device) -> dict[str, Any]:
    x = torch.arange(6.0, device=device).view(2, 3)
    view = x.t()[1:]
    view.add_(1)
    generator = torch.Generator(device).manual_seed(3)
    drawn = torch.randn(4, device=device, generator=generator)
    torch.manual_seed(5)
    global_ = torch.randn(4, device=device)
    now, mine = torch.get_rng_state(), torch.npu.get_rng_state()  # type: ignore[attr-defined]
    F.dropout(x)
    refused = []
    for name in ("other", "cuda"):
        try:
            host_device(name)
        except HostDeviceError as error:
            refused.append(str(error))
    out = torch.empty(0, device=device)
    torch.add(x, x, out=out)
    return {
        "type": [type(x) is Tensor, str(x.device), x.is_cpu, str(torch.accelerator.current_accelerator())],
        "views": x.tolist(),
        "out": out.shape == (2, 3) and torch.equal(out.cpu(), 2 * x.cpu()),
        "drawn": torch.equal(drawn.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3))),
        "dropped": [torch.equal(now, torch.get_rng_state()), torch.equal(mine, torch.npu.get_rng_state())],  # type: ignore[attr-defined]
        "global": torch.equal(global_.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(5))),
        "copied": copy.deepcopy(nn.Linear(2, 2).to(device)).weight.device.type,
        "again": str(host_device(NAME)),
        "refused": refused,
    }


def moved(device: torch.device) -> dict[str, Any]:
    """A model that is moved after `hs.prepare` computes there as its policy says."""
    formats = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        formats.append(str(output.dtype))

    model = hs.prepare(net("cpu"), policy=POLICIES["mixed"])
    model[4].register_forward_hook(note)
    for place in ("cpu", device, "cpu"):
        model.to(place)(batches(place, 1)[0][0])
    refused, words = hs.prepare(net("cpu"), policy=hs.Policy.of("mixed")), ""
    with mock.patch("halfstep.binding.bind.resolved", lambda policy, kind: policy.replace(dtype=HERE[kind])):
        refused.to(device)  # no error yet: it may be on its way to a file
        words = error_of(refused, device)
    return {"formats": formats, "refused": words, "placed": placed(device)}


def error_of(model: nn.Module, device: torch.device) -> str:
    """Return the first line of the error of a call, or ""."""
    try:
        model(batches(device, 1)[0][0])
    except hs.HalfstepError as error:
        return str(error).partition("\n")[0]
    return ""


def place(module: nn.Module, device: Any) -> None:
    """Replace every parameter and buffer one by one, as a device map does."""
    for part in module.modules():
        for name, own in part._parameters.items():
            part._parameters[name] = None if own is None else nn.Parameter(own.detach().as_subclass(Tensor).to(device))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


def placed(device: torch.device) -> dict[str, Any]:
    """A prepared model whose parts are moved or replaced on their own: formats of a layer's output, or the error."""

    def by_child(model: nn.Module, device: Any) -> None:
        for child in model.children():
            child.to(device)

    found: dict[str, Any] = {}
    ways: dict[str, Any] = {"replaced": place, "children": by_child, "to_empty": lambda m, d: m.to_empty(device=d)}
    for way, move in ways.items():
        formats: list[str] = []
        model = hs.prepare(net("cpu"), policy=POLICIES["mixed"]).eval()
        model[4].register_forward_hook(lambda module, args, output, seen=formats: seen.append(str(output.dtype)))
        with torch.no_grad():
            for there in ("cpu", device, "cpu"):  # with low copies of the weights that are replaced
                move(model, there)
                model(batches(there, 1)[0][0])
        found[way] = formats
    low = hs.prepare(net("cpu"), policy=hs.Policy.of("O2", dtype="bf16"))
    place(low, device)
    found["low"] = error_of(low, device)
    return found


def reads(device: torch.device) -> dict[str, int]:
    """Return how often 5 updates by optimizers without a form of the user's choice read the device."""
    found = {}
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        model = net(device)
        step = hs.TrainStep(model, kind(model.parameters(), lr=0.01), loss_fn, policy=POLICIES["mixed"])
        for x, y in batches(device, 5):
            step(x, y)
        found[kind.__name__] = step.host_reads
    return found


class PinsAsCuda(TorchFunctionMode):
    """CUDA's refusal to pin memory that is not the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory") and made.device.type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return made


def default_device(device: torch.device) -> list[bool]:
    """Return whether the updates of a step that is built and called under this default device were applied."""
    updated = []
    with PinsAsCuda(), device:
        for blackbox in (True, False):
            model = nn.Linear(8, 8)
            step = hs.TrainStep(model, torch.optim.AdamW(model.parameters()), square, blackbox=blackbox)
            metrics, monitor = step.metrics(every=1), hs.Monitor(step, every=1)
            updated += [step(torch.ones(4, 8)).host().updated for _ in range(3)]
            updated += [len(metrics.flush()) == 3, len(monitor.flush()) == 1]
    return updated


def streams(device: torch.device) -> list[int]:
    """Return the devices on whose streams events are recorded while another device is current, each once."""
    current, recorded = [1], set[int]()

    class Event:
        def record(self, stream: int | None = None) -> None:
            recorded.add(current[-1] if stream is None else stream)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    def stream(device: Any = None) -> int:
        return current[-1] if device is None else int(torch.device(device).index)

    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=POLICIES["mixed"], scheduler=scheduler)
    metrics, monitor, alarm = step.metrics(every=1), hs.Monitor(step, every=1), DelayedFlag()
    module: Any = torch.get_device_module(device)
    with mock.patch.multiple(module, Event=Event, current_stream=stream):
        for x, y in batches(device, 3):
            alarm.read(step(x, y).skipped)
        metrics.flush()
        monitor.flush()
    return sorted(recorded)


def apex(device: torch.device) -> list[float]:
    """Return the losses of a program with Apex's O2, whose casts last as long as the process."""
    model = net(device)
    model, stepped = amp.initialize(
        model, OPTIMIZERS["SGD"](model.parameters()), opt_level="O2", loss_scale="dynamic", verbosity=0
    )
    losses = []
    for x, y in batches(device):
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, stepped) as scaled:
            scaled.backward()
        stepped.step()
        stepped.zero_grad()
        losses.append(loss.item())
    return losses


def doctor() -> dict[str, Any]:
    """`halfstep doctor --device npu`, in sizes that take no time."""
    sizes = Sizes(product=8, small_product=8, image=(1, 4, 4), small_image=(1, 4, 4), seconds=0.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "doctor.json")
        tiny = mock.patch.object(command, "sizes_for", lambda kind, quick: sizes)
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()), tiny:
            code = command.carry_out(NAME, quick=True, json=path)
        report = json.loads(path.read_text(encoding="utf-8"))
    return {
        "code": code,
        "accelerator": report["machine"]["accelerator"],
        "units": report["units"][0],
        "optimizers": sorted({one["problem"] for one in report["optimizers"]}),
        "printed": f"Use on {NAME}" in printed.getvalue(),
    }


def run() -> dict[str, Any]:
    device = host_device(NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats without units on this CPU
        return {
            "device": device_itself(device),
            "rules": rules(),
            "equal": equal(device),
            "training": {NAME: training_on(device), "cpu": training_on("cpu")},
            "sent": sorted(Landing().devices),
            "default device": default_device(device),
            "streams": streams(device),
            "instruments": instruments(device),
            "doctor": doctor(),
            "apex": apex(device),
            "moved": moved(device),
            "reads": reads(device),
        }


if __name__ == "__main__":
    print(json.dumps(run()), flush=True)
    os._exit(0)  # torch's backward thread of the device can abort a process that ends under load
