"""Every recipe in examples/ runs, and what it promises holds."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import halfstep as hs
from tests.examples.loading import EXAMPLES, load
from tests.two_processes import as_script, run_all

ROOT = EXAMPLES.parent
FILES = sorted(EXAMPLES.glob("*.py"))
AS_SCRIPTS = ("accumulation", "clipping", "dict_batches", "export")  # the others are run so with `make test-hours`
FOUND = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def run(name: str, *args: Any) -> Any:
    """Return what a recipe's main() returns."""
    return load(name).main(*args)


def learned(run: dict[str, float], share: float) -> bool:
    """Whether the last loss is below `share` of the first one."""
    return run["last"] < share * run["first"]


# ---------------------------------------------------------------------- the folder


def test_the_table_lists_every_recipe_and_nothing_else() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| \[(\w+\.py)\]\((\w+\.py)\) \| [^|]+ \|$", (EXAMPLES / "README.md").read_text(), re.M
    )
    assert all(shown == linked for shown, linked in rows)
    assert [linked for _, linked in rows] == [file.name for file in FILES]


def test_large_vocabulary() -> None:
    runs = run("large_vocabulary")
    for policy in ("mixed", "pure"):
        scores, in_one = runs[f"{policy}, scores"], runs[f"{policy}, linear_cross_entropy"]
        assert learned(in_one, 0.3) and in_one["kept"] < scores["kept"] / 5
        assert in_one["last"] == pytest.approx(scores["last"], rel=1e-2)


def test_an_audit_finds_what_nothing_else_says_and_its_remedy_cures_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("audit")
    assert out["before"] > 4 and out["after"] == 0
    assert "underflow: " in capsys.readouterr().out


@pytest.mark.hours
def test_a_70b_model_is_planned_in_its_parts() -> None:
    pytest.importorskip("transformers")
    one, two = run("llama_70b", 1), run("llama_70b", 2)
    assert all(0 < two[policy] - one[policy] < 3 for policy in one)  # GiB: a block's part, its state and its input


def test_every_recipe_is_run_here() -> None:
    calls = re.findall(r'run\("(\w+)"', Path(__file__).read_text())
    assert sorted(set(calls)) == [file.stem for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_says_what_it_shows_and_uses_public_names_only(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert ast.get_docstring(functions["main"]) and functions["main"].returns is not None
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    main()"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "halfstep", "recipes write `import halfstep as hs`"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hs":
            assert node.attr in hs.__all__


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.slow if file.stem in AS_SCRIPTS else pytest.mark.hours) for file in FILES],
    ids=lambda file: file.stem,
)
def test_a_recipe_runs_as_a_script(file: Path, tmp_path: Path) -> None:
    run = as_script([file], tmp_path, PYTHONPATH=FOUND["PYTHONPATH"])
    assert not run.returncode, run.stderr


# ---------------------------------------------------------------------- the training step


def test_accumulation_with_a_short_window_gives_the_result_of_large_batches() -> None:
    out = run("accumulation")
    assert out["updates"] == 30
    assert out["micro_batches"] == pytest.approx(out["large_batches"], rel=1e-3)
    assert out["micro_batches_bf16"] == pytest.approx(out["large_batches"], rel=0.05)
    assert out["micro_batches"] < 0.2 * out["before"]


def test_clipping_acts_on_unscaled_gradients() -> None:
    out = run("clipping")
    for name in ("norm", "norm_fp32"):
        assert out[name]["grad_norm"] > 100 and out[name]["update_norm"] == pytest.approx(1.0, abs=1e-3)
    for name in ("value", "value_fp32"):
        assert out[name]["grad_norm"] > 100 and out[name]["update_value"] == pytest.approx(0.1, abs=1e-4)
    for kind in ("norm", "value"):
        assert out[kind]["loss"] == pytest.approx(out[f"{kind}_fp32"]["loss"], rel=0.1)


def test_a_skipped_step_does_not_advance_a_scheduler() -> None:
    out = run("schedulers")
    for name in ("warmup_cosine", "one_cycle"):
        assert out[name]["skipped"] > 0
        assert out[name]["advanced"] == 120 - out[name]["skipped"]
    assert out["step"]["advanced"] == 6 and out["step"]["lr"] == pytest.approx(0.05 / 8)
    assert out["plateau"]["lr"] < 0.05
    assert all(learned(one, 0.2) for one in out.values())


def test_dictionaries_reach_the_loss_function_and_aux_comes_back() -> None:
    out = run("dict_batches")
    assert learned(out, 0.1) and out["accuracy"] > 0.98


def test_a_resumed_run_has_the_same_bits() -> None:
    out = run("resume")
    assert learned(out, 0.5)
    assert out["different_losses"] == 0 and out["different_weights"] == 0


def test_fp32_sums_are_ten_times_closer() -> None:
    out = run("fp32_accumulation")
    assert out["fp32"]["error"] < 0.002 < 0.005 < out["param"]["error"]
    assert all(learned(one, 0.25) for one in out.values())


# ---------------------------------------------------------------------- several models and losses


