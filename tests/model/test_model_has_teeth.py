"""Would the model notice? All the budget arithmetic is broken, one place at a time; it has to."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from prefixd.tiers import ledger
from prefixd.tiers.ledger import Ledger
from tests.model.machine import MetaStateMachine

#: Ends at the first problem: most of these find one within ten examples.
SHORT = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

OFF_BY_ONE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
}
#: Changes nothing; `tests.tiers.test_foretell` holds it against what happens.
NOT_ARITHMETIC = {"foretell"}
OTHER_SIGN: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass
class Mutation:
    """A method of the ledger with one thing in it broken."""

    method: str
    old: str
    new: str
    broken: Any

    def __str__(self) -> str:
        return f"{self.method}: {self.old} => {self.new}"


def damage(node: ast.AST) -> bool:
    """Break a node if it is arithmetic: a sum left out, a comparison off by one, a sign turned."""
    match node:
        case ast.AugAssign():
            node.value = ast.Constant(0)
        case ast.Compare(ops=[op]) if type(op) in OFF_BY_ONE:
            node.ops = [OFF_BY_ONE[type(op)]()]
        case ast.BinOp(op=op) if type(op) in OTHER_SIGN:
            node.op = OTHER_SIGN[type(op)]()
        case _:
            return False
    return True


def mutations() -> Iterator[Mutation]:
    for name, member in vars(Ledger).items():
        function = member.fget if isinstance(member, property) else member
        if not inspect.isfunction(function) or name in NOT_ARITHMETIC:
            continue
        source = textwrap.dedent(inspect.getsource(function))
        for index in range(len(list(ast.walk(ast.parse(source))))):
            tree = ast.parse(source)
            node = list(ast.walk(tree))[index]
            old = ast.unparse(node)
            if damage(node):
                namespace = dict(vars(ledger))
                exec(compile(ast.fix_missing_locations(tree), ledger.__file__, "exec"), namespace)
                yield Mutation(name, old, ast.unparse(node), namespace[name])


MUTATIONS = list(mutations())


def test_all_of_the_arithmetic_is_broken_once() -> None:
    """What every method books is there: sums of bytes and of numbers, and how they are compared."""
    broken = {(mutation.method, mutation.new) for mutation in MUTATIONS}
    for method in ("reserve", "cancel", "publish"):
        assert (method, f"self.reserved_bytes {'+-'[method != 'reserve']}= 0") in broken
    for method in ("publish", "adopt", "forget"):
        assert (method, f"self.entries {'+-'[method == 'forget']}= 0") in broken
    for method in ("pin", "unpin"):
        assert (method, f"self.pinned_bytes {'+-'[method == 'unpin']}= 0") in broken
    assert ("admission", "stored_bytes >= self.budget_bytes - self._header_bytes") in broken
    assert len(broken) >= 28


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_model_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, mutation.method, mutation.broken)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_state_machine_as_test(MetaStateMachine, settings=SHORT)
