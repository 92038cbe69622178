"""Measure models that serve: time, memory, distance from fp32, beside torch.amp; write a JSON file.

    python -m benchmarks.serving --json benchmarks/results/serving.json

torch.amp casts every weight in every forward pass. `hs.lowered` and `hs.exported` store weights in the format that
their operators take. torch.amp returns low outputs, and presets return fp32 ones: one candidate of each does as the
other. A case of decoding generates `TOKENS` tokens with a cache of keys and values; the rest are forward passes.
All candidates run under `torch.inference_mode`, in turns in one process, in an order shuffled
each round; a figure is the median of ratios within rounds, with its 90 % interval.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from benchmarks.cases import CASES, Batch, Case, text
from benchmarks.counts import allocated
from benchmarks.markdown import megabytes, ratio, table
from benchmarks.stamp import commit, write
from benchmarks.turns import Track, in_turns
from benchmarks.turns import ratio as paired
from halfstep.tasks import machine
from halfstep.timing import WARM_UP

AMP, AGAIN, WIDE = "torch.amp", "torch.amp again", "torch.amp, fp32 outputs"
TOKENS = 16
ROUNDS, QUICK = 60, 6
SECONDS = 25.0  # what the rounds of a case may take
RARE = 3  # rounds of torch's fp16 kernels on a CPU

Model = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One candidate.

    Attributes:
        run: its forward pass.
        module: what holds its weights.
        timed: what is measured; None: `run`.
        like: the candidate whose outputs it must have, or "".
    """

    run: Model
    module: nn.Module
    timed: Model | None = None
    like: str = ""


def llama() -> nn.Module:
    """Return a small Llama of transformers with new weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def no_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    raise NotImplementedError("a model that decodes is not trained here")


DECODING = Case(
    name="llama256",
    title="Llama, d = 256, decoding",
    about=f"4 layers of 256, vocabulary 1024, one prompt of 16; {TOKENS} tokens by `generate`",
    model=llama,
    batch=text(1, 16, 1024),
    loss_fn=no_loss,
)
FORWARD = ("gpt512", "mlp21m", "resnet18", "gpt256", "gpt256_fp16")
CHOSEN = {**{name: CASES[name] for name in FORWARD}, DECODING.name: DECODING}


def decoding(net: nn.Module) -> Model:
    """Return what generates `TOKENS` tokens greedily."""
    return lambda x: net.generate(x, max_new_tokens=TOKENS, do_sample=False)  # type: ignore[operator]


def logits(net: nn.Module) -> Model:
    """Return the forward pass of a language model of transformers."""
    return lambda x: net(x, use_cache=False).logits


def candidates(case: Case) -> dict[str, Served]:
    """Return what serves the model of `case`, by label; all start from the same weights."""
    torch.manual_seed(0)
    model = case.model().eval().requires_grad_(False)
    x = case.batch(0)[0]

    def amp(run: Model, dtype: torch.dtype | None = None) -> Model:
        def under_autocast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=case.low):
                found = run(x)
            return found if dtype is None else found.to(dtype)

        return under_autocast

    def prepared(name: str, **fields: Any) -> nn.Module:
        policy = hs.Policy.of(name, dtype=case.dtype).replace(**fields)
        return hs.prepare(copy.deepcopy(model), policy=policy)

    live = {name: prepared(name) for name in ("mixed", "O2", "pure")}
    plain = hs.lowered(live["pure"])
    if case is DECODING:
        nets = {"fp32": model, **live, "pure, lowered": plain}
        by_amp = Served(run=amp(logits(model)), module=model, timed=amp(decoding(model)))
        return {AMP: by_amp, AGAIN: by_amp} | {
            name: Served(run=logits(net), module=net, timed=decoding(net)) for name, net in nets.items()
        }
    made = {
        "fp32": Served(run=model, module=model),
        AMP: Served(run=amp(model), module=model),
        AGAIN: Served(run=amp(model), module=model),
        **{name: Served(run=net, module=net) for name, net in live.items()},
        "pure, lowered": Served(
            run=lambda x: plain(x.to(case.low) if x.is_floating_point() else x), module=plain, like="pure"
        ),
    }
    if case.dtype == "bf16":
        low = prepared("mixed", outputs="keep")
        made[WIDE] = Served(run=amp(model, torch.float32), module=model)
        made["mixed, low outputs"] = Served(run=low, module=low)
    for name in ("mixed", "O2"):
        run = hs.exported(live[name], (x,)).module()
        made[f"{name}, exported"] = Served(run=run, module=run, like=name)
    return made


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of parameters and buffers, without what a weight store keeps for training."""
    return sum(t.nbytes for t in itertools.chain(module.parameters(), module.buffers()))


