"""A checkpoint called by hand under amp changes no gradient, whether casts belong to the process or to the model."""

from __future__ import annotations

import pytest
import torch

from halfstep.compat.apex import amp
from halfstep.compat.apex.amp.handle import close_casts
from tests.cast.checkpointed import FUNCTIONS
from tests.compat.test_checkpointed import Checkpointed


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_levels(level: str, reentrant: bool) -> None:
    for called in ("linear", "softmax", "layer_norm", "exp", "attention", "cross_entropy"):
        found = []
        for how in (None, reentrant):
            model = Checkpointed(FUNCTIONS[called], how)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            loss = model(torch.eye(4).requires_grad_()).float().square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            found.append(next(model.parameters()).detach().clone())
            close_casts()
        assert torch.equal(*found), called
