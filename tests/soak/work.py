"""The clients of a soak: they do what engines do, and disconnect as dying engines do."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prefixd.client import Client, SaveReason, Tier
from prefixd.proto.endpoints import LOCAL_SUFFIX, UNIX_SCHEME
from tests.support.entries import items_of, key_of, payload_of

_ENTRIES: Final = 400
_MOST_BYTES: Final = 200_000
_DEADLINE_MS: Final = 10_000
#: Operations after which a client is closed and a new one opened.
_LIFE: Final = 300


class Worker(threading.Thread):
    """Uses one client after another until it is stopped. Passes each operation's time to `note`."""

    def __init__(
        self,
        address: str,
        seed: int,
        pause_s: float,
        note: Callable[[str, float], None],
        life_s: float | None = None,
    ) -> None:
        """`life_s`: how long each client is used. None: for some hundred operations."""
        super().__init__(name=f"soak {seed}", daemon=True)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._address = address
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._note = note
        self._life_s = life_s
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        operations = [self.save, self.restore, self.restore, self.probe, self.delete]
        until_s = time.monotonic()
        while not self._stopping.is_set():
            with Client(self._address, name=self.name, deadline_ms=_DEADLINE_MS) as client:
                client.wait_connected()
                self.counts["connected"] += 1
                until_s += self._life_s or 0.0
                for number in itertools.count():
                    if self._over(number, until_s):
                        break
                    operation = self._random.choice(operations)
                    begun_s = time.monotonic()
                    operation(client)
                    name = operation.__name__
                    self._note(name, time.monotonic() - begun_s)
                    self.counts[name] += 1
                    if self._stopping.wait(self._pause_s):
                        break
            self._send_half_a_frame()

    def _over(self, operations: int, until_s: float) -> bool:
        """Whether it is time for another client. In an even pace, whatever each one takes."""
        if self._life_s is None:
            return operations >= _LIFE
        return operations > 0 and time.monotonic() >= until_s

    def _names(self) -> list[str]:
        first = self._random.randrange(_ENTRIES)
        return [f"soak {first + number}" for number in range(self._random.choice((1, 4, 16)))]

    def _payload_bytes(self, name: str) -> int:
        return 1 + int.from_bytes(key_of(name)[:4]) % _MOST_BYTES

    def save(self, client: Client) -> None:
        tier = self._random.choice(list(Tier))
        items = [items_of([name], self._payload_bytes(name))[0] for name in self._names()]
        for outcome in client.save_many(items, tier=tier, reason=SaveReason.EVICT):
            self.counts[outcome.status.label] += 1

    def restore(self, client: Client) -> None:
        with client.claim([key_of(name) for name in self._names()]) as hit:
            buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
            result = hit.restore_into(buffers)
            for entry, buffer, good in zip(hit.entries, buffers, result.restored, strict=True):
                self.counts["restored"] += good
                if good and buffer != payload_of(entry.key, entry.payload_bytes):
                    self.wrong.append(entry.key.hex())

    def probe(self, client: Client) -> None:
        client.probe([key_of(name) for name in self._names()])

    def delete(self, client: Client) -> None:
        client.delete([key_of(name) for name in self._names()[:2]])

    def _send_half_a_frame(self) -> None:
        """Connect, send half a frame and hang up."""
        path = self._address.removeprefix(UNIX_SCHEME) + LOCAL_SUFFIX
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.connect(path)
            sock.sendall(b"\x40\0\0\0half")
        self.counts["hung up"] += 1
