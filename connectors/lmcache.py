"""LMCache: an L2 adapter, for its `plugin` adapter type.

    {"type": "plugin", "module_path": "prefixd.connectors.lmcache",
     "class_name": "PrefixdL2Adapter", "adapter_params": {"tier": "shm"}}

Everything is done by the threads of the client, whose futures ring the event descriptors that
LMCache polls. A lookup that hits holds its entries, each until its key was unlocked as often as it
was locked; a load of what was not looked up is a claim of its own.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, Final, TypeVar

from ..client.buffers import flat_bytes
from ..client.client import Client
from ..client.hits import Hit
from ..client.results import MissReason
from ..client.saves import SaveItem
from ..proto.errors import CallerError
from ..proto.keys import ForeignNamespace, Key
from ..proto.vocabulary import Tier
from . import compat

ENGINE: Final = "LMCache"
PACKAGE: Final = "lmcache"
TESTED: Final = "0.5.6"
T = TypeVar("T")

#: Namespaces that are remembered: a process serves few models.
_MAX_NAMESPACES: Final = 1024


class Keys:
    """An LMCache key as one of ours: the chunk's hash in the namespace of all else."""

    def __init__(self, fields: dict[str, Any]) -> None:
        """`fields`: of all keys of this process."""
        self._fields = fields
        self._namespaces: dict[tuple[Any, ...], ForeignNamespace] = {}

    def of(self, objects: Iterable[Any]) -> list[Key]:
        return [self._namespace(each).key(_plain(each.chunk_hash)) for each in objects]

    def _namespace(self, key: Any) -> ForeignNamespace:
        parts = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
        found = self._namespaces.get(parts)
        if found is None:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            names = ("model", "rank", "group", "salt")
            values = dict(zip(names, (_plain(part) for part in parts), strict=True))
            found = ForeignNamespace("lmcache", {**self._fields, **values})
            self._namespaces[parts] = found
        return found