def far(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance of two outputs."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return time, bytes and distances of every candidate of a case."""
    print(case.name, file=sys.stderr, flush=True)
    begun, at = time.perf_counter(), commit()
    made = candidates(case)
    tracks = {label: Track() for label in made}
    rare = dict.fromkeys((AMP, AGAIN, "pure, lowered"), RARE) if case.dtype == "fp16" else {}

    def step(run: Model) -> Callable[[Batch], Tensor]:
        return lambda batch: run(batch[0]).flatten()[:1]

    steps = {label: step(served.timed or served.run) for label, served in made.items()}
    with torch.inference_mode():
        outputs = {label: served.run(case.batch(0)[0]) for label, served in made.items()}
        once, unseen = dict.fromkeys(rare, 1), {label: Track() for label in made}
        in_turns(steps, case.batch, unseen, "cpu", rounds=range(WARM_UP), rare=once)
        begun_rounds, number = time.perf_counter(), 0
        while number < rounds and time.perf_counter() - begun_rounds < SECONDS:
            left = {label: max(0, most - number) for label, most in rare.items()}
            in_turns(steps, case.batch, tracks, "cpu", rounds=range(number, number + QUICK), rare=left)
            number += QUICK
        batch = case.batch(0)[0]
        peaks = {label: allocated(partial(served.timed or served.run, batch), "cpu") for label, served in made.items()}
    rows = {}
    for label, served in made.items():
        times = sorted(tracks[label].seconds.values())
        rows[label] = {
            "ms": 1e3 * times[len(times) // 2],
            "to_amp": dataclasses.asdict(paired(tracks[label], tracks[AMP])),
            "weights_bytes": bytes_of(served.module),
            "forward_bytes": peaks[label],
            "to_fp32": far(outputs[label], outputs["fp32"]),
            "to_policy": far(outputs[label], outputs[served.like]) if served.like else None,
        }
    about = case.about.partition(":")[0]
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "title": case.title,
        "about": about,
        "commit": at,
        "dtype": case.dtype,
        "rounds": number,
        "seconds": seconds,
        "rows": rows,
    }


def serving_table(report: dict[str, Any]) -> str:
    """Return what was measured, a table for each case."""
    if not report:
        return "Not measured here."
    parts = []
    for case in report["cases"].values():
        rows = []
        for label, data in case["rows"].items():
            policy = {None: "-", 0.0: "equal bits"}.get(data["to_policy"], f"{data['to_policy'] or 0:.2g}")
            bytes = [megabytes(data["weights_bytes"]), megabytes(data["forward_bytes"])]
            rows.append(
                [f"`{label}`", f"{data['ms']:.2f}", ratio(data["to_amp"]), *bytes, f"{data['to_fp32']:.2g}", policy]
            )
        head = ["candidate", "ms a call", "/ torch.amp", "weights, MB", "more at one time, MB", "from fp32"]
        parts.append(
            f"**{case['title']}**, {case['dtype']}; {case['about']}; {case['rounds']} rounds, "
            f"commit {case.get('commit') or report['commit']}.\n\n"
            f"{table([*head, 'from its policy'], rows)}"
        )
    if report["quick"]:
        parts.insert(0, "**Few rounds (`--quick`), which show that it runs and measure nothing.**")
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report; default: print it")
    parser.add_argument(
        "--only", action="append", choices=CHOSEN, help="a case, of several if repeated; the report keeps its others"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # of torch's exporter and of emulated fp16
    known = (
        json.loads(options.json.read_text("utf-8")) if options.only and options.json and options.json.exists() else {}
    )
    report = {
        "command": " ".join(["python -m benchmarks.serving", *sys.argv[1:]]),
        "commit": commit(),
        "quick": options.quick,
        "machine": {**machine(), "torch_threads": torch.get_num_threads()},
        "cases": {
            **{name: {"commit": known["commit"], **case} for name, case in known.get("cases", {}).items()},
            **{name: measure(CHOSEN[name], QUICK if options.quick else ROUNDS) for name in options.only or CHOSEN},
        },
    }
    write(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
