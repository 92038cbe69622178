"""Instruments are compared with the loop they stand on; who names whom is judged by the truth about a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import blame
from benchmarks.blame import Said, anomaly_mode, answer, in_torch, instruments, judged, meant
from benchmarks.candidates import start
from benchmarks.cases import AMP, mlp_case
from benchmarks.faults.case import Fault, marked_line
from benchmarks.faults.catalog import LIST_A
from benchmarks.goal_tables import goal_row
from benchmarks.goals import Reached, dearest_audit, instrument, instrument_goals
from benchmarks.instruments import BASELINES, BOXED, LABELS, OFF, ON, NotFinite, sampled, watch_modules
from benchmarks.lens import CASES, Watched, audited, begun, broken, explained, measure, timed
from benchmarks.lens_tables import NOTHING, lens_blocks, lens_source
from benchmarks.measure import QUICK
from benchmarks.reports import Reports
from benchmarks.turns import Track

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

SMALL = mlp_case("small", 32, 64, 10)
FAULTS = {fault.name: fault for fault in LIST_A}


def found(name: str) -> Fault:
    return FAULTS[name]


# ------------------------------------------------------------------ steps


def test_instruments_train_as_the_loop_they_stand_on() -> None:
    losses: dict[str, list[float]] = {}
    for label in LABELS:
        run = start(SMALL, label, "cpu")
        losses[label] = [float(run.step(SMALL.batch(number))) for number in range(4)]
    for label, base in BASELINES.items():
        assert losses[label] == losses[base], label


def test_a_monitor_costs_one_sampled_step_and_the_rest_plain_ones() -> None:
    sampling, between = Track(seconds={1: 11.0, 2: 12.0}), Track(seconds={1: 1.0, 2: 2.0, 3: 9.0})
    plain = Track(seconds={1: 1.0, 2: 2.0, 3: 9.0})
    assert sampled(sampling, between, plain, 10).median == pytest.approx((2.0 + 1.5) / 2)
    assert sampled(sampling, between, plain, 1).median == (11 + 6) / 2


def test_a_measured_case_says_everything() -> None:
    report = measure(Watched(case=replace(SMALL, rare=((BOXED, 2),)), layer="0"), QUICK, 1)
    turns = report["turns"]
    assert set(turns["rows"]) == {label for label in LABELS if not label.endswith("again")}
    assert all(row["ms"] > 0 and ("ratio" in row) == (name not in {OFF, AMP}) for name, row in turns["rows"].items())
    assert turns["rows"][BOXED]["ratio"]["rounds"] == 2 and set(turns["every"]) == {"10", "100"}
    verdict = report["explain"]["verdict"]
    assert (verdict["kind"], verdict["op"], verdict["module"]) == ("overflow", "linear", "0")
    assert report["explain"]["verified"]
    assert all(report["explain"][part]["low"] > 0 for part in ("explain", "diagnosis", "cures"))
    assert report["audit"]["steps"] == 3 and report["audit"]["ratio"]["rounds"] == 1
    lens = {"cases": {"gpt256": report, "lenet5": report}, "faults": {}}
    for goal in instrument_goals():
        assert goal.read(Reports(cpu={}, gpu={}, counts={}, lens=lens)) is not None
    blocks = lens_blocks(lens)
    assert blocks["named"] == NOTHING and "`linear` in `0`" in blocks["explain"]


def test_a_box_of_a_good_run_keeps_nothing_on_a_cpu_and_of_a_bad_one_the_last_batch() -> None:
    report = measure(Watched(case=SMALL, layer="0"), QUICK, 1)
    x, y = SMALL.batch(0)
    batch = x.nbytes + y.nbytes  # the states of generators are copies of these, which are no tensors
    assert report["turns"]["held_bytes"][ON] == 0
    scalars = 512  # loss, scale, flag; norms and magnitudes of a few updates
    assert batch <= report["explain"]["held_bytes"] <= batch + scalars
    assert batch <= report["turns"]["held_bytes"][BOXED] <= batch + scalars


# ------------------------------------------------------------------ a bad step


def test_a_layer_is_whole_again_after_its_bad_step() -> None:
    run = begun(replace(SMALL, dtype="fp16"), blackbox=True)
    before = [p.detach().clone() for p in run.model.parameters()]
    assert broken(run, "2", SMALL.batch(0)).module == "2"
    assert all(map(torch.equal, before, run.model.parameters()))


def test_a_step_that_is_not_bad_is_no_measurement() -> None:
    run = begun(SMALL, blackbox=True)  # bf16 holds what fp16 does not
    with pytest.raises(RuntimeError, match="2 does not overflow with weights 262144 times as large"):
        broken(run, "2", SMALL.batch(0))


def test_calls_of_a_function_are_timed_and_it_is_restored() -> None:
    original = blame.plain
    with timed(blame, "plain") as spent:
        assert blame.plain("linalg.EIGH_") == "eigh"
    assert len(spent) == 1 and spent[0] > 0 and blame.plain is original


def test_explaining_and_auditing_leave_the_first_time_out() -> None:
    assert explained(SMALL, "0", 2)["explain"]["rounds"] == 2
    assert audited(SMALL, 2, steps=1)["ratio"]["rounds"] == 2


def test_every_layer_that_is_to_break_has_a_weight() -> None:
    for watched in CASES.values():
        layer = watched.case.model().get_submodule(watched.layer)
        assert isinstance(layer.weight, nn.Parameter)
        assert {label for label, _ in watched.case.rare} <= set(LABELS)


# ------------------------------------------------------------------ who names whom


def test_hooks_raise_at_the_first_module_that_is_not_finite() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    watch_modules(model)
    model(torch.ones(1, 2)).sum().backward()
    nn.init.constant_(model.get_parameter("1.0.weight"), float("inf"))
    with pytest.raises(NotFinite, match=r"an output of module '1\.0' is not finite"):
        model(torch.ones(1, 2))


def test_instruments_are_asked_about_faults_with_a_producer() -> None:
    asked = blame.asked()
    assert len(asked) > 40 and set(blame.SHOWN) <= {fault.name for fault in asked}


def test_each_instrument_names_what_it_can() -> None:
    """NaN made in a backward pass, inside of a module: the fault that suits all of them best."""
    fault = found("where_hides_the_log")
    asked = {name: ask for name, ask in instruments(fault).items() if name != "DebugUnderflowOverflow"}
    told = {name: judged(ask(), fault) for name, ask in asked.items()}
    parts = {name: (said["op"], said["module"], said["line"]) for name, said in told.items()}
    assert parts == {
        "hs.TrainStep": (True, True, True),
        "detect_anomaly": (True, False, True),
        "hooks on modules": (False, True, False),
        "mode on every operator": (True, False, True),
    }
    assert "LogBackward" not in told["detect_anomaly"]["words"] and "backward of Log" in told["detect_anomaly"]["words"]


@pytest.mark.hours  # the import of transformers alone takes seconds
def test_the_report_of_transformers_names_a_module_of_a_forward_pass_and_is_silent_otherwise() -> None:
    pytest.importorskip("transformers")
    forward, backward = found("attention_logits"), found("where_hides_the_log")
    said = judged(blame.debug_underflow_overflow(in_torch(forward)), forward)
    assert said["module"] and not said["op"] and said["words"].startswith("inf or nan around blocks.1.attn")
    assert blame.debug_underflow_overflow(in_torch(backward)) == blame.SILENT


def test_a_line_counts_in_the_files_of_every_set() -> None:
    places = [(str(blame.PROGRAMS / "second" / "losses.py"), 7), (str(blame.PROGRAMS / "case.py"), 9), ("torch.py", 3)]
    assert blame.innermost(places) == ("losses.py", 7)


def test_an_instrument_that_stays_silent_is_right_about_nothing() -> None:
    fault = found("summed_loss")  # gradients of weights are infinite, no NaN anywhere
    said = judged(anomaly_mode(in_torch(fault)), fault)
    assert said == {"words": "", "op": False, "module": False, "line": False}
    assert not torch.is_anomaly_enabled()


def test_an_instrument_that_breaks_the_program_is_told_and_right_about_nothing() -> None:
    def breaks() -> Said:
        raise RuntimeError("Output 0 is a view\nand more")

    said = judged(answer(breaks), found("summed_loss"))
    assert said == {"words": "fails: RuntimeError: Output 0 is a view", "op": False, "module": False, "line": False}


def test_a_part_is_right_only_if_it_is_the_truth() -> None:
    fault = found("attention_logits")
    marked = marked_line(fault)
    assert marked is not None
    right = Said(words="x", op=frozenset({"matmul"}), module="blocks.1.attn", line=marked[:2])
    assert judged(right, fault) == {"words": "x", "op": True, "module": True, "line": True}
    wrong = Said(words="x", op=frozenset({"softmax"}), module="blocks.1", line=(marked[0], marked[1] + 1))
    assert judged(wrong, fault) == {"words": "x", "op": False, "module": False, "line": False}


def test_nodes_of_the_graph_stand_for_operators() -> None:
    assert {"matmul", "linear", "einsum"} <= meant("Mm") | meant("Bmm")
    assert "crossentropy" in meant("LogSoftmax") and "log" not in meant("LogSoftmax")
    assert "eigh" in meant("LinalgEigh")


def test_the_table_counts_who_is_right() -> None:
    report = blame.compared([found("where_hides_the_log")])
    blocks = lens_blocks({"faults": {**report, "shown": ["where_hides_the_log"]}, "cases": {}})
    assert "| first, 1 | hs.TrainStep | 1 | 1 | 1 | 1 | 0 |" in blocks["named"]
    assert "| first, 1 | detect_anomaly | 1 | 0 | 1 | 0 | 0 |" in blocks["named"]
    assert "| first, 1 | hooks on modules | 0 | 1 | 0 | 0 | 0 |" in blocks["named"]


# ------------------------------------------------------------------ goals and tables


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.125, "high": median + 0.125}


def known(**cases: float) -> Reports:
    lens: dict[str, Any] = {
        "cases": {
            name: {
                "title": name,
                "turns": {"rows": {ON: {"ratio": ratio(value)}}},
                "audit": {"ratio": ratio(8 * value)},
            }
            for name, value in cases.items()
        }
    }
    return Reports(cpu={}, gpu={}, counts={}, lens=lens)


def test_goals_of_instruments_are_read_where_they_were_measured() -> None:
    nothing = Reports(cpu={}, gpu={}, counts={})
    for goal in instrument_goals():
        assert goal.read(nothing) is None and goal_row(goal, nothing)[2:] == ["not measured", ""]
    read = instrument("gpt256", "turns", "rows", ON, "ratio")
    assert read(known(gpt256=1.0)) == Reached(value=1.0, low=0.875, high=1.125)
    assert read(known(lenet5=1.0)) is None
    assert instrument("gpt256", "turns", "every", "100")(known(gpt256=1.0)) is None


def test_the_dearest_audit_is_named() -> None:
    assert dearest_audit(known(a=0.5, b=1.5)) == Reached(value=12.0, low=11.875, high=12.125, where="b")


def test_without_measurements_the_tables_say_so() -> None:
    assert set(lens_blocks({}).values()) == {NOTHING} and lens_source({}) == NOTHING
