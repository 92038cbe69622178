"""Candidates of a comparison, by label: fp32, torch.amp, a preset, a policy's file."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import halfstep as hs
from halfstep.errors import TaskError, did_you_mean

SUFFIXES = ("bf16", "fp16", "fp32")  # behind the colon of a label
AMP, FP32 = "torch.amp", "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One policy or loop that trains a task."""

    label: str  # its name in tables and reports; unique in a comparison
    dtype: str  # the low format: "bf16", "fp16", or "fp32" for none
    policy: hs.Policy | None = None  # what halfstep carries out, or None for a loop of torch alone
    compile: bool = False  # whether the TrainStep of a policy has ``compile=True``


def default_format(device: str) -> str:
    """Return the low format of candidates that name none: bf16, or fp16 on an accelerator with units for that alone."""
    return "bf16" if device == "cpu" or hs.policy.units(device).bf16 else "fp16"


def default_labels(device: str) -> tuple[str, ...]:
    """Return what is compared by default: most presets, and two of them in fp16, emulated where there are no units."""
    labels = ("torch", "O1", "mixed", "O2", "lean", "mixed:fp16", "O2:fp16")
    return labels if device == "cpu" else (f"{AMP}:fp16", *labels)


def candidates(labels: Sequence[str], device: str) -> tuple[Candidate, ...]:
    """Return the candidates called `labels`, with fp32 and torch.amp before them, each once."""
    wanted = [_candidate(label, device) for label in (FP32, AMP, *labels)]
    unique: dict[str, Candidate] = {}
    for candidate in wanted:
        if unique.setdefault(candidate.label, candidate) != candidate:
            raise TaskError(f"two different policies are called {candidate.label!r}; give one another name in its file")
    return tuple(unique.values())


def amp_of(labelled: Iterable[Any]) -> Any:
    """Return the first of some candidates, or of what has their labels, that is torch.amp."""
    return next(each for each in labelled if each.label.startswith(AMP))


def policy_named(label: str, device: str) -> hs.Policy:
    """Return the policy called `label`; TaskError if there is none, or if it is a loop of torch alone."""
    policy = _candidate(label, device).policy
    if policy is None:
        raise TaskError(
            f"{label!r} is a training loop without halfstep and has no policy; preset 'O0' keeps everything in fp32, "
            "preset 'torch' has its lists"
        )
    return policy


def _candidate(label: str, device: str) -> Candidate:
    name, dtype = split_label(label)
    if name == FP32:
        if dtype not in ("", "fp32"):
            raise TaskError(f"policy {label!r}: fp32 has no other format")
        return Candidate(label=FP32, dtype="fp32")
    if name == AMP:
        made = dtype or default_format(device)
        if hs.formats.DTYPES[made] not in hs.formats.LOW_DTYPES:
            raise TaskError(f"policy {label!r}: torch.amp runs in bf16 or fp16")
        return Candidate(label=f"{AMP} {made}", dtype=made)
    if not name.endswith(".toml") and name not in hs.policy.PRESETS:
        known = (*hs.policy.PRESETS, FP32, AMP)
        if name == "auto":
            raise TaskError(f"policy {label!r} is measured by hs.TrainStep alone; there are {', '.join(known)}")
        raise TaskError(
            f"unknown policy {label!r}{did_you_mean(name, known)}; there are {', '.join(known)} and paths ending in "
            f".toml, each with :{' or :'.join(SUFFIXES)} behind it for another format"
        )
    policy = hs.Policy.of(name)
    if dtype or policy.dtype == "auto":
        policy = hs.Policy.of(policy, dtype=dtype or default_format(device))
    title = (policy.name or Path(name).stem) if name.endswith(".toml") else name
    return Candidate(
        label=title if policy.dtype == "fp32" else f"{title} {policy.dtype}", dtype=policy.dtype, policy=policy
    )


def split_label(label: str) -> tuple[str, str]:
    """Return the name and the format behind its last colon (or blank, as tables print it), "" if there is none."""
    for separator in (":", " "):
        name, found, dtype = label.strip().rpartition(separator)
        if found and dtype in SUFFIXES:
            return name.strip(), dtype
        if found and separator == ":" and not dtype.endswith(".toml"):
            raise TaskError(
                f"policy {label!r}: unknown format {dtype!r}{did_you_mean(dtype, SUFFIXES)}; "
                f"expected one of {', '.join(SUFFIXES)}"
            )
    return label.strip(), ""
