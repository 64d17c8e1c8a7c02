"""Steps that show a mistake: of each one that `test_model_has_teeth` plants, as few as do.

    python -m tests.model.teeth

looks for those that are missing in `teeth.txt`, or that do not show their mistake any more, with
Hypothesis, and leaves out what is not needed. They are statements, as Hypothesis prints them, so
they hold for any version of it.
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
#: How a mistake shows.
NOTICED: Final = (AssertionError, KeyError, TypeError, ValueError)
#: What the steps name.
NAMES: Final = {
    one.__name__: one
    for one in (
        *(MetaStateMachine, ResizingMachine, SharesMachine, FewEntriesMachine),
        *(ClaimMode, SaveStatus, Tier),
    )
}
#: Ends at the first problem: most of these find one within ten examples.
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
    """Do these steps, of which the first makes the machine, and end."""
    exec("\n".join([*steps, "state.teardown()"]), dict(NAMES))


def search(*machines: type[MetaStateMachine]) -> None:
    """Do random steps until one shows a mistake; that is raised, with the steps in its notes."""
    for machine in dict.fromkeys(machines):
        run_state_machine_as_test(machine, settings=SHORT)


def stored() -> dict[str, list[str]]:
    """By the name of the mistake."""
    found: dict[str, list[str]] = {}
    if not STORED.exists():
        return found
    for block in STORED.read_text().split("\n\n"):
        name, *steps = block.strip().splitlines()
        found[name.removeprefix("# ")] = steps
    return found


def shows(steps: list[str]) -> bool:
    """Is something noticed?"""
    try:
        run(steps)
    except NOTICED:
        return True
    except Exception:  # as they are now they make no sense
        return False
    return False


def makes_sense(steps: list[str]) -> bool:
    """Is all well where nothing is broken?"""
    try:
        run(steps)
    except Exception:
        return False
    return True


def found(machine: type[MetaStateMachine]) -> list[str]:
    """Steps that show the mistake there is."""
    try:
        search(machine, SharesMachine)
    except NOTICED as problem:
        said = textwrap.dedent("\n".join(getattr(problem, "__notes__", [])))
        steps = said[said.index("state = ") : said.index("state.teardown()")]
        steps = re.sub(r"<(\w+\.\w+): \d+>", r"\1", steps)
        return [ast.unparse(step) for step in ast.parse(steps).body]
    raise AssertionError("no step shows it")


def fewer(steps: list[str], still: Callable[[list[str]], bool]) -> list[str]:
    """Without what is not needed, large parts first. The first stays."""
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
