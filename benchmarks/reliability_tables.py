"""The conclusions of docs/reliability.md: sentences with their numbers, from the committed JSON."""

from __future__ import annotations

from benchmarks.conclusions import bullets, link, under
from benchmarks.reports import load
from benchmarks.zoo_tables import deviations

__all__ = ["reliability_blocks"]


def reliability_blocks() -> dict[str, str]:
    """Return what stands between the markers, by their names."""
    return {"reliability": conclusions()}


def conclusions() -> str:
    parity, ranks, sent = (load(f"{name}.json")["rows"] for name in ("parity", "ranks", "collectives"))
    kills, soak, zoo = load("kills.json"), load("soak.json"), load("zoo.json")["rows"]
    equal = sum(row["deviation"] == 0.0 for row in parity)
    share = under(max(row["deviation"] / row["bound"] for row in parity), "deviation as a share of its bound")
    same = sum(row["skipped_as_expected"] and row["scales_equal"] and row["weights_equal"] for row in ranks)
    ddp = [row for row in sent if row["strategy"] == "ddp" and row["policy"].startswith("mixed")]
    assert not any(row["good"]["number"] for row in ddp), "TrainStep adds a collective to DDP under mixed"
    cases = [*kills["cases"].values(), kills["disk"]]
    runs, alike = (sum(case[key] for case in cases) for key in ("runs", "equal"))
    killed, damaged = (sum(case[key] for case in kills["cases"].values()) for key in ("killed", "damaged"))
    presets = sum(len(row["presets"]) for row in zoo)
    found = [(row["name"], one) for row in zoo for one in deviations(row)]
    assert all(one.reason for _, one in found), "a deviation without a known reason"
    outside = {(name, one.preset) for name, one in found}
    alone = [1 for _, one in found if one.kind == "raises" and not one.reason.startswith("torch.amp raises")]
    flat = [quantity["flat"] for quantity in soak["growths"].values()]
    return bullets(
        f"**One process and many.** {equal} of {len(parity)} runs on 2 and 4 processes have the bits of one process; "
        f"the others deviate by at most {share:.2f} of their bound ([below](#one-process-and-many)).",
        f"**Ranks agree.** In {same} of {len(ranks)} runs of 1,000 updates, about a tenth of them bad, all ranks skip "
        f"the same updates, have the same scales and end with equal weights.",
        "**Collectives.** `TrainStep` adds no collective to DDP and one reduction to sharded models; a skipped step "
        "sends what a good one does.",
        f"**Kills.** {killed} runs were killed, also while they wrote, and the disk was full in "
        f"{kills['disk']['runs']} more: {alike} of {runs} ended with the bits of an undisturbed run, and {damaged} "
        f"checkpoints were damaged ([kills](checkpoints.md#kills-full-disks)).",
        f"**Architectures.** {len(zoo)} architectures of transformers train under five presets in two formats: "
        f"{presets - len(outside)} of {presets} combinations are within all bounds, every other one has a known "
        f"reason, and {len(alone)} raise where torch.amp does not ({link('architectures', 'architectures')}).",
        f"**Long runs.** Over {soak['steps']:,} steps with overflows, retries, checkpoints and evidence, {sum(flat)} "
        f"of {len(flat)} quantities (memory, objects, files, threads) stay flat "
        f"({link('long runs', 'runs')}).",
    )
