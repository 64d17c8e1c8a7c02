"""What only the disk store does: commits that survive, full disks, damage found at recovery."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from prefixd.proto.disk import CHUNK_BYTES, chunk_count, chunk_key
from prefixd.proto.keys import Key
from prefixd.proto.record import RecordHead, crc32c
from prefixd.proto.vocabulary import Tier
from prefixd.tiers.disk import DiskStore, default_map_bytes
from prefixd.tiers.store import StoreError, StoreFull, Usage

MIB = 2**20


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def head(number: int, payload_bytes: int, token_ids: bytes = b"") -> RecordHead:
    return RecordHead(
        key(number), number, payload_bytes, 1, 0, 1, Tier.DISK, 1_000 + number, token_ids
    )


def payload_of(number: int, payload_bytes: int) -> bytes:
    return random.Random(number).randbytes(payload_bytes)


def save(store: DiskStore, *numbers: int, payload_bytes: int = 3 * MIB) -> None:
    writers = []
    for number in numbers:
        writer = store.writer(head(number, payload_bytes), ())
        writer.write(payload_of(number, payload_bytes))
        writer.seal()
        writers.append(writer)
    store.apply(writers, [])


def is_whole(store: DiskStore, number: int, payload_bytes: int = 3 * MIB) -> bool:
    found = b"".join(store.read(head(number, payload_bytes), (), 0, payload_bytes))
    return found == payload_of(number, payload_bytes)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens the one store of a test, closing the one before."""
    stores: list[DiskStore] = []

    def open_again(**options: int) -> DiskStore:
        while stores:
            stores.pop().close()
        stores.append(DiskStore(tmp_path / "disk", 256 * MIB, sync=False, **options))
        return stores[-1]

    yield open_again
    while stores:
        stores.pop().close()


# ---- commits


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tiers_disk import save, DiskStore, MIB
store = DiskStore(Path(sys.argv[1]), 256 * MIB)
for batch in range(100):
    save(store, *range(3 * batch, 3 * batch + 3))
    print(batch, flush=True)
"""


@pytest.mark.parametrize("acknowledged", [1, 4])
def test_what_was_acknowledged_survives_a_kill(
    opened: Callable[..., DiskStore], tmp_path: Path, acknowledged: int
) -> None:
    """A process saves batch after batch and is killed while it works on the next one."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "disk"), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(acknowledged)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.stdout.close()
    assert child.wait() == -9
    batches = sum(line.endswith("\n") for line in lines)
    assert batches >= acknowledged

    store = opened(verify_payloads=True)
    recovery = store.recover({})
    assert not recovery.dropped
    found = {entry.head.generation for entry in recovery.entries}
    assert found >= set(range(3 * batches))
    # At most one batch more was committed and not yet acknowledged, and that one is whole.
    assert len(found) in (3 * batches, 3 * batches + 3)
    for number in found:
        assert is_whole(store, number)


def test_readers_see_entries_whole_while_others_are_written(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened()
    save(store, 0, 1)
    done, went_round = threading.Event(), threading.Event()
    bad: list[int] = []

    def read() -> None:
        while not done.is_set():
            bad.extend(number for number in (0, 1) if not is_whole(store, number))
            went_round.set()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2, 12):
        save(store, number)
        store.apply([], [key(number - 1)] if number > 2 else [])
    assert went_round.wait(60)
    done.set()
    reader.join()
    assert not bad


def test_commits_may_come_from_many_threads(opened: Callable[..., DiskStore]) -> None:
    store = opened()

    def work(first: int) -> None:
        for number in range(first, first + 5):
            save(store, number, payload_bytes=70_000)
            assert is_whole(store, number, 70_000)
            if number % 2:
                store.apply([], [key(number)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 100, 5)))
    assert store.held_keys() == {key(number) for number in range(0, 100, 2)}
    assert not opened(verify_payloads=True).recover({}).dropped


