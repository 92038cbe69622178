"""Trainer under a policy: the numbers of a hand-written loop, Trainer's features, checkpoints; no download."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import IntegrationError
from halfstep.integrations.shared import checking
from tests.examples.loading import load

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from halfstep.integrations import transformers as ours

VOCABULARY, LENGTH = 31, 12
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

POLICIES = {
    f"{name}-{dtype}": hs.Policy.of(name, dtype=dtype) for name in ("mixed", "O2", "pure") for dtype in ("bf16", "fp16")
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep libraries off the network, and off what TrainingArguments of transformers 4 leave in the environment."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
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


def gpt2(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        **settings,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


STILL: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
"""Settings without dropout."""


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=LENGTH, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def arguments(folder: Path, **settings: Any) -> Any:
    defaults = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
        "max_steps": 6, "logging_steps": 1, "learning_rate": 3e-3, "per_device_train_batch_size": 16, "seed": 1,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**defaults, **settings})


def trainer(folder: Path, policy: Any = "mixed", *, model: Any = None, **settings: Any) -> Any:
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
    assert type(a) is type(b) or isinstance(a, Tensor), where  # a state_dict of low weights has a class of tensors
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
        assert torch.equal(a, b), f"{where}: {float((a.double() - b.double()).abs().max())}"
    else:
        assert a == b, where


class Ordered(ours.Trainer):
    """A subclass of ours that keeps the order of the data."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Plain(transformers.Trainer):
    """Trainer without a policy; it takes the argument, to be called alike."""

    def __init__(self, *args: Any, policy: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


# ---------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("name", POLICIES)
def test_a_run_has_the_bits_of_the_loop_written_by_hand(tmp_path: Path, name: str) -> None:
    """Accumulation with a partial last window, clipping, `num_items_in_batch`, a scheduler."""
    policy, data = POLICIES[name], sequences(7 * 8)  # 7 micro-batches an epoch: windows of 3, 3 and 1
    ran = trainer(
        tmp_path, policy, kind=Ordered, model=gpt2(**STILL), train_dataset=data, gradient_accumulation_steps=3,
        max_grad_norm=0.5, per_device_train_batch_size=8, max_steps=6, optim="adamw_torch",
    )  # fmt: skip
    ran.train()

    model = gpt2(**STILL)
    decayed: list[Any] = []
    plain: list[Any] = []
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
    assert losses(ran) == pytest.approx(totals, abs=6e-5)  # the log of transformers 4 has 4 decimals
    assert all(value.dtype is torch.float32 for value in ran.model.state_dict().values())


@pytest.mark.hours
@pytest.mark.parametrize(("make", "data"), [(gpt2, sequences), (llama, sequences), (bert, labelled)])
def test_the_loss_is_that_of_fp32_within_seed_noise(
    tmp_path: Path, make: Callable[[int], Any], data: Callable[[], Any]
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
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
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


def alarm(dtype: str) -> Any:
    """Expect the scaler's warning of gradients that no scale can make finite."""
    return pytest.warns(UserWarning, match="gradients are not finite") if dtype == "bf16" else nullcontext()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_with_nan_changes_nothing(tmp_path: Path, dtype: str) -> None:
    class Poisoned(ours.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 2 else loss

    seen = []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            seen.append({key: value.clone() for key, value in model.state_dict().items()})

    ran = trainer(tmp_path, POLICIES[f"O2-{dtype}"], kind=Poisoned, callbacks=[Look()], max_steps=4, black_box=False)
    with alarm(dtype):
        assert ran.train().metrics["skipped_steps"] == 1
    assert_equal(seen[2], seen[3])
    assert not torch.equal(seen[1]["lm_head.weight"], seen[2]["lm_head.weight"])
    assert logged(ran, "skipped_steps") == [0, 0, 1, 1, 1]  # the last: the record of the whole run
    assert len(logged(ran, "culprits")) == 1
    assert ran.lr_scheduler.last_epoch == 3


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("name", "low"),
    [pytest.param(n, low, marks=() if low == n.endswith("fp16") else pytest.mark.hours)
     for n in POLICIES for low in (False, True)],
)  # fmt: skip
def test_a_resumed_run_is_bit_equal(tmp_path: Path, name: str, low: bool) -> None:
    """With dropout, accumulation, a partial window, a scale that moves; `low`: the model comes in the low format."""
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

    class Worse(transformers.TrainerCallback):
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


@pytest.mark.parametrize("name", ["mixed-fp16", "pure-bf16"])
def test_a_second_run_goes_on_and_counts_anew(tmp_path: Path, name: str) -> None:
    """Also after an evaluation before any training."""
    ran = trainer(tmp_path, POLICIES[name], eval_dataset=sequences(16), max_steps=3)
    assert 3.0 < ran.evaluate()["eval_loss"] < 3.5
    assert hs.prepared_policy(ran.model) == POLICIES[name]
    ran.train()
    first = losses(ran)
    ran.train()
    assert losses(ran)[0] < first[0] and logged(ran, "skipped_steps") == [0] * 4


def test_a_checkpoint_of_bf16_does_not_fix_the_scale_of_fp16(tmp_path: Path) -> None:
    trainer(tmp_path, POLICIES["O2-bf16"], save_strategy="steps", save_steps=3, max_steps=3).train()
    assert not (tmp_path / "checkpoint-3" / "scaler.pt").exists()
    fp16 = trainer(tmp_path, POLICIES["O2-fp16"], save_strategy="steps", save_steps=6, max_steps=6)
    fp16.train(resume_from_checkpoint=True)
    assert fp16.accelerator.scaler.state_dict()["_growth_tracker"] == 3
    bf16 = trainer(tmp_path, POLICIES["O2-bf16"], max_steps=7)
    bf16.train(resume_from_checkpoint=True)
    assert bf16.accelerator.scaler.get_scale() == 1.0


def test_checkpoints_of_plain_trainer_and_of_torch_amp_are_continued(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"bf16": True}]
    for settings in cases:
        plain = trainer(tmp_path, kind=Plain, save_strategy="steps", save_steps=3, max_steps=3, **settings)
        plain.train()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 sets it, for all that comes later
        ran = trainer(tmp_path, "O2", max_steps=4, ignore_data_skip=True)
        ran.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert losses(ran)[:3] == losses(plain) and losses(ran)[3] < losses(plain)[0]


@pytest.mark.parametrize("fields", [{"master": "stochastic"}, {"state": "low"}])
def test_stochastic_rounding_goes_on_with_its_random_bits(tmp_path: Path, fields: dict[str, str]) -> None:
    def run(seed: int, **resume: Any) -> Any:
        policy = hs.Policy.of("pure", dtype="bf16", **fields)
        ran = trainer(tmp_path, policy, kind=Ordered, model=gpt2(**STILL), save_strategy="steps", save_steps=3)
        torch.manual_seed(seed)  # of the random bits of a fresh run
        ran.train(**resume)
        return ran

    whole, again = run(5), run(6, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(parts(again), parts(whole))


# ---------------------------------------------------------------------- the black box


@pytest.mark.parametrize("name", ["mixed-bf16", "pure-fp16"])
def test_the_black_box_changes_no_bit_of_a_good_run(tmp_path: Path, name: str) -> None:
    runs = []
    for black_box in (True, False):
        settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}
        ran = trainer(tmp_path, POLICIES[name], black_box=black_box, max_steps=3, **settings)
        ran.train()
        assert (ran.black_box is not None) is black_box
        assert "compute_loss" not in vars(ran)
        runs.append(ran)
    assert_equal(parts(runs[0]), parts(runs[1]))
    assert losses(runs[0]) == losses(runs[1])


class Overflowing(nn.Module):
    """A model that is not transformers', and overflows in one line when its inputs say so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        hidden = torch.exp(hidden * x.mean())  # the line
        return {"loss": (self.head(hidden).squeeze(-1) - labels).square().mean()}


class OwnLoss(ours.Trainer):
    """A subclass whose loss does not call that of Trainer."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize("kind", [ours.Trainer, OwnLoss])
def test_the_black_box_names_operator_and_line(tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(1.0)} for _ in range(12)]
    data[8:] = [{"x": torch.full((4,), 300.0), "labels": torch.tensor(1.0)}] * 4

    class Mine(kind):
        _get_train_sampler = Ordered._get_train_sampler

    settings: dict[str, Any] = {
        "train_dataset": data,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_nan_inf_filter": False,
    }
    ran = trainer(tmp_path, POLICIES["mixed-bf16"], kind=Mine, model=Overflowing(), **settings)
    with alarm("bf16"):
        ran.train()
    assert "black box: step 3: overflow of float32" in caplog.text and " | exp in " in caplog.text
    verdict = ran.black_box.verdict
    assert (verdict.kind, verdict.op, verdict.step) == ("overflow", "exp", 3)
    assert "torch.exp(hidden * x.mean())" in verdict.line and ran.black_box.explain() is verdict
    assert logged(ran, "skipped_steps")[-1] == 1


