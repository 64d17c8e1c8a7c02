"""What a node reads from another one: in one trip, and right or not at all."""

from __future__ import annotations

import os
from contextlib import closing
from time import monotonic
from typing import Any

from prefixd.client import Client, SaveReason, Tier
from prefixd.client.wire.channel import Security
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.peers import DaemonPeer
from prefixd.server.sharing.store import Outcome, SharedEntry, Wanted
from tests.support.daemon import tcp_address, tcp_daemon
from tests.support.fakes import PATIENCE_S


def wanted(key: Key, payload: bytes, *, crc: int | None = None) -> Wanted:
    expected = crc32c(payload) if crc is None else crc
    entry = SharedEntry(key, len(payload), 1, 0, expected)
    return Wanted(entry, memoryview(bytearray(len(payload))))


def test_payloads_come_in_one_trip_each_for_itself() -> None:
    keys = [Key(os.urandom(32)) for _ in range(5)]
    payloads = [os.urandom(size) for size in (1, 5_000, 300_000, 7_000, 7_000)]
    with tcp_daemon(ram="64MiB") as daemon:
        with Client(daemon.address) as client:
            for key, payload in list(zip(keys, payloads, strict=True))[:4]:
                assert client.save(key, payload, tier=Tier.RAM, reason=SaveReason.EVICT).ok
        with closing(DaemonPeer(tcp_address(daemon), Security())) as peer:
            assert peer._client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
            asked = [
                wanted(keys[0], payloads[0]),
                wanted(keys[1], payloads[1][1:]),  # another length
                wanted(keys[2], payloads[2]),
                wanted(keys[3], payloads[3], crc=0),  # other bytes
                wanted(keys[4], payloads[4]),  # was never there
            ]
            outcomes = peer.read(asked, monotonic() + PATIENCE_S)
            done, absent = Outcome.DONE, Outcome.ABSENT
            assert outcomes == [done, absent, done, absent, absent]
            assert [bytes(asked[n].room) for n in (0, 2)] == [payloads[0], payloads[2]]
            rpcs: Any = peer._client.counters["rpcs"]
            assert {name: count for name, count in rpcs.items() if count} == {"Fetch": 1}
            with daemon.admin() as admin:
                assert not admin.claims()
            daemon.kill()
            assert peer.read(asked[:1], monotonic() + PATIENCE_S) == [Outcome.UNAVAILABLE]
            assert peer.read(asked[:1], monotonic()) == [Outcome.UNAVAILABLE]
