"""An inference worker that is stopped where it hurts, run as a process by `tests.hostile`.

It reads two entries in place, and stops at a moment that it is told. What it says on stdout, one
JSON object for each restore or view: `restored` (or `held`, for a view) and `right`, both for each
entry, or for the view as a whole.
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


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def stop() -> None:
    """Until SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil() -> None:
    """In C code that does not give it back, until there is a line on stdin: no other thread of this
    process runs meanwhile, and no heartbeat is sent."""
    say(waiting=True)
    byte = ctypes.create_string_buffer(1)
    while ctypes.PyDLL(None).read(0, byte, 1) == 1 and byte.raw != b"\n":
        pass


def restore(client: Client, keys: list[Key], moment: str, *, claimed: bool) -> None:
    """Stopped in the middle of it."""
    hit = found(client, keys, claimed=claimed)
    buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
    with pytest.MonkeyPatch.context() as patch:
        disrupt(patch, moment, stop)
        result = hit.restore_into(buffers)
    right = [
        buffer == payload_of(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)
    ]
    say(restored=result.restored, right=right, held=hit.release())


def view(client: Client, keys: list[Key], how: str) -> None:
    """Stopped, by a signal or by its own C code, while it holds views."""
    hit = found(client, keys, claimed=True)
    views = hit.buffers
    assert views is not None
    wanted = b"".join(payload_of(entry.key, entry.payload_bytes) for entry in hit.entries)
    assert b"".join(views) == wanted
    if how == "stopped":
        stop()
    else:
        hold_the_gil()
    right = b"".join(views) == wanted
    say(held=hit.release(), right=right)


def found(client: Client, keys: list[Key], *, claimed: bool) -> Hit:
    """Both entries. The session may have ended with the last stop."""
    while True:
        assert client.wait_connected(deadline_ms=60_000)
        hit = client.longest_run(keys, claim=claimed)
        if len(hit) == len(keys) and "index" not in client._transport.refused():
            return hit


def main() -> None:
    """Arguments: address, verify, and what to do at each line on stdin: `view HOW`, or `claimed` or
    `looked` and the number of a moment."""
    address, verify = sys.argv[1:]
    arenas._PIECE_BYTES = 2**18  # type: ignore[misc]  # a payload is read in two of them
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