class Locks:
    """Which hits are held for which keys. Thread-safe.

    A hit is released when none of its keys is locked any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Key, list[Hit]] = {}
        self._open: dict[int, Counter[Key]] = {}

    def add(self, hit: Hit) -> None:
        with self._lock:
            self._open[id(hit)] = Counter(hit.keys)
            for key in hit.keys:
                self._held.setdefault(key, []).append(hit)

    def hit_of(self, key: Key) -> Hit | None:
        """One that holds it."""
        with self._lock:
            hits = self._held.get(key)
            return hits[-1] if hits else None

    def drop(self, keys: Iterable[Key]) -> list[Hit]:
        """Each key once less. Returns the hits that nobody needs any more."""
        done: list[Hit] = []
        with self._lock:
            for key in keys:
                hits = self._held.get(key)
                if not hits:
                    continue
                hit = hits.pop(0)
                if not hits:
                    del self._held[key]
                still = self._open[id(hit)]
                still[key] -= 1
                if not +still:
                    del self._open[id(hit)]
                    done.append(hit)
        return done

    def everything(self) -> list[Hit]:
        with self._lock:
            hits = {id(hit): hit for held in self._held.values() for hit in held}
            self._held.clear()
            self._open.clear()
            return list(hits.values())


class Event:
    """A descriptor that is readable when something is done."""

    def __init__(self) -> None:
        self.fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def ring(self) -> None:
        if not self._closed:
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        self._closed = True
        os.close(self.fd)


class L2Core:
    """The work, in terms of keys and buffers. Every method returns at once. Thread-safe."""

    def __init__(self, client: Client, tier: Tier) -> None:
        """Owns the client from now on."""
        self._client = client
        self._tier = tier
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._stored: dict[int, int] = {}
        self._found: dict[int, list[bool]] = {}
        self._loaded: dict[int, list[bool]] = {}
        self._locks = Locks()
        self._closed = False
        self.store_event: Final = Event()
        self.lookup_event: Final = Event()
        self.load_event: Final = Event()

    # ---- stores

    def store(self, keys: Sequence[Key], payloads: Sequence[Any]) -> int:
        number = next(self._numbers)
        try:
            items = [SaveItem(key, data) for key, data in zip(keys, payloads, strict=True)]
            size_bytes = sum(len(flat_bytes(data)) for data in payloads)
            saving = self._client.save_many_async(items, tier=self._tier)
        except CallerError:
            # What can't be saved, or a closed client: the task ends, as every task does.
            self._end(self._stored, number, -1, self.store_event)
            return number
        saving.add_done_callback(lambda done: self._store_ended(number, size_bytes, done))
        return number

    def _store_ended(self, number: int, size_bytes: int, saving: Future[Any]) -> None:
        ok = not saving.exception() and all(each.ok for each in saving.result())
        self._end(self._stored, number, size_bytes if ok else -1, self.store_event)

    def stored(self) -> dict[int, int]:
        """What ended since this was asked last: its bytes, -1 if not all of it is there."""
        with self._lock:
            done = dict(self._stored)
            self._stored.clear()
            return done

    # ---- lookups

    def look_up(self, keys: Sequence[Key]) -> int:
        """Those that are there are locked."""
        number = next(self._numbers)
        claiming = self._client.claim_async(keys)
        claiming.add_done_callback(lambda done: self._look_up_ended(number, len(keys), done))
        return number

    def _look_up_ended(self, number: int, size: int, claiming: Future[Hit]) -> None:
        found = [False] * size
        if not claiming.exception() and (hit := claiming.result()):
            if self._closed:
                hit.release()
            else:
                self._locks.add(hit)
                for position in hit.positions:
                    found[position] = True
        self._end(self._found, number, found, self.lookup_event)

    def found(self, number: int) -> list[bool] | None:
        with self._lock:
            return self._found.pop(number, None)

    def unlock(self, keys: Sequence[Key]) -> None:
        done = self._locks.drop(keys)
        if done:
            self._client.release_many(done)

    # ---- loads

    def load(self, keys: Sequence[Key], buffers: Sequence[Any]) -> int:
        """Any subset of what is there, locked or not."""
        number = next(self._numbers)
        hits: dict[int, tuple[Hit, list[int]]] = {}
        rest: list[int] = []
        for position, key in enumerate(keys):
            hit = self._locks.hit_of(key)
            if hit is None:
                rest.append(position)
            else:
                hits.setdefault(id(hit), (hit, []))[1].append(position)
        loading = _Loading(len(keys), len(hits) + bool(rest))
        loading.then = lambda: self._end(self._loaded, number, loading.good, self.load_event)
        for hit, positions in hits.values():
            places = {key: index for index, key in enumerate(hit.keys)}
            restoring = self._client.restore_async(
                hit,
                [buffers[position] for position in positions],
                indices=[places[keys[position]] for position in positions],
            )
            restoring.add_done_callback(
                lambda done, positions=positions: loading.ended(positions, done)  # type: ignore[misc]
            )
        if rest:
            claiming = self._client.claim_async([keys[position] for position in rest])
            claiming.add_done_callback(
                lambda done: self._load_unlocked(loading, rest, buffers, done)
            )
        elif not hits:
            loading.then()
        return number

    def _load_unlocked(
        self, loading: _Loading, rest: list[int], buffers: Sequence[Any], claiming: Future[Hit]
    ) -> None:
        """In a thread of the client's."""
        if claiming.exception():
            loading.ended(rest, None)
            return
        with claiming.result() as hit:
            positions = [rest[position] for position in hit.positions]
            try:
                result = hit.restore_into([buffers[position] for position in positions])
            except Exception:
                loading.ended(rest, None)
                return
        for position, miss in zip(positions, result.misses, strict=True):
            loading.good[position] = miss is None
        loading.ended([], None)

    def loaded(self, number: int) -> list[bool] | None:
        with self._lock:
            return self._loaded.pop(number, None)

    # ---- the rest

    def delete(self, keys: Sequence[Key]) -> None:
        self._client.delete(keys)

    def close(self) -> None:
        """What is under way ends first, within the client's deadline."""
        self._closed = True
        hits = self._locks.everything()
        if hits:
            self._client.release_many(hits)
        self._client.close()
        for event in (self.store_event, self.lookup_event, self.load_event):
            event.close()

    def _end(self, results: dict[int, T], number: int, result: T, event: Event) -> None:
        with self._lock:
            results[number] = result
        event.ring()


