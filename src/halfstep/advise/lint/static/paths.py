"""Paths: the orders in which a function can make the calls of a training step.

A condition that is tested twice has one truth on a path, a loop runs twice, and a name that is assigned anew is another
object. What a rule reports must hold on every path that reaches the place (`judged`), so a step that is right under
some condition is never reported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from halfstep.advise.lint.rule import CHECKS, Hit
from halfstep.advise.lint.static.ops import Op, Operations, State, plain, words
from halfstep.advise.lint.static.regions import Place, blocks, entered, place_of
from halfstep.advise.lint.static.script import Function, Script, stored

Verdicts = Iterator[tuple[Op, str]]
"""Operations of a path on which a rule decides: with what is wrong, or with "" if it is right or cannot be known."""

Judge = Callable[[Sequence[Op]], Verdicts]

VARYING = re.compile(r"[%<>]|==|!=|\(")
"""Conditions whose truth is another one in the next iteration of a loop."""

LIMIT = 256
"""The most paths of a function; one with more is left undecided."""

FEW = 16
"""A loop with more paths than this runs once."""


class _TooManyError(Exception):
    """A function has more paths than are looked at."""


@lru_cache(maxsize=1024)
def paths(script: Script, function: Function) -> tuple[tuple[Op, ...], ...]:
    """Return the paths of a function; none if there are too many."""
    walk, body = _Walk(script), function.node.body
    if not script.uses_torch or not any(map(walk.relevant, body)):
        return ()
    try:
        return tuple(state.ops for state in walk.block(body, [State()], place_of(script, function)))
    except _TooManyError:
        return ()


def on_paths(code: str, *, library: str = "") -> Callable[[Judge], Judge]:
    """Make the decorated judge of paths the check of the rule `code`; `library`: "torch" for torch's scalers alone."""

    def register(judge: Judge) -> Judge:
        CHECKS[code] = partial(judged, judge=judge, library=library)
        return judge

    return register


def judged(script: Script, judge: Judge, *, library: str = "") -> Iterator[Hit]:
    """Yield a hit for each operation that is wrong on every path on which it is judged."""
    for function in script.functions:
        found: dict[ast.AST, set[str]] = {}
        for path in paths(script, function):
            verdicts: dict[ast.AST, str] = {}  # a call of a loop is judged in each iteration; one wrong one is enough
            for op, what in judge(path):
                if library and script.scalers.get(plain(op.scaler)) != library:
                    continue
                verdicts[op.call] = verdicts.get(op.call) or what
            for call, what in verdicts.items():
                found.setdefault(call, set()).add(what)
        for call, whats in found.items():
            if "" not in whats:
                yield Hit(getattr(call, "lineno", 0), min(whats))


class _Walk(Operations):
    """The walk through the statements of one function."""

    def block(self, body: Sequence[ast.stmt], states: list[State], place: Place) -> list[State]:
        for statement in body:
            running = [state for state in states if not state.ended]
            if not running:
                break
            states = [state for state in states if state.ended] + self.statement(statement, running, place)
            unique = {state.identity(): state for state in states}
            states = list(unique.values())
            if len(states) > LIMIT:
                raise _TooManyError
        return states

    def statement(self, node: ast.stmt, states: list[State], place: Place) -> list[State]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return states
        if isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            for state in states:
                self.expression(node, state, place)
                state.ended = "loop" if isinstance(node, (ast.Break, ast.Continue)) else "function"
            return states
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            one, other = (ast.copy_location(ast.Expr(part), node) for part in (node.value.body, node.value.orelse))
            node = ast.If(node.value.test, [one], [other])
        if isinstance(node, ast.If):
            return self.choice(node, states, place)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self.loop(node, states, place)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                for state in states:
                    self.expression(item.context_expr, state, place)
                place = entered(self.script, place, item.context_expr)
            return self.block(node.body, states, place)
        if isinstance(node, ast.Match):
            return [s for case in node.cases for s in self.block(case.body, [s.fork() for s in states], place)] + states
        if inside := blocks(node):  # try: its handlers are not taken
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            for part in [part for part in inside if part not in handlers]:
                states = self.block(part, states, place)
            return states
        for state in states:
            self.expression(node, state, place)
            self.assign(node, state)
        return states

    def choice(self, node: ast.If, states: list[State], place: Place) -> list[State]:
        """Take both branches of an if, as far as what is known of its condition allows it."""
        if not any(self.relevant(statement) for statement in (*node.body, *node.orelse)):
            return states
        found = []
        for state in states:
            for truth, branch in ((True, node.body), (False, node.orelse)):
                taken = state.fork()
                if assume(node.test, truth, taken.known):
                    found += self.block(branch, [taken], replace(place, branches=(*place.branches, (node, truth))))
        return found

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, states: list[State], place: Place) -> list[State]:
        """Run a loop's body twice; once if that makes many paths of it."""
        if not any(self.relevant(statement) for statement in node.body):
            return states
        inner = replace(place, loops=(*place.loops, node))
        changed = stored(node)
        for number in range(2):
            if number and len(states) > FEW:
                break
            for state in states:
                if not state.ended:
                    state.ops += (Op("iteration", node, inner),)
                    self.vary(state, changed)
                    if not isinstance(node, ast.While):
                        self.rebind(node.target, state)
            states = self.block(node.body, states, inner)
            for state in states:
                state.ended = state.ended if state.ended == "function" else ""
                self.vary(state, changed)
            states = list({state.identity(): state for state in states}.values())
        return states

    @staticmethod
    def vary(state: State, changed: set[str]) -> None:
        """Forget the conditions that may have another truth in the next iteration."""
        for text in [text for text in state.known if VARYING.search(text) or words(text) & changed]:
            del state.known[text]


def assume(test: ast.expr, truth: bool, known: dict[str, bool]) -> bool:
    """Note that a condition is `truth`; return False if that contradicts what is known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return assume(test.operand, not truth, known)
    if isinstance(test, ast.Constant):
        return bool(test.value) is truth
    if isinstance(test, ast.BoolOp) and truth is isinstance(test.op, ast.And):
        return all(assume(value, truth, known) for value in test.values)
    text = ast.unparse(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        if ast.unparse(test.comparators[0]) == "None":
            text, truth = f"{ast.unparse(test.left)} is None", truth is isinstance(test.ops[0], ast.Is)
            if truth and not _note(ast.unparse(test.left), False, known):
                return False
    elif truth and not _note(f"{text} is None", False, known):
        return False
    return _note(text, truth, known)


def _note(text: str, truth: bool, known: dict[str, bool]) -> bool:
    return known.setdefault(text, truth) is truth
