"""custom_fwd(cast_inputs=...) raises for a named tuple and turns an OrderedDict into a dict."""

from collections import OrderedDict, namedtuple

import torch

Pair = namedtuple("Pair", "a b")


def received(argument: object) -> str:
    """Return the type in which `forward` receives an argument, or the error."""
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, container):
            seen.append(type(container).__name__)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            Probe.apply(torch.ones(1), argument)
        except TypeError as error:
            return f"TypeError: {error}"
    return seen[0]


def main() -> int:
    """Pass a named tuple and an ordered mapping; return 1 unless both arrive as they are."""
    half = torch.ones(1, dtype=torch.bfloat16)
    found = [received(Pair(half, half)), received(OrderedDict(a=half))]
    print("expected: ['Pair', 'OrderedDict']")
    print(f"found:    {found}")
    return int(found != ["Pair", "OrderedDict"])


if __name__ == "__main__":
    raise SystemExit(main())
