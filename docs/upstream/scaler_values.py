"""GradScaler.scale of a dict returns a map object, and update(1024) raises AttributeError."""

import torch


def main() -> int:
    """Scale a dict of losses and set the scale to a whole number; return 1 if either does not work."""
    scaler = torch.amp.GradScaler("cpu")
    found = []
    try:
        found.append(type(scaler.scale({"a": torch.ones(())})).__name__)
    except ValueError:  # a refusal would do
        found.append("dict")
    scaler.scale(torch.ones(()))
    try:
        scaler.update(1024)
        found.append("set")
    except (AttributeError, AssertionError) as error:
        found.append(f"{type(error).__name__}: {error}")
    print("expected: ['dict', 'set'], or errors that name the argument")
    print(f"found:    {found}")
    return int(found != ["dict", "set"])


if __name__ == "__main__":
    raise SystemExit(main())