def test_a_gan_learns_with_one_scale_and_with_one_for_each_loss() -> None:
    out = run("gan")
    assert all(one["distance"] < 0.3 for one in out.values())
    assert out["shared"]["scale_d"] == out["shared"]["scale_g"] > 2.0**12
    assert out["per_loss"]["scale_g"] > out["per_loss"]["scale_d"] > 2.0**12


@pytest.mark.parametrize("updates", [2, 50])
def test_the_gan_is_the_one_that_a_hand_written_loop_trains(updates: int) -> None:
    gan = load("gan")
    torch.manual_seed(0)
    generator, discriminator = gan.mlp(4, 2), gan.mlp(2, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.0, 0.99))
    data = torch.Generator().manual_seed(1)
    for _ in range(updates):
        real = gan.MEAN + 0.5 * torch.randn(64, 2, generator=data)
        fake = generator(torch.randn(64, 4, generator=data)).detach()
        yes, no = discriminator(real), discriminator(fake)
        loss = F.binary_cross_entropy_with_logits(yes, torch.ones_like(yes))
        loss = loss + F.binary_cross_entropy_with_logits(no, torch.zeros_like(no))
        optimizer_d.zero_grad()
        loss.backward()
        optimizer_d.step()
        verdict = discriminator(generator(torch.randn(64, 4, generator=data)))
        optimizer_g.zero_grad()
        F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)).backward()
        optimizer_g.step()
    with torch.no_grad():
        distance = float((generator(torch.randn(2000, 4, generator=data)).mean(dim=0) - gan.MEAN).norm())
    assert gan.train("O0", None, None, updates)["distance"] == pytest.approx(distance, rel=1e-5)


def test_the_gradient_of_a_gradient_penalty_is_right() -> None:
    out = run("gradient_penalty")
    assert out["fp32"]["gradient_error"] == 0.0
    assert out["bf16"]["gradient_error"] < 0.01 and out["fp16"]["gradient_error"] < 0.002
    assert all(abs(one["distance"] - 2**0.5) < 0.2 for one in out.values())


def test_optimizers_with_closures_work_without_a_scale_and_else_say_why_not() -> None:
    out = run("lbfgs")
    assert out["fp32"] < 0.01 * out["first"] and out["bf16"] < 0.05 * out["first"]
    assert "enabled=False" in out["scaler"]
    assert "params='fp32'" in out["masters"]
    assert "optimizer.step(closure)" in out["step"]


# ---------------------------------------------------------------------- weights


def test_averages_are_taken_over_fp32_weights() -> None:
    out = run("ema_swa")
    for one in out.values():
        assert one["ema_is_fp32"] and one["ema_error"] < 1e-6
        assert one["ema"] < one["model"] and one["swa"] < one["model"]
    assert out["O2 bf16"]["ema"] == pytest.approx(out["fp32"]["ema"], rel=0.05)


@pytest.mark.hours  # 4 seconds and more
def test_adapters_learn_and_the_frozen_base_stays() -> None:
    out = run("lora")
    for one in out.values():
        assert learned(one, 0.1)
        assert one["frozen_changed"] == 0 and one["trained_changed"] == 6
        assert one["last"] == pytest.approx(out["fp32"]["last"], rel=0.05)
    assert out["O2 bf16"]["frozen_bytes"] == out["fp32"]["frozen_bytes"] / 2


def test_tied_weights_stay_tied() -> None:
    out = run("tied_weights")
    assert learned(out, 0.01)
    assert out["tied_model"] and out["tied_state"] and out["tied_copy"]


def test_parametrised_weights_keep_their_promise() -> None:
    out = run("parametrized")
    for one in out.values():
        assert learned(one, 0.2)
        assert one["last"] == pytest.approx(out["fp32"]["last"], rel=0.05)
        assert one["spectral_norm"] == pytest.approx(1.0, abs=2e-3)
        assert one["not_orthogonal"] < 1e-5
        assert one["plain_weights"] == 8


def test_fine_tuning_from_a_bf16_checkpoint_keeps_small_updates() -> None:
    out = run("from_bf16_checkpoint")
    for name in ("mixed, built in bf16", "O2, built in bf16", "O2, built in fp32"):
        assert out[name]["last"] == pytest.approx(out["fp32"]["last"], rel=0.02), name
    assert out["O3, no masters"]["last"] > 2 * out["fp32"]["last"]


def test_an_exported_model_is_plain_and_has_the_trained_weights() -> None:
    out = run("export")
    assert out["plain"] and out["equal"] and out["same"]
    assert out["prepared"] > 0.95
    assert out["state_dict"] == out["unprepared"] == pytest.approx(out["prepared"], abs=0.02)
    assert out["lowered"] == pytest.approx(out["prepared"], abs=0.02)


# ---------------------------------------------------------------------- models


@pytest.mark.hours  # 4 seconds and more
def test_checkpointing_changes_no_bit() -> None:
    out = run("checkpointing")
    assert len(out) == 4
    for one in out.values():
        assert one["equal"] and learned(one, 0.1)
        assert one["bytes"] < 0.3


