"""The conclusions of docs/performance.md: sentences with their numbers, from the committed JSON; `make tables`.

A sentence stands under a heading that its numbers must justify: `under` and `over` raise where one no longer does, so
a new measurement cannot leave a wrong sentence behind.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cases import AMP
from benchmarks.goals import goals
from benchmarks.reports import Reports, bf16_cases, load, row
from benchmarks.zoo_tables import deviations

__all__ = ["conclusion_blocks"]

TABLES = "tables"


class Turned(Exception):
    """A number is on the other side of 1 than its sentence states."""


def under(value: float, what: str, bound: float = 1.0) -> float:
    """Return `value`, which the sentence states to be below `bound`."""
    if value >= bound:
        raise Turned(f"{what}: {value:.3f} is not below {bound:g}; move the sentence in {__file__}")
    return value


def over(value: float, what: str, bound: float = 1.0) -> float:
    """Return `value`, which the sentence states to be above `bound`."""
    if value <= bound:
        raise Turned(f"{what}: {value:.3f} is not above {bound:g}; move the sentence in {__file__}")
    return value


def to(bench: dict[str, Any], case: str, label: str, what: str = "to_amp") -> float:
    """Return a paired ratio of step times."""
    found = row(bench, case, label)
    assert found is not None, (case, label)
    return float(found[what]["median"])


def count(bench: dict[str, Any], case: str, label: str, what: str) -> int:
    """Return a counted number of a candidate."""
    found = row(bench, case, label)
    assert found is not None, (case, label)
    return int(found["counts"][what])


def link(text: str, page: str, anchor: str = "") -> str:
    return f"[{text}]({TABLES}/{page}.md{'#' + anchor if anchor else ''})"


def bullets(*sentences: str) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def conclusion_blocks(reports: Reports) -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {
        "conditions": conditions(reports.cpu),
        "faster": faster(reports),
        "smaller": smaller(reports),
        "as accurate": accurate(reports),
        "slower": slower(reports),
        "named causes": causes(reports),
        "instrument costs": instruments(reports),
        "counted for a gpu": on_a_gpu(reports),
    }


def conditions(bench: dict[str, Any]) -> str:
    machine = bench["machine"]
    assert "avx512_bf16" in machine["instruction_sets"] and "avx512_fp16" not in machine["instruction_sets"]
    return (
        f"**Conditions of every number on this page:** {machine['cpu']}, {machine['cores']} cores with bf16 units and "
        f"without fp16 units, torch {machine['torch']}, no GPU. halfstep was never measured on a GPU. A ratio is the "
        f"median over rounds in which all candidates take turns in one process, on the same batches; below 1 is less "
        f"time, or fewer bytes, than torch.amp in bf16. The tables have every interval and the "
        f"{link('method', 'speed', 'method')}."
    )


def faster(reports: Reports) -> str:
    bench, losses = reports.cpu, load("losses.json")
    mlp = under(to(bench, "mlp21m", "pure"), "pure on the MLP")
    gpt = under(to(bench, "gpt512", "pure"), "pure on the GPT of one sequence")
    resnet = under(to(bench, "resnet18", "mixed"), "mixed on ResNet-18")
    mixed = under(to(bench, "gpt256", "mixed"), "mixed on the GPT")
    tiny = under(to(bench, "chain148", "mixed"), "mixed on 148 tiny tensors")
    tail = under(bench["cases"]["mlp25m"]["stages"]["pure"]["tail_to_amp"]["median"], "the tail")
    half = over(1 / to(bench, "gpt256_fp16", "mixed"), "torch.amp in fp16")
    ce = [
        case["rows"]["cross_entropy"]["to_amp"]["median"]
        for case in losses["cases"]
        if case["title"].startswith("cross entropy") and case["threads"] == 2
    ]
    pages = [case["rows"] for case in reports.pages["cases"].values()]
    most = max(rows[AMP]["alone"] for rows in pages)
    ours = max(own["alone"] for rows in pages for name, own in rows.items() if name != AMP)
    return bullets(
        f"**Models whose time goes to their weights.** A step under `pure` takes {mlp:.2f} of torch.amp's time on an "
        f"MLP of 21M parameters and {gpt:.2f} on a GPT that trains on one sequence a step "
        f"({link('steps', 'speed', 'mlp-21m-parameters')}).",
        f"**Models bound by products.** `mixed`, the recommended preset, takes {resnet:.2f} of torch.amp's time on "
        f"ResNet-18 and {mixed:.2f} on a GPT of 5.3M parameters ({link('steps', 'speed', 'resnet-18')}).",
        f"**Many tiny tensors.** 74 linear layers of 8 take {tiny:.2f} of torch.amp's time under `mixed`; fp32 "
        f"takes {to(bench, 'chain148', 'fp32'):.2f} ({link('steps', 'speed', '148-tiny-tensors')}).",
        f"**The tail.** Unscaling, clipping and AdamW on 25M parameters take {tail:.2f} of torch.amp's time under "
        f"`pure` ({link('stages', 'limit', 'stages')}).",
        f"**fp16 on a CPU.** torch.amp in fp16 takes {half:.0f} times as long as halfstep's emulated fp16 on the GPT "
        f"({link('steps', 'speed', 'gpt-d--256-fp16')}).",
        f"**Cross entropy.** With a C++ compiler it takes {min(ce):.2f} to {under(max(ce), 'cross entropy'):.2f} of "
        f"torch.amp's time on two threads ({link('losses', 'losses')}).",
        f"**Page faults.** Alone in its process torch.amp has up to {most:,} page faults a step; a TrainStep has at "
        f"most {ours} ({link('page faults', 'page_faults')}).",
    )


def smaller(reports: Reports) -> str:
    bench = reports.cpu
    amp = count(bench, "gpt256", AMP, "saved_bytes")

    def kept(label: str) -> float:
        return under(count(bench, "gpt256", label, "saved_bytes") / amp, f"bytes saved by {label}")

    lean = under(count(bench, "mlp21m", "lean", "state_bytes") / count(bench, "mlp21m", AMP, "state_bytes"), "lean")
    ratios = [
        round(count(bench, case, "mixed", "peak_bytes") / count(bench, case, AMP, "peak_bytes"), 2)
        for case in bf16_cases(bench)
    ]
    most = under(max(ratios), "bytes of mixed at once", 1.005)
    peak = under(count(bench, "mlp21m", "pure", "peak_bytes") / count(bench, "mlp21m", AMP, "peak_bytes"), "pure")
    return bullets(
        f"**Activations.** The GPT saves {kept('mixed'):.2f} of torch.amp's bytes for the backward pass under `mixed`, "
        f"{kept('pure'):.2f} under `pure`, and {kept('pure, linear_cross_entropy'):.2f} under `pure` with "
        f"`hs.linear_cross_entropy` ({link('memory', 'memory', 'gpt-d--256')}).",
        f"**Weights and optimizer state.** `lean` stores {lean:.2f} of torch.amp's bytes between steps: 6 a parameter "
        f"with AdamW instead of 12 ({link('bytes a parameter', 'weights')}; "
        f"[when to use it](concepts/weights.md#half-the-state-lean)).",
        f"**The most at once.** A step under `mixed` needs {min(ratios):.2f} to {most:.2f} of torch.amp's bytes, on "
        f"every model; one of the MLP under `pure` {peak:.2f}, because the gradients are bf16 and no weight is copied "
        f"({link('memory', 'memory', 'mlp-21m-parameters')}).",
    )


def accurate(reports: Reports) -> str:
    tasks = [task for name in ("compare.json", "compare_resnet.json") for task in load(name)["tasks"]]
    verdicts = [found["difference"]["verdict"] for task in tasks for found in task["rows"] if found["label"] != "fp32"]
    good = verdicts.count("within the margin")
    curves = [
        (own["curve"]["of_spread"], case["title"], label)
        for case in bf16_cases(reports.cpu).values()
        for label, own in case["rows"].items()
        if own["curve"] is not None and not label.startswith("torchao")
    ]
    far, where, label = max(curves)
    tuned = load("lean.json")["programs"]["tune 1e-5"]["rows"]
    lean = next(found for found in tuned if found["label"] == "lean")["difference"]
    unsure = [
        found["label"]
        for found in load("lean.json")["programs"]["gpt"]["rows"]
        if found["difference"].get("verdict") == "undecided"
    ]
    zoo = load("zoo.json")["rows"]
    assert all(found.reason for name in zoo for found in deviations(name)), "a deviation without a known reason"
    return bullets(
        f"**Final results.** LeNet-5, a ResNet and a GPT end within the margin of fp32 in {good} of {len(verdicts)} "
        f"comparisons over 5 seeds: torch.amp, `torch`, `O1`, `mixed` and `O2`, in bf16 and fp16 "
        f"({link('accuracy', 'accuracy')}).",
        f"**Loss curves.** Over 50 steps no preset is further from fp32 than {far:.1f} times torch.amp's own distance "
        f"({where}, `{label}`); the bound is 4 ({link('loss curves', 'accuracy', 'loss-curves')}).",
        f"**Architectures.** {len(zoo)} architectures of transformers were trained tiny under five presets in two "
        f"formats; every deviation beyond the bounds has a known reason ({link('architectures', 'architectures')}).",
        f"**Fine-tuning under `lean`.** At a learning rate of 1e-5 its loss ends {abs(lean['mean']):.4f} nats "
        f"{'above' if lean['mean'] > 0 else 'below'} fp32's, "
        f"{lean['verdict']} ({link('fine-tuning', 'weights', 'fine-tuning')}).",
        f"**Undecided.** Training a GPT for 3,000 steps, with two seeds, does not decide whether "
        f"{', '.join(f'`{name}`' for name in unsure)} end within the margin "
        f"({link('from the start', 'weights', 'from-the-start')}).",
    )


def slower(reports: Reports) -> str:
    bench = reports.cpu
    entry = over(bench["micro"]["region_entry"]["rows"]["hs.autocast"]["median"], "entering a region")
    small = over(to(bench, "resnet_small", "mixed"), "mixed on the small ResNet")
    lenet = under(to(bench, "lenet5", "fp32"), "fp32 on LeNet-5", to(bench, "lenet5", "mixed"))
    compiled = over(to(bench, "lenet5", "mixed compiled"), "mixed compiled on LeNet-5")
    half = over(to(bench, "gpt256_fp16", "mixed", "to_fp32"), "emulated fp16")
    half_small = over(to(bench, "lenet5_fp16", "mixed", "to_fp32"), "emulated fp16")
    listed = [(goal, goal.read(reports)) for goal in goals()]
    measured = [goal.met(found) for goal, found in listed if found is not None]
    return bullets(
        f"**Small models.** fp32 is the fastest on LeNet-5: it takes {lenet:.2f} of torch.amp's time, `mixed` "
        f"{to(bench, 'lenet5', 'mixed'):.2f} ({link('steps', 'speed', 'lenet-5')}).",
        f"**The worst model of the suite.** On a ResNet of 77,562 parameters `mixed` takes {small:.3f} and `O2` "
        f"{to(bench, 'resnet_small', 'O2'):.3f} of torch.amp's time ({link('steps', 'speed', 'resnet-9-norms')}).",
        f"**`torch.compile` on LeNet-5.** `mixed` compiled takes {compiled:.2f} of eager torch.amp's time; torch.amp "
        f"compiled takes {to(bench, 'lenet5', 'torch.amp compiled'):.2f} ({link('compiled', 'compile')}).",
        f"**Entering a region** takes {entry:.2f} of `torch.autocast`'s time, about a microsecond more "
        f"({link('regions', 'regions')}).",
        f"**Emulated fp16** takes {half:.2f} of fp32's time on the GPT and {half_small:.2f} on LeNet-5: it shows what "
        f"fp16 does to a model and saves no time on a CPU ({link('steps', 'speed', 'gpt-d--256-fp16')}).",
        f"**Goals.** {sum(measured)} of {len(measured)} goals that were set beforehand are met "
        f"({link('goals, and why the others are missed', 'goals')}).",
    )


def instruments(reports: Reports) -> str:
    cases = reports.lens["cases"].values()
    turns = [case["turns"] for case in cases if "turns" in case]
    box = max(turn["rows"]["TrainStep, black box on"]["ratio"]["median"] for turn in turns)
    monitor = max(turn["every"]["100"]["median"] for turn in turns)
    explained = [case["explain"]["explain"]["median"] for case in cases]
    audit = max(case["audit"]["ratio"]["median"] for case in cases)
    return bullets(
        f"**The black box**, which is on by default, makes a good step at most {box:.3f} times as long; to explain a "
        f"bad step takes as long as {min(explained):.0f} to {max(explained):.0f} steps "
        f"({link('steps', 'instruments', 'steps')}).",
        f"**`hs.Monitor(every=100)`** makes a step {monitor:.3f} times as long on average, at most.",
        f"**An audited step** takes up to {audit:.1f} times a training step "
        f"({link('audit', 'instruments', 'an-audit')}).",
    )


def causes(reports: Reports) -> str:
    stories = [found for found in load("stories.json")["stories"].values() if "died" not in found]
    right = sum(found["cause"] is True for found in stories)
    first = [found for found in load("stories_first.json")["stories"].values() if "died" not in found]
    before = sum(found["cause"] is True for found in first)
    later = load("stories_fourth_first.json")["stories"].values()
    known = sum(found["cause"] is True for found in later)
    twins = [found["twin"] for found in stories if found["twin"]]
    lines = [words for found in twins for words in found if not words.startswith("Monitor:")]
    assert all("hardly a number has moved" in words for words in lines), "the black box accuses a healthy twin"
    told = reports.lens["faults"]["rows"].values()
    blind = [found["said"]["hs.TrainStep"] for found in told if found["set"] == "second"]
    whole = sum(said["op"] and said["module"] and said["line"] for said in blind)
    return bullets(
        f"**Operator, module and line.** Of {len(blind)} faults that were written without knowledge of the black box, "
        f"it names all three in {whole}; none of four other instruments names all three in any "
        f"({link('seeded faults', 'causes', 'seeded-faults')}).",
        f"**Root cause.** Of {len(stories)} stories rebuilt from public trackers it names the root cause of {right}; "
        f"before changes that its wrong answers led to, it was {before} of {len(first)}. Of a later set, scored once, "
        f"it was {known} of {len(later)} "
        f"({link('stories', 'causes', 'stories')}).",
        f"**False alarms.** The black box accuses none of the {len(stories)} healthy twins of these stories; "
        f"`hs.Monitor` accuses {len(twins)}, and a line of the step says of {len(lines)} that low weights stand still, "
        f"which is so ({link('wrong answers', 'causes', 'answers-that-are-wrong')}).",
    )


def on_a_gpu(reports: Reports) -> str:
    gpt = {name: found["summary"] for name, found in reports.counts["models"]["gpt"].items()}

    def around(name: str) -> float:
        return float(gpt[name]["tail_bytes_per_parameter"] + gpt[name]["weight_bytes_per_parameter"])

    amp, pure = "torch.amp:fp16", "pure:fp16"
    return (
        f"No time was measured on a GPU. Steps on fake CUDA tensors run torch's CUDA dispatcher and compute nothing; "
        f"they show that `pure` in fp16 has {gpt[pure]['casts']} casts where torch.amp has {gpt[amp]['casts']}, moves "
        f"{around(pure):.0f} bytes a parameter around the optimizer instead of {around(amp):.1f}, and launches "
        f"{gpt[pure]['launches_tail']} kernels after the backward pass instead of {gpt[amp]['launches_tail']} "
        f"({link('counts', 'counts')}). `make bench-gpu` measures the times."
    )
