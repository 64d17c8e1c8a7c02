"""What only the shm store does: the rest is in `test_arena_store.py` and the contract suite."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import PAYLOAD, SLAB, Placed, budget, numbers_of, payload_of

from prefixd.tiers.shm import ShmStore
from prefixd.tiers.store import StoreError

HERE = str(Path(__file__).parent)


@pytest.fixture
def placed(shm: Path) -> Iterator[Placed]:
    made = Placed(ShmStore, shm)
    yield made
    made.store.close()


def test_a_payload_begins_at_the_first_byte_of_its_room(placed: Placed) -> None:
    (entry,) = placed.save(3)
    raw = (placed.store.directory / "arena").read_bytes()
    assert raw[entry.location[0] :][:PAYLOAD] == payload_of(3)
    (view,) = placed.store.read(entry, 0, PAYLOAD)
    placed.store.arena.writable(entry.location[0], 1)[0] ^= 1  # type: ignore[attr-defined]  # of shm
    assert view != payload_of(3), "a view is the arena itself"


def test_what_is_forgotten_is_erased_at_once(placed: Placed) -> None:
    entries = placed.save(1, 2)
    placed.store.forget(entries[:1])
    assert placed.store.unerased == 0
    assert placed.numbers() == {2}


WRITES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers import Placed, ShmStore
placed = Placed(ShmStore, Path(sys.argv[1]), 4096)
for number in range(600):
    placed.save(number)
    print(number, flush=True)
"""


def test_what_was_saved_survives_a_kill(shm: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(shm), HERE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(20)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    child.wait()
    saved = {int(line) for line in lines if line.endswith("\n")}
    assert len(saved) >= 20
    placed = Placed(ShmStore, shm, 4096)
    try:
        recovery = placed.recover()
        assert not recovery.dropped
        assert saved <= set(numbers_of(recovery.entries))
        assert len(recovery.entries) <= len(saved) + 1
        assert all(placed.is_whole(entry.record) for entry in recovery.entries)
    finally:
        placed.store.close()


def test_what_can_be_no_store_is_refused(shm: Path) -> None:
    (shm / "file").write_text("")
    with pytest.raises(StoreError, match="can't make the shm tier"):
        ShmStore(shm / "file" / "below", budget(64, ShmStore), SLAB)
