"""Write the tables and pictures of README and docs from the committed JSON files; `make tables`.

    python -m benchmarks.tables [--check]

Numbers in documents are never typed: this script puts short tables between the markers ``<!-- name -->`` and
``<!-- end -->``, and draws docs/pictures/. Long tables are only on the site (`docs_site.tables`). A test runs it with
--check, which compares a picture by the data it states it was drawn from: another matplotlib draws other lines.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

import torch

from benchmarks import concepts
from benchmarks.accuracy_tables import metrics, spread
from benchmarks.advice_tables import plan_table, tune_table
from benchmarks.auto import auto_table
from benchmarks.block_formats import block_formats_table
from benchmarks.compare_tables import compare_tables
from benchmarks.conclusions import conclusion_blocks
from benchmarks.engine_tables import engine_blocks
from benchmarks.front import front_pictures
from benchmarks.goal_tables import goal_table
from benchmarks.goals import goals, instrument_goals
from benchmarks.invariance import invariance_table
from benchmarks.kills_tables import kills_table
from benchmarks.lens_tables import lens_blocks, lens_source
from benchmarks.lint_tables import lint_blocks
from benchmarks.losses import losses_table, moved_table
from benchmarks.markdown import fill, names
from benchmarks.matrix import matrix_table
from benchmarks.memory_tables import counted, faults, memory, process_memory, task_memory
from benchmarks.optimizers import optimizers_table
from benchmarks.pictures import picture_blocks, pictures
from benchmarks.recipes import recipes_table
from benchmarks.reliability_tables import reliability_blocks
from benchmarks.reports import Reports, committed, load
from benchmarks.rl_formats import rl_formats_table
from benchmarks.scale_tables import scale_blocks
from benchmarks.serving import serving_table
from benchmarks.soak import soak_table
from benchmarks.speed_tables import (
    bench_source,
    beside,
    bounds,
    cases,
    compiled,
    entry,
    gpu,
    norms,
    source,
    stages,
)
from benchmarks.stamp import AGE
from benchmarks.stories_tables import scores, story_blocks
from benchmarks.upstream import upstream_tables
from benchmarks.wheel import wheel_table
from benchmarks.zoo_tables import zoo_table
from halfstep.report import picture_file

ROOT = Path(__file__).resolve().parent.parent


def pages() -> list[Path]:
    """Return the README and every page of docs with a table or a place for one, in order."""
    found = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [path for path in found if names(path.read_text(encoding="utf-8"))]


def blocks(reports: Reports) -> dict[str, str]:
    """Return every table by its name: those of the JSON files, and those that are read from the code."""
    full, digits = load("compare.json"), load("compare_resnet.json")
    tasks = {t["task"]: t for report in (full, digits) for t in report["tasks"]}
    bench, serving, losses, auto = reports.cpu, reports.serving, load("losses.json"), load("auto.json")
    optimizers, recipes = load("optimizers.json"), load("recipes.json")
    wheel, plan, tune = load("wheel.json"), load("plan.json"), load("tune.json")
    return {
        **concepts.blocks(),
        **conclusion_blocks(reports),
        **picture_blocks(reports),
        **reliability_blocks(),
        "source bench": bench_source(bench),
        "source compare": source(full),
        "source compare resnet": source(digits),
        "goals": goal_table(reports, goals()),
        "entry": entry(bench),
        "norms": norms(bench),
        "source pages": source(reports.pages),
        "pages": faults(reports.pages),
        "process memory": process_memory(reports.pages),
        "spread": spread(bench),
        "cases": cases(bench),
        "compiled": compiled(bench),
        "memory": memory(bench),
        "task memory": task_memory(tasks),
        "beside": beside(bench),
        "stages": stages(bench),
        "bounds": bounds(bench),
        "counted": counted(reports.counts),
        "gpu": gpu(reports.gpu),
        "instrument goals": goal_table(reports, instrument_goals()),
        "source lens": lens_source(reports.lens),
        **lens_blocks(reports.lens),
        **lint_blocks(),
        **engine_blocks(load("engines.json")),
        **scale_blocks(*(load(f"{name}.json") for name in ("parity", "collectives"))),
        "kills": kills_table(load("kills.json")),
        "matrix": matrix_table(load("matrix.json")),
        "source auto": source(auto),
        "auto": auto_table(auto),
        "source plan": source(plan),
        "plan": plan_table(plan),
        "source tune": source(tune),
        "tune": tune_table(tune),
        "source serving": source(serving),
        "serving": serving_table(serving),
        "source optimizers": source(optimizers),
        "optimizers": optimizers_table(optimizers),
        "source recipes": source(recipes),
        "recipes": recipes_table(recipes),
        "invariance": invariance_table(load("invariance.json")),
        "block formats": block_formats_table(load("block_formats.json")),
        "rl formats": rl_formats_table(load("rl_formats.json")),
        "source losses": source(losses),
        "losses": losses_table(losses),
        "losses moved": moved_table(losses),
        "source wheel": source(wheel),
        "wheel": wheel_table(wheel),
        "soak": soak_table(load("soak.json")),
        **story_blocks(load("stories.json")),
        "stories fourth": scores(load("stories_fourth_first.json")),
        **compare_tables(),
        **upstream_tables(load("upstream.json")),
        "zoo": zoo_table(zoo) if (zoo := load("zoo.json")) else "Not measured here.",
        **{f"metric {name}": metrics(task) for name, task in tasks.items()},
    }


def main() -> int:
    torch.set_num_threads(1)
    check, reports = "--check" in sys.argv, committed()
    made, stale, shown = blocks(reports), [], set[str]()
    for path in pages():
        text = path.read_text(encoding="utf-8")
        shown |= names(text)
        new = fill(text, made)
        if AGE.sub("", new) != AGE.sub("", text):
            stale.append(path.name)
        if not check and new != text:
            path.write_text(new, encoding="utf-8")
    for name, (chart, words) in pictures(reports).items():
        path = ROOT / "docs" / "pictures" / name
        if not path.exists() or f"<title>{html.escape(words)}</title>" not in path.read_text(encoding="utf-8"):
            stale.append(path.name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(picture_file(chart, words), encoding="utf-8")
    for name, picture in front_pictures(
        reports.cpu, load("lean.json"), load("plan.json"), load("verdict.json")
    ).items():
        path = ROOT / "docs" / "pictures" / name
        if not path.exists() or path.read_text(encoding="utf-8") != picture:
            stale.append(name)
        if not check:
            path.write_text(picture, encoding="utf-8")
    if unread := sorted(made.keys() - shown):
        print(f"on no page: {', '.join(unread)}", file=sys.stderr)
        return 1
    if stale and check:
        print(f"not what the JSON files say: {', '.join(stale)}; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
