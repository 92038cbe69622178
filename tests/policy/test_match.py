"""Match: which modules a pattern speaks of."""

from __future__ import annotations

import pytest
from torch import nn

from halfstep.errors import PolicyError
from halfstep.policy.match import glob_covers, rules_of_modules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.alias = self.blocks[1]


CASES = [
    # patterns, path -> rule
    ((("head", "fp32"),), {"head": "fp32", "": ""}),
    ((("", "fp32"),), {"": "fp32", "blocks.0.mlp.1": "fp32", "head": "fp32"}),
    ((("*", "low"),), {"": "low", "head": "low"}),
    ((("blocks.*.norm", "fp32"),), {"blocks.0.norm": "fp32", "blocks.1.norm": "fp32", "blocks.0": "", "head": ""}),
    ((("*norm", "fp32"),), {"blocks.0.norm": "fp32", "head": ""}),  # * crosses dots
    ((("blocks.0", "keep"),), {"blocks.0": "keep", "blocks.0.mlp.0": "keep", "blocks.1": ""}),
    ((("blocks.[1]", "keep"),), {"blocks.0": "", "blocks.1.norm": "keep"}),
    ((("class:LayerNorm", "fp32"),), {"blocks.0.norm": "fp32", "blocks.0.mlp.1": ""}),
    ((("class:*Norm*", "fp32"),), {"blocks.0.norm": "fp32", "blocks.0.mlp.1": "fp32", "blocks.0.mlp.0": ""}),
    ((("class:_BatchNorm", "fp32"),), {"blocks.0.mlp.1": "fp32", "blocks.0.norm": ""}),  # a base class
    ((("class:Block", "low"),), {"blocks.0.mlp.0": "low", "blocks": "", "head": ""}),
    ((("class:Norm", "fp32"), ("", "low")), None),
    # the last that speaks of a module wins, also when an earlier one names it more closely
    ((("", "low"), ("blocks.0.norm", "fp32")), {"blocks.0.norm": "fp32", "blocks.1.norm": "low", "": "low"}),
    ((("blocks.0.norm", "fp32"), ("blocks", "low")), {"blocks.0.norm": "low", "head": ""}),
    ((("class:*Norm*", "fp32"), ("blocks.1", "keep")), {"blocks.0.norm": "fp32", "blocks.1.norm": "keep"}),
    # a module at two places is spoken of by either name
    ((("alias", "fp32"),), {"blocks.1": "fp32", "blocks.1.norm": "fp32", "blocks.0": ""}),
    # pattern case matters, as names do
    ((("class:layernorm", "fp32"),), None),
]


@pytest.mark.parametrize(("patterns", "want"), CASES)
def test_the_last_pattern_that_speaks_of_a_module_wins(
    patterns: tuple[tuple[str, str], ...], want: dict[str, str] | None
) -> None:
    model = Net()
    if want is None:
        with pytest.raises(PolicyError, match="matches no module of Net"):
            rules_of_modules(patterns, model)
        return
    decided = rules_of_modules(patterns, model)
    got = {path: decided.get(model.get_submodule(path), ("", ""))[1] for path in want}
    assert got == want


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("haed", r"module pattern 'haed' matches no module of Net; its modules are .*; did you mean 'head'\?"),
        ("blocks.*.nrm", r"did you mean 'blocks\.[01]\.norm'\?"),
        ("class:LayerNrm", r"its classes are 'BatchNorm1d', 'Block', .*; did you mean 'LayerNorm'\?"),
        ("LayerNorm", "to mean the class, write 'class:LayerNorm'"),
        ("class:*Transformer*", "its classes are"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        rules_of_modules((("head", "fp32"), (pattern, "low")), Net())


def test_a_pattern_that_matches_nothing_in_a_model_without_modules() -> None:
    with pytest.raises(PolicyError, match="'head' matches no module of Linear; its modules are none"):
        rules_of_modules((("head", "low"),), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("pattern", "path", "covers"),
    [
        ("decoder", "decoder.1.norm", True),
        ("decoder.*.norm", "decoder.1.norm", True),
        ("decoder.*.norm", "decoder.1", False),
        ("", "anything", True),
        ("head", "", False),
        ("class:*Norm*", "class:LayerNorm", True),
        ("class:*Norm*", "decoder.norm", False),
        ("decoder", "class:decoder", False),
    ],
)
def test_what_names_alone_tell(pattern: str, path: str, covers: bool) -> None:
    assert glob_covers(pattern, path) is covers
