"""torch.autocast as a decorator of a generator function has no effect on its body."""

import torch


def main() -> int:
    """Read in a decorated generator whether autocast is on; return 1 if it is not (and nothing was raised)."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def batches():
        yield torch.is_autocast_enabled("cpu")

    try:
        found = next(iter(batches()))
    except (RuntimeError, TypeError) as error:  # a refusal would do
        print(f"found:    it is refused: {error}")
        return 0
    print("expected: the body runs under autocast (as under torch.no_grad()), or the decorator refuses it")
    print(f"found:    autocast is {'on' if found else 'off'} in the body")
    return int(not found)


if __name__ == "__main__":
    raise SystemExit(main())
