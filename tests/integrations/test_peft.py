"""PEFT: a frozen low base with nothing behind it, adapters in fp32 or with fp32 values behind, merging and saving."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

import halfstep as hs  # noqa: E402
from halfstep.binding.prepare import store_of  # noqa: E402
from halfstep.kernels.eager.low import split_bf16  # noqa: E402
from tests.examples.loading import load  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torchao.*"),
]

BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(24).reshape(2, 12) % 32

POLICIES = {
    "mixed": hs.Policy.of("mixed", dtype="bf16"),
    "O2": hs.Policy.of("O2", dtype="bf16"),
    "O2, fp32 adapters": hs.Policy.of("O2", dtype="bf16").with_modules({"*lora_*": "fp32"}),
    "O2, mixed adapters": hs.Policy.of("O2", dtype="bf16").with_modules({"*lora_*": "mixed"}),
    "pure": hs.Policy.of("pure", dtype="bf16", master="master"),
    "split": hs.Policy.of("pure", dtype="bf16", master="split"),
    "fp16": hs.Policy.of("O2", dtype="fp16"),
}
LOW = [name for name in POLICIES if name != "mixed"]


def base() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def prepared(name: str, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = peft.get_peft_model(base(), lora())
    model, optimizer, scaler = hs.prepare(model, torch.optim.AdamW(trained(model), lr=1e-2), policy=POLICIES[name])
    train(model, optimizer, scaler, steps)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, scaler: hs.GradScaler, steps: int) -> None:
    for _ in range(steps):
        scaler.scale(model(input_ids=TOKENS, labels=TOKENS).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if name.endswith(("q_proj", "v_proj")))


@pytest.mark.parametrize("name", POLICIES)
def test_the_base_is_stored_once_and_only_adapters_have_something_behind_them(name: str) -> None:
    model, _ = prepared(name)
    policy, store = POLICIES[name], store_of(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    low = sum(p.numel() for p in frozen if p.dtype is not FP32)
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    everything = sum(p.numel() for p in frozen)
    assert low == {"mixed": 0, "pure": everything, "split": everything}.get(name, everything - norms)
    kept = 0 if store is None else sum(t.nbytes for t in store.kept())
    adapters = sum(p.numel() for p in trained(model))
    assert kept == {"mixed": 0, "O2, fp32 adapters": 0, "O2, mixed adapters": 0, "split": 2 * adapters}.get(
        name, 4 * adapters
    )
    assert {p.dtype for p in trained(model)} == {FP32 if not kept else BF16 if policy.dtype == "bf16" else torch.half}


@pytest.mark.parametrize("name", POLICIES)
def test_saved_adapters_are_fp32_and_load_into_another_prepared_base(name: str, tmp_path: Path) -> None:
    model, _ = prepared(name)
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    state = model.state_dict()
    assert len(saved) == 8 and all(value.dtype is FP32 for value in saved.values())
    assert all(torch.equal(value, state[key.replace(".weight", ".default.weight")]) for key, value in saved.items())
    again = peft.PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    hs.prepare(again, torch.optim.AdamW(trained(again), lr=1e-2), policy=POLICIES[name])
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("unload", [False, True])
def test_weights_are_merged_in_fp32_and_rounded_once(name: str, *, unload: bool) -> None:
    model, _ = prepared(name)
    state = model.state_dict()
    wanted = {}
    for path, layer in layers(model):
        weight = state[f"{path}.base_layer.weight"]
        down, up = (state[f"{path}.lora_{side}.default.weight"] for side in "AB")
        delta = up @ down * layer.scaling["default"]
        merged_weight = weight.float() + delta
        wanted[path] = split_bf16(merged_weight)[0] if name == "split" else merged_weight.to(weight.dtype)
    before = logits(model)
    with hs.edit_weights(model):
        if unload:
            merged = model.merge_and_unload()
            assert not isinstance(merged, peft.PeftModel)
        else:
            model.merge_adapter()
    for path, value in wanted.items():
        layer = model.get_submodule(path)
        found = layer.weight if unload else layer.base_layer.weight
        assert torch.equal(found, value) and found.dtype is value.dtype
    after = logits(merged if unload else model)
    assert (after - before).abs().max() < 0.05 * before.abs().max()


@pytest.mark.parametrize("name", LOW)
def test_a_merge_outside_of_edit_weights_moves_the_base_as_in_fp32(name: str, recwarn: pytest.WarningsRecorder) -> None:
    model, _ = prepared(name)
    state, sums = {key: value.float().clone() for key, value in model.state_dict().items()}, torch.zeros(2)
    recwarn.clear()
    model.merge_adapter()
    for path, layer in layers(model):
        down, up = (state[f"{path}.lora_{side}.default.weight"] for side in "AB")
        delta = up @ down * layer.scaling["default"]
        moved = Tensor.detach(layer.base_layer.weight).float() - state[f"{path}.base_layer.weight"]
        sums += torch.stack([(moved * delta).sum(), (delta * delta).sum()])
    assert abs(sums[0] / sums[1] - 1) < 0.01
    assert not [w for w in recwarn if "frozen" in str(w.message)]


@pytest.mark.parametrize("name", LOW)
def test_a_merge_outside_of_edit_weights_adds_to_fp32_values_and_keeps_those_of_the_adapter(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    model, _ = prepared(name)
    before = {key: value.float().clone() for key, value in model.state_dict().items()}
    recwarn.clear()
    model.merge_adapter()
    after = model.state_dict()
    for path, layer in layers(model):
        for side in "AB":
            key = f"{path}.lora_{side}.default.weight"
            assert torch.equal(after[key].float(), before[key])
        down, up = (before[f"{path}.lora_{side}.default.weight"] for side in "AB")
        delta = up @ down * layer.scaling["default"]  # PEFT rounds it to the format of the adapter
        moved = after[f"{path}.base_layer.weight"].float() - before[f"{path}.base_layer.weight"]
        torch.testing.assert_close(moved, delta, rtol=2**-7, atol=1e-6)
    assert not [w for w in recwarn if "by no method" in str(w.message)]


@pytest.mark.parametrize("name", POLICIES)
def test_without_its_adapter_the_model_is_the_base_under_the_policy(name: str) -> None:
    model, _ = prepared(name)
    alone = hs.prepare(base(), policy=POLICIES[name].replace(modules={}))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(alone))
    assert not torch.equal(logits(model), logits(alone))


@pytest.mark.parametrize("name", ["mixed", "O2", "split"])
def test_a_second_adapter_added_later_is_fp32_and_leaves_the_first_alone(name: str) -> None:
    model, _ = prepared(name)
    first = {n: v.clone() for n, v in model.state_dict().items() if ".default." in n}
    own = logits(model)
    model.add_adapter("second", lora())
    model.set_adapter("second")
    assert all(p.dtype is FP32 for p in trained(model))
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    before = [p.detach().clone() for p in trained(model)]
    train(model, optimizer, hs.GradScaler(enabled=False), 2)
    assert all(not torch.equal(a, b) for a, b in zip(before, trained(model), strict=True))
    state = model.state_dict()
    assert all(torch.equal(state[n], v) for n, v in first.items())
    model.set_adapter("default")
    assert torch.equal(logits(model), own)


@pytest.mark.parametrize("name", ["O2", "split"])
def test_two_adapters_in_one_optimizer_both_keep_fp32_values(name: str) -> None:
    model = peft.get_peft_model(base(), lora())
    model.add_adapter("second", lora())
    both = [p for n, p in model.named_parameters() if "lora_" in n]
    precise = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    hs.prepare(model, torch.optim.AdamW(both, lr=1e-2), policy=POLICIES[name])
    state = model.state_dict()
    assert len(precise) == 16 and all(torch.equal(state[n], value) for n, value in precise.items())


@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpoint_of_a_training_step_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def begin() -> hs.TrainStep:
        model = peft.get_peft_model(base(), lora())
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
        return hs.TrainStep(model, optimizer, lambda m, x: m(input_ids=x, labels=x).loss, policy=POLICIES[name])

    whole, first, second = begin(), begin(), begin()
    losses = [whole(TOKENS).loss.item() for _ in range(4)]
    for _ in range(2):
        first(TOKENS)
    hs.save(first, tmp_path)
    hs.load(second, tmp_path)
    assert [second(TOKENS).loss.item() for _ in range(2)] == losses[2:]


# ---------------------------------------------------------------------- quantised bases


class Quantised(nn.Linear):
    """A linear layer whose weight is stored in 8 bits, one scale for each row, as bitsandbytes stores it."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` in the format of `x`."""
        scale: Any = self.scale
        return nn.functional.linear(x, (self.weight * scale).to(x.dtype))