def test_no_black_box_where_a_replay_could_wait_for_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = trainer(tmp_path, kind=OwnLoss), trainer(tmp_path)
    own.optimizer = theirs.optimizer = None
    assert own._box(own.model) is not None
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", property(lambda _: 2))
    assert own._box(own.model) is None and theirs._box(theirs.model) is not None


# ---------------------------------------------------------------------- what Trainer can do besides


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16_full_eval", "fp16_full_eval"])
def test_a_second_precision_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        IntegrationError, match=rf"TrainingArguments\({name}=True\) beside policy 'O2'.*leave out {name}"
    ):
        trainer(tmp_path, "O2", **{name: True})


def test_a_second_precision_from_the_launcher_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(IntegrationError, match="mixed precision is 'bf16'"):
        trainer(tmp_path, "O2")


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["mixed-bf16", "O2-fp16", "pure-bf16"])
def test_generation_in_evaluation(tmp_path: Path, name: str) -> None:
    """The tokens of `generate` are those of the trained model."""
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["tokens"] = prediction.predictions
        return {"equal": float((prediction.predictions[:, 1:7] == prediction.label_ids[:, :6]).mean())}

    folder = str(tmp_path)
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    args = transformers.Seq2SeqTrainingArguments(
        folder, max_steps=4, predict_with_generate=True, generation_max_length=8, save_strategy="no", **settings
    )
    data = sequences(16)
    ran = ours.Seq2SeqTrainer(
        t5(), args, train_dataset=data, eval_dataset=data[:4], compute_metrics=metrics, policy=POLICIES[name]
    )
    ran.train()
    found = ran.evaluate()
    assert 0.0 <= found["eval_equal"] <= 1.0 and math.isfinite(found["eval_loss"])
    plain = t5()
    plain.load_state_dict(ran.model.state_dict())
    hs.prepare(plain.eval(), policy=POLICIES[name])
    prompt = torch.stack([one["input_ids"] for one in data[:4]])
    expected = plain.generate(input_ids=prompt, max_length=8)
    assert seen["tokens"][:, : expected.shape[1]].tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("O2-bf16", "eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.hours) for name in ("mixed-bf16", "O2-fp16", "pure-bf16")),
    ],
)
def test_compiled_by_torch(tmp_path: Path, name: str, backend: str) -> None:
    settings: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": backend, "eval_dataset": sequences(16)}
    ran = trainer(tmp_path, POLICIES[name], model=llama(), max_steps=2, **settings)
    ran.train()
    eager = trainer(tmp_path, POLICIES[name], model=llama(), max_steps=2)
    eager.train()
    assert type(ran.model_wrapped).__name__ == "OptimizedModule"
    assert losses(ran) == pytest.approx(losses(eager), rel=1e-3)
    ran.save_model(str(tmp_path))
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype is torch.float32
    assert math.isfinite(ran.evaluate()["eval_loss"])


