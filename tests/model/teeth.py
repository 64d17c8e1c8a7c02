"""Finds the fewest steps that show each mistake that `test_model_has_teeth` plants.

    python -m tests.model.teeth

uses Hypothesis to find steps for mistakes that `teeth.txt` does not show any more, and omits
needless steps. Steps are stored as the statements that Hypothesis prints, so they do not depend on
its version.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from prefixd.proto.vocabulary import ClaimMode, SaveStatus, Tier
from tests.model.machine import MetaStateMachine
from tests.model.resizing import ResizingMachine
from tests.model.sharing import FewEntriesMachine, SharesMachine
from tests.support.lengths import times

STORED: Final = Path(__file__).with_suffix(".txt")
#: The errors that show a mistake.
NOTICED: Final = (AssertionError, KeyError, TypeError, ValueError)
#: The names that steps use.
NAMES: Final = {
    one.__name__: one
    for one in (
        *(MetaStateMachine, ResizingMachine, SharesMachine, FewEntriesMachine),
        *(ClaimMode, SaveStatus, Tier),
    )
}
#: Stops at the first problem. Most mistakes show within ten examples.
SHORT: Final = settings(
    max_examples=times(400, 4_000),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def run(steps: list[str]) -> None:
    """Run these steps, of which the first creates the machine, and tear the machine down."""
    exec("\n".join([*steps, "state.teardown()"]), dict(NAMES))


def search(*machines: type[MetaStateMachine]) -> None:
    """Run random steps until one shows a mistake. Raises its error, with the steps in the notes."""
    for machine in dict.fromkeys(machines):
        run_state_machine_as_test(machine, settings=SHORT)


def stored() -> dict[str, list[str]]:
    """The stored steps, by the name of their mistake."""
    found: dict[str, list[str]] = {}
    if not STORED.exists():
        return found
    for block in STORED.read_text().split("\n\n"):
        name, *steps = block.strip().splitlines()
        found[name.removeprefix("# ")] = steps
    return found


def shows(steps: list[str]) -> bool:
    """Whether these steps show a mistake."""
    try:
        run(steps)
    except NOTICED:
        return True
    except Exception:  # the steps are not valid any more
        return False
    return False


def makes_sense(steps: list[str]) -> bool:
    """Whether these steps pass without a planted mistake."""
    try:
        run(steps)
    except Exception:
        return False
    return True


def found(machine: type[MetaStateMachine]) -> list[str]:
    """Steps that show the planted mistake."""
    try:
        search(machine, SharesMachine)
    except NOTICED as problem:
        notes = textwrap.dedent("\n".join(getattr(problem, "__notes__", [])))
        steps = notes[notes.index("state = ") : notes.index("state.teardown()")]
        steps = re.sub(r"<(\w+\.\w+): \d+>", r"\1", steps)
        return [ast.unparse(step) for step in ast.parse(steps).body]
    raise AssertionError("no step shows it")


def fewer(steps: list[str], still: Callable[[list[str]], bool]) -> list[str]:
    """The steps without needless ones. Tries to omit large parts first; the first step stays."""
    part = len(steps) // 2
    while part:
        at = 1
        while at < len(steps):
            without = steps[:at] + steps[at + part :]
            if still(without):
                steps = without
            else:
                at += part
        part //= 2
    return steps


def main() -> None:
    from tests.model import test_model_has_teeth as teeth

    kept, blocks = stored(), []
    for mutation in teeth.MUTATIONS:
        broken = mock.patch.object(mutation.of, mutation.method, mutation.broken)

        def still(steps: list[str], broken: Any = broken) -> bool:
            with broken:
                return shows(steps)

        steps = kept.get(str(mutation), [])
        if not (makes_sense(steps) and still(steps)):
            with broken:
                steps = found(mutation.machine)
            steps = fewer(steps, still)
            assert makes_sense(steps), mutation
            print(len(steps), mutation, flush=True)
        blocks.append("\n".join([f"# {mutation}", *steps]))
    STORED.write_text("\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
