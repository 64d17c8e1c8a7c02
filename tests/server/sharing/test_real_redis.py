"""A real redis-server: dead, restarted, failing over, full, moving slots, behind TLS."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest
import redis

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing import redis_nodes
from prefixd.server.sharing.engine_record import MAX_VALUE_BYTES
from prefixd.server.sharing.engine_store import Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.redis_store import RedisStore

from ...support.certificates import Authority
from ...support.daemon import eventually
from ...support.ports import free_ports
from ...support.redis_servers import (
    RedisServer,
    Sentinel,
    add_replica,
    needs_redis,
    primary_and_replica,
    redis_servers,
)

pytestmark = needs_redis

PATIENCE_S = 30.0
DATA = bytes(range(256)) * 4
LARGE = bytes(range(256)) * (MAX_VALUE_BYTES // 128)


def entry_of(number: int, data: bytes = DATA) -> SharedEntry:
    return SharedEntry(Key(number.to_bytes(32, "big")), Content(len(data)), crc32c(data))


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


def told(server: RedisServer, *command: object) -> Any:
    with closing(redis.Redis.from_url(server.url)) as client:
        return client.execute_command(*command)


def swap(primary: RedisServer, replica: RedisServer) -> None:
    """As Sentinel does: promote the replica, and demote the primary."""
    told(replica, "REPLICAOF", "NO", "ONE")
    told(primary, "REPLICAOF", replica.address, replica.port)


@pytest.mark.parametrize("connections", ["stay", "break"])
def test_roles_that_are_swapped_are_followed(tmp_path: Path, connections: str) -> None:
    """Also while the old primary answers, and would take what nobody will ever read."""
    with primary_and_replica(tmp_path) as (primary, replica), ExitStack() as stack:
        store = store_of([primary], stack)
        swap(primary, replica)
        if connections == "break":
            for server in (primary, replica):
                told(server, "CLIENT", "KILL", "TYPE", "normal")
        eventually(lambda: store.nodes.all() == [("127.0.0.1", replica.port)])
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})
        assert told(replica, "DBSIZE") == len(KEYS)
        assert set(fetch(store)) == {Outcome.DONE}
        eventually(lambda: store.health() == {})
        swap(replica, primary)
        eventually(lambda: store.nodes.all() == [("127.0.0.1", primary.port)])
        eventually(lambda: store.find(KEYS, soon()) == ENTRIES)


def test_a_primary_that_says_it_is_none_is_left_at_once(tmp_path: Path) -> None:
    """A READONLY need not wait for the next question of who the primary is."""
    with primary_and_replica(tmp_path) as (primary, replica), ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            redis_nodes, "PRIMARY_EVERY_S", 3_600.0
        )
        told(primary, "CONFIG", "SET", "replica-read-only", "yes")
        store = store_of([primary], stack)
        swap(primary, replica)
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})
        assert store.nodes.all() == [("127.0.0.1", replica.port)]


def test_a_replica_is_not_used_while_there_is_no_primary(tmp_path: Path) -> None:
    with primary_and_replica(tmp_path) as (primary, replica), ExitStack() as stack:
        store = store_of([primary, replica], stack)
        primary.kill()
        eventually(lambda: "can't be reached" in store.health().get("slots", ""))
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
        told(replica, "REPLICAOF", "NO", "ONE")
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})
        eventually(lambda: store.health() == {})


def test_sentinels_are_asked_for_the_primary(tmp_path: Path) -> None:
    with primary_and_replica(tmp_path) as (primary, replica), ExitStack() as stack:
        sentinel = Sentinel(tmp_path / "sentinel", primary)
        stack.callback(sentinel.kill)
        sentinel.start()
        store = store_of([sentinel], stack)
        assert store.nodes.all() == [("127.0.0.1", primary.port)]
        primary.kill()
        eventually(lambda: store.nodes.all() == [("127.0.0.1", replica.port)])
        eventually(lambda: set(store.put(offers(), soon())) == {Outcome.DONE})
        assert store.find(KEYS, soon()) == ENTRIES


def test_what_the_engine_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with redis_servers(tmp_path, 1) as servers, ExitStack() as stack:
        store = store_of(servers, stack)
        told(servers[0], "ACL", "SETUSER", "default", "-set")
        assert set(store.put(offers(), soon())) == {Outcome.REFUSED}
        (why,) = store.health().values()
        assert "refuses" in why
        assert "no permissions to run the 'set' command" in why
        assert [status.why for status in store.statuses()] == [why]
        assert set(fetch(store)) == {Outcome.DONE}, "it serves what it has"


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