@pytest.mark.parametrize("name", ["mixed-fp16", "O2-bf16", "pure-fp16"])
def test_an_optimizer_of_ones_own(tmp_path: Path, name: str) -> None:
    """As an object, and as a class with arguments: the same bits."""
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    one = trainer(tmp_path, POLICIES[name], model=model, optimizers=(optimizer, scheduler), max_steps=3)
    one.train()
    assert logged(one, "learning_rate")[-1] == pytest.approx(0.01)
    given = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    two = trainer(tmp_path, POLICIES[name], optimizer_cls_and_kwargs=given, max_steps=3, lr_scheduler_type="constant")
    two.train()
    assert losses(one)[:2] == losses(two)[:2] and losses(one)[0] > losses(one)[2]
    assert one.optimizer.optimizer is optimizer


@pytest.mark.parametrize("name", ["mixed-fp16", "pure-bf16"])
def test_gradient_checkpointing_has_the_bits_of_a_run_without(tmp_path: Path, name: str) -> None:
    word = "activation" if "activation_checkpointing" in vars(arguments(tmp_path)) else "gradient"
    runs = []
    for on in (True, False):
        settings: dict[str, Any] = {
            f"{word}_checkpointing": on,
            f"{word}_checkpointing_kwargs": {"use_reentrant": False},
        }
        runs.append(trainer(tmp_path, POLICIES[name], max_steps=3, **settings))
        runs[-1].train()
    assert_equal(parts(runs[0]), parts(runs[1]))


