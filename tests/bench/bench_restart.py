"""Measures a restart with many entries on disk: times until it listens and serves, and memory.

    python tests/bench/bench_restart.py --entries 1000000     # two minutes, 6 GiB of disk

Creates a disk tier with many records (their payloads are never read), starts a daemon on it, and
continuously claims an entry of the RAM tier meanwhile. Prints one JSON object. Times are from the
start of the process; `listens_s` is when its socket accepts a connection. Peak memory per entry is
the daemon's own (VmHWM) minus that of a daemon without entries; `table_peak_bytes` is that of the
process with the table of records.

On a busy machine, look at `cpu_s`, the CPU time of the daemon and that process (including the
claims, about half a millisecond each), and compare `machine_late_ms` with the longest claim.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.ctl.private import PrivateDaemon, temporary_directories
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content, EntryRecord
from prefixd.proto.errors import PrefixdError
from prefixd.proto.keys import Key
from prefixd.tiers.arena_stores import DiskStore

SLAB_BYTES = 4096
_AT_ONCE = 10_000
_CLAIMS_A_LOOK = 100
#: The longest that a start may take on a busy machine.
_PATIENCE_S = 600.0


def fill(directory: Path, entries: int) -> int:
    """Write records as a daemon would. Returns the tier's budget."""
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
        content=Content(4_000, 512),
        location=((number + 1) * SLAB_BYTES, SLAB_BYTES),
        payload_crc32c=number,
    )


def memory_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_of(pid: int) -> int | None:
    """The child process with the table, if there is one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            return int(child)
    return None


@contextmanager
def lateness() -> Iterator[Callable[[], float]]:
    """The longest delay, in seconds, with which the machine wakes an idle process. No daemon can be
    faster."""
    code = (
        "import sys, threading, time\n"
        "ended = threading.Event()\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()\n"
        "late = 0.0\n"
        "while not ended.is_set():\n"
        "    due = time.monotonic() + 0.001\n"
        "    time.sleep(0.001)\n"
        "    late = max(late, time.monotonic() - due)\n"
        "print(late)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        found: list[float] = []

        def end() -> float:
            if not found:
                found.append(float(process.communicate()[0]))
            return found[0]

        try:
            yield end
        finally:
            end()


def wait_until_listening(address: str) -> None:
    """Connect only a socket: a client would wait before it tries again after a refusal."""
    path = address.removeprefix("unix:")
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(path)
            except OSError:
                time.sleep(0.002)
            else:
                return


def restart(entries: int) -> dict[str, object]:
    """Measure one restart with this many entries."""
    with temporary_directories("restart") as (directory, shm_directory):
        budget_bytes = fill(directory / "disk", entries)
        flags = [
            "--ram.budget=64MiB",
            "--shm.budget=0",
            f"--disk.budget={budget_bytes}",
            f"--disk.slab={SLAB_BYTES}",
            "--disk.max_entries=0",
            # Scrubbing would drop the entries, as their payloads do not match their records.
            "--server.scrub_rate=0",
        ]
        daemon = PrivateDaemon(directory, shm_directory, flags, start_within_s=_PATIENCE_S)
        begun_s = time.monotonic()
        # `start` waits until all entries are served. Meanwhile, others are measured.
        starting = threading.Thread(target=daemon.start)
        starting.start()
        try:
            wait_until_listening(daemon.address)
            listened_s = time.monotonic() - begun_s
            claims_s: list[float] = []
            with daemon.admin() as admin, Client(daemon.address) as client, lateness() as late_s:
                while not client.wait_connected(deadline_ms=1_000):
                    pass
                key = Key(bytes(32))
                client.save(key, b"bytes", tier=Tier.RAM)
                while not _served(admin.stats(), entries):
                    for _ in range(_CLAIMS_A_LOOK):
                        asked_s = time.monotonic()
                        client.claim([key]).release()
                        claims_s.append(time.monotonic() - asked_s)
                served_s = time.monotonic() - begun_s
                machine_late_s = late_s()
            claims_s.sort()
            starting.join()
            table = child_of(daemon.pid)
            return {
                "entries": entries,
                "listens_s": round(listened_s, 2),
                "served_s": round(served_s, 2),
                "claims": len(claims_s),
                "claim_p50_ms": round(1e3 * claims_s[len(claims_s) // 2], 2) if claims_s else None,
                "claim_p999_ms": round(1e3 * claims_s[-1 - len(claims_s) // 1000], 1)
                if claims_s
                else None,
                "claim_longest_ms": round(1e3 * claims_s[-1], 1) if claims_s else None,
                "machine_late_ms": round(1e3 * machine_late_s, 1),
                "cpu_s": round(cpu_s(daemon.pid), 1),
                "table_cpu_s": round(cpu_s(table), 1) if table is not None else None,
                "peak_bytes": memory_bytes(daemon.pid, "VmHWM"),
                "table_peak_bytes": memory_bytes(table, "VmHWM") if table is not None else None,
                "memory_bytes": memory_bytes(daemon.pid, "VmRSS"),
            }
        finally:
            starting.join()
            daemon.stop()


def _served(stats: object, entries: int) -> bool:
    (disk,) = [tier for tier in stats.tiers if tier.tier == Tier.DISK]  # type: ignore[attr-defined]
    if disk.state == pb.TIER_STATE_SERVING and disk.entries != entries:
        raise PrefixdError(f"{disk.entries} of {entries} entries came back")
    return bool(disk.state == pb.TIER_STATE_SERVING)


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
