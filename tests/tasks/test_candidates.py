from __future__ import annotations

from pathlib import Path

import pytest

import halfstep as hs
from halfstep.errors import PolicyError
from halfstep.tasks import TaskError
from halfstep.tasks.candidates import candidates, default_labels


def labels(*wanted: str, device: str = "cpu") -> list[str]:
    return [c.label for c in candidates(wanted, device)]


def test_fp32_and_torch_amp_are_always_there_and_first() -> None:
    assert labels() == ["fp32", "torch.amp bf16"]
    assert labels("mixed", "fp32", "torch.amp") == ["fp32", "torch.amp bf16", "mixed bf16"]


def test_the_default_list_has_presets_that_train_and_emulated_fp16() -> None:
    assert labels(*default_labels("cpu"))[2:] == [
        "torch bf16", "O1 bf16", "mixed bf16", "O2 bf16", "lean bf16", "mixed fp16", "O2 fp16",
    ]  # fmt: skip
    assert "torch.amp fp16" not in labels(*default_labels("cpu"))  # tens of times slower than fp32 without fp16 units
    assert "torch.amp:fp16" in default_labels("cuda")


def test_a_label_names_preset_and_format() -> None:
    (found,) = candidates(["mixed:fp16"], "cpu")[2:]
    assert found.label == "mixed fp16" and found.dtype == "fp16"
    assert found.policy == hs.Policy.of("mixed", dtype="fp16")
    assert labels("mixed fp16", "mixed:fp16")[2:] == ["mixed fp16"]  # as tables print it works too
    assert labels("O0")[2:] == ["O0"]
    assert labels("torch.amp:fp16")[2:] == ["torch.amp fp16"]


def test_a_policy_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "careful.toml"
    file.write_text('preset = "mixed"\nname = "careful"\n')
    (found,) = candidates([f"{file}:fp16"], "cpu")[2:]
    assert found.label == "careful fp16"
    assert found.policy == hs.Policy.of("mixed", name="careful", dtype="fp16")
    file.write_text('preset = "mixed"\nname = ""\ndtype = "fp16"\n')
    assert labels(str(file))[2:] == ["careful fp16"]  # without a name the file's
    other = tmp_path / "other.toml"
    other.write_text('preset = "O1"\nname = "careful"\ndtype = "fp16"\n')
    with pytest.raises(TaskError, match="two different policies are called 'careful fp16'; give one another name"):
        labels(str(file), str(other))
    with pytest.raises(PolicyError, match="cannot read the policy file"):
        labels(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("mixd", r"unknown policy 'mixd'; did you mean 'mixed'\?; there are O0, torch, O1, mixed, O2"),
        ("auto", r"policy 'auto' is measured by hs.TrainStep alone; there are O0, torch"),
        ("torch.apm", r"unknown policy 'torch.apm'; did you mean 'torch.amp'\?"),
        ("mixed:bf61", r"policy 'mixed:bf61': unknown format 'bf61'; did you mean 'bf16'\?"),
        ("fp32:bf16", "policy 'fp32:bf16': fp32 has no other format"),
        ("torch.amp:fp32", "policy 'torch.amp:fp32': torch.amp runs in bf16 or fp16"),
    ],
)
def test_a_wrong_label_names_what_is_wrong_and_the_nearest(label: str, complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        candidates([label], "cpu")
