"""A CUDA graph capture that fails leaves the side stream current and random generators unable to draw."""

import torch


def main() -> int:
    """Let a capture fail and draw a random number; return 1 if stream or generator are not as before."""
    if not torch.cuda.is_available():
        print("not applicable: no CUDA device")
        return 2
    before, wrong = torch.cuda.current_stream(), 0
    x = torch.ones(4, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()  # forbidden in a capture
    except RuntimeError:
        pass
    print("expected: the stream that was current before, and random numbers as before")
    after = torch.cuda.current_stream()
    print(f"found:    stream {before.cuda_stream} before, {after.cuda_stream} afterwards")
    wrong |= before != after
    torch.cuda.set_stream(before)
    try:
        torch.rand(4, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"found:    torch.rand: {str(error).splitlines()[0]}")
        wrong = 1
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