class _Loading:
    """One load, of several parts that end in any order and thread."""

    def __init__(self, size: int, parts: int) -> None:
        self.good = [False] * size
        self._parts = parts
        self._lock = threading.Lock()
        self.then: Any = None

    def ended(self, positions: Sequence[int], restoring: Future[Any] | None) -> None:
        if restoring is not None and not restoring.exception():
            misses: Sequence[MissReason | None] = restoring.result().misses
            for position, miss in zip(positions, misses, strict=True):
                self.good[position] = miss is None
        with self._lock:
            self._parts -= 1
            last = not self._parts
        if last:
            self.then()


def _plain(value: Any) -> Any:
    """Something that a namespace and a key can be made of."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)


# ---- the adapter


def _adapter() -> type:
    """The class that LMCache constructs, made when its module is there."""
    base = compat.require(
        ENGINE,
        PACKAGE,
        TESTED,
        "lmcache.v1.distributed.l2_adapters.base",
        ["L2AdapterInterface"],
    )
    internal = compat.require(
        ENGINE, PACKAGE, TESTED, "lmcache.v1.distributed.internal_api", ["L2StoreResult"]
    )
    native = compat.require(
        ENGINE, PACKAGE, TESTED, "lmcache.lmcache_native", ["Bitmap", "Bitmap.set"]
    )

    class PrefixdL2Adapter(base.L2AdapterInterface):  # type: ignore[misc, name-defined]
        """`{"address": ..., "tier": "ram" | "shm" | "disk", "deadline_ms": ..., "fields": {...}}`;
        `fields` are more that keys are told apart by, such as the version of a chunk's layout."""

        def __init__(self, config: dict[str, Any], l1_memory_desc: object = None) -> None:
            super().__init__()
            del l1_memory_desc
            client = Client(
                config.get("address"),
                name="lmcache",
                deadline_ms=int(config.get("deadline_ms", 5_000)),
                max_pending_saves=int(config.get("max_pending_saves", 1_024)),
            )
            self._keys = Keys(dict(config.get("fields", {})))
            self._core = L2Core(client, Tier[str(config.get("tier", "ram")).upper()])

        def get_store_event_fd(self) -> int:
            return self._core.store_event.fd

        def get_lookup_and_lock_event_fd(self) -> int:
            return self._core.lookup_event.fd

        def get_load_event_fd(self) -> int:
            return self._core.load_event.fd

        def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
            return self._core.store(self._keys.of(keys), [each.byte_array for each in objects])

        def pop_completed_store_tasks(self) -> dict[int, Any]:
            return {
                number: internal.L2StoreResult(moved_bytes >= 0, max(0, moved_bytes))
                for number, moved_bytes in self._core.stored().items()
            }

        def submit_lookup_and_lock_task(
            self, keys: Sequence[Any], group_layout_descs: object = None
        ) -> int:
            del group_layout_descs
            return self._core.look_up(self._keys.of(keys))

        def query_lookup_and_lock_result(self, task_id: int) -> Any:
            return _bitmap(self._core.found(task_id))

        def submit_unlock(self, keys: Sequence[Any]) -> None:
            self._core.unlock(self._keys.of(keys))

        def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
            return self._core.load(self._keys.of(keys), [each.byte_array for each in objects])

        def query_load_result(self, task_id: int) -> Any:
            return _bitmap(self._core.loaded(task_id))

        def delete(self, keys: Sequence[Any]) -> None:
            self._core.delete(self._keys.of(keys))

        def close(self) -> None:
            self._core.close()

    def _bitmap(good: list[bool] | None) -> Any:
        if good is None:
            return None
        made = native.Bitmap(len(good))
        for position, each in enumerate(good):
            if each:
                made.set(position)
        return made

    compat.check_abstract(ENGINE, PACKAGE, TESTED, PrefixdL2Adapter)
    return PrefixdL2Adapter


def __getattr__(name: str) -> Any:
    if name != "PrefixdL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["PrefixdL2Adapter"] = _adapter()
    return made
