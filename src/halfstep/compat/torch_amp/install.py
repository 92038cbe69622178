"""install: torch.amp's public names are those of this package in this process, and follow a policy.

`halfstep run --policy mixed train.py` does this for scripts that import the names from torch: regions follow the policy
instead of torch's operator lists.

Note [what stays torch's]: code of torch gets torch's class, because checkpointing and torch.compile restore autocast's
own state with it, and halfstep restores its rules there itself. The exception is DataParallel, which opens the region
of its caller in other threads. The modules in which torch defines the names (``torch.amp.autocast_mode``,
``torch.amp.grad_scaler``) keep them: Dynamo identifies autocast by these, and would trace any class in their place as
a region with torch's lists. `unserved` finds the scripts that import from there.
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch.cpu.amp
import torch.cuda.amp
from torch.optim.optimizer import register_optimizer_step_post_hook

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.compat.torch_amp.served import Served, installed

CUSTOM = ("custom_fwd", "custom_bwd")
NAMES: dict[Any, tuple[Any, tuple[str, ...]]] = {
    torch: (torch_amp, ("autocast",)),
    torch.amp: (torch_amp, ("autocast", "GradScaler", *CUSTOM)),
    torch.cuda.amp: (torch_amp.cuda, ("autocast", "GradScaler", *CUSTOM)),
    torch.cpu.amp: (torch_amp.cpu, ("autocast", "GradScaler")),
}
"""Module of torch -> ours, and the names that are ours while installed."""

_back = ExitStack()  # gives torch its names back


def install(policy: hs.Policy) -> Served:
    """Let torch.amp's public names follow `policy` in this process, until `uninstall` or another `install`.

    A format that `policy` names is that of every region that is on; with ``dtype="auto"`` each has the script's. A loss
    scale that it names is that of every scaler; with ``scale="auto"`` scalers have the script's arguments and torch's
    default values.

    Returns:
        What counts their use.

    Raises:
        PolicyError: `policy` needs a model: it lowers parameters, has rules for modules, and so on.
    """
    hs.autocast(policy=policy.replace(scale="auto"))  # refuses what a region cannot carry out
    uninstall()
    served = Served(policy)
    installed.append(served)
    _back.callback(register_optimizer_step_post_hook(served.stepped).remove)
    for module, (ours, names) in NAMES.items():
        for name in names:
            _back.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, getattr(ours, name))
    return served


def uninstall() -> None:
    """Give torch its names back. Regions and scalers that were made follow the policy still; new ones none."""
    _back.close()
    installed.clear()