def quantised() -> Any:
    model = base()
    for _, layer in list(model.named_modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("proj"):
                setattr(layer, name, Quantised(child))
    return model


@pytest.mark.parametrize("name", POLICIES)
def test_a_quantised_base_is_left_alone(name: str) -> None:
    model = peft.get_peft_model(quantised(), lora())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype is torch.int8}
    scales = {n: b.clone() for n, b in model.named_buffers() if n.endswith("scale")}
    assert len(before) == len(scales) == 14
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=POLICIES[name])
    first = logits(model)
    train(model.train(), optimizer, scaler, 2)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], value) and after[n].dtype is torch.int8 for n, value in before.items())
    assert all(torch.equal(dict(model.named_buffers())[n], value) for n, value in scales.items())
    assert not torch.equal(first, logits(model)) and torch.isfinite(first).all()


@pytest.mark.parametrize("name", ["mixed", "O2", "split"])
def test_the_casts_for_training_on_a_quantised_base_come_before_prepare(name: str) -> None:
    model = base().to(BF16)
    model.is_loaded_in_8bit = True
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert all(p.dtype is FP32 and not p.requires_grad for p in model.parameters())
    model = peft.get_peft_model(model, lora())
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=POLICIES[name])
    first = model.train()(input_ids=TOKENS, labels=TOKENS).loss.item()
    train(model, optimizer, scaler, 3)
    assert model(input_ids=TOKENS, labels=TOKENS).loss.item() < first


@pytest.mark.parametrize("name", ["mixed", "O2", "split"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_weights_of_torchao_are_left_alone(name: str, dtype: torch.dtype) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)
    quantization.quantize_(model[0:1], quantization.Int8WeightOnlyConfig())
    model[0].requires_grad_(False)
    kind, before = type(model[0].weight.data), model[0].weight.dequantize().clone()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    hs.prepare(model, optimizer, policy=POLICIES[name])
    model(torch.randn(4, 32)).float().sum().backward()
    optimizer.step()
    assert type(model[0].weight.data) is kind and model[0].weight.dtype is dtype
    assert torch.equal(model[0].weight.dequantize(), before)
    notes = hs.resolve(POLICIES[name], model).notes
    assert any("0.weight" in note and kind.__name__ in note and "never converted" in note for note in notes)


@pytest.mark.parametrize("name", POLICIES)
def test_the_example_learns_and_its_adapters_reload(name: str) -> None:
    out = load("frameworks/peft_lora").main(POLICIES[name], steps=40)
    assert out["last"] < 0.95 * out["first"] and out["reloaded"] == 0
    assert out["merged"] < 0.02 * out["largest"]
