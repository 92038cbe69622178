"""Fused optimizers on a CPU update wrong elements of a parameter that has gaps in memory."""

import torch


def main() -> int:
    """Step a slice of a larger tensor by the for-loop form and by the fused one; return 1 if they differ."""
    wrong = 0
    print("expected: the fused form writes what the for-loop form writes, into the slice alone")
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        wholes = []
        for fused in (False, True):
            whole = torch.zeros(4, 8)
            weight = torch.nn.Parameter(whole[:, :4])  # rows of 4 elements, 8 apart
            weight.grad = torch.arange(1.0, 17.0).reshape(4, 4)
            try:
                kind([weight], lr=0.5, fused=fused).step()
            except RuntimeError as error:  # a refusal would do
                print(f"found:    {kind.__name__} refuses: {str(error).splitlines()[0]}")
                break
            wholes.append(whole)
        if len(wholes) == 2:
            inside = int((wholes[0] != wholes[1])[:, :4].sum())
            outside = int((wholes[1][:, 4:] != 0).sum())
            print(f"found:    {kind.__name__}: {inside} of 16 elements differ, {outside} beside the slice were written")
            wrong |= inside + outside > 0
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
