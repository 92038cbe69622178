"""Resolve: no "auto" left, the order of rules, and plans whose every decision has a reason."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.errors import HalfstepError, PolicyError
from halfstep.policy import PRESETS, SCALE_RULES, Plan, Policy, ScaleRule, resolve
from halfstep.policy.operators import known, table
from halfstep.policy.plan import ModuleDecision, ParameterDecision
from halfstep.policy.resolve import Decision, Units, operator_rules, reduces_itself, resolve_dtype, resolved
from tests.policy.strategies import policies


class Net(nn.Module):
    """Tied weights, a norm, a buffer, an fp64 parameter and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.exact = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("inverse_frequency", torch.ones(4))


class Gate(nn.Module):
    """A router: a parameter of its own, and a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.statics = nn.Linear(4, 4)


class Declaring(nn.Module):
    """What a transformers model declares, on class and instance."""

    _keep_in_fp32_modules = ["wo"]  # as transformers does
    _keep_in_fp32_modules_strict = None

    def __init__(self) -> None:
        super().__init__()
        self._keep_in_fp32_modules_strict = {"gate.weight", "statics", "sinks", "n*m", "missing"}
        self.gate, self.wo, self.wide = Gate(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.Linear(4, 4))
        self.sinks, self.weights = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a device have given units."""

    def build(*, bf16: bool, fp16: bool) -> None:
        def units(device: str) -> Units:
            return Units(device, bf16=bf16, fp16=fp16, reason="as told")

        # the package re-exports a function of the module's name, which hides the module as an attribute
        monkeypatch.setattr(import_module("halfstep.policy.resolve"), "units", units)

    return build


class TestDtype:
    @pytest.mark.parametrize(
        ("device", "bf16", "fp16", "want", "note"),
        [
            ("cpu", True, False, "bf16", "dtype auto: as told"),
            ("cpu", True, True, "bf16", "dtype auto: as told"),
            ("cpu", False, True, "fp32", "so everything stays fp32"),  # fp16 is never a default on a CPU
            ("cpu", False, False, "fp32", "dtype='bf16' or 'fp16' (emulated) by name"),
            ("cuda", True, True, "bf16", "dtype auto: as told"),
            ("cuda", False, True, "fp16", "dtype auto: as told"),
        ],
    )
    def test_auto(self, machine: Any, device: str, bf16: bool, fp16: bool, want: str, note: str) -> None:
        machine(bf16=bf16, fp16=fp16)
        got, said = resolve_dtype(Policy(), device)
        assert got == want
        assert note in said

    @pytest.mark.parametrize(
        ("fields", "bf16", "fp16", "note"),
        [
            ({"dtype": "bf16"}, True, True, ""),
            ({"dtype": "bf16"}, False, True, "bf16 runs in torch's kernels without units"),
            ({"dtype": "fp16"}, True, True, ""),
            ({"dtype": "fp16"}, True, False, "fp16 is emulated"),
            ({"dtype": "fp16", "emulate": "never"}, True, False, "many times slower"),
            ({"dtype": "fp16", "emulate": "always"}, True, True, "emulate='always'"),
            ({"dtype": "fp32"}, False, False, ""),
        ],
    )
    def test_by_name_is_obeyed_and_says_what_is_missing(
        self, machine: Any, fields: dict[str, Any], bf16: bool, fp16: bool, note: str
    ) -> None:
        machine(bf16=bf16, fp16=fp16)
        got, said = resolve_dtype(Policy(**fields), "cpu")
        assert got == fields["dtype"]
        assert note in said
        assert bool(said) == bool(note)

    def test_unknown_device(self) -> None:
        with pytest.raises(PolicyError, match="device type 'gpu' has no torch.autocast"):
            resolve_dtype(Policy(), "gpu")


