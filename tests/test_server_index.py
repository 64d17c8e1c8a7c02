"""The index: what readers on this host believe, and who sees to it that they may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prefixd.proto.index import CLAIMED, INCARNATION_ROW, INDEX_DIRECTORY, unpack_row
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server import index as module
from prefixd.server.effects import IndexClaim, IndexDelete, IndexPut
from prefixd.server.index import Index, IndexFailed
from prefixd.server.tables import Entry

from .running import key

INCARNATION = b"an incarnation :"
MAP_BYTES = 2**20


def entry(number: int, tier: Tier = Tier.RAM, pins: int = 0, generation: int = 0) -> Entry:
    return Entry(
        key=key(number),
        tier=tier,
        reason=SaveReason.COLD,
        generation=generation or 100 + number,
        last_used_ns=number,
        payload_bytes=5000,
        stored_bytes=8192,
        token_count=16,
        payload_crc32c=7,
        layer_count=0,
        token_ids_bytes=0,
        location=(number * 8192, 8192) if tier is not Tier.DISK else (),
        pins=pins,
    )


def table(*entries: Entry) -> dict[Key, Entry]:
    return {one.key: one for one in entries}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path, INCARNATION, MAP_BYTES)
    yield made
    made.close()


#: What a reader does: one transaction, the incarnation first. As another process, for an
#: environment is open only once in each.
READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, map_size=0)
with env.begin() as txn:
    if txn.get(b"incarnation") != b"an incarnation :":
        print("nobody")
    else:
        print(*sorted(key[-1] for key in txn.cursor().iternext(values=False) if len(key) == 32))
print("ready", flush=True)
held = env.begin() if "hold" in sys.argv else None
for _ in sys.stdin:
    if held:
        print(held.get(b"incarnation") == b"an incarnation :")
    print("ready", flush=True)
"""


