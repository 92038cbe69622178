"""Trainers and models of other libraries under a policy: TRL, PEFT, optuna's search; run where they are installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from halfstep.integrations import transformers as ours
from tests.integrations.test_transformers import (
    POLICIES,
    STILL,
    assert_equal,
    gpt2,
    llama,
    logged,
    losses,
    offline,
    parts,
    sequences,
    trainer,
)  # fmt: skip

__all__ = ["offline"]


# ---------------------------------------------------------------------- PEFT


def adapted(name: str) -> Any:
    """Return a llama with LoRA adapters."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    return peft.get_peft_model(llama(), config)


@pytest.mark.filterwarnings("default")  # of peft beside this transformers
@pytest.mark.parametrize("name", ["mixed-bf16", "O2-bf16", "O2-fp16", "pure-fp16"])
def test_adapters_train_save_and_resume(tmp_path: Path, name: str) -> None:
    def run(folder: Path, **resume: Any) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "learning_rate": 3e-2}
        ran = trainer(folder, POLICIES[name], model=adapted(name), **settings)
        ran.train(**resume)
        return ran

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_equal(parts(again), parts(whole))
    assert losses(whole)[-1] < losses(whole)[0]
    base = llama().state_dict()
    for key, value in whole.model.state_dict().items():
        if "lora_" not in key:  # frozen: exact, or rounded once to the format that it is stored in
            own = base[key.removeprefix("base_model.model.").replace(".base_layer", "")]
            assert torch.equal(value, own.to(value.dtype)), key
    saved = pytest.importorskip("safetensors.torch").load_file(
        tmp_path / "whole" / "checkpoint-3" / "adapter_model.safetensors"
    )
    assert {value.dtype for value in saved.values()} == {torch.float32}


# ---------------------------------------------------------------------- TRL


def tokenizer() -> Any:
    """Return a tokenizer without files: one token for each character."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {chr(97 + i): i for i in range(26)} | {"<pad>": 26, "<eos>": 27, " ": 28, "<unk>": 29}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(count: int = 48) -> list[str]:
    found = []
    for first in torch.randint(26, (count,), generator=torch.Generator().manual_seed(0)).tolist():
        found.append("".join(chr(97 + (first + 3 * i) % 26) for i in range(8)))
    return found


SETTINGS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
    "max_steps": 4, "logging_steps": 1, "learning_rate": 3e-3, "per_device_train_batch_size": 8, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mixed-bf16", "O2-fp16", "pure-bf16"])
def test_sft(tmp_path: Path, name: str) -> None:
    pytest.importorskip("trl")
    import trl

    datasets = pytest.importorskip("datasets")

    class Mine(ours.PolicyMixin, trl.SFTTrainer):
        pass

    data = datasets.Dataset.from_dict({"text": texts()})
    args = trl.SFTConfig(str(tmp_path), max_length=12, **SETTINGS)
    ran = Mine(gpt2(), args, train_dataset=data, processing_class=tokenizer(), policy=POLICIES[name])
    ran.train()
    assert hs.prepared_policy(ran.model) == POLICIES[name]
    assert losses(ran)[-1] < losses(ran)[0] and logged(ran, "skipped_steps")[-1] == 0
    assert ran.black_box is not None


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mixed-bf16", "O2-fp16", "pure-bf16"])
def test_dpo(tmp_path: Path, name: str) -> None:
    pytest.importorskip("trl")
    import trl

    datasets = pytest.importorskip("datasets")

    class Mine(ours.PolicyMixin, trl.DPOTrainer):
        pass

    rows = texts()
    data = datasets.Dataset.from_dict(
        {"prompt": [t[:3] for t in rows], "chosen": [t[3:] for t in rows], "rejected": [t[3:][::-1] for t in rows]}
    )
    args = trl.DPOConfig(str(tmp_path), max_length=12, **{**SETTINGS, "learning_rate": 1e-2})
    ran = Mine(
        gpt2(**STILL),
        args=args,
        ref_model=gpt2(**STILL),
        train_dataset=data,
        processing_class=tokenizer(),
        policy=POLICIES[name],
    )
    ran.train()
    assert hs.prepared_policy(ran.model) == POLICIES[name]
    assert losses(ran)[0] == pytest.approx(math.log(2), rel=2e-2) and losses(ran)[-1] < losses(ran)[0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["mixed-bf16", "O2-fp16", "pure-bf16"])
def test_grpo(tmp_path: Path, name: str) -> None:
    pytest.importorskip("trl")
    import trl

    datasets = pytest.importorskip("datasets")

    class Mine(ours.PolicyMixin, trl.GRPOTrainer):
        pass

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(text.count("a")) for text in completions]

    data = datasets.Dataset.from_dict({"prompt": [t[:3] for t in texts()]})
    args = trl.GRPOConfig(str(tmp_path), num_generations=4, max_completion_length=6, **SETTINGS)
    ran = Mine(
        gpt2(), reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer(), policy=POLICIES[name]
    )
    ran.train()
    assert hs.prepared_policy(ran.model) == POLICIES[name]
    assert len(losses(ran)) == 4 and all(math.isfinite(loss) for loss in losses(ran))


# ---------------------------------------------------------------------- search


@pytest.mark.filterwarnings("default")
def test_a_search_prepares_each_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    begun = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
            begun.append((hs.prepared_policy(model), model.lm_head.weight.dtype))

    ran = trainer(
        tmp_path, "O2", model_init=lambda trial=None: gpt2(), eval_dataset=sequences(16), max_steps=3,
        eval_strategy="steps", eval_steps=3, callbacks=[Watch()],
    )  # fmt: skip
    found = ran.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        n_trials=2, backend="optuna", direction="minimize", compute_objective=lambda metrics: metrics["eval_loss"],
    )  # fmt: skip
    assert math.isfinite(found.objective)
    assert begun == [(hs.Policy.of("O2"), torch.bfloat16)] * 2