class TestResolved:
    @settings(max_examples=100, deadline=None)
    @given(policies(), st.sampled_from(["cpu", "cuda"]))
    def test_leaves_no_auto_and_is_idempotent(self, policy: Policy, device: str) -> None:
        try:
            concrete = resolved(policy, device)
        except HalfstepError:  # its fields contradict each other
            return
        assert "auto" not in (concrete.dtype, concrete.master, concrete.scale, concrete.emulate)
        assert concrete.scale == "none" or isinstance(concrete.scale, (float, ScaleRule))
        assert resolved(concrete, device) == concrete

    @pytest.mark.parametrize(
        ("fields", "want"),
        [
            ({"dtype": "fp16"}, {"scale": SCALE_RULES["halfstep"], "master": "none"}),
            ({"dtype": "bf16"}, {"scale": "none", "emulate": "never"}),
            ({"dtype": "bf16", "scale": "megatron"}, {"scale": SCALE_RULES["megatron"]}),
            ({"dtype": "bf16", "scale": 4}, {"scale": 4.0}),
            ({"dtype": "bf16", "params": "low"}, {"master": "master", "params": "low"}),
            ({"dtype": "bf16", "params": "low", "master": "none"}, {"master": "none"}),
            (
                {"dtype": "fp32", "params": "low", "residual": "low", "inputs": "low"},
                {"params": "fp32", "residual": "fp32", "inputs": "keep", "master": "none", "scale": "none"},
            ),
        ],
    )
    def test_values(self, fields: dict[str, Any], want: dict[str, Any]) -> None:
        concrete = resolved(Policy(**fields), "cpu")
        assert {name: getattr(concrete, name) for name in want} == want

    @pytest.mark.parametrize(("fp16", "want"), [(True, "never"), (False, "always")])
    def test_emulates_fp16_where_there_are_no_units(self, machine: Any, fp16: bool, want: str) -> None:
        machine(bf16=True, fp16=fp16)
        assert resolved(Policy(dtype="fp16"), "cpu").emulate == want

    def test_auto_scale_has_a_floor_and_a_ceiling(self) -> None:
        rule = resolved(Policy(dtype="fp16"), "cpu").scale
        assert isinstance(rule, ScaleRule)
        assert (rule.floor, rule.ceiling) == (2.0**-14, 2.0**24)


class TestEngine:
    @pytest.mark.parametrize("name", ["O0", "torch", "O1", "mixed", "O2", "pure", "lean", "O3"])
    def test_runs(self, name: str) -> None:
        assert resolved(PRESETS[name], "cpu").dtype in {"fp32", "bf16"}

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            (Policy(dtype="e4m3", reduce="low"), "reduce='low' would send 'e4m3'"),
            (Policy(dtype="e4m3", params="low"), "parameters cannot be held in 'e4m3'"),
        ],
    )
    def test_says_what_is_missing(self, policy: Policy, message: str) -> None:
        for kind in (NotImplementedError, HalfstepError):
            with pytest.raises(kind, match=message):
                resolved(policy, "cpu")

    @pytest.mark.parametrize("name", PRESETS)
    def test_a_name_decides_nothing(self, name: str) -> None:
        own = resolved(PRESETS[name], "cpu")
        for called in ("", *PRESETS):
            assert resolved(PRESETS[name].replace(name=called), "cpu") == own.replace(name=called)

    @pytest.mark.parametrize(
        ("fields", "own"),
        [
            ({}, False),
            ({"reduce": "fp32"}, False),
            ({"reduce": "low"}, True),
            ({"reduce": "low", "dtype": "fp32"}, False),
            ({"grads": "fp32"}, False),
            ({"params": "low"}, False),
            ({"params": "low", "grads": "fp32"}, True),
            ({"params": "low", "reduce": "fp32"}, True),
            ({"params": "low", "reduce": "low"}, True),
            ({"params": "low", "dtype": "fp32", "grads": "fp32", "reduce": "fp32"}, False),
            ({"reduce": "fp32", "modules": {"head": "keep"}}, True),
        ],
    )
    def test_knows_which_averages_are_not_those_of_ddp(self, fields: dict[str, Any], own: bool) -> None:
        assert reduces_itself(resolved(Policy(**{"dtype": "bf16", **fields}), "cpu")) is own

    @pytest.mark.parametrize("master", ["master", "split", "kahan", "stochastic", "none"])
    def test_lets_every_weight_strategy_pass(self, master: Literal["master", "split"]) -> None:
        policy = PRESETS["O2"].replace(master=master)
        assert resolved(policy, "cpu").master == master

    def test_refuses_split_where_low_is_no_upper_half(self) -> None:
        with pytest.raises(PolicyError, match="master='split' keeps the lower halves.*use master='master' or 'kahan'"):
            resolved(PRESETS["O2"].replace(master="split", dtype="fp16"), "cpu")

    def test_refuses_masters_of_nothing(self) -> None:
        with pytest.raises(PolicyError, match="policy 'mixed': master='split' is what stands behind low parameters"):
            resolved(PRESETS["mixed"].replace(master="split"), "cpu")