@pytest.mark.parametrize("name", ["O2-fp16", pytest.param("mixed-fp16", marks=pytest.mark.hours)])
def test_a_smaller_batch_is_found(tmp_path: Path, name: str) -> None:
    """An attempt that fails in the middle of a window leaves nothing behind: bits of a run with the smaller batch."""

    class Small(ours.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.is_in_train and len(inputs["input_ids"]) > 8:
                self.accelerator.backward(loss)
                raise RuntimeError("CUDA out of memory.")
            return loss

    policy, runs = POLICIES[name], []
    cases: list[tuple[Any, int, dict[str, Any]]] = [(Small, 9, {"auto_find_batch_size": True}), (ours.Trainer, 8, {})]
    for kind, size, settings in cases:
        ran = trainer(tmp_path, policy, kind=kind, model=gpt2(**STILL), per_device_train_batch_size=size, **settings)
        ran.train()
        runs.append(ran)
    assert runs[0]._train_batch_size == 8
    assert_equal(parts(runs[0]), parts(runs[1]))


def test_a_model_from_model_init_collator_metrics_and_callbacks(tmp_path: Path) -> None:
    begun: list[Any] = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
            begun.append((hs.prepared_policy(model), model.lm_head.weight.dtype))

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def metrics(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.dtype == "float32"
        return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    ran = trainer(
        tmp_path, "O2", model_init=lambda: gpt2(), data_collator=collate, compute_metrics=metrics, callbacks=[Watch()],
        eval_dataset=sequences(16), max_steps=30, logging_steps=10, eval_strategy="steps", eval_steps=30,
    )  # fmt: skip
    ran.train()
    first = losses(ran)
    ran.train()  # model_init again: the same run
    assert losses(ran) == first
    assert begun == [(hs.Policy.of("O2"), torch.bfloat16)] * 2
    assert logged(ran, "eval_accuracy")[0] > 0.2


def test_data_parallel_of_one_process(tmp_path: Path) -> None:
    """What Trainer does with several GPUs and no launcher; without GPUs DataParallel calls the model itself."""
    runs = []
    for kind, policy in ((Plain, None), (ours.Trainer, "O2"), (ours.Trainer, POLICIES["pure-fp16"])):
        ran = trainer(tmp_path, policy, kind=kind, model=gpt2(**STILL), max_steps=3, eval_dataset=sequences(16))
        ran.args._n_gpu = 2
        ran.train()
        ran.evaluate()
        assert isinstance(ran.model_wrapped, nn.DataParallel)
        runs.append(ran)
    for ran in runs[1:]:
        assert hs.prepared_policy(ran.model) is not None
        assert losses(ran) == pytest.approx(losses(runs[0]), rel=2e-4)  # no loss is rounded to a low format


def test_the_count_of_labels_stays_exact(tmp_path: Path) -> None:
    """It is an input of the model, which O2 casts; as fp16 it would be infinite, and the loss 0."""
    kept = []

    class Counting(ours.Trainer):
        def _get_num_items_in_batch(self, *args: Any) -> Any:
            kept.append(super()._get_num_items_in_batch(*args))
            return kept[-1] + 70000

    ran = trainer(tmp_path, POLICIES["O2-fp16"], kind=Counting, model=gpt2(**STILL), max_steps=1)
    ran.train()
    true = 16 * LENGTH * math.log(VOCABULARY) / (70000 + int(kept[0]))
    assert not kept[0].is_floating_point() and losses(ran)[0] == pytest.approx(true, rel=0.1)


def test_a_mixin_over_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Theirs(transformers.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            super().create_optimizer_and_scheduler(num_training_steps)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    class Mine(ours.PolicyMixin, Theirs):
        pass

    ran = trainer(tmp_path, "pure", kind=Mine, max_steps=3)
    ran.train()
    assert ran.model.lm_head.weight.dtype is torch.bfloat16 and ran.black_box is not None
    assert losses(ran)[-1] < losses(ran)[0]


def test_what_updates_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    class LayerWiseDummyOptimizer(torch.optim.SGD):
        pass

    model = gpt2()
    optimizer = LayerWiseDummyOptimizer(model.parameters(), lr=0.1)
    ran = trainer(tmp_path, "mixed", model=model, optimizers=(optimizer, None))
    with pytest.raises(IntegrationError, match="updates each layer in the backward pass"):
        ran.train()


# ---------------------------------------------------------------------- the example


@pytest.mark.parametrize("name", POLICIES)
def test_the_example_trains_within_the_noise_of_fp32(name: str) -> None:
    """The bound: the spread of four seeds in fp32."""
    plain = example_in_fp32()
    assert abs(load("frameworks/transformers_trainer").train(POLICIES[name]) - plain[0]) <= max(plain) - min(plain)


@cache
def example_in_fp32() -> list[float]:
    train = load("frameworks/transformers_trainer").train
    return [train("O0", seed=seed) for seed in range(4)]


# ---------------------------------------------------------------------- several processes


ALL = [f"{way}:{name}" for way in ("ddp", "fsdp") for name in ("O2-bf16", "pure-bf16", "pure-fp16", "mixed-bf16")]


@pytest.mark.dist
@pytest.mark.hours  # test_accelerate.py has shorter ones
@pytest.mark.parametrize("cases", [ALL])
def test_two_processes_by_torchrun(tmp_path: Path, cases: list[str]) -> None:
    """Ranks end alike, wherever they began; a resumed run has the bits of the whole one; O2 over FSDP2 by hs.shard."""
    if transformers.__version__.startswith("4."):
        cases = [case for case in cases if "fsdp" not in case]  # its accelerate has no FSDP on a CPU
    script = Path(__file__).with_name("trainer_ranks.py")
    root = script.parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path), *cases],
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"},
        timeout=240, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert list(first) == cases and repr(first) == repr(second)
    for case, runs in first.items():
        assert repr(runs["again"]) == repr(runs["whole"]), case
        saved = tmp_path / case.replace(":", "-") / "saved"
        assert transformers.AutoConfig.from_pretrained(saved).dtype is torch.float32
