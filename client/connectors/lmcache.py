"""LMCache: an L2 adapter, for its `plugin` adapter type.

    {"type": "plugin", "module_path": "prefixd.connectors.lmcache",
     "class_name": "PrefixdL2Adapter", "adapter_params": {"tier": "shm"}}

The client's threads do all the work, and its futures signal the event descriptors that LMCache
polls. A lookup locks the entries that it finds; each stays claimed until its key was unlocked as
often as it was locked. A load of keys that were not looked up makes a claim of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from ...proto.errors import CallerError, ConfigError
from ...proto.keys import ForeignNamespace, Key
from ...proto.vocabulary import ClaimMode, MissReason, Tier
from .. import Client
from ..buffers import flat_bytes
from ..config_values import plain
from ..hits import Hit
from ..identity import Dimension, Part, StateIdentity
from ..saves import SaveItem
from .engine import Engine, attach, fingerprint_of, weights_dimension

ENGINE: Final = Engine("LMCache", "lmcache", "0.5.5 to 0.5.6")
T = TypeVar("T")

#: Most namespaces in memory. A process serves few models.
_MAX_NAMESPACES: Final = 1024
_KIND: Final = attrgetter("model_name", "cache_salt")
#: Shorter hashes of chunks are numbers of Python's `hash` (`--hash-algorithm builtin`): anybody can
#: make two prompts with the same one.
_LEAST_HASH_BYTES: Final = 16

logger = logging.getLogger("prefixd.connectors")


def identity_of(config: Mapping[str, Any]) -> StateIdentity:
    """Everything that the bytes of a chunk depend on, beside its key in LMCache.

    LMCache tells its adapters the name of a model, and nothing of its weights. So the option
    `fingerprint` has to name them, and what else the engine behind LMCache does not tell it
    (revision, quantisation, overrides); without it nothing is shared beyond this process. `fields`
    distinguish keys further, for example by the version of a chunk's layout. Raises ConfigError.
    """
    fields = config.get("fields") or {}
    if not isinstance(fields, Mapping):
        raise ConfigError(f"prefixd's options for lmcache: fields is a dictionary, not {fields!r}")
    return StateIdentity(
        f"lmcache {ENGINE.version}",
        (
            weights_dimension(fingerprint_of("lmcache", config)),
            Dimension("fields", plain(fields), "the option fields", Part.CONTEXT),
            Dimension(
                "model, cache_salt, rank, group, tokens", None, "LMCache's keys", Part.BLOCKS
            ),
        ),
    )


class Keys:
    """Makes prefixd's keys from LMCache's: of rank, group and hash, in a namespace of model and
    salt. Hashes of less than 128 bits name nothing beyond this process."""

    def __init__(self, fields: dict[str, Any]) -> None:
        """`fields`: further fields of the namespace, the same for all keys of this process."""
        self._fields = fields
        self._namespaces: dict[tuple[str, str], ForeignNamespace] = {}
        self._process = b""

    def of(self, objects: Sequence[Any]) -> list[Key]:
        kinds = list(map(_KIND, objects))
        hashes = [b"%d/%d/%b" % (o.kv_rank, o.object_group_id, o.chunk_hash) for o in objects]
        if any(len(each.chunk_hash) < _LEAST_HASH_BYTES for each in objects):
            hashes = self._of_this_process(hashes)
        if len(set(kinds)) == 1:
            # The case of nearly every call.
            return self._namespace(*kinds[0]).keys(hashes)
        return [self._namespace(*kind).key(each) for kind, each in zip(kinds, hashes, strict=True)]

    def _of_this_process(self, hashes: list[bytes]) -> list[bytes]:
        if not self._process:
            self._process = secrets.token_bytes(_LEAST_HASH_BYTES)
            logger.warning(
                "nothing is shared beyond this process: LMCache's hashes of chunks have 64 bits; "
                "start it with --hash-algorithm blake3"
            )
        return [self._process + each for each in hashes]

    def _namespace(self, model: str, salt: str) -> ForeignNamespace:
        found = self._namespaces.get((model, salt))
        if found is None:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            found = ForeignNamespace("lmcache", {**self._fields, "model": model, "salt": salt})
            self._namespaces[model, salt] = found
        return found


class Lock:
    """The keys that one lookup locked."""

    def __init__(self, keys: Sequence[Key]) -> None:
        #: How often each key still has to be unlocked.
        self.open = dict.fromkeys(keys, 1)
        if len(self.open) < len(keys):
            self.open = dict(Counter(keys))
        #: The claim that holds the keys, None until it is made, and the place of each key in it.
        self.hit: Hit | None = None
        self.places: dict[Key, int] = {}


class Locks:
    """Which lookups hold which keys. Thread-safe.

    A hit is released when none of its keys is locked any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Key, Lock] = {}
        #: The later locks of keys that are locked more than once.
        self._more: dict[Key, deque[Lock]] = {}
        self._closed = False

    def add(self, keys: Sequence[Key]) -> Lock:
        """Lock these keys; their claim may come later."""
        lock = Lock(keys)
        with self._lock:
            if len(lock.open) == len(keys) and self._held.keys().isdisjoint(lock.open):
                self._held.update(dict.fromkeys(keys, lock))
                return lock
            for key in keys:
                if key in self._held:
                    self._more.setdefault(key, deque()).append(lock)
                else:
                    self._held[key] = lock
        return lock

    def landed(self, lock: Lock, hit: Hit) -> bool:
        """Attach the claim. False: it is not needed any more."""
        with self._lock:
            if self._closed or not lock.open:
                return False
            lock.hit, lock.places = hit, {key: place for place, key in enumerate(hit.keys)}
            return True

    def holding(self, key: Key) -> tuple[Hit, int] | None:
        """A hit that holds the key, and the place of the key in it."""
        with self._lock:
            for lock in (self._held.get(key), *self._more.get(key, ())):
                if lock is not None and lock.hit is not None and key in lock.places:
                    return lock.hit, lock.places[key]
            return None

    def drop(self, keys: Iterable[Key]) -> list[Hit]:
        """Unlock each key once. Returns the hits that have no locked key left."""
        done: list[Hit] = []
        with self._lock:
            for key in keys:
                lock = self._held.pop(key, None)
                if lock is None:
                    continue
                if more := self._more.get(key):
                    self._held[key] = more.popleft()
                    if not more:
                        del self._more[key]
                lock.open[key] -= 1
                if not lock.open[key]:
                    del lock.open[key]
                if not lock.open and lock.hit is not None:
                    done.append(lock.hit)
        return done

    def close(self) -> list[Hit]:
        """Returns every hit that is held. Later claims are refused."""
        with self._lock:
            self._closed = True
            locks = {id(lock): lock for lock in chain(self._held.values(), *self._more.values())}
            self._held.clear()
            self._more.clear()
            return [lock.hit for lock in locks.values() if lock.hit is not None]


