"""Processes with a client that are killed while they hold everything that a client can hold."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Final

from tests.support.warm import WARM

#: Saves, claims and views entries, keeps others reserved, saves for ever, and is killed then. Every
#: second one is remote: its calls and payloads travel over gRPC.
_HOLDER: Final = """
import os, sys
from prefixd.client import Client, ReserveItem, SaveItem, SaveReason, Tier
address, local = sys.argv[1], sys.argv[2] == "local"
client = Client(address, name="killed", local=local, deadline_ms=20_000)
client.wait_connected()
keys = [os.urandom(32) for _ in range(8)]
items = [SaveItem(key, bytes(50_000), 512) for key in keys]
client.save_many(items, tier=Tier.SHM, reason=SaveReason.EVICT)
hit = client.claim(keys)
views = [hit.views(index) for index in range(len(hit))] if local else []
reserve = [ReserveItem(os.urandom(32), 20_000, 512) for _ in range(4)]
held = client.reserve(reserve, tier=Tier.DISK, reason=SaveReason.COLD)
print("holding", flush=True)
while True:
    item = SaveItem(os.urandom(32), bytes(1_000_000), 512)
    client.save_many([item], tier=Tier.RAM, reason=SaveReason.EVICT)
"""


class Killed(threading.Thread):
    """Kills one process after another, one every `every_s`, until it is stopped. None: none."""

    def __init__(self, address: str, every_s: float | None) -> None:
        super().__init__(name="killed", daemon=True)
        self.count = 0
        self._address = address
        self._every_s = every_s
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        if self._every_s is None:
            return
        due_s = time.monotonic()
        while not self._stopping.wait(max(0.0, due_s - time.monotonic())):
            due_s += self._every_s
            self._kill_one("local" if self.count % 2 else "remote")
            self.count += 1

    def _kill_one(self, how: str) -> None:
        command = [*WARM, "-c", _HOLDER, self._address, how]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "holding\n"
            finally:
                process.kill()
