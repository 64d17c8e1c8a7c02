"""Would the model notice? All the budget arithmetic is broken, one place at a time; it has to."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from prefixd.tiers.ledger import Ledger
from prefixd.tiers.shares import Shares, Standing
from tests.model.machine import MetaStateMachine
from tests.model.resizing import ResizingMachine
from tests.model.sharing import FewEntriesMachine, SharesMachine

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
#: Where the two are equal it is all the same; and to LRU its capacity is.
#: A tier that is full of entries and has exactly the bytes is seldom: `tests.tiers.test_shares`.
NO_DIFFERENCE = {
    "who.stored_bytes < self.free_bytes",
    "self.share_bytes >= limit_bytes",
    "fixed_bytes >= share_bytes",
    "fixed_entries >= share_entries",
    "capacity_bytes + self.share_bytes",
}
#: Of an assertion, and of a tier that grows: the ram tier, which has no header.
NOT_MET = {
    ("resize", "self.limit_bytes - self._header_bytes"),
    ("grow", "self.arena_bytes + self._header_bytes"),
}
OTHER_SIGN: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass
class Mutation:
    """A method of the ledger, or of what shares there are, with one thing in it broken."""

    of: type
    method: str
    old: str
    new: str
    broken: Any

    def __str__(self) -> str:
        return f"{self.of.__name__}.{self.method}: {self.old} => {self.new}"

    @property
    def machine(self) -> type[MetaStateMachine]:
        """That meets it."""
        if self.of is Ledger and self.method in OF_RESIZES:
            return ResizingMachine
        if self.method == "may_pin":
            return FewEntriesMachine
        shared = self.of is not Ledger or self.method in OF_SHARES or "most_bytes" in self.new
        return SharesMachine if shared else MetaStateMachine


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


def mutations(of: type) -> Iterator[Mutation]:
    module = sys.modules[of.__module__]
    for name, member in vars(of).items():
        function = member.fget if isinstance(member, property) else member
        if not inspect.isfunction(function) or name in NOT_ARITHMETIC or "__" in name:
            continue
        source = textwrap.dedent(inspect.getsource(function))
        for index in range(len(list(ast.walk(ast.parse(source))))):
            tree = ast.parse(source)
            node = list(ast.walk(tree))[index]
            old = ast.unparse(node)
            if damage(node):
                namespace = dict(vars(module))
                code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
                exec(code, namespace)
                new = ast.unparse(node)
                if new not in NO_DIFFERENCE and (name, new) not in NOT_MET:
                    yield Mutation(of, name, old, new, namespace[name])


MUTATIONS = [m for of in (Ledger, Shares, Standing) for m in mutations(of)]
#: These need an operator who makes tiers smaller and larger.
OF_RESIZES = {"grow", "resize", "retire", "next_restored", "restore"}
#: These need a tier that has shares.
OF_SHARES = {"next_victim"}


def test_all_of_the_arithmetic_is_broken_once() -> None:
    """What every method books is there: sums of bytes and of numbers, and how they are compared."""
    broken = {(mutation.method, mutation.new) for mutation in MUTATIONS}
    for method in ("reserve", "cancel", "publish"):
        assert (method, f"self.reserved_bytes {'+-'[method != 'reserve']}= 0") in broken
    for method in ("publish", "adopt", "forget"):
        assert (method, f"self.entries {'+-'[method == 'forget']}= 0") in broken
    for method in ("pin", "unpin"):
        assert (method, f"self.pinned_bytes {'+-'[method == 'unpin']}= 0") in broken
    assert ("admission", "stored_bytes >= self.arena_bytes - self._header_bytes") in broken
    assert len(broken) >= 28


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_model_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation.of, mutation.method, mutation.broken)
    with pytest.raises((AssertionError, KeyError, TypeError, ValueError)):
        run_machines(mutation.machine, SharesMachine)


def run_machines(*machines: type[MetaStateMachine]) -> None:
    for machine in dict.fromkeys(machines):
        run_state_machine_as_test(machine, settings=SHORT)
