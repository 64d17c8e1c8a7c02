"""A real redis-server: dead, restarted, failing over, full, moving slots, behind TLS."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic, time
from typing import Any

import redis

from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.record import MAX_VALUE_BYTES
from prefixd.server.sharing.redis_store import RedisStore
from prefixd.server.sharing.store import Offer, Outcome, SharedEntry, Wanted

from ...support.certificates import Authority
from ...support.daemon import eventually
from ...support.redis_servers import (
    RedisServer,
    add_replica,
    free_ports,
    needs_redis,
    redis_servers,
)

pytestmark = needs_redis

PATIENCE_S = 30.0
DATA = bytes(range(256)) * 4
LARGE = bytes(range(256)) * (MAX_VALUE_BYTES // 128)


def entry_of(number: int, data: bytes = DATA) -> SharedEntry:
    return SharedEntry(Key(number.to_bytes(32, "big")), len(data), 0, 0, crc32c(data))


ENTRIES = [entry_of(number) for number in range(60)]
KEYS = [entry.key for entry in ENTRIES]


def offer_of(entry: SharedEntry, data: bytes = DATA) -> Offer:
    return Offer(entry, [memoryview(data)], int(time() * 1000) + 3_600_000)


def offers() -> list[Offer]:
    return [offer_of(entry) for entry in ENTRIES]


def soon() -> float:
    return monotonic() + PATIENCE_S


def fetch(store: RedisStore, entries: list[SharedEntry] = ENTRIES) -> list[Outcome]:
    rooms = [memoryview(bytearray(entry.payload_bytes)) for entry in entries]
    wanted = [Wanted(entry, room) for entry, room in zip(entries, rooms, strict=True)]
    outcomes = store.get(wanted, soon())
    for outcome, want in zip(outcomes, wanted, strict=True):
        assert outcome is not Outcome.DONE or crc32c(want.room) == want.entry.payload_crc32c
    return outcomes


def store_of(servers: list[RedisServer], stack: ExitStack) -> RedisStore:
    """A store that has put all entries."""
    store = stack.enter_context(closing(RedisStore([s.url for s in servers], "test", 2)))
    assert store.nodes.wait_until_reached(PATIENCE_S)
    assert set(store.put(offers(), soon())) == {Outcome.DONE}
    return store


def test_with_one_of_three_masters_dead_the_others_are_used(tmp_path: Path) -> None:
    with redis_servers(tmp_path, 3) as servers, ExitStack() as stack:
        store = store_of(servers, stack)
        servers[0].kill()
        assert 0.6 * len(KEYS) <= fetch(store).count(Outcome.DONE) < len(KEYS)
        eventually(lambda: list(store.health()) == [f"127.0.0.1:{servers[0].port}"])


def test_a_restarted_engine_is_empty_and_accepts_entries(tmp_path: Path) -> None:
    with redis_servers(tmp_path, 1) as servers, ExitStack() as stack:
        store = store_of(servers, stack)
        servers[0].restart()
        assert store.find(KEYS, soon()) == [None] * len(KEYS)
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})
        assert store.find(KEYS, soon()) == ENTRIES
        eventually(lambda: store.health() == {})


def test_a_replica_that_takes_over_is_used(tmp_path: Path) -> None:
    with redis_servers(tmp_path, 3) as servers, ExitStack() as stack:
        replica = add_replica(servers[0], tmp_path / "replica", stack)
        store = store_of(servers, stack)
        with closing(redis.Redis.from_url(servers[0].url)) as client:
            assert client.wait(1, 10_000) == 1, "the replica is not complete"
        servers[0].kill()
        eventually(lambda: store.find(KEYS, soon()) == ENTRIES)
        assert ("127.0.0.1", replica.port) in store.nodes.all()
        assert set(fetch(store)) == {Outcome.DONE}
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})


def test_slots_that_move_cost_misses_while_they_do(tmp_path: Path) -> None:
    with redis_servers(tmp_path, 3) as servers, ExitStack() as stack:
        store = store_of(servers, stack)
        one, two, _ = (
            stack.enter_context(closing(redis.Redis.from_url(server.url))) for server in servers
        )
        first = ("127.0.0.1", servers[0].port)
        moved = next(key for key in KEYS if store.nodes.of(store.name(key)) == first)
        slot = one.execute_command("CLUSTER KEYSLOT", store.name(moved))
        ids = [each.execute_command("CLUSTER MYID").decode() for each in (one, two)]
        two.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        one.execute_command("MIGRATE", "127.0.0.1", servers[1].port, store.name(moved), 0, 5000)
        expected = [entry if entry.key != moved else None for entry in ENTRIES]
        assert store.find(KEYS, soon()) == expected, "only the moving entry is a miss"
        for each in (two, one):
            each.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        eventually(lambda: store.find(KEYS, soon()) == ENTRIES)
        assert set(fetch(store)) == {Outcome.DONE}


def test_a_full_engine_refuses_and_its_policy_is_named(tmp_path: Path) -> None:
    full = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with redis_servers(tmp_path, 1, *full) as servers, ExitStack() as stack:
        store = store_of(servers, stack)
        more = [entry_of(1000 + number, LARGE) for number in range(4)]
        outcomes = store.put([offer_of(entry, LARGE) for entry in more], soon())
        assert Outcome.REFUSED in outcomes
        for entry, outcome in zip(more, outcomes, strict=True):
            found = store.find([entry.key], soon())
            assert found == [entry if outcome is Outcome.DONE else None], "a head without its parts"
        assert set(fetch(store)) == {Outcome.DONE}
        assert any("noeviction" in problem for problem in store.problems())
        assert store.statuses()[0].refused > 0


def tls(directory: Path, days: int) -> tuple[tuple[str, ...], str]:
    """Options of a server that speaks TLS, and its URL."""
    authority = Authority(directory)
    certificate, key = authority.sign("server", days=days)
    (port,) = free_ports(1)
    options: dict[str, Any] = {
        "--tls-port": port,
        "--tls-cert-file": certificate,
        "--tls-key-file": key,
        "--tls-ca-cert-file": authority.certificate,
        "--tls-auth-clients": "no",
    }
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.certificate}"
    return tuple(str(word) for option in options.items() for word in option), url


def test_tls(tmp_path: Path) -> None:
    options, url = tls(tmp_path / "certificates", 2)
    with redis_servers(tmp_path, 1, *options), closing(RedisStore([url], "test", 2)) as store:
        assert store.nodes.wait_until_reached(PATIENCE_S), store.health()
        large = [entry_of(1000 + number, LARGE) for number in range(3)]
        wanted = [*offers(), *(offer_of(entry, LARGE) for entry in large)]
        assert set(store.put(wanted, soon())) == {Outcome.DONE}
        assert store.find(KEYS, soon()) == ENTRIES
        assert set(fetch(store, [*ENTRIES, *large])) == {Outcome.DONE}


def test_an_expired_certificate_is_reported_and_nothing_is_sent(tmp_path: Path) -> None:
    options, url = tls(tmp_path / "certificates", -1)
    with redis_servers(tmp_path, 1, *options), closing(RedisStore([url], "test", 2)) as store:
        eventually(lambda: "certificate" in store.health().get("slots", ""))
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
        assert store.find(KEYS, soon()) == [None] * len(KEYS)
