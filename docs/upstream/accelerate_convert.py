"""accelerate's convert_model stops at the first Linear whose sizes are not multiples of 16, without a word."""

import sys
import types
from unittest import mock

import torch
from torch import nn

try:
    import accelerate
    from accelerate.utils import transformer_engine as converter
except ImportError:
    accelerate = None


class Linear(nn.Linear):
    """Stands for transformer_engine.pytorch.Linear, which needs a GPU to import."""

    def __init__(self, *args: int, params_dtype: torch.dtype, **options: bool) -> None:
        """Take the arguments of Transformer Engine."""
        super().__init__(*args, dtype=params_dtype, **options)


def main() -> int:
    """Convert a model whose first layer cannot be converted; return 1 if the others were left out, too."""
    if accelerate is None:
        print("not applicable: no accelerate")
        return 2
    engine = types.ModuleType("transformer_engine")
    engine.pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.pytorch.Linear, engine.pytorch.LayerNorm = Linear, type("LayerNorm", (nn.LayerNorm,), {})
    modules = {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}
    model = nn.Sequential(nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    accelerate.Accelerator(cpu=True)  # whose state the conversion reads
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(converter, "is_transformer_engine_available", lambda: True),
        torch.no_grad(),
    ):
        converter.convert_model(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = [isinstance(layer, Linear) for layer in model]
    print("expected: [False, True, True]: the layer of 10 inputs is left out, the others are converted")
    print(f"found:    {found}")
    return int(found != [False, True, True])


if __name__ == "__main__":
    raise SystemExit(main())
