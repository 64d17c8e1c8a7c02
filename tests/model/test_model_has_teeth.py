"""The model has to notice each mistake in the budget arithmetic, planted one at a time."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from prefixd.tiers.ledger import Ledger
from prefixd.tiers.tier_shares import Standing, TierShares
from tests.model.machine import MetaStateMachine
from tests.model.resizing import ResizingMachine
from tests.model.sharing import FewEntriesMachine, SharesMachine
from tests.model.teeth import NOTICED, run, search, stored
from tests.support.lengths import LONG

OFF_BY_ONE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
}
#: Methods that change no state. `tests.tiers.test_foretell` compares their predictions with the
#: results, `tests.tiers.test_pieces` tests entries that are too large for any free extents, and
#: `tests.tiers.test_ledger` compares `victims_for` with what leaves for one entry after the other.
NOT_ARITHMETIC = {"foretell", "_fitting", "_has_pieces", "victims_for"}
#: Mistakes without an effect: where the comparisons differ, both results are the same, or LRU
#: ignores the capacity. The first one shows only in a tier with too many entries and exactly the
#: free bytes, which is rare here: `tests.tiers.test_tier_shares` tests it.
NO_DIFFERENCE = {
    "who.stored_bytes < self.free_bytes",
    "self.share_bytes >= limit_bytes",
    "fixed_bytes >= share_bytes",
    "fixed_entries >= share_entries",
    "capacity + self.share_bytes",
}
#: Mistakes that the model can't reach: two in assertions, and one that needs a growing tier with a
#: header. Only the ram tier grows here, and it has no header.
NOT_MET = {
    ("replace", "self.published_bytes - self.reserved_bytes"),
    ("resize", "self.limit_bytes - self.header_bytes"),
    ("grow", "self.arena_bytes + self.header_bytes"),
}
OTHER_SIGN: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass
class Mutation:
    """A method of the ledger or of its shares, with one mistake in it."""

    of: type
    method: str
    old: str
    new: str
    broken: Any
    #: The number among mutations with the same text.
    number: int = 1

    def __str__(self) -> str:
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.of.__name__}.{self.method}: {self.old} => {self.new}{again}"

    @property
    def machine(self) -> type[MetaStateMachine]:
        """The machine whose steps reach the mistake."""
        if self.of is Ledger and self.method in OF_RESIZES:
            return ResizingMachine
        if self.method == "may_pin":
            return FewEntriesMachine
        shared = self.of is not Ledger or self.method in OF_SHARES or "most_bytes" in self.new
        return SharesMachine if shared else MetaStateMachine


def damage(node: ast.AST) -> bool:
    """Break a node if it is arithmetic: drop a sum, shift a comparison by one, flip a sign."""
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
        seen: Counter[tuple[str, str]] = Counter()
        for index, untouched in enumerate(ast.walk(ast.parse(source))):
            if not damage(untouched):
                continue
            tree = ast.parse(source)
            node = list(ast.walk(tree))[index]
            old = ast.unparse(node)
            damage(node)
            namespace = dict(vars(module))
            code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
            exec(code, namespace)
            new = ast.unparse(node)
            if new not in NO_DIFFERENCE and (name, new) not in NOT_MET:
                seen[old, new] += 1
                yield Mutation(of, name, old, new, namespace[name], seen[old, new])


MUTATIONS = [m for of in (Ledger, TierShares, Standing) for m in mutations(of)]
#: The steps that show each mistake. `python -m tests.model.teeth` rewrites them.
STEPS = stored()
#: Methods that only resizing reaches.
OF_RESIZES = {"grow", "resize", "retire", "retire_range", "_retired", "next_restored", "restore"}
#: Methods that need a tier with shares.
OF_SHARES = {"next_victim"}


def test_all_of_the_arithmetic_is_broken_once() -> None:
    """The mutations include all sums in each method, and the comparisons."""
    broken = {(mutation.method, mutation.new) for mutation in MUTATIONS}
    for method in ("reserve", "cancel", "publish"):
        assert (method, f"self.reserved_bytes {'+-'[method != 'reserve']}= 0") in broken
    for method in ("publish", "adopt", "forget"):
        assert (method, f"self.entries {'+-'[method == 'forget']}= 0") in broken
    for method in ("pin", "unpin"):
        assert (method, f"self.pinned_bytes {'+-'[method == 'unpin']}= 0") in broken
    assert ("admission", "stored_bytes >= self.arena_bytes - self.header_bytes") in broken
    assert len(broken) >= 28


def test_all_stored_steps_belong_to_a_mistake() -> None:
    assert STEPS.keys() <= set(map(str, MUTATIONS))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_model_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored steps show the mistake, and pass without it. Random steps are tried if none are
    stored, and always in the long form."""
    steps = None if LONG else STEPS.get(str(mutation))
    if steps is not None:
        run(steps)
    monkeypatch.setattr(mutation.of, mutation.method, mutation.broken)
    with pytest.raises(NOTICED):
        search(mutation.machine, SharesMachine) if steps is None else run(steps)
