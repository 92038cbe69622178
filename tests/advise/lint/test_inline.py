"""Functions in the place of their calls: which are followed, under which names, on which lines."""

from __future__ import annotations

import ast

import pytest

from halfstep.advise.lint.static.inline import inlined

MAKE = "def make(width, rate=0.1):\n    net = Net(width)\n    return net, SGD(net.parameters(), rate)\n"


def text(script: str) -> str:
    return ast.unparse(inlined(ast.parse(script)))


def test_results_and_arguments_have_the_names_of_the_caller() -> None:
    assert text(f"{MAKE}model, optimizer = make(size)") == (
        "model = Net(size)\nmodel, optimizer = (model, SGD(model.parameters(), 0.1))"
    )


def test_lines_stay_those_of_the_function() -> None:
    tree = inlined(ast.parse(f"{MAKE}\nmodel, optimizer = make(size)"))
    assert [statement.lineno for statement in tree.body] == [2, 3]


def test_functions_in_functions_are_followed() -> None:
    script = "def a(x):\n    x.step()\n\ndef b(y):\n    a(y)\n\ndef train(z):\n    for _ in z:\n        b(z)\n"
    assert text(script) == "def train(z):\n    for _ in z:\n        z.step()"


def test_an_argument_that_the_function_changes_is_a_variable_of_it() -> None:
    assert text("def f(x):\n    x = x + 1\n    return x\ny = f(2)") == "y = 2\ny = y + 1"


def test_the_statements_under_the_guard_of_a_script_are_under_no_condition() -> None:
    assert text("if __name__ == '__main__':\n    train()") == "train()"


@pytest.mark.parametrize(
    ("script", "becomes"),
    [
        ("def f(x):\n    if x:\n        return 1\n    return 2\ny = f(z)", "if z:\n    y = 1\nelse:\n    y = 2"),
        ("def f(x):\n    with a:\n        return x.b\ny = f(z)", "with a:\n    y = z.b"),
        ("def f(x):\n    g(x)\n    return x.b\nh(1, f(z))", "g(z)\nh(1, z.b)"),
        ("def f(x):\n    h(x)\n    h(x)\nf(m.parameters())", "h(m.parameters())\nh(m.parameters())"),
        ("def f(x):\n    return x.b\nif f(z):\n    pass", "if z.b:\n    pass"),
    ],
)
def test_returns_and_calls_in_expressions_are_followed(script: str, becomes: str) -> None:
    assert text(script) == becomes


def test_a_method_that_its_class_calls_is_followed() -> None:
    base = "class A:\n\n    def f(self, x):\n        self.y = x\n"
    script = f"{base}\nclass B(A):\n\n    def g(self):\n        self.f(1)"
    assert text(script) == "class A:\n    pass\n\nclass B(A):\n\n    def g(self):\n        self.y = 1"


@pytest.mark.parametrize(
    "script",
    [
        "def f(x):\n    for y in x:\n        return 1\n    return 2\ny = f(z)",  # returns out of a loop
        "def f(x):\n    if x:\n        y = 2\n        if y:\n            return 1\n    return 2\ny = f(z)",
        "def f(*x):\n    g(x)\nf(z)",
        "@h\ndef f(x):\n    g(x)\nf(z)",
        "def f(x):\n    yield x\ny = f(z)",
        "def f(x):\n    f(x)",  # itself
        "def f(x):\n    g(x)\nf(*z)",
        "def f(x):\n    g(x)\nf()",
        "def f(x):\n    g(x)\nh(f(z))",  # returns nothing
        "def f(x):\n    return g(x)\ny = a and f(z)",  # perhaps
        "def f(x):\n    return g(x)\ny = [f(z) for z in a]",
        "class A:\n\n    def f(self):\n        self.x = 1\na.f()",  # of another object
        "class A:\n\n    def f(self):\n        pass\n\nclass B:\n\n    def g(self):\n        self.f()",
        "def f(x):\n    g(x)\nif a:\n\n    def f(x):\n        pass\nf(z)",
    ],
)
def test_what_is_not_followed_stays_as_it_is(script: str) -> None:
    assert text(script) == ast.unparse(ast.parse(script))


def test_a_function_that_is_also_used_otherwise_stays() -> None:
    script = "def f(x):\n    g(x)\nf(z)\nhook(f)"
    assert text(script) == "def f(x):\n    g(x)\ng(z)\nhook(f)"
