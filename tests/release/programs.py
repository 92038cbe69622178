"""Programs that `tests.release.check` runs where only the wheel is installed, with one extra each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STEP = """
import torch, halfstep as hs
model = torch.nn.Linear(4, 2)
step = hs.TrainStep(model, torch.optim.AdamW(model.parameters()), lambda m, x: m(x).square().mean(), policy="O2")
result = step(torch.ones(3, 4)).host()
assert result.updated, result
print(hs.__file__, hs.step.cpu_kernels(), sep="\\n")
"""

LOGGERS = """
import importlib, logging, halfstep as hs
for name in ("mlflow", "tensorboard", "wandb"):
    importlib.import_module(name)
print(sorted(hs.integrations.loggers.__all__))
"""

FP8 = STEP.replace("Linear(4, 2)", "Sequential(torch.nn.Linear(16, 16))").replace("ones(3, 4)", "ones(16, 16)")
FP8 = FP8.replace('policy="O2"', 'policy=hs.Policy.of("O2", dtype="bf16").with_modules({"0": "fp8"})')

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tasks": (
            "halfstep",
            "compare",
            "--task",
            "lenet5",
            "--steps",
            "2",
            "--seeds",
            "1",
            "--html",
            "{out}/a.html",
        ),
        "transformers": ("python", "{examples}/frameworks/transformers_trainer.py"),
        "accelerate": ("python", "{examples}/frameworks/accelerate_loop.py"),
        "lightning": ("python", "{examples}/frameworks/lightning_module.py"),
        "timm": ("python", "{examples}/frameworks/timm_loop.py"),
        "fp8": ("python", "-c", FP8),
        "loggers": ("python", "-c", LOGGERS),
    }
)
"""Extra -> a command that needs it. `docs`, `notebooks`, `bench` and `dev` need the tree, and have targets."""