def test_a_writer_of_another_kind_or_unsealed_is_refused(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    writer = store.writer(head(1, 10), ())
    with pytest.raises(ValueError, match="sealed"):
        store.apply([writer], [])
    with pytest.raises(ValueError, match="addressed by key"):
        store.writer(head(1, 10), (0, 4096))


def test_chunks_are_used_again_and_hold_nothing_of_the_last_entry(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened()
    for number, payload_bytes in enumerate((5 * MIB, 2 * MIB, 3 * MIB + 5, CHUNK_BYTES, 5 * MIB)):
        save(store, number, payload_bytes=payload_bytes)
        assert is_whole(store, number, payload_bytes)


# ---- room


def test_a_full_map_is_an_answer_and_changes_nothing(opened: Callable[..., DiskStore]) -> None:
    store = opened(map_bytes=16 * MIB)
    save(store, 0, 1)
    with pytest.raises(StoreFull, match="MDB_MAP_FULL"):
        save(store, 2, 3, 4, 5)
    assert store.held_keys() == {key(0), key(1)}
    assert is_whole(store, 0)
    save(store, 2)
    store.apply([], [key(0), key(1)])
    save(store, 3)
    save(store, 4, 5)
    assert not opened(map_bytes=16 * MIB).recover({}).dropped


def test_an_apply_that_finds_no_room_can_be_repeated(opened: Callable[..., DiskStore]) -> None:
    store = opened(map_bytes=16 * MIB)
    save(store, 0, 1)
    writer = store.writer(head(2, 12 * MIB), ())
    writer.write(payload_of(2, 12 * MIB))
    writer.seal()
    with pytest.raises(StoreFull):
        store.apply([writer], [key(0), key(1)])
    assert store.held_keys() == {key(0), key(1)}
    store.apply([], [key(0), key(1)])
    # What was erased is free for the second transaction after.
    save(store, 3, payload_bytes=1)
    store.apply([writer], [])
    assert is_whole(store, 2, 12 * MIB)


LIMITED = """
import ctypes, resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tiers_disk import save, is_whole, DiskStore, StoreFull, MIB, key
kind, directory = sys.argv[3], Path(sys.argv[1])
if kind == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 * MIB, 12 * MIB))
else:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
        sys.exit(77)
    if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=12m"):
        sys.exit(77)
store = DiskStore(directory, 256 * MIB)
save(store, 0, 1)
for _ in range(3):
    try:
        save(store, 2, 3, 4, 5)
    except StoreFull:
        print("full", end=" ")
assert store.held_keys() == {key(0), key(1)} and is_whole(store, 0) and is_whole(store, 1)
store.apply([], [key(0)])
store.apply([], [key(1)])
save(store, 6)
store.close()
store = DiskStore(directory, 256 * MIB, verify_payloads=True)
assert not store.recover({}).dropped
assert store.held_keys() == {key(6)}
"""


@pytest.mark.parametrize("kind", ["limit", "tmpfs"])
def test_a_full_disk_is_an_answer_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    """With a limit on the size of files, and on a tmpfs of 12 MiB in a namespace of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(Path(__file__).parent), kind],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("no permission to mount a tmpfs in a namespace of its own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["full"] * 3


@pytest.mark.parametrize("token_ids_bytes", [0, 400, 40_000])
@pytest.mark.parametrize("payload_bytes", [1, 1_900, 1_994, 1_995, 4_080, 4_096, 65_536, 2 * MIB])
def test_an_entry_costs_at_least_its_pages(
    opened: Callable[..., DiskStore], payload_bytes: int, token_ids_bytes: int
) -> None:
    store = opened()
    count = 4 if payload_bytes > MIB else 100
    writers = []
    for number in random.Random(1).sample(range(2**30), count):
        # Keys are hashes: rows go to any page.
        entry = head(number, payload_bytes, bytes(token_ids_bytes))
        entry = RecordHead(Key(random.Random(number).randbytes(32)), *astuple(entry)[1:])
        writers.append(store.writer(entry, ()))
        writers[-1].write(bytes(payload_bytes))
        writers[-1].seal()
    for writer in writers:
        store.apply([writer], [])
    store.record_usage([Usage(writer.head.key, 1, 1) for writer in writers])
    stored_bytes = count * store.stored_bytes(payload_bytes, token_ids_bytes)
    with store._env.begin() as txn:
        stats = [txn.stat(table) for table in (store._heads, store._chunks, store._usage)]
    pages = sum(
        stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats
    )
    # But for the root page that each of the three tables has.
    assert stored_bytes + 3 * 4096 >= pages * 4096
    # And not much more: four times for the smallest, a few per cent for what matters.
    assert stored_bytes <= pages * 4096 * (4 if payload_bytes < 4096 else 1.05)


def astuple(entry: RecordHead) -> tuple[object, ...]:
    return tuple(getattr(entry, name) for name in RecordHead.__slots__)


def test_the_file_stays_below_its_map_whatever_comes_and_goes(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    rng = random.Random(5)
    store = opened(map_bytes=48 * MIB)
    live: dict[int, int] = {}
    for number in range(150):
        payload_bytes = int(2 ** rng.uniform(10, 22.5))
        while sum(live.values()) + payload_bytes > 24 * MIB:
            gone = rng.choice(list(live))
            live.pop(gone)
            store.apply([], [key(gone)])
        save(store, number, payload_bytes=payload_bytes)
        live[number] = payload_bytes
    assert store.held_keys() == {key(number) for number in live}
    assert (tmp_path / "disk/data.mdb").stat().st_size <= 48 * MIB


def test_the_map_is_larger_than_the_budget() -> None:
    for budget_bytes in (1, MIB, 100 * MIB, 2**40):
        assert default_map_bytes(budget_bytes) >= 1.5 * budget_bytes + 64 * MIB
        assert default_map_bytes(budget_bytes) % 4096 == 0


# ---- recovery


def damage(
    path: Path, change: Callable[[lmdb.Transaction, Callable[[bytes], object]], None]
) -> None:
    with (
        lmdb.open(str(path / "disk"), map_size=256 * MIB, max_dbs=3) as env,
    ):
        tables = {name: env.open_db(name) for name in (b"heads", b"chunks", b"usage")}
        with env.begin(write=True) as txn:
            change(txn, tables.__getitem__)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda txn, db: txn.delete(chunk_key(key(1), 1), db=db(b"chunks")), "chunk 1 is missing"),
        (lambda txn, db: txn.delete(chunk_key(key(1), 0), db=db(b"chunks")), "chunk 0 is missing"),
        (
            lambda txn, db: txn.put(chunk_key(key(1), 1), bytes(9000), db=db(b"chunks")),
            "chunk 1 has 9000 bytes",
        ),
        (lambda txn, db: txn.put(key(1), b"PFXD" + bytes(200), db=db(b"heads")), "format 0"),
        (lambda txn, db: txn.put(key(1), b"", db=db(b"heads")), "begins with 48 bytes"),
        (
            lambda txn, db: txn.put(key(1), txn.get(key(0), db=db(b"heads")), db=db(b"heads")),
            "the head is that of",
        ),
        (
            lambda txn, db: txn.put(key(1), txn.get(key(1), db=db(b"heads"))[:-1], db=db(b"heads")),
            "3",
        ),
    ],
)
def test_a_damaged_entry_is_dropped_and_erased(
    opened: Callable[..., DiskStore],
    tmp_path: Path,
    change: Callable[[lmdb.Transaction, Callable[[bytes], object]], None],
    reason: str,
) -> None:
    store = opened()
    save(store, 0, 1, 2)
    store.record_usage([Usage(key(1), 5, 5)])
    store.close()
    damage(tmp_path, change)
    store = opened()
    recovery = store.recover({})
    assert [entry.head.key for entry in recovery.entries] == [key(0), key(2)]
    ((dropped, why),) = recovery.dropped
    assert dropped == key(1)
    assert reason in why
    assert store.held_keys() == {key(0), key(2)}
    with store._env.begin() as txn:
        assert txn.stat(store._chunks)["entries"] == 2 * chunk_count(3 * MIB)
        assert txn.get(key(1), db=store._usage) is None
    again = store.recover({})
    assert not again.dropped
    assert len(again.entries) == 2
    save(store, 1)
    assert is_whole(store, 1)


@pytest.mark.parametrize("table", [b"chunks", b"heads"])
def test_rows_of_nobody_are_erased(
    opened: Callable[..., DiskStore], tmp_path: Path, table: bytes
) -> None:
    store = opened()
    save(store, 0, 1)
    store.close()
    damage(tmp_path, lambda txn, db: txn.put(b"junk" * 9, b"x" * 5000, db=db(table)))
    store = opened()
    recovery = store.recover({})
    assert len(recovery.entries) == 2
    assert len(recovery.dropped) == (table == b"heads")
    with store._env.begin() as txn:
        assert txn.stat(store._chunks)["entries"] == 2 * chunk_count(3 * MIB)
        assert txn.stat(store._heads)["entries"] == 2


def test_a_flipped_bit_is_found_by_verifying_or_by_its_reader(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened()
    save(store, 0, 1)
    store.close()

    def flip(txn: lmdb.Transaction, db: Callable[[bytes], object]) -> None:
        chunk = bytearray(txn.get(chunk_key(key(1), 1), db=db(b"chunks")))
        chunk[1000] ^= 4
        txn.put(chunk_key(key(1), 1), chunk, db=db(b"chunks"))

    damage(tmp_path, flip)
    store = opened()
    found = {entry.head.key: entry.payload_crc32c for entry in store.recover({}).entries}
    read = b"".join(store.read(head(1, 3 * MIB), (), 0, 3 * MIB))
    assert crc32c(read) != found[key(1)]
    store = opened(verify_payloads=True)
    recovery = store.recover({})
    assert recovery.dropped == [(key(1), "the payload does not match its checksum")]
    assert store.held_keys() == {key(0)}


def test_recovery_reads_no_payload(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    save(store, 0, 1, 2)
    monkeypatch.setattr(store, "_damage", lambda *_: pytest.fail("a chunk was looked at"))
    assert len(store.recover({}).entries) == 3


def test_a_missing_or_short_chunk_is_an_error_of_its_reader(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened()
    save(store, 0)
    for wrong in (head(9, 100), head(0, 3 * MIB + 1), head(0, 3 * MIB - 1)):
        with pytest.raises(StoreError, match="chunk"):
            store.read(wrong, (), wrong.payload_bytes - 1, 1)
    with pytest.raises(StoreError, match="head"):
        store.token_ids(head(9, 100), (), 4)
    with pytest.raises(StoreError, match="0 bytes of token ids, not 4"):
        store.token_ids(head(0, 3 * MIB), (), 4)


# ---- readers and openers


READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=3)
txn = env.begin()
print("reading", flush=True)
sys.stdin.read()
"""


def test_the_slot_of_a_killed_reader_is_given_back(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened()
    save(store, 0)
    child = subprocess.Popen(
        [sys.executable, "-c", READER, str(tmp_path / "disk")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "reading\n"
    assert str(child.pid) in store._env.readers()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    save(store, 1)
    assert str(child.pid) not in store._env.readers()


def test_a_second_open_is_refused(opened: Callable[..., DiskStore], tmp_path: Path) -> None:
    opened()
    with pytest.raises(StoreError, match="can't open"):
        DiskStore(tmp_path / "disk", MIB)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't open"):
        DiskStore(tmp_path / "file", MIB)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk/data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="can't open"):
        DiskStore(tmp_path / "junk", MIB)


def test_readers_of_the_group_may_use_the_table_of_readers(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    opened()
    modes = [(tmp_path / "disk" / name).stat().st_mode & 0o777 for name in ("data.mdb", "lock.mdb")]
    assert modes == [0o640, 0o660]
    opened(mode=0o600)


def test_a_closed_store_answers_with_an_error(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    save(store, 0)
    store.close()
    for action in (
        lambda: is_whole(store, 0),
        lambda: save(store, 1),
        lambda: store.recover({}),
        lambda: store.record_usage([Usage(key(0), 1, 1)]),
    ):
        with pytest.raises(StoreError):
            action()
