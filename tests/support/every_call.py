"""Every call of the public API, on entries of a disk that hangs, and how each of them ends.

A call is a function of a client (`Client` or `AsyncClient`) and a `Scene`. Its result is a value, a
future, or an awaitable. The tables name all methods; a test compares them with the classes, so that
a new method can't be forgotten.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from typing import Any, Final, NamedTuple

from prefixd.client import (
    AsyncClient,
    ClaimMode,
    Client,
    Hit,
    Reservation,
    ReserveItem,
    SaveItem,
    StateIdentity,
    Tier,
)
from prefixd.proto.keys import Key, Namespace
from tests.support.daemon import eventually, tcp_address
from tests.support.hanging_device import HangingDevice, hanging_device
from tests.support.outside import DaemonProcess, daemon_process
from tests.support.running import payload

NAMESPACE: Final = Namespace(b"f" * 32, "q4_0", b"c" * 32)
TOKENS: Final = list(range(64))
TERMS: Final[dict[str, Any]] = {"tier": Tier.DISK}


@dataclass
class Scene:
    """What a call finds: entries on a disk, and what the client took of them before."""

    #: Entries of `payload_bytes` on the disk.
    keys: list[Key]
    payload_bytes: int
    #: Keys that were never saved.
    others: list[Key]
    #: A claim on the first of `keys`.
    hit: Any = None
    #: A reservation for the first of `others`, on the disk.
    reservation: Any = None
    #: Every buffer that a call was given.
    buffers: list[bytearray] = field(default_factory=list)

    def buffer(self) -> bytearray:
        self.buffers.append(bytearray(self.payload_bytes))
        return self.buffers[-1]

    @property
    def payload(self) -> bytes:
        return bytes(self.payload_bytes)

    @property
    def reserved(self) -> list[ReserveItem]:
        return [ReserveItem(self.others[0], self.payload_bytes)]


Call = Callable[[Any, Scene], Any]

#: By name: a method of a client, with arguments for which it needs the disk, where it can.
CALLS: Final[dict[str, Call]] = {
    "announce": lambda c, _: c.announce(StateIdentity("engine 1", (), "it is a test")),
    "cancel": lambda c, s: c.cancel([s.reservation]),
    "chain": lambda c, _: c.chain(NAMESPACE, TOKENS, 16),
    "claim": lambda c, s: c.claim(s.keys, mode=ClaimMode.RUN),
    "claim_async": lambda c, s: c.claim_async(s.keys),
    "close": lambda c, _: c.close(),
    "delete": lambda c, s: c.delete(s.keys[-1:]),
    "exists": lambda c, s: c.exists(s.keys + s.others),
    "exists_one": lambda c, s: c.exists_one(s.keys[0]),
    "flush": lambda c, _: c.flush(),
    "leading_run": lambda c, s: c.leading_run(s.keys),
    "longest_prefix": lambda c, _: c.longest_prefix(NAMESPACE, TOKENS),
    "longest_run": lambda c, s: c.longest_run(s.keys),
    "probe": lambda c, s: c.probe(s.keys),
    "release_many": lambda c, s: c.release_many([s.hit]),
    "reserve": lambda c, s: c.reserve([ReserveItem(s.others[2], s.payload_bytes)], **TERMS),
    "restore_keys": lambda c, s: c.restore_keys(s.keys[:2], [s.buffer(), s.buffer()]),
    "resume": lambda c, s: c.resume(s.keys[0], TOKENS, namespace=NAMESPACE),
    "save": lambda c, s: c.save(s.others[3], s.payload, **TERMS),
    "save_async": lambda c, s: c.save_async(s.others[4], s.payload, **TERMS),
    "save_made_async": lambda c, s: c.save_made_async(
        [s.others[5]],
        lambda: [[SaveItem(s.others[5], s.payload)]],
        payload_bytes=s.payload_bytes,
        **TERMS,
    ),
    "save_many": lambda c, s: c.save_many([SaveItem(s.others[6], s.payload)], **TERMS),
    "save_many_async": lambda c, s: c.save_many_async([SaveItem(s.others[7], s.payload)], **TERMS),
    "touch": lambda c, s: c.touch(s.keys),
    "wait_connected": lambda c, _: c.wait_connected(),
    "would_drop": lambda c, s: c.would_drop(s.payload_bytes),
    "write": lambda c, s: c.write([(s.reservation, s.payload)]),
}
#: Methods of `Client` and `Hit` that asyncio does not need: those of other names are coroutines.
SYNCHRONOUS: Final = {"claim_async", "restore_async"}
#: By name: a method of a hit.
HIT_CALLS: Final[dict[str, Call]] = {
    "layer": lambda _, s: s.hit.layer(0, 0),
    "prefault": lambda _, s: s.hit.prefault(),
    "read": lambda _, s: s.hit.read(0),
    "release": lambda _, s: s.hit.release(),
    "release_some": lambda _, s: s.hit.release_some([0]),
    "restore_async": lambda _, s: s.hit.restore_async([s.buffer()]),
    "restore_into": lambda _, s: s.hit.restore_into([s.buffer()]),
    "token_ids": lambda _, s: s.hit.token_ids(0),
    "views": lambda _, s: s.hit.views(0),
}
#: By name: a method of a reservation.
RESERVATION_CALLS: Final[dict[str, Call]] = {
    "cancel": lambda _, s: s.reservation.cancel(),
    "write": lambda _, s: s.reservation.write(s.payload),
}


#: By the name of its class.
TABLES: Final = {"Client": CALLS, "Hit": HIT_CALLS, "Reservation": RESERVATION_CALLS}


# ---- a daemon whose disk can hang

ENTRIES: Final = 4
PAYLOAD_BYTES: Final = 2**20
#: A call that takes longer beyond its deadline has not ended.
PATIENCE_S: Final = 30.0
#: Between two looks at the event loop.
PAUSE_S: Final = 0.001
WITHIN: Final[dict[str, Any]] = {"deadline_ms": round(PATIENCE_S * 1e3)}


class Ended(NamedTuple):
    """How a call ended."""

    name: str
    #: None: it has not ended in `PATIENCE_S`.
    took_s: float | None
    #: For how long the event loop stood still meanwhile. 0 without one.
    still_s: float
    #: What it returned, or raised.
    what: str


class OnHangingDisk:
    """A daemon with entries on a disk that can hang, which it does not notice by itself."""

    def __init__(self, daemon: DaemonProcess, device: HangingDevice) -> None:
        self.daemon = daemon
        self.device = device
        self._arena = device.from_outside / "disk" / "arena"
        self._numbers = count()

    def new_keys(self, many: int) -> list[Key]:
        return [Key(sha256(b"%d" % next(self._numbers)).digest()) for _ in range(many)]

    def entries(self, client: Client, many: int) -> list[Key]:
        """Save new entries."""
        keys = self.new_keys(many)
        for each in keys:
            terms = {"tier": Tier.DISK, "layer_count": 4, **WITHIN}
            outcome = client.save(each, payload(1, PAYLOAD_BYTES), **terms)
            assert outcome.ok, outcome
        return keys

    def forget_pages(self) -> None:
        """Let the page cache hold nothing of the arena."""
        fd = os.open(self._arena, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    @contextmanager
    def client(self, deadline_ms: int, *, local: bool) -> Iterator[Client]:
        address = self.daemon.address if local else tcp_address(self.daemon)
        limits = {"deadline_ms": deadline_ms, "save_timeout_ms": deadline_ms}
        with Client(address, local=local, **limits) as client:
            client.wait_connected(**WITHIN)
            yield client

    def ends(self, deadline_ms: int, *, local: bool, asynchronous: bool) -> Iterator[Ended]:
        """Make every call while the disk hangs."""
        for kind, table in TABLES.items():
            for name, call in table.items():
                if not (asynchronous and name in SYNCHRONOUS):
                    named = f"{kind}.{name}"
                    yield self._end(
                        named, call, deadline_ms, local=local, asynchronous=asynchronous
                    )

    def _end(
        self, name: str, call: Call, deadline_ms: int, *, local: bool, asynchronous: bool
    ) -> Ended:
        with self.client(deadline_ms, local=local) as client:
            keys = self.entries(client, ENTRIES)
            scene = Scene(keys, PAYLOAD_BYTES, self.new_keys(10))
            try:
                if asynchronous:
                    return asyncio.run(self._awaited(name, call, client, scene))
                return self._returned(name, call, client, scene)
            finally:
                self.device.answer()

    def _hang(self) -> None:
        self.forget_pages()
        self.device.hang()

    def _returned(self, name: str, call: Call, client: Client, scene: Scene) -> Ended:
        scene.hit = client.claim(scene.keys[:1], **WITHIN)
        assert len(scene.hit) == 1, scene.hit.miss
        (scene.reservation,) = client.reserve(scene.reserved, tier=Tier.DISK, **WITHIN)
        self._hang()
        result: Future[tuple[float, str]] = Future()

        def make() -> None:
            begun_s = time.perf_counter()
            try:
                found = call(client, scene)
                if isinstance(found, Future):
                    found = found.result(PATIENCE_S)
                took_s, what = time.perf_counter() - begun_s, repr(found)
                if isinstance(found, Hit):
                    found.release()
                for each in found if isinstance(found, list) else ():
                    if isinstance(each, Reservation):
                        each.cancel(**WITHIN)
            except Exception as problem:
                took_s, what = time.perf_counter() - begun_s, f"raised {problem!r}"
            result.set_result((took_s, what))

        threading.Thread(target=make, daemon=True).start()
        try:
            took_s, what = result.result(PATIENCE_S)
        except TimeoutError:
            return Ended(name, None, 0.0, "it has not ended")
        scene.hit.release()
        scene.reservation.cancel(**WITHIN)
        return Ended(name, took_s, 0.0, what)

    async def _awaited(self, name: str, call: Call, client: Client, scene: Scene) -> Ended:
        still_s = 0.0

        async def beat() -> None:
            nonlocal still_s
            while True:
                at_s = time.perf_counter()
                await asyncio.sleep(PAUSE_S)
                still_s = max(still_s, time.perf_counter() - at_s - PAUSE_S)

        async with AsyncClient(client) as asynchronous:
            scene.hit = await asynchronous.claim(scene.keys[:1], **WITHIN)
            (scene.reservation,) = await asynchronous.reserve(
                scene.reserved, tier=Tier.DISK, **WITHIN
            )
            self._hang()
            beating = asyncio.create_task(beat())
            await asyncio.sleep(0)
            begun_s = time.perf_counter()
            took_s: float | None
            try:
                found = call(asynchronous, scene)
                if isinstance(found, Future):
                    found = asyncio.wrap_future(found)
                if inspect.isawaitable(found):
                    found = await asyncio.wait_for(found, PATIENCE_S)
                took_s, what = time.perf_counter() - begun_s, repr(found)
            except TimeoutError:
                took_s, what = None, "it has not ended"
            except Exception as problem:
                took_s, what = time.perf_counter() - begun_s, f"raised {problem!r}"
            beating.cancel()
        return Ended(name, took_s, still_s, what)

    def reuse(self, client: Client, keys: list[Key], random: random.Random) -> bool:
        """Restore into a buffer while the disk hangs, give that up, and use the buffer for
        something else, while the disk answers. Whether its bytes stay those."""
        buffer, later = bytearray(PAYLOAD_BYTES), random.randbytes(PAYLOAD_BYTES)
        hit = client.longest_run([random.choice(keys)], claim=random.random() < 0.5, **WITHIN)
        assert len(hit) == 1
        self._hang()
        within_ms = random.randrange(1, 20)
        if random.random() < 0.5:
            assert not hit.restore_into([buffer], deadline_ms=within_ms).run
        else:
            future = hit.restore_async([buffer], deadline_ms=round(PATIENCE_S * 1e3))
            threading.Event().wait(within_ms / 1e3)
            future.cancel()
            with suppress(CancelledError):
                future.result(PATIENCE_S)
        buffer[:] = later
        self.device.answer()
        hit.release()
        # What was asked of the disk before has come, because this comes after it. It is a miss
        # while a read is under way for so long that the disk counts as hung.
        rooms = [bytearray(PAYLOAD_BYTES) for _ in keys]
        eventually(lambda: client.restore_keys(keys, rooms, **WITHIN), PATIENCE_S)
        return buffer == later


@contextmanager
def on_hanging_disk() -> Iterator[OnHangingDisk]:
    flags = ("--disk.budget=200MiB", "--disk.hung_after=1h", "--server.tcp=127.0.0.1:0")
    with daemon_process(*flags) as daemon:
        place = daemon.directory / "mount"
        with hanging_device(place, 300 * 2**20) as device:
            daemon._command += (f"--disk.directory={place / 'disk'}",)
            daemon.run_with(device.script())
            daemon.start()
            with daemon.admin() as admin:
                eventually(lambda: admin.stats().health == "serving")
            yield OnHangingDisk(daemon, device)
