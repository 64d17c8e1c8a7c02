"""The protocol of a save, pair by pair: what each signal does at each stage, if it can occur.

`python -m tests.server.core.test_stages` prints the table as Markdown.
"""

from __future__ import annotations

from itertools import product

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core.entries import EntryState
from prefixd.server.core.saves import advance
from prefixd.server.core.sessions import NEXT_STAGE, HeldReservation, SaveBatch, Signal, Stage

#: Rows are stages, columns are signals; `-` cannot happen.
PROTOCOL = """
            BEGIN    SEALED      REFUSED  STOPPED  LOSE        COMMITTED  COMMIT_FAILED
RESERVED    WRITING  -           -        -        GONE        -          -
WRITING     -        COMMITTING  GONE     GONE     DOOMED      -          -
COMMITTING  -        -           -        -        COMMITTING  PUBLISHED  GONE
DOOMED      -        GONE        GONE     GONE     DOOMED      -          -
PUBLISHED   -        -           -        -        -           -          -
GONE        -        -           -        -        -           -          -
"""


def expected() -> dict[tuple[Stage, Signal], Stage | None]:
    header, *rows = (line.split() for line in PROTOCOL.strip().splitlines())
    return {
        (Stage[row[0]], Signal[signal]): None if cell == "-" else Stage[cell]
        for row in rows
        for signal, cell in zip(header, row[1:], strict=True)
    }


def reservation(stage: Stage) -> HeldReservation:
    entry = EntryState(
        key=Key(bytes(32)),
        stored_bytes=1,
        place=(),
        tier=Tier.RAM,
        reason=SaveReason.COLD,
        generation=1,
        last_used_ns=0,
        content=Content(1, 1),
        payload_crc32c=0,
        published=False,
    )
    return HeldReservation(
        token=1,
        entry=entry,
        session=1,
        token_ids=b"",
        batch=SaveBatch((), {1}),
        reserved_ns=0,
        expires_ns=1,
        ttl_ns=1,
        stage=stage,
    )


def test_the_table_above_names_every_pair() -> None:
    assert set(expected()) == set(product(Stage, Signal))


@pytest.mark.parametrize(
    ("stage", "signal"), list(product(Stage, Signal)), ids=lambda one: one.name.lower()
)
def test_every_pair(stage: Stage, signal: Signal) -> None:
    save = reservation(stage)
    following = expected()[stage, signal]
    if following is None:
        with pytest.raises(KeyError):
            advance(save, signal)
        assert save.stage is stage, "an impossible signal changes nothing"
    else:
        assert advance(save, signal) is following
        assert save.stage is following


def test_every_stage_is_reached_and_every_save_can_end() -> None:
    reached = {Stage.RESERVED}
    while True:
        more = {after for (before, _), after in NEXT_STAGE.items() if before in reached}
        if more <= reached:
            break
        reached |= more
    assert reached == set(Stage)
    ends = {Stage.PUBLISHED, Stage.GONE}
    assert not any(before in ends for before, _ in NEXT_STAGE)
    for stage in set(Stage) - ends:
        assert any(before is stage and after in ends for (before, _), after in NEXT_STAGE.items())


def test_what_is_whole_is_not_lost() -> None:
    """Only the store can end a save whose bytes are complete and checked."""
    enders = {s for (before, s), after in NEXT_STAGE.items() if before is Stage.COMMITTING != after}
    assert enders == {Signal.COMMITTED, Signal.COMMIT_FAILED}


def markdown() -> str:
    """The table for the documentation: a row for each stage, empty where a signal cannot occur."""

    def name(one: Stage | Signal) -> str:
        return one.name.lower().replace("_", " ")

    lines = ["| stage | " + " | ".join(map(name, Signal)) + " |"]
    lines.append("|---" * (len(Signal) + 1) + "|")
    for stage in Stage:
        after = (NEXT_STAGE.get((stage, signal)) for signal in Signal)
        cells = (name(one) if one else "" for one in after)
        lines.append(f"| **{name(stage)}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_for_the_documentation() -> None:
    lines = markdown().splitlines()
    assert len(lines) == 2 + len(Stage)
    assert lines[0].startswith("| stage | begin | sealed |")
    assert lines[3] == "| **writing** |  | committing | gone | gone | doomed |  |  |"


if __name__ == "__main__":
    print(markdown())
