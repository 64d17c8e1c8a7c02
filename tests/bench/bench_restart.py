"""A restart with many entries on disk: when it listens, when everything is served, what it takes.

    python tests/bench/bench_restart.py --entries 1000000

Makes a disk tier with so many records (of payloads that nobody reads), starts a daemon on it, and
claims an entry of the RAM tier all the time meanwhile. Prints one JSON object. Peak memory is the
daemon's own (VmHWM) above that of one without entries, per entry.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from pathlib import Path

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.proto.entry import EntryRecord
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.tiers.disk import DiskStore

SLAB_BYTES = 4096
_AT_ONCE = 10_000


def fill(directory: Path, entries: int) -> int:
    """Records as a daemon leaves them. Returns the tier's budget."""
    budget_bytes = entries * SLAB_BYTES + DiskStore.record_bytes(entries) + 64 * 2**20
    store = DiskStore(directory, budget_bytes, SLAB_BYTES, sync=False)
    for _ in store.recover():
        pass
    for _ in store.secure_segments():
        pass
    store.set_incarnation(bytes(16))
    for first in range(0, entries, _AT_ONCE):
        store._records.put([_record(n) for n in range(first, min(entries, first + _AT_ONCE))])
    store.close()
    return budget_bytes


def _record(number: int) -> EntryRecord:
    return EntryRecord(
        key=Key(hashlib.sha256(b"%d" % number).digest()),
        tier=Tier.DISK,
        reason=SaveReason.COLD,
        generation=1_000 + number,
        created_ns=1_000 + number,
        payload_bytes=4_000,
        token_count=512,
        layer_count=0,
        token_ids_bytes=0,
        location=((number + 1) * SLAB_BYTES, SLAB_BYTES),
        payload_crc32c=number,
    )


def memory_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def restart(entries: int) -> dict[str, object]:
    """One restart with so many entries."""
    with temporary_directories("restart") as (directory, shm_directory):
        budget_bytes = fill(directory / "disk", entries)
        flags = [
            "--ram.budget=64MiB",
            "--shm.budget=0",
            f"--disk.budget={budget_bytes}",
            f"--disk.slab={SLAB_BYTES}",
            "--disk.max_entries=0",
        ]
        daemon = PrivateDaemon(directory, shm_directory, flags)
        begun_s = time.monotonic()
        # It waits until everything is served; what others see until then is seen beside it.
        starting = threading.Thread(target=daemon.start)
        starting.start()
        try:
            pauses_s: list[float] = []
            with daemon.admin() as admin, Client(daemon.address) as client:
                while not client.wait_connected(deadline_ms=20):
                    pass
                listened_s = time.monotonic() - begun_s
                key = Key(bytes(32))
                client.save(key, b"bytes", tier=Tier.RAM)
                while not _served(admin.stats(), entries):
                    for _ in range(100):
                        asked_s = time.monotonic()
                        client.claim([key]).release()
                        pauses_s.append(time.monotonic() - asked_s)
                served_s = time.monotonic() - begun_s
            pauses_s.sort()
            starting.join()
            return {
                "entries": entries,
                "listens_s": round(listened_s, 2),
                "served_s": round(served_s, 2),
                "claim_p50_ms": round(1e3 * pauses_s[len(pauses_s) // 2], 2) if pauses_s else None,
                "claim_longest_ms": round(1e3 * pauses_s[-1], 1) if pauses_s else None,
                "peak_bytes": memory_bytes(daemon.pid, "VmHWM"),
                "memory_bytes": memory_bytes(daemon.pid, "VmRSS"),
            }
        finally:
            starting.join()
            daemon.stop()


def _served(stats: object, entries: int) -> bool:
    (disk,) = [tier for tier in stats.tiers if tier.tier == Tier.DISK]  # type: ignore[attr-defined]
    if disk.state == "serving" and disk.entries != entries:
        raise PrefixdError(f"{disk.entries} of {entries} entries came back")
    return bool(disk.state == "serving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    entries = parser.parse_args().entries
    none, many = restart(0), restart(entries)
    of_each = {
        name: round((many[name] - none[name]) / entries)  # type: ignore[operator]
        for name in ("peak_bytes", "memory_bytes")
    }
    print(json.dumps({"without": none, "with": many, "of_each_entry": of_each}, indent=2))


if __name__ == "__main__":
    main()
