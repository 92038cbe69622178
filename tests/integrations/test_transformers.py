"""Trainer under a policy: the numbers of a hand-written loop, Trainer's features, checkpoints; no download."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import HalfstepError, PolicyError
from halfstep.integrations.shared import checking

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
ours = hs.integrations.transformers

VOCABULARY, LENGTH = 31, 12
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

POLICIES = {
    f"{name}-{dtype}": hs.Policy.of(name, dtype=dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep libraries off the network, and off the precision that an earlier Trainer has set."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield


def sequences(count: int = 96, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return sequences in which each token follows from the one before, by a rule that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for first in torch.randint(VOCABULARY, (count,), generator=generator).tolist():
        tokens = [first]
        while len(tokens) < LENGTH:
            tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
        found.append({"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)})
    return found


def labelled(count: int = 96) -> list[dict[str, Any]]:
    """Return sequences with the class of their first token."""
    return [{"input_ids": one["input_ids"], "labels": int(one["labels"][0]) % 3} for one in sequences(count)]


def gpt2(seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    config = transformers.GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **settings})
    return transformers.GPT2LMHeadModel(config)


STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
"""Settings without dropout."""


def llama(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=LENGTH, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def arguments(folder: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = dict(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        save_strategy="no", max_steps=6, logging_steps=1, learning_rate=3e-3, per_device_train_batch_size=16, seed=1,
    )  # fmt: skip
    return transformers.TrainingArguments(**{**defaults, **settings})


def trainer(folder: Path, policy: Any = "mixed", *, model: nn.Module | None = None, **settings: Any) -> Any:
    """Return a Trainer of ours; settings are those of Trainer, and else of TrainingArguments."""
    own = {"callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics", "eval_dataset", "model_init"}
    own |= {"black_box", "data_collator", "train_dataset", "compute_loss_func"}
    given = {name: settings.pop(name) for name in own & set(settings)}
    kind = settings.pop("kind", ours.Trainer)
    given.setdefault("train_dataset", sequences())
    model = gpt2() if model is None and "model_init" not in given else model
    return kind(model, arguments(folder, **settings), policy=policy, **given)


def losses(trained: Any) -> list[float]:
    return [record["loss"] for record in trained.state.log_history if "loss" in record]


def logged(trained: Any, key: str) -> list[Any]:
    return [record[key] for record in trained.state.log_history if key in record]


def parts(trained: Any) -> dict[str, Any]:
    """Return the state of a run: weights, optimizer, scheduler, scale."""
    optimizer = trained.optimizer.state_dict()
    return {
        "model": dict(trained.accelerator.unwrap_model(trained.model).state_dict()),
        "optimizer": optimizer["state"],
        "rates": [group["lr"] for group in optimizer["param_groups"]],
        "scheduler": trained.lr_scheduler.state_dict(),
        "scaler": trained.accelerator.scaler.state_dict(),
    }


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Compare trees bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}.{i}")
    elif isinstance(a, Tensor):
        assert a.dtype is b.dtype, where
        assert torch.equal(a, b), f'{where}: {float((a.double() - b.double()).abs().max())}'
    else:
        assert a == b, where


class Ordered(ours.Trainer):  # type: ignore[misc]
    """A subclass of ours that keeps the order of the data."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Plain(transformers.Trainer):  # type: ignore[misc]
    """Trainer without a policy; it takes the argument, to be called alike."""

    def __init__(self, *args: Any, policy: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_has_the_bits_of_the_loop_written_by_hand(tmp_path: Path, name: str) -> None:
    """Accumulation with a partial last window, clipping, `num_items_in_batch`, a scheduler."""
    policy, data = POLICIES[name], sequences(7 * 8)  # 7 micro-batches an epoch: windows of 3, 3 and 1
    ran = trainer(
        tmp_path, policy, kind=Ordered, model=gpt2(**STILL), train_dataset=data, gradient_accumulation_steps=3, max_grad_norm=0.5,
        per_device_train_batch_size=8, max_steps=6, optim="adamw_torch",
    )  # fmt: skip
    ran.train()

    model = gpt2(**STILL)
    decayed, plain = [], []
    for key, parameter in model.named_parameters():
        (plain if "bias" in key or "ln_" in key else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    model, optimizer, scaler = hs.prepare(model, optimizer, policy=policy)
    scaler = checking(scaler)  # in bf16 gradients are fp32 from `unscale_` on, so clipping does not round them
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (6 - step) / 6)
    norms, totals = [], []
    for _ in range(2):
        batches = [
            {key: torch.stack([one[key] for one in data[i : i + 8]]) for key in data[0]} for i in range(0, 56, 8)
        ]
        for window in (batches[:3], batches[3:6], batches[6:]):
            counted = ran._get_num_items_in_batch(window, torch.device("cpu"))
            total = 0.0
            model.train()
            for batch in window:
                loss = model(**batch, num_items_in_batch=counted).loss
                total += float(loss.detach())
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            totals.append(total)
    assert_equal(dict(ran.model.state_dict()), dict(model.state_dict()))
    assert logged(ran, "grad_norm") == norms
    assert losses(ran) == pytest.approx(totals, rel=1e-6)
    assert all(value.dtype is torch.float32 for value in ran.model.state_dict().values())


@pytest.mark.parametrize("make, data", [(gpt2, sequences), (llama, sequences), (bert, labelled)])
def test_the_loss_is_that_of_fp32_within_seed_noise(
    tmp_path: Path, make: Callable[[int], nn.Module], data: Callable[[], Any]
) -> None:
    """The bound: the spread of plain fp32 over three seeds. torch.amp is run beside."""

    def last(kind: Any, policy: Any = None, seed: int = 0, **settings: Any) -> float:
        options = {"kind": kind, "model": make(seed), "train_dataset": data(), "logging_steps": 40, "max_steps": 40}
        ran = trainer(tmp_path, policy, seed=seed, **options, **settings)
        ran.train()
        return losses(ran)[-1]

    plain = [last(Plain, seed=seed) for seed in range(3)]
    noise = max(plain) - min(plain)
    amp = last(Plain, bf16=True)
    found = {name: last(ours.Trainer, policy) for name, policy in POLICIES.items()}
    print(make.__name__, plain, "amp", amp, found)
    assert plain[0] < math.log(VOCABULARY if data is sequences else 3)
    for name, value in found.items():
        assert abs(value - plain[0]) <= noise, name


# ---------------------------------------------------------------------- skipped steps


def high_scale(dtype: str, exponent: int = 22) -> hs.Policy:
    """Return a policy whose scale begins so high that the first steps overflow."""
    return hs.Policy.of("O2", dtype=dtype, scale=hs.ScaleRule(init=2.0**exponent, ceiling=2.0**exponent))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
def test_a_skipped_step_advances_no_scheduler_and_is_in_the_log(tmp_path: Path, optim: str) -> None:
    ran = trainer(tmp_path, high_scale("fp16"), optim=optim, max_steps=10)
    ran.train()
    skipped = logged(ran, "skipped_steps")
    assert 2 <= skipped[-1] < 10 and skipped == sorted(skipped)
    assert ran.lr_scheduler.last_epoch == 10 - skipped[-1]
    assert logged(ran, "learning_rate")[0] == logged(ran, "learning_rate")[1] == 3e-3
    assert logged(ran, "loss_scale")[:2] == [2.0**21, 2.0**20]
    culprits = logged(ran, "culprits")
    assert len(culprits) == skipped[-1] and "transformer." in culprits[0] and " values)" in culprits[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_with_nan_changes_nothing(tmp_path: Path, dtype: str) -> None:
    class Poisoned(ours.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 2 else loss

    seen = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            seen.append({key: value.clone() for key, value in model.state_dict().items()})

    policy = hs.Policy.of("O2", dtype=dtype)
    ran = trainer(tmp_path, policy, kind=Poisoned, callbacks=[Look()], max_steps=4, black_box=False)
    ran.train()
    assert_equal(seen[2], seen[3])
    assert not torch.equal(seen[1]["lm_head.weight"], seen[2]["lm_head.weight"])
    assert logged(ran, "skipped_steps") == [0, 0, 1, 1]
    assert len(logged(ran, "culprits")) == 1
    assert ran.lr_scheduler.last_epoch == 3


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, name: str, low: bool) -> None:
    """With dropout, accumulation, a partial window, and a scale that moves; `low`: the model comes in the low format."""
    policy = POLICIES[name]
    if policy.dtype == "fp16":
        policy = policy.replace(scale=hs.ScaleRule(init=2.0**21, interval=3))

    def run(folder: Path, **resume: Any) -> Any:
        model = gpt2().to(getattr(torch, DTYPES[policy.dtype])) if low else gpt2()
        ran = trainer(
            folder, policy, model=model, train_dataset=sequences(7 * 8), gradient_accumulation_steps=2,
            per_device_train_batch_size=8, max_steps=7, save_strategy="steps", save_steps=3, lr_scheduler_type="cosine",
        )  # fmt: skip
        ran.train(**resume)
        return ran

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_equal(parts(again), parts(whole))
    for key in ("loss", "grad_norm", "learning_rate", "skipped_steps", "loss_scale", "culprits"):
        assert repr(logged(again, key)) == repr(logged(whole, key)), key  # nan too
    if policy.dtype == "fp16":
        scales = logged(whole, "loss_scale")
        assert min(scales[:3]) < 2.0**21 and len(set(scales[3:])) > 1  # moved before and after the checkpoint


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_saved_has_fp32_weights_and_a_truthful_dtype(tmp_path: Path, name: str) -> None:
    ran = trainer(tmp_path, POLICIES[name], save_strategy="steps", save_steps=6)
    ran.train()
    ran.save_model(str(tmp_path / "saved"))
    expected = {key: value.clone() for key, value in ran.model.state_dict().items()}
    for folder in (tmp_path / "saved", tmp_path / "checkpoint-6"):
        config = json.loads((folder / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == "float32"
        assert_equal(dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()), expected)
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert_equal(dict(auto.state_dict()), expected)
    assert not any("halfstep" in key for key in config)
    assert_equal(dict(ran.model.state_dict()), expected)


@pytest.mark.parametrize("name", ["mixed-bf16", "O2-bf16", "pure-fp16"])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, name: str) -> None:
    seen: list[Any] = []

    class Worse(transformers.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, *args: Any, model: Any, metrics: dict[str, float], **kwargs: Any) -> None:
            seen.append({key: value.clone() for key, value in model.state_dict().items()})

    counted = iter([3.0, 1.0, 2.0, 4.0])
    ran = trainer(
        tmp_path, POLICIES[name], callbacks=[Worse()], eval_dataset=sequences(16), eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="made",
        greater_is_better=False, compute_metrics=lambda _: {"made": next(counted)},
    )  # fmt: skip
    ran.train()
    assert ran.state.best_model_checkpoint.endswith("checkpoint-4")
    assert_equal(dict(ran.model.state_dict()), seen[1])
    before = ran.evaluate()["eval_loss"]
    fresh = trainer(tmp_path, POLICIES[name], eval_dataset=sequences(16))
    fresh.model.load_state_dict(seen[1])
    assert fresh.evaluate()["eval_loss"] == before  # the low weights too