def seen(directory: Path) -> str:
    """The last bytes of the keys that a reader finds, or `nobody`."""
    command = [sys.executable, "-c", READER, str(directory / INDEX_DIRECTORY)]
    shown = subprocess.run(command, input="", capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()[0]


class FailingIndex(Index):
    """Refuses changes as long as `refuses` says so of one of them."""

    refuses: Callable[[object], bool] = staticmethod(lambda change: False)  # noqa: ARG005

    def apply(self, changes: object) -> None:
        changes = list(changes)  # type: ignore[call-overload]
        if any(self.refuses(change) for change in changes):
            raise IndexFailed("no room, on purpose")
        super().apply(changes)


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[FailingIndex]:
    made = FailingIndex(tmp_path, INCARNATION, MAP_BYTES)
    yield made
    made.close()


# ---- what it says


def test_it_says_what_it_was_told(index: Index, tmp_path: Path) -> None:
    one, two = entry(1), entry(2, Tier.SHM)
    index.change([IndexPut(one), IndexPut(two), IndexPut(entry(3, Tier.DISK)), IndexDelete(key(3))])
    assert index.keys() == {key(1), key(2)}
    row = index.get(key(2))
    assert row is not None
    assert (row.tier, row.generation, row.location) == (Tier.SHM, 102, (16384, 8192))
    assert index.get(key(3)) is None
    assert index.locations(Tier.SHM) == {key(2): (16384, 8192)}
    assert index.locations(Tier.RAM) == {key(1): (8192, 8192)}
    assert seen(tmp_path) == "1 2"
    assert index.problem is None


def test_changes_of_one_key_are_made_in_order(index: Index) -> None:
    index.change([IndexPut(entry(1)), IndexDelete(key(1)), IndexPut(entry(1, generation=9))])
    row = index.get(key(1))
    assert row is not None
    assert row.generation == 9
    index.change([IndexPut(entry(1)), IndexDelete(key(1)), IndexDelete(key(1))])
    assert index.keys() == set()


def test_claims_are_remembered_and_no_reader_takes_them_for_entries(index: Index) -> None:
    index.change([IndexPut(entry(1, Tier.SHM)), IndexClaim((key(1),), claimed=True)])
    assert index.claimed() == {key(1)}
    assert index.keys() == {key(1)}
    index.change([IndexClaim((key(1),), claimed=False), IndexClaim((key(2),), claimed=False)])
    assert index.claimed() == set()


def test_another_start_finds_the_rows_and_writes_its_own_name(tmp_path: Path) -> None:
    first = Index(tmp_path, INCARNATION, MAP_BYTES)
    first.change([IndexPut(entry(1, Tier.SHM)), IndexClaim((key(1),), claimed=True)])
    first.close()
    first.close()
    second = Index(tmp_path, b"another one ....", MAP_BYTES)
    assert second.locations(Tier.SHM) == {key(1): (8192, 8192)}
    assert second.claimed() == {key(1)}
    second.close()
    assert seen(tmp_path) == "nobody", "readers of the first start find nothing"


def test_rows_that_are_none_are_not_recovered(index: Index) -> None:
    index._put(key(1), b"too short")
    index._put(CLAIMED + b"no key", b"")
    index.change([IndexPut(entry(2, Tier.SHM))])
    assert index.locations(Tier.SHM) == {key(2): (16384, 8192)}
    assert index.claimed() == set()
    assert index.keys() == {key(1), key(2)}
    index.mend(table(entry(2, Tier.SHM)))
    assert index.keys() == {key(2)}


def test_its_differences_from_the_state_are_named_one_by_one(index: Index) -> None:
    same, moved, missing = entry(1), entry(2), entry(3)
    claimed, unclaimed = entry(4, Tier.SHM, pins=1), entry(5, Tier.SHM)
    index.change(
        [
            *map(IndexPut, [same, moved, entry(9), claimed, unclaimed]),
            IndexClaim((key(5),), claimed=True),
            IndexClaim((key(8),), claimed=True),
        ]
    )
    state = table(same, replace(moved, generation=7), missing, claimed, unclaimed)
    differences = index.differences(state)
    assert {one.key for one in differences if isinstance(one, IndexDelete)} == {key(9)}
    puts = {one.entry.key for one in differences if isinstance(one, IndexPut)}
    assert puts == {key(2), key(3)}
    claims = {
        (of, one.claimed) for one in differences if isinstance(one, IndexClaim) for of in one.keys
    }
    assert claims == {(key(4), True), (key(5), False), (key(8), False)}
    index.mend(state)
    assert index.differences(state) == []
    assert index.problem is None


# ---- what can't be changed


def test_an_entry_that_cannot_be_listed_is_a_miss_until_it_can(
    failing: FailingIndex, tmp_path: Path
) -> None:
    failing.change([IndexPut(entry(1)), IndexPut(entry(2))])
    failing.refuses = lambda change: isinstance(change, IndexPut)
    failing.change([IndexPut(entry(3)), IndexDelete(key(1))])
    assert failing.problem == "no room, on purpose"
    assert not failing.revoked
    assert seen(tmp_path) == "2", "what was to be deleted is"
    failing.mend(table(entry(2), entry(3)))
    assert failing.problem is not None, "there still is no room"
    failing.refuses = lambda _: False
    failing.mend(table(entry(2), entry(3)))
    assert failing.problem is None
    assert seen(tmp_path) == "2 3"


def test_a_row_that_cannot_be_removed_is_believed_by_nobody(
    failing: FailingIndex, tmp_path: Path
) -> None:
    """Its room may be written to the moment that `change` returns."""
    failing.change([IndexPut(entry(1)), IndexPut(entry(2))])
    assert seen(tmp_path) == "1 2"
    failing.refuses = lambda change: isinstance(change, IndexDelete)
    failing.change([IndexDelete(key(1)), IndexPut(entry(3))])
    assert failing.revoked
    assert seen(tmp_path) == "nobody"
    failing.change([IndexPut(entry(4))])
    failing.mend(table(entry(2), entry(3), entry(4)))
    assert failing.revoked
    assert seen(tmp_path) == "nobody"

    failing.refuses = lambda _: False
    failing.mend(table(entry(2), entry(3), entry(4)))
    assert (failing.problem, failing.revoked) == (None, False)
    assert seen(tmp_path) == "2 3 4"


def test_a_reader_of_an_older_state_stops_believing_too(index: Index, tmp_path: Path) -> None:
    """Its transaction began long ago, in pages that were replaced since."""
    index.change([IndexPut(entry(number)) for number in range(1, 50)])
    command = [sys.executable, "-c", READER, str(tmp_path / INDEX_DIRECTORY), "hold"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask() -> list[str]:
            assert reader.stdin is not None
            print(file=reader.stdin, flush=True)
            return list(iter(lambda: str(reader.stdout.readline()).strip(), "ready"))

        assert list(iter(lambda: reader.stdout.readline().strip(), "ready"))
        for number in range(50, 60):
            index.change([IndexPut(entry(number)), IndexDelete(key(number - 49))])
        assert ask() == ["True"]
        index.distrust("somebody said so")
        assert ask() == ["False"]
        reader.stdin.close()
    assert INCARNATION not in (tmp_path / INDEX_DIRECTORY / "data.mdb").read_bytes()


def test_an_index_without_room_says_so_and_comes_back(tmp_path: Path) -> None:
    """For once with a map that is really full, held full by a reader of an old state."""
    index = Index(tmp_path, INCARNATION, 64 * 2**10)
    state = table(*(entry(number) for number in range(1, 100)))
    index.change([IndexPut(one) for one in state.values()])
    assert index.problem is None
    reader = index._env.begin()
    for number in range(1, 1000):
        index.change([IndexDelete(key(number % 99 + 1)), IndexPut(entry(number % 99 + 1))])
        if index.revoked:
            break
    assert "MDB_MAP_FULL" in str(index.problem)
    assert index.revoked
    assert seen(tmp_path) == "nobody"
    index.mend(state)
    assert index.revoked, "the reader is still there"
    reader.abort()
    index.mend(state)
    assert index.problem is None
    assert seen(tmp_path).split() == [str(number) for number in range(1, 100)]
    index.close()


# ---- opening it


def test_a_damaged_index_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / INDEX_DIRECTORY
    path.mkdir()
    (path / "data.mdb").write_bytes(b"this is no environment" * 1000)
    index = Index(tmp_path, INCARNATION, MAP_BYTES)
    assert index.keys() == set()
    index.change([IndexPut(entry(1))])
    assert seen(tmp_path) == "1"
    index.close()


def test_an_index_that_cannot_be_opened_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(IndexFailed, match=r"can't open the index .*No space left"):
        Index(tmp_path, INCARNATION, MAP_BYTES)
    monkeypatch.undo()
    monkeypatch.setattr(module, "INCARNATION_ROW", b"x" * 600)
    with pytest.raises(IndexFailed, match="MDB_BAD_VALSIZE"):
        Index(tmp_path, INCARNATION, MAP_BYTES)
    monkeypatch.undo()
    index = Index(tmp_path, INCARNATION, MAP_BYTES)
    with index._env.begin() as txn:
        assert txn.get(INCARNATION_ROW) == INCARNATION
    index.close()


def test_a_row_survives_as_it_was_packed(index: Index) -> None:
    index.change([IndexPut(entry(5, Tier.SHM))])
    ((found, data),) = index.rows()
    assert found == key(5)
    assert unpack_row(data).payload_crc32c == 7
