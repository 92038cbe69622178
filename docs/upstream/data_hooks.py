"""Assigning ``parameter.data`` of another dtype drops the hooks of its gradient accumulation, without an error."""

import torch


def main() -> int:
    """Hook a parameter's AccumulateGrad node as DistributedDataParallel does, assign .data; return 1 if it is lost."""
    calls = []
    weight = torch.nn.Parameter(torch.ones(2))
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # kept alive, as DistributedDataParallel keeps it
    node.register_hook(lambda *_: calls.append("called"))
    weight.sum().backward()
    weight.data = weight.data.to(torch.bfloat16)
    weight.data = weight.data.to(torch.float32)  # back to what it was
    weight.sum().backward()
    print("expected: the hook is called in both backward passes (or the assignment raises)")
    print(f"found:    it was called {len(calls)} time(s)")
    return int(len(calls) != 2)


if __name__ == "__main__":
    raise SystemExit(main())