class TestOperatorRules:
    def test_come_from_the_table(self) -> None:
        rules = operator_rules(PRESETS["mixed"], "cpu")
        assert rules.keys() == table("mixed").keys() | {"linear_cross_entropy"}  # its parts are in the table
        decision = rules["linear"]
        assert (decision.rule, decision.origin) == ("low", "table")
        assert table("mixed")["linear"].reason in decision.reason
        assert table("mixed")["linear"].source in decision.reason

    def test_of_torch_are_the_devices_lists_and_nothing_else(self) -> None:
        for device in ("cpu", "cuda"):
            rules = operator_rules(PRESETS["torch"], device)
            assert {op: d.rule for op, d in rules.items()} == {op: r.rule for op, r in table("torch", device).items()}
            assert {d.origin for d in rules.values()} == {"table"}

    def test_of_mixed_are_the_same_on_every_device(self) -> None:
        assert operator_rules(PRESETS["mixed"], "cpu") == operator_rules(PRESETS["mixed"], "cuda")

    @pytest.mark.parametrize(
        ("policy", "op", "rule", "origin"),
        [
            (Policy(table="none", loss="keep"), "linear", None, None),
            (Policy(residual="low"), "embedding", "low", "residual"),
            (Policy(residual="low"), "add", "keep", "residual"),
            (Policy(residual="low", table="apex-o1"), "add", "keep", "residual"),  # over the table
            (Policy(residual="low").with_ops(widest=["add"]), "add", "widest", "ops"),  # under ops
            (Policy(residual="fp32"), "embedding", None, None),
            (Policy(table="none"), "cross_entropy", "fp32", "loss"),
            (Policy(table="all-low"), "mse_loss", "fp32", "loss"),
            (Policy(table="all-low", loss="keep"), "mse_loss", "low", "table"),
            (Policy(table="mixed"), "mse_loss", "fp32", "table"),  # the table says so itself, with a better reason
            (Policy(table="apex-o1"), "binary_cross_entropy", "banned", "table"),  # a ban stays
            (Policy(table="apex-o1"), "triplet_margin_with_distance_loss", "fp32", "loss"),
            (Policy().with_ops(low=["cross_entropy"]), "cross_entropy", "low", "ops"),
            (Policy().with_ops(low=["softmax"], fp32=["soft*"]), "softmax", "fp32", "ops"),  # last wins
            (Policy().with_ops(fp32=["soft*"]).with_ops(low=["softmax"]), "softmax", "low", "ops"),
            (Policy().with_ops(keep=["*"]), "gelu", "keep", "ops"),
        ],
    )
    def test_order(self, policy: Policy, op: str, rule: str | None, origin: str | None) -> None:
        decision = operator_rules(policy, "cpu").get(op)
        assert (decision and decision.rule, decision and decision.origin) == (rule, origin)
        assert decision is None or decision.reason

    def test_a_star_covers_every_operator(self) -> None:
        assert operator_rules(Policy(ops=(("*", "keep"),)), "cpu").keys() == known()

    def test_the_callers_copy_is_its_own(self) -> None:
        operator_rules(PRESETS["mixed"], "cpu").clear()
        assert operator_rules(PRESETS["mixed"], "cpu")


