"""Models of transformers, served: outputs beside the prepared model's, and a folder in the low format that opens."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.trees import tensors

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model with values as after a training, and its inputs."""
    torch.manual_seed(0)
    t: Any = transformers
    made: Any
    given: dict[str, Any] = {"input_ids": IDS, "use_cache": False}
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 32}
        made = t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    elif name == "llama":
        made = t.LlamaForCausalLM(t.LlamaConfig(**SIZES, vocab_size=100, max_position_embeddings=64))
    elif name == "bert":
        made, given = t.BertForSequenceClassification(t.BertConfig(**SIZES, vocab_size=100)), {"input_ids": IDS}
    elif name == "vit":
        made = t.ViTForImageClassification(t.ViTConfig(**SIZES, image_size=16, patch_size=4))
        given = {"pixel_values": torch.randn(2, 3, 16, 16)}
    else:
        made = t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=100)
        )
        given |= {"decoder_input_ids": IDS}
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return made.eval(), given


def policy(name: str) -> hs.Policy:
    return hs.Policy.of(name, dtype="bf16")


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / a.float().norm())


NAMES = ["gpt2", "llama", "bert", "vit", "t5"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_a_program_are_equal_and_of_a_module_where_its_layers_decide(name: str) -> None:
    model, given = model_of(name)
    for preset in ("O2", "pure"):
        live = hs.prepare(copy.deepcopy(model), policy=policy(preset))
        with torch.inference_mode():
            expected, got = live(**given).logits, hs.lowered(live)(**given).logits
        if name in {"bert", "vit"} or (name in {"llama", "t5"} and preset == "pure"):
            assert torch.equal(expected, got.float())
        else:
            assert far(expected, got) < 0.015  # as far as bf16 itself is from fp32
    live = hs.prepare(copy.deepcopy(model), policy=policy("mixed"))
    run = hs.exported(live, kwargs=given).module()
    with torch.inference_mode():
        assert torch.equal(live(**given).logits, run(**given).logits)


@pytest.mark.hours
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["mixed", "torch", "O1", "O2", "pure", "O3"])
@pytest.mark.parametrize("name", [*NAMES, "lstm", "encoder"])
def test_outputs_of_a_program_are_equal_under_every_preset(name: str, preset: str, dtype: str) -> None:
    model: Any
    if name == "lstm":
        model, given = nn.LSTM(16, 16, batch_first=True).eval(), {"input": torch.randn(2, 9, 16)}
    elif name == "encoder":
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        model, given = nn.TransformerEncoder(layer, 2).eval(), {"src": torch.randn(2, 9, 32)}
    else:
        model, given = model_of(name)
    live = hs.prepare(model, policy=hs.Policy.of(preset, dtype=dtype))
    known = preset == "torch" and dtype == "bf16" and name in {"lstm", "encoder"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = hs.exported(live, kwargs=given).module()
    with torch.inference_mode():
        pairs = zip(tensors(live(**given)), tensors(run(**given)), strict=True)
        assert known or all(torch.equal(a, b) for a, b in pairs)
    assert any("hs.exported" in str(warning.message) for warning in told) is known


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folder_in_the_low_format_opens_with_a_truthful_dtype_and_generates(name: str, tmp_path: Path) -> None:
    model, given = model_of(name)
    live = hs.prepare(model, policy=policy("O2"))
    plain: Any = hs.lowered(live, policy=policy("pure"))
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    size = sum(p.numel() for p in plain.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * size + 10_000
    kind: Any = type(plain)
    for dtype in ("auto", torch.bfloat16):
        opened = kind.from_pretrained(tmp_path, dtype=dtype).eval()
        assert {p.dtype for p in opened.parameters()} == {torch.bfloat16}
        with torch.inference_mode():
            assert torch.equal(opened(**given).logits, plain(**given).logits)
            words = [m.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (opened, plain)]
        assert torch.equal(*words) and words[0].shape == (2, 13)