class Event:
    """A descriptor that becomes readable when a task has ended. Thread-safe."""

    def __init__(self) -> None:
        self.fd: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        # After `close` the number of the descriptor may belong to another file.
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


class L2Core:
    """The adapter's work, on keys and buffers. Every method returns at once. Thread-safe."""

    def __init__(self, client: Client, tier: Tier, chunk_tokens: int = 0) -> None:
        """`chunk_tokens`: what a key stands for; 0: not known. Takes over the client."""
        self._chunk_tokens = chunk_tokens
        self._client = client
        self._tier = tier
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._stored: dict[int, int] = {}
        self._found: dict[int, list[bool]] = {}
        self._loaded: dict[int, list[bool]] = {}
        self._locks = Locks()
        self.store_event: Final = Event()
        self.lookup_event: Final = Event()
        self.load_event: Final = Event()

    # ---- stores

    def store(self, keys: Sequence[Key], payloads: Sequence[Any]) -> int:
        number = next(self._numbers)
        try:
            tokens = self._chunk_tokens or None
            items = [SaveItem(key, data, tokens) for key, data in zip(keys, payloads, strict=True)]
            size_bytes = sum(len(flat_bytes(data)) for data in payloads)
            saving = self._client.save_many_async(items, tier=self._tier)
        except CallerError:
            # Unsuitable payloads, or a closed client. The task ends, as every task has to.
            self._end(self._stored, number, -1, self.store_event)
            return number
        saving.add_done_callback(lambda done: self._store_ended(number, size_bytes, done))
        return number

    def _store_ended(self, number: int, size_bytes: int, saving: Future[Any]) -> None:
        ok = not saving.exception() and all(each.ok for each in saving.result())
        self._end(self._stored, number, size_bytes if ok else -1, self.store_event)

    def stored(self) -> dict[int, int]:
        """The tasks that ended since the last call: their bytes, -1 if anything was not saved."""
        with self._lock:
            done = dict(self._stored)
            self._stored.clear()
            return done

    # ---- lookups

    def look_up(self, keys: Sequence[Key]) -> int:
        """Look keys up and lock those that are there.

        On the daemon's host the shared index answers at once, and the claim follows. An entry that
        is evicted in between is a miss when it is loaded.
        """
        number = next(self._numbers)
        lock: Lock | None = None
        tokens = len(keys) * self._chunk_tokens
        try:
            if self._client.in_place:
                found = self._client.exists(keys, in_place_only=True, prompt_tokens=tokens)
                locked = [key for key, there in zip(keys, found, strict=True) if there]
                lock = self._locks.add(locked)
                self._end(self._found, number, found, self.lookup_event)
            claiming = self._client.claim_async(keys, prompt_tokens=tokens, counted=lock is None)
        except CallerError:  # a closed client
            if lock is None:
                self._end(self._found, number, [False] * len(keys), self.lookup_event)
            return number
        claiming.add_done_callback(lambda done: self._claimed(number, keys, lock, done))
        return number

    def _claimed(
        self, number: int, keys: Sequence[Key], lock: Lock | None, claiming: Future[Hit]
    ) -> None:
        """`lock`: of the keys that LMCache was told already; None: it was told nothing yet."""
        hit = None if claiming.exception() else claiming.result()
        if lock is not None:
            if hit and self._locks.landed(lock, hit):
                with suppress(CallerError):  # it was unlocked, and so released, meanwhile
                    hit.prefault()
            elif hit:
                hit.release()
            return
        found = [False] * len(keys)
        if hit and self._locks.landed(self._locks.add(hit.keys), hit):
            for position in hit.positions:
                found[position] = True
        elif hit:
            hit.release()
        elif hit is not None and hit.miss is MissReason.REFUSED:
            # More than one session may pin. They are loaded without a lock, as far as they stay.
            with suppress(CallerError):
                found = self._client.exists(keys, counted=False)
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
        """Load the entries that are there, locked or not."""
        number = next(self._numbers)
        held: dict[int, _Held] = {}
        rest: list[int] = []
        for position, key in enumerate(keys):
            found = self._locks.holding(key)
            if found is None:
                rest.append(position)
                continue
            hit, place = found
            part = held.setdefault(id(hit), _Held(hit, [], []))
            part.positions.append(position)
            part.places.append(place)
        loading = _Loading(
            len(keys),
            len(held) + bool(rest),
            lambda good: self._end(self._loaded, number, good, self.load_event),
        )
        for part in held.values():
            try:
                restoring = part.hit.restore_async(
                    [buffers[each] for each in part.positions], indices=part.places
                )
            except CallerError:  # a closed client
                loading.ended(part.positions, None)
                continue
            restoring.add_done_callback(partial(loading.ended, part.positions))
        if rest:
            try:
                some = [keys[position] for position in rest]
                claiming = self._client.claim_async(some, counted=False)
            except CallerError:  # a closed client
                loading.ended(rest, None)
                return number
            claiming.add_done_callback(
                lambda done: self._load_unlocked(loading, keys, rest, buffers, done)
            )
        elif not held:
            loading.then(loading.good)
        return number

    def _load_unlocked(
        self,
        loading: _Loading,
        keys: Sequence[Key],
        rest: list[int],
        buffers: Sequence[Any],
        claiming: Future[Hit],
    ) -> None:
        """Runs in a thread of the client."""
        with suppress(Exception), claiming.result() as hit:
            if not hit and hit.miss is MissReason.REFUSED:
                # More than one session may pin: restore what is there without a claim.
                some, into = [keys[each] for each in rest], [buffers[each] for each in rest]
                result = self._client.restore_keys(some, into, mode=ClaimMode.ANY, counted=False)
                positions = rest
            else:
                positions = [rest[each] for each in hit.positions]
                result = hit.restore_into([buffers[each] for each in positions])
            for position, good in zip(positions, result.restored, strict=True):
                loading.good[position] = good
        loading.ended([], None)

    def loaded(self, number: int) -> list[bool] | None:
        with self._lock:
            return self._loaded.pop(number, None)

    # ---- the rest

    def delete(self, keys: Sequence[Key]) -> None:
        self._client.delete(keys)

    def close(self) -> None:
        """Waits for tasks in progress, within the client's deadline."""
        hits = self._locks.close()
        if hits:
            self._client.release_many(hits)
        self._client.close()
        for event in (self.store_event, self.lookup_event, self.load_event):
            event.close()

    def _end(self, results: dict[int, T], number: int, result: T, event: Event) -> None:
        with self._lock:
            results[number] = result
        event.ring()


