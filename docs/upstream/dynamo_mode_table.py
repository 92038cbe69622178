"""torch.compile fails where a TorchFunctionMode with a table has a row for an operator written as ``x ** 2``."""

import torch
from torch.overrides import TorchFunctionMode


class Table(TorchFunctionMode):
    """Call what a table holds for an operator."""

    def __init__(self, table: dict) -> None:
        """Keep the table."""
        super().__init__()
        self.table = table

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Look up the operator, and call what is found."""
        found = self.table.get(func)
        return found(*args, **(kwargs or {})) if found else func(*args, **(kwargs or {}))


def in_double(x: torch.Tensor, *others: object) -> torch.Tensor:
    """Compute a power in double precision."""
    return torch.pow(x.double(), *others)


def main() -> int:
    """Compile ``x ** 2`` under the mode; return 1 if that raises and the eager call does not."""
    table = dict.fromkeys((torch.Tensor.pow, torch.pow, torch.Tensor.__pow__), in_double)
    x = torch.ones(2)
    print("expected: torch.float64, eager and compiled")
    with Table(table):
        eager = (x**2).dtype
        try:
            compiled = torch.compile(lambda x: x**2, backend="eager")(x).dtype
        except Exception as error:
            print(f"found:    {eager}; compiled: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            return 1
        finally:
            torch._dynamo.reset()
    print(f"found:    {eager}, {compiled}")
    return int(eager != compiled)


if __name__ == "__main__":
    raise SystemExit(main())
