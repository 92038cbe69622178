"""An autocast object that is entered again while it is open leaves autocast on for the thread."""

import torch


def main() -> int:
    """Enter one object twice, and call a decorated recursive function; return 1 if autocast is on afterwards."""
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    with region, region:
        pass
    nested = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def down(depth: int) -> None:
        if depth:
            down(depth - 1)

    down(2)
    recursive = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    print("expected: autocast is off after the last exit")
    print(f"found:    on after `with region, region`: {nested}; on after a decorated recursion: {recursive}")
    return int(nested or recursive)


if __name__ == "__main__":
    raise SystemExit(main())