class _Held(NamedTuple):
    """The keys of a load that one hit holds: positions in the load, and places in the hit."""

    hit: Hit
    positions: list[int]
    places: list[int]


class _Loading:
    """One load. Its parts end in any order, in any thread."""

    def __init__(self, size: int, parts: int, then: Callable[[list[bool]], None]) -> None:
        self.good = [False] * size
        self.then: Final = then
        self._parts = parts
        self._lock = threading.Lock()

    def ended(self, positions: Sequence[int], restoring: Future[Any] | None) -> None:
        if restoring is not None and not restoring.exception():
            misses: Sequence[MissReason | None] = restoring.result().misses
            for position, miss in zip(positions, misses, strict=True):
                self.good[position] = miss is None
        with self._lock:
            self._parts -= 1
            last = not self._parts
        if last:
            self.then(self.good)


# ---- the adapter


def _adapter() -> type:
    """Make the class that LMCache constructs. Raises UnsupportedEngine."""
    base = ENGINE.require("lmcache.v1.distributed.l2_adapters.base", ["L2AdapterInterface"])
    internal = ENGINE.require("lmcache.v1.distributed.internal_api", ["L2StoreResult"])
    native = ENGINE.require("lmcache.lmcache_native", ["Bitmap", "Bitmap.set"])

    class PrefixdL2Adapter(base.L2AdapterInterface):  # type: ignore[misc, name-defined]
        """`{"address": ..., "tier": "ram" | "shm" | "disk", "deadline_ms": ..., "fingerprint": ...,
        "fields": {...}, "chunk_tokens": ...}`; see `identity_of`. `chunk_tokens` is LMCache's
        chunk size, which it does not tell: without it, hits and misses are not counted in tokens.
        """

        def __init__(self, config: dict[str, Any], l1_memory_desc: object = None) -> None:
            super().__init__()
            del l1_memory_desc
            identity = identity_of(config)
            self._keys = Keys({"identity": identity.digest})
            chunk_tokens = config.get("chunk_tokens", 0)
            if type(chunk_tokens) is not int or chunk_tokens < 0:
                raise ConfigError(f"chunk_tokens is a whole number, not {chunk_tokens!r}")
            client, tier = attach("lmcache", config, ["fields", "chunk_tokens"])
            client.announce(identity)
            self._core = L2Core(client, tier, chunk_tokens)

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
        run = good.index(False) if False in good else len(good)
        made = native.Bitmap(len(good), run)
        for position in range(run + 1, len(good)):
            if good[position]:
                made.set(position)
        return made

    ENGINE.check_interface(PrefixdL2Adapter)
    return PrefixdL2Adapter


def __getattr__(name: str) -> Any:
    if name != "PrefixdL2Adapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["PrefixdL2Adapter"] = _adapter()
    return made
