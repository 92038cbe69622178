"""TrainingArguments(bf16=True) turns bf16 on for TrainingArguments that are made later in the same process."""

import os
import tempfile

try:
    import accelerate
    import transformers
except ImportError:
    transformers = None


def main() -> int:
    """Make arguments with bf16 and arguments without; return 1 if the second run's accelerator is bf16."""
    if transformers is None:
        print("not applicable: no transformers")
        return 2
    before = os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            transformers.TrainingArguments(folder, bf16=True, use_cpu=True)
            transformers.TrainingArguments(folder, use_cpu=True)
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            found = accelerate.Accelerator(cpu=True).mixed_precision
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        if before is not None:
            os.environ["ACCELERATE_MIXED_PRECISION"] = before
    print("expected: no: the second arguments do not ask for mixed precision")
    print(f"found:    {found}")
    return int(found != "no")


if __name__ == "__main__":
    raise SystemExit(main())