def test_recurrent_layers_learn_in_every_format() -> None:
    out = run("recurrent")
    for kind in ("lstm", "gru", "rnn"):
        for dtype in ("bf16", "fp16"):
            assert out[kind][dtype] == pytest.approx(out[kind]["fp32"], rel=0.25), (kind, dtype)
            assert out[kind][dtype] < 0.75 * out[kind]["first"]


@pytest.mark.hours  # 4 seconds and more
def test_a_unet_learns_in_every_format() -> None:
    out = run("unet")
    for one in out.values():
        assert learned(one, 0.1)
        assert one["last"] == pytest.approx(out["fp32"]["last"], rel=0.05)


def test_inference_leaves_the_training_alone_and_is_close_to_fp32() -> None:
    out = run("inference")
    assert learned(out, 0.2)
    assert out["evaluation_changes_nothing"] and out["served_equals_trained"]
    assert out["program_equals_trained"] and out["plain_equals_trained"]
    assert 0 < out["error"] < 0.01
    assert out["bytes"] < 0.55


# ---------------------------------------------------------------------- other ways in


def test_a_loop_for_torch_amp_trains_as_in_fp32() -> None:
    out = run("hand_written_loop")
    assert learned(out, 0.6)
    assert out["last"] == pytest.approx(out["last_fp32"], rel=0.05)


def test_a_policy_file_decides_for_every_module() -> None:
    out = run("policy_file")
    assert learned(out, 0.2) and out["round_trip"]
    assert out["formats"] == {
        "blocks.0.0": "float32",
        "blocks.1.0": "float16",
        "blocks.2.0": "float16",
        "head": "float32",
    }
    assert out["scale"] == 2048.0


def test_a_step_that_overflows_is_located_and_its_first_cure_trains(capsys: pytest.CaptureFixture[str]) -> None:
    out = run("why_nan")
    assert (out["op"], out["module"]) == ("matmul", "1") and "why_nan.py:" in out["line"]
    assert out["verified"] and out["steps"] == 60 and out["last"] < out["first"]
    committed = json.loads((ROOT / "benchmarks" / "results" / "verdict.json").read_text(encoding="utf-8"))["lines"]
    printed = capsys.readouterr().out.splitlines()
    without_numbers = [re.sub(r"[0-9][0-9.e+]*", "#", line).split() for line in (*printed, *committed)]
    assert without_numbers[: len(printed)] == without_numbers[len(printed) :]  # the README's picture is drawn from it


def test_at_scale_one_process_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    assert run("at_scale", "pure", 4, str(tmp_path))["first"] == 0
    assert run("at_scale", "pure", 6, str(tmp_path))["first"] == 4
    assert run("at_scale", "ddp", 2)["loss"] < 5.5


@pytest.mark.dist
@pytest.mark.hours  # 14 seconds; tests/distributed has a sample of the strategies in CI
def test_at_scale_two_ranks_reach_the_loss_of_one_process_which_opens_their_checkpoint(tmp_path: Path) -> None:
    folder, updates = str(tmp_path / "checkpoints"), 40
    wanted = run("at_scale", "pure", updates)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = [str(EXAMPLES / "at_scale.py"), "--way", "pure", "--updates", str(updates), "--folder", folder]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r"2 ranks: from update 0 to 40, loss (\d+\.\d+)", done.stdout)
    stored = re.search(r"of this rank: ([\d,]+) bytes", done.stdout)
    assert found is not None and stored is not None, done.stdout + done.stderr
    assert float(found[1]) == pytest.approx(wanted["loss"], rel=2e-3)
    assert int(stored[1].replace(",", "")) == pytest.approx(wanted["bytes"] / 2, rel=0.01)
    assert run("at_scale", "pure", updates + 2, folder)["first"] == updates


@pytest.mark.dist
def test_stages_of_a_pipeline_share_norm_and_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("pipeline"), "spawn", run_all)
    out = run("pipeline")
    assert learned(out, 0.5) and out["equal"] and out["skipped"]


@pytest.mark.dist
def test_two_ranks_skip_together_and_stay_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("data_parallel"), "spawn", run_all)
    out = run("data_parallel")
    assert learned(out, 0.5)
    assert out["skipped"] == [[20], [20]] and out["equal"]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.hours,  # a minute of compiling
                pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),  # torch's own import
            ],
        ),
    ],
)
def test_a_compiled_model_trains_as_the_eager_one(backend: str) -> None:
    torch._dynamo.reset()  # other tests compile too, and graphs of one function are limited
    out = run("compiled", backend)
    torch._dynamo.reset()
    for one in out.values():
        assert learned(one, 0.1)
        assert one["first"] == pytest.approx(one["first_eager"], rel=0.01)
        assert one["last"] == pytest.approx(one["last_eager"], rel=0.05)
        assert one["last_by_hand"] == pytest.approx(one["last_eager"], rel=0.05)


def test_monitoring() -> None:
    runs = run("monitoring")
    lost, kinds = runs["none"]
    assert len(lost) == 4 and min(lost) > 0.3 and kinds == ("underflow",)
    lost, kinds = runs["auto"]
    assert max(lost) < 0.05 and kinds == ()