def formats(plan: Plan) -> dict[str, str]:
    return {p.name: p.format for p in plan.parameters}


class TestPlan:
    def test_of_low_parameters(self) -> None:
        plan = resolve(Policy.of("O2", dtype="bf16"), Net(), "cpu")
        assert formats(plan) == {
            "gain": "bf16",
            "embedding.weight": "bf16",
            "block.0.weight": "bf16",
            "block.0.bias": "bf16",
            "block.1.weight": "fp32",
            "block.1.bias": "fp32",
        }
        reasons = {p.name: p.reason for p in plan.parameters}
        assert "normalisation layer" in reasons["block.1.weight"]
        assert "params='low'" in reasons["block.0.weight"]
        assert {p.name for p in plan.parameters if p.low} == {n for n, f in formats(plan).items() if f == "bf16"}

    def test_names_parameters_as_torch_does(self) -> None:
        model = Net()
        named = dict(model.named_parameters())
        plan = resolve(PRESETS["O2"], model, "cpu")
        assert [p.name for p in plan.parameters] == [n for n, p in named.items() if p.dtype is torch.float32]
        assert [p.numel for p in plan.parameters] == [named[p.name].numel() for p in plan.parameters]

    def test_never_touches_other_dtypes_nor_buffers_and_says_so(self) -> None:
        plan = resolve(PRESETS["O2"], Net(), "cpu")
        assert "exact" not in formats(plan)
        assert "parameter exact is float64 and is never converted" in plan.notes
        assert "floating buffers are never converted" in plan.notes

    def test_of_tied_parameters(self) -> None:
        plan = resolve(Policy.of("O2", dtype="fp16"), Net(), "cpu")
        tied = next(p for p in plan.parameters if p.name == "embedding.weight")
        assert tied.aliases == ("head.weight",)
        assert tied.format == "fp16"

    def test_of_tied_parameters_one_fp32_owner_wins(self) -> None:
        plan = resolve(Policy.of("O2", dtype="fp16").with_modules({"head": "fp32"}), Net(), "cpu")
        tied = next(p for p in plan.parameters if p.name == "embedding.weight")
        assert (tied.format, tied.low) == ("fp32", False)
        assert tied.reason == "shared by 2 modules; modules: 'head' = 'fp32'"

    @pytest.mark.parametrize(
        ("rules", "want"),
        [
            ({"block": "fp32"}, {"block.0.weight": "fp32", "block.1.weight": "fp32", "gain": "fp16"}),
            ({"block": "low"}, {"block.0.weight": "fp16", "block.1.weight": "fp16"}),  # as params, norms too
            ({"block": "keep"}, {"block.0.weight": "fp32", "block.1.weight": "fp32"}),  # untouched
            ({"block": "fp32", "block.0": "low"}, {"block.0.weight": "fp16", "block.1.weight": "fp32"}),
            ({"": "fp32"}, {"block.0.weight": "fp32", "gain": "fp32", "embedding.weight": "fp32"}),
            ({"class:Linear": "fp32"}, {"block.0.weight": "fp32", "embedding.weight": "fp32", "gain": "fp16"}),
        ],
    )
    def test_of_module_rules(self, rules: dict[str, str], want: dict[str, str]) -> None:
        got = formats(resolve(Policy.of("O2", dtype="fp16").with_modules(rules), Net(), "cpu"))
        assert {name: got[name] for name in want} == want

    @pytest.mark.parametrize("name", ["pure", "O3"])
    def test_weights_beside_running_statistics_stay_fp32(self, name: str) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, track_running_stats=False))
        plan = resolve(Policy.of(name, dtype="bf16"), model)
        got = {p.name: p.format for p in plan.parameters}
        assert (got["0.weight"], got["1.weight"], got["1.bias"], got["2.weight"]) == ("bf16", "fp32", "fp32", "bf16")
        low = resolve(Policy.of(name, dtype="bf16").with_modules({"1": "low"}), model)
        assert {p.name: p.format for p in low.parameters}["1.weight"] == "bf16"

    def test_low_norms_when_asked(self) -> None:
        got = formats(resolve(Policy.of("O3", dtype="bf16"), Net(), "cpu"))
        assert set(got.values()) == {"bf16"}

    @pytest.mark.parametrize("name", ["O0", "torch", "O1", "mixed"])
    def test_of_fp32_parameters_widens_a_low_checkpoint_and_leaves_what_is_frozen(self, name: str) -> None:
        model = Net().to(torch.bfloat16)
        model.embedding.weight.requires_grad_(False)
        plan = resolve(PRESETS[name], model, "cpu")
        named = dict(model.named_parameters(remove_duplicate=False))
        assert all(p.format == ("fp32" if named[p.name].requires_grad else "bf16") for p in plan.parameters)
        assert {p.format for p in plan.parameters} == {"fp32", "bf16"}
        assert not any(p.low for p in plan.parameters)

    def test_of_modules(self) -> None:
        plan = resolve(Policy.of("O2", dtype="fp16").with_modules({"block": "fp32"}), Net(), "cpu")
        modules = {m.path: m for m in plan.modules}
        assert list(modules) == [path for path, _ in Net().named_modules()]
        assert {path: (m.rule, m.format) for path, m in modules.items()} == {
            "": ("", ""),
            "embedding": ("", ""),
            "block": ("fp32", "fp32"),
            "block.0": ("fp32", "fp32"),
            "block.1": ("fp32", "fp32"),
            "head": ("", ""),
        }
        assert modules["block.0"].reason == "modules: 'block' = 'fp32'"
        assert modules["block.1"].kind == "LayerNorm"

    @pytest.mark.parametrize("name", ["mixed", "O2", "pure", "lean", "torch"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_of_what_a_model_declares_to_be_fp32(self, name: str, dtype: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Declaring())
        plan = resolve(Policy.of(name, dtype=dtype), model, "cpu")
        always, narrow = {"1.gate", "1.gate.statics", "1.norm", "1.norm.0"}, {"1.wo"}
        modules = {module.path for module in plan.modules if module.rule == "fp32"}
        ignored = dtype == "fp32" or name == "torch"
        assert modules == (set() if ignored else always if dtype == "bf16" else always | narrow)
        if plan.policy.params == "low":
            low = {"0.weight", "0.bias", "1.weights", "1.wide.weight", "1.wide.bias"}
            low |= {"1.wo.weight", "1.wo.bias"} if dtype == "bf16" else set()
            assert {parameter.name for parameter in plan.parameters if parameter.low} == low
            reasons = {parameter.name: parameter.reason for parameter in plan.parameters}
            assert reasons["1.sinks"] == "Declaring._keep_in_fp32_modules_strict has 'sinks'"
            assert "1.gate (Gate): fp32 because Declaring._keep_in_fp32_modules_strict has 'gate.weight'" in str(plan)

    def test_of_a_users_pattern_over_what_a_model_declares(self) -> None:
        policy = Policy.of("O2", dtype="bf16").with_modules({"*.gate": "low", "1": "keep"})
        rules = {module.path: module.rule for module in resolve(policy, nn.Sequential(Net(), Declaring())).modules}
        assert rules["1.gate"] == rules["1.norm"] == "keep"
        policy = Policy.of("O2", dtype="bf16").with_modules({"*.gate": "low"})
        plan = resolve(policy, nn.Sequential(Net(), Declaring()))
        assert {p.name: p.low for p in plan.parameters}["1.gate.weight"]
        assert {module.path: module.rule for module in plan.modules}["1.norm.0"] == "fp32"

    def test_changes_nothing(self) -> None:
        model = Net()
        before = {name: (id(t), t.dtype, t.clone()) for name, t in model.state_dict().items()}
        resolve(PRESETS["O3"], model, "cpu")
        for name, tensor in model.state_dict().items():
            assert (tensor.dtype, torch.equal(tensor, before[name][2])) == (before[name][1], True)

    def test_is_for_the_models_device(self) -> None:
        assert resolve(PRESETS["O0"], Net()).device == "cpu"
        assert resolve(PRESETS["O0"], nn.Identity()).device in {"cpu", "cuda", "mps", "xpu"}

    def test_of_a_lazy_model(self) -> None:
        plan = resolve(PRESETS["O2"], nn.LazyLinear(3), "cpu")
        assert [p.numel for p in plan.parameters] == [0, 0]

    def test_a_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(
            PolicyError, match=r"module pattern 'blok' matches no module of Net.*did you mean 'block'\?"
        ):
            resolve(Policy(modules=(("blok", "fp32"),)), Net(), "cpu")

    def test_repr_can_be_pasted(self) -> None:
        plan = resolve(Policy.of("O2", dtype="fp16").with_modules({"head": "fp32"}), Net(), "cpu")
        names = (Plan, Policy, ScaleRule, Decision, ModuleDecision, ParameterDecision)
        assert eval(repr(plan), {kind.__name__: kind for kind in names}) == plan
        assert hash(plan)

    @pytest.mark.parametrize("name", ["O2", "pure"])
    def test_says_what_each_front_door_keeps_behind_low_weights(self, name: str) -> None:
        policy, net = Policy.of(name, dtype="bf16"), Net()
        plan = resolve(policy, net, "cpu")
        assert f"master auto: {plan.masters}" in " ".join(str(plan).split())
        assert plan.masters.startswith("split in a TrainStep") and "master in a loop" in plan.masters
        assert resolved(policy, "cpu").master == plan.policy.master == "master"
        assert resolved(policy, "cpu", one_pass=True).master == "split"
        for one_pass, master in ((True, "split"), (False, "master")):
            plan = resolve(policy, net, "cpu", one_pass=one_pass)
            assert plan.policy == resolved(policy, "cpu", one_pass=one_pass)
            assert plan.policy.master == master and f"master {master}" in str(plan)
        for wanted in (policy.replace(master="kahan"), policy.replace(dtype="fp16"), Policy.of("mixed", dtype="bf16")):
            plan = resolve(wanted, net, "cpu")
            assert plan.masters == "" and f"master {plan.policy.master}" in str(plan)
            assert resolved(wanted, "cpu", one_pass=True) == resolved(wanted, "cpu")

    def test_reads_well(self) -> None:
        text = str(
            resolve(Policy.of("O2", dtype="fp16", emulate="always").with_modules({"head": "fp32"}), Net(), "cpu")
        )
        for expected in (
            "plan: Net on cpu under policy 'O2'",
            "low format fp16, scale dynamic from 65536 in",
            "note: emulate='always'",
            "parameters: 64 in 6 tensors",
            "fp16: 4 (gain): params='low'; frozen: nothing is kept behind it unless an optimizer has it",
            "fp16: 20 (block.0.weight, block.0.bias): params='low'",
            "fp32: 8 (block.1.weight, block.1.bias): norms='fp32'",
            "head (Linear): fp32 because modules: 'head' = 'fp32'",
            "low: addbmm, addmm,",
            "keep: adaptive_avg_pool3d,",
        ):
            assert expected in text, text
        assert max(len(line) for line in text.splitlines()) <= 120
