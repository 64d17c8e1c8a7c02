"""An inference worker that stops at critical moments, run as a process by `tests.hostile`.

It reads two entries in place, and stops at the moment that a command on stdin names. It reports
each restore or view on stdout as a JSON object: `restored` and `right` of each entry, or `right` of
the view as a whole, and `held`, the result of the release.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import pytest

from prefixd.client import Client, Hit, Key
from prefixd.client.local import arenas
from tests.support.entries import key_of, payload_of
from tests.support.moments import MOMENTS, disrupt

NAMES = ("one", "two")


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def stop() -> None:
    """Stop this process until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil() -> None:
    """Hold the GIL in C code until there is a line on stdin: no other thread of this process runs
    meanwhile, and no heartbeat is sent."""
    report(waiting=True)
    byte = ctypes.create_string_buffer(1)
    while ctypes.PyDLL(None).read(0, byte, 1) == 1 and byte.raw != b"\n":
        pass


def restore(client: Client, keys: list[Key], moment: str, *, claimed: bool) -> None:
    """Restore both entries, and stop at this moment of it."""
    hit = found(client, keys, claimed=claimed)
    buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
    with pytest.MonkeyPatch.context() as patch:
        disrupt(patch, moment, stop)
        result = hit.restore_into(buffers)
    right = [
        buffer == payload_of(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)
    ]
    report(restored=result.restored, right=right, held=hit.release())


def view(client: Client, keys: list[Key], how: str) -> None:
    """Hold views of both entries while a signal or the process's own C code stops it."""
    hit = found(client, keys, claimed=True)
    while (views := hit.buffers) is None:  # with such short heartbeats the claim may be lost
        hit.release()
        hit = found(client, keys, claimed=True)
    expected = b"".join(payload_of(entry.key, entry.payload_bytes) for entry in hit.entries)
    assert b"".join(views) == expected
    if how == "stopped":
        stop()
    else:
        hold_the_gil()
    right = b"".join(views) == expected
    report(held=hit.release(), right=right)


def found(client: Client, keys: list[Key], *, claimed: bool) -> Hit:
    """A hit on both entries. Retries, because the last stop may have ended the session."""
    while True:
        assert client.wait_connected(deadline_ms=60_000)
        hit = client.longest_run(keys, claim=claimed)
        if len(hit) == len(keys) and "index" not in client._transport.refused():
            return hit


def main() -> None:
    """Arguments: the address, and how the client verifies. Each line on stdin is a command: `view
    HOW`, or `claimed` or `looked` with the number of a moment."""
    address, verify = sys.argv[1:]
    arenas._PIECE_BYTES = 2**18  # type: ignore[misc]  # a payload is read in two pieces
    keys = [key_of(name) for name in NAMES]
    with Client(address, verify=verify) as client:  # type: ignore[arg-type]  # checked there
        while line := os.read(0, 100).decode().split():
            match line:
                case ["view", how]:
                    view(client, keys, how)
                case [kind, number]:
                    restore(client, keys, MOMENTS[int(number)], claimed=kind == "claimed")


if __name__ == "__main__":
    main()
