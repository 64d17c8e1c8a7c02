"""The LMCache adapter against hand-written twins of its few types, and a real daemon."""

from __future__ import annotations

import os
import select
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixd.client import Client, Hit, Tier
from prefixd.client.connectors import lmcache
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.ctl.private import PrivateDaemon
from tests.support.daemon import eventually, private_daemon
from tests.support.engines import fresh_keys
from tests.support.fakes import PATIENCE_S

SIZE = 4_096


class Bitmap(list[bool]):
    def __init__(self, size: int, prefix_bits: int = 0) -> None:
        super().__init__([True] * prefix_bits + [False] * (size - prefix_bits))

    def set(self, position: int) -> None:
        self[position] = True


class Base(ABC):
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.capacity = max_capacity_bytes

    @abstractmethod
    def submit_store_task(self, keys: Any, objects: Any) -> int: ...


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)


def modules(**of_base: Any) -> dict[str, ModuleType]:
    made = {
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": Base, **of_base},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
    }
    found: dict[str, ModuleType] = {}
    for name, contents in made.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for each, value in contents.items():
            setattr(found[name], each, value)
    return found


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    vars(lmcache).pop("PrefixdL2Adapter", None)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.fixture(params=["ram", "shm", "disk"])
def adapter(daemon: PrivateDaemon, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = lmcache.PrefixdL2Adapter(
        {"address": daemon.address, "tier": request.param, "fingerprint": "test"}
    )
    yield made
    made.close()


def key(number: int, model: str = "m", rank: int = 0, salt: str = "") -> Any:
    return SimpleNamespace(
        chunk_hash=number.to_bytes(32, "big"),
        model_name=model,
        kv_rank=rank,
        object_group_id=0,
        cache_salt=salt,
    )


def objects(*numbers: int) -> list[Any]:
    return [SimpleNamespace(byte_array=bytearray(bytes([n % 256]) * SIZE)) for n in numbers]


def ring(fd: int) -> None:
    assert select.select([fd], [], [], PATIENCE_S)[0]
    os.eventfd_read(fd)


def store(adapter: Any, keys: list[Any], values: list[Any]) -> int:
    number = adapter.submit_store_task(keys, values)
    ring(adapter.get_store_event_fd())
    done = adapter.pop_completed_store_tasks()
    assert list(done) == [number]
    return int(done[number])


def look_up(adapter: Any, keys: list[Any]) -> list[bool]:
    number = adapter.submit_lookup_and_lock_task(keys, {})
    ring(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(number)
    assert adapter.query_lookup_and_lock_result(number) is None
    return list(found)


def load(adapter: Any, keys: list[Any], values: list[Any]) -> list[bool]:
    number = adapter.submit_load_task(keys, values)
    ring(adapter.get_load_event_fd())
    return list(adapter.query_load_result(number))


def test_store_look_up_load_unlock(adapter: Any, daemon: PrivateDaemon) -> None:
    salt = os.urandom(4).hex()
    keys = [key(n, salt=salt) for n in range(4)]
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert store(adapter, keys[:3], objects(1, 2, 3)) == 3 * SIZE
    assert adapter.pop_completed_store_tasks() == {}
    assert look_up(adapter, keys) == [True, True, True, False]
    targets = objects(0, 0, 0)
    assert load(adapter, [keys[2], keys[0], keys[3]], targets) == [True, True, False]
    assert [target.byte_array[0] for target in targets] == [3, 1, 0]
    with daemon.admin() as admin:
        # A look-up in place is answered before its claim is made.
        eventually(lambda: list(admin.all_claims()))
        adapter.submit_unlock(keys[:2])
        assert list(admin.all_claims()), "the third key is still locked"
        adapter.submit_unlock(keys[2:])
        eventually(lambda: not list(admin.all_claims()))


def test_a_subset_is_loaded_without_a_lock(adapter: Any) -> None:
    salt = os.urandom(4).hex()
    keys = [key(n, salt=salt) for n in range(3)]
    store(adapter, keys[:2], objects(1, 2))
    targets = objects(0, 0)
    assert load(adapter, [keys[2], keys[1]], targets) == [False, True]
    assert targets[1].byte_array[0] == 2
    short = [SimpleNamespace(byte_array=bytearray(SIZE - 1)), *objects(0)]
    assert load(adapter, keys[:2], short) == [False, True]
    assert load(adapter, [], []) == []
    adapter.delete(keys)
    assert look_up(adapter, keys) == [False] * 3


def test_locks_are_counted_for_each_key(adapter: Any, daemon: PrivateDaemon) -> None:
    salt = os.urandom(4).hex()
    keys = [key(n, salt=salt) for n in range(2)]
    store(adapter, keys, objects(1, 2))
    assert look_up(adapter, keys) == look_up(adapter, keys) == [True, True]
    with daemon.admin() as admin:
        adapter.submit_unlock(keys)
        eventually(lambda: len(list(admin.all_claims())) == 1)
        adapter.submit_unlock(keys)
        eventually(lambda: not list(admin.all_claims()))
    adapter.submit_unlock(keys)


def test_a_claim_lands_later_than_its_answer() -> None:
    first, second = fresh_keys(2)
    locks = lmcache.Locks()
    lock = locks.add([first, second])
    assert (locks.holding(first), locks.drop([first])) == (None, [])
    hit: Any = SimpleNamespace(keys=[second])
    assert locks.landed(lock, hit)
    assert (locks.holding(first), locks.holding(second)) == (None, (hit, 0))
    assert (locks.drop([first]), locks.drop([second]), locks.drop([second])) == ([], [hit], [])
    late = locks.add([first])
    assert locks.drop([first]) == []
    assert not locks.landed(late, hit), "it was unlocked meanwhile"
    held, other = locks.add([first]), locks.add([first])
    assert locks.landed(held, hit)
    assert locks.close() == [hit]
    assert not locks.landed(other, hit)


def test_a_key_that_several_lookups_locked_is_held_by_the_oldest() -> None:
    key, other = fresh_keys(2)
    locks = lmcache.Locks()
    taken = [locks.add(keys) for keys in ([key], [key, other], [other, key, key])]
    hits: list[Any] = [SimpleNamespace(keys=[key, other]) for _ in taken]
    assert all(map(locks.landed, taken, hits))
    assert locks.holding(key) == (hits[0], 0)
    assert locks.drop([key]) == [hits[0]]
    assert (locks.holding(key), locks.holding(other)) == ((hits[1], 0), (hits[1], 1))
    assert locks.drop([key]) == []
    assert (locks.holding(key), locks.drop([other])) == ((hits[2], 0), [hits[1]])
    assert (locks.drop([key]), locks.drop([other]), locks.drop([key])) == ([], [], [hits[2]])
    assert (locks.holding(key), locks.drop([key, other])) == (None, [])
    assert (locks._held, locks._more) == ({}, {}), "no task is left"


def test_a_closed_event_rings_nobody() -> None:
    event = lmcache.Event()
    event.ring()
    assert os.eventfd_read(event.fd) == 1
    event.close()
    event.ring()


def test_what_differs_in_anything_is_another_key() -> None:
    keys = lmcache.Keys({})
    made = [key(1), key(2), key(1, "n"), key(1, rank=1), key(1, salt="s")]
    assert len(set(keys.of(made))) == len(made)
    assert keys.of(made) == [keys.of([each])[0] for each in made]
    assert keys.of([]) == []
    assert keys.of([key(1)]) == lmcache.Keys({}).of([key(1)])
    assert keys.of([key(1)]) != lmcache.Keys({"layout": 2}).of([key(1)])


def test_short_hashes_of_chunks_name_nothing_beyond_this_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 64 bits, as Python's `hash` makes them: two prompts with one hash are easily made."""
    short = [SimpleNamespace(**{**vars(key(1)), "chunk_hash": b"8 bytes."})]
    keys = lmcache.Keys({})
    assert keys.of(short) == keys.of(short)
    assert keys.of(short) != lmcache.Keys({}).of(short)
    assert [each.getMessage()[:14] for each in caplog.records] == ["nothing is sha"] * 2
    assert keys.of([key(1)]) == lmcache.Keys({}).of([key(1)])


def test_without_a_daemon_every_task_ends(tmp_path: os.PathLike[str]) -> None:
    core = lmcache.L2Core(Client(f"unix:{tmp_path}/none.sock", deadline_ms=50), Tier.RAM)
    ours = lmcache.Keys({}).of([key(1)])
    stored, bad = core.store(ours, [b"abc"]), core.store(ours, [5])
    found, loaded = core.look_up(ours), core.load(ours, [bytearray(3)])
    eventually(lambda: len(core._stored) == 2 and core._found and core._loaded)
    assert core.stored() == {stored: -1, bad: -1}
    assert (core.found(found), core.loaded(loaded)) == ([False], [False])
    core.close()
    stored, found = core.store(ours, [b"abc"]), core.look_up(ours)
    loaded, nothing = core.load(ours, [bytearray(3)]), core.load([], [])
    assert core.stored() == {stored: -1}
    assert (core.found(found), core.loaded(loaded)) == ([False], [False])
    assert core.loaded(nothing) == []


def test_another_lmcache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(Base):
        @abstractmethod
        def submit_prefetch(self) -> None: ...

    for name, module in modules(L2AdapterInterface=Later).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UnsupportedEngine, match="it asks for submit_prefetch; it was made for"):
        _ = lmcache.PrefixdL2Adapter
    monkeypatch.setitem(sys.modules, "lmcache.v1.distributed.l2_adapters.base", None)
    with pytest.raises(UnsupportedEngine, match="needs LMCache"):
        _ = lmcache.PrefixdL2Adapter


def test_what_a_lookup_locked_is_mapped_before_it_is_loaded(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of the client. What was unlocked by then is not mapped."""
    keys = [key(n, salt=os.urandom(4).hex()) for n in range(2)]
    assert store(adapter, keys, objects(1, 2)) == 2 * SIZE
    look_up(adapter, keys)  # from here on in place
    adapter.submit_unlock(keys)
    mapped: list[int] = []
    prefault = Hit.prefault

    def noted(hit: Hit) -> None:
        prefault(hit)
        mapped.append(len(hit))

    monkeypatch.setattr(Hit, "prefault", noted)
    assert look_up(adapter, keys) == [True, True]
    eventually(lambda: mapped == [2])
    assert load(adapter, keys, objects(0, 0)) == [True, True]
    adapter.submit_unlock(keys)

    unlocked = threading.Event()

    def too_late(hit: Hit) -> None:
        adapter.submit_unlock(keys)
        unlocked.set()
        noted(hit)

    monkeypatch.setattr(Hit, "prefault", too_late)
    assert look_up(adapter, keys) == [True, True]
    assert unlocked.wait(PATIENCE_S)
    assert load(adapter, keys, objects(0, 0)) == [True, True], "with a claim of its own"
    assert mapped == [2]
