"""parallel_apply (DataParallel) gives its threads the switch of autocast and not its dtype."""

import torch
from torch.nn.parallel.parallel_apply import parallel_apply


class Probe(torch.nn.Module):
    """Return the format in which it computes."""

    def __init__(self) -> None:
        """Hold one layer."""
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.dtype:
        """Return the dtype of a product."""
        return self.layer(x).dtype


def main() -> int:
    """Run two CUDA replicas' worth of modules under a bf16 region; return 1 if they compute in another format."""
    if not torch.cuda.is_available():
        print("not applicable: parallel_apply reads the state of CUDA's autocast, and there is no CUDA device")
        return 2
    replicas, inputs = [Probe().cuda() for _ in range(2)], [(torch.ones(2, 2, device="cuda"),)] * 2
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = parallel_apply(replicas, inputs, devices=[0, 0])
    print("expected: torch.bfloat16 in both replicas")
    print(f"found:    {found}")
    return int(found != [torch.bfloat16] * 2)


if __name__ == "__main__":
    raise SystemExit(main())
