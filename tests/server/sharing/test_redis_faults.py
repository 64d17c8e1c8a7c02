"""Failures of an engine's nodes are misses of their keys, by the deadline, and are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from time import monotonic, time

import pytest

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.engine_store import NodeState, Offer, Outcome, SharedEntry, Wanted
from prefixd.server.sharing.redis_nodes import PATIENCE_CALLS, slots_of
from prefixd.server.sharing.redis_store import RedisStore, bad_settings, clock_problems

from ...support.daemon import eventually
from ...support.fake_redis import FakeRedis, HangUp, fake_redis, share_slots

PATIENCE_S = 30.0
DATA = bytes(range(256)) * 4
ENTRIES = [
    SharedEntry(Key(number.to_bytes(32, "big")), Content(len(DATA)), crc32c(DATA))
    for number in range(60)
]
KEYS = [entry.key for entry in ENTRIES]


@pytest.fixture
def nodes() -> Iterator[list[FakeRedis]]:
    with fake_redis(3) as nodes:
        yield nodes


@pytest.fixture
def store(nodes: list[FakeRedis]) -> Iterator[RedisStore]:
    with closing(RedisStore([nodes[0].url], "test", 2)) as store:
        assert store.nodes.wait_until_reached(PATIENCE_S)
        assert store.put(offers(), soon()) == [Outcome.DONE] * len(ENTRIES)
        yield store


def offers() -> list[Offer]:
    until_ms = int(time() * 1000) + 3_600_000
    return [Offer(entry, [memoryview(DATA)], until_ms) for entry in ENTRIES]


def soon() -> float:
    return monotonic() + PATIENCE_S


def fetch(store: RedisStore, deadline_s: float) -> list[Outcome]:
    buffers = [memoryview(bytearray(len(DATA))) for _ in ENTRIES]
    requests = [Wanted(entry, buffer) for entry, buffer in zip(ENTRIES, buffers, strict=True)]
    outcomes = store.get(requests, deadline_s)
    for outcome, buffer in zip(outcomes, buffers, strict=True):
        assert outcome is not Outcome.DONE or bytes(buffer) == DATA
    return outcomes


def share_of(node: FakeRedis) -> int:
    return len(node.values)


def counts(store: RedisStore, node: FakeRedis) -> tuple[int, int, int]:
    """The numbers of all, unanswered and refused requests to a node."""
    (found,) = (each for each in store.statuses() if each.name == f"127.0.0.1:{node.port}")
    return found.requests, found.unanswered, found.refused


def states(store: RedisStore) -> list[NodeState]:
    return [each.state for each in store.statuses()]


def test_a_node_that_hangs_costs_its_own_keys_and_no_more_than_the_deadline(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    nodes[1].answers.clear()
    began_s = monotonic()
    outcomes = fetch(store, began_s + 1)
    assert monotonic() - began_s >= 1
    assert outcomes.count(Outcome.UNAVAILABLE) == share_of(nodes[1])
    assert outcomes.count(Outcome.DONE) == len(KEYS) - share_of(nodes[1])
    assert counts(store, nodes[1])[1:] == (share_of(nodes[1]), 0)
    assert counts(store, nodes[0])[1:] == (0, 0)


def test_a_slow_node_misses_only_what_it_sends_late(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    sent: list[bytes] = []

    def halt(command: list[bytes]) -> bytes | None:
        if command[0] == b"GET":
            sent.append(command[1])
            if len(sent) == 5:
                nodes[1].answers.clear()
        return None

    nodes[1].fault = halt
    outcomes = fetch(store, monotonic() + 1)
    assert outcomes.count(Outcome.DONE) == len(KEYS) - share_of(nodes[1]) + 4
    assert outcomes.count(Outcome.UNAVAILABLE) == share_of(nodes[1]) - 4


def test_a_hanging_node_is_skipped_after_some_calls(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    nodes[1].answers.clear()
    for _ in range(PATIENCE_CALLS):
        store.find(KEYS, monotonic() + 0.5)
    began_s = monotonic()
    found = store.find(KEYS, began_s + PATIENCE_S)
    assert found.count(None) == share_of(nodes[1])
    assert monotonic() - began_s < PATIENCE_S, "the store waited for the hanging node"
    assert list(store.health()) == [f"127.0.0.1:{nodes[1].port}"]
    assert states(store).count(NodeState.SERVING) == 2
    nodes[1].answers.set()
    eventually(lambda: None not in store.find(KEYS, soon()))
    eventually(lambda: store.health() == {})
    assert states(store) == [NodeState.SERVING] * 3


def test_an_answer_that_comes_late_is_never_taken_for_another(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    """The connection is closed at its first missing answer."""
    nodes[1].answers.clear()
    store.find(KEYS, monotonic() + 0.01)
    nodes[1].answers.set()
    for _ in range(20):
        found = store.find(list(reversed(KEYS)), soon())
        assert all(
            each is None or each == entry
            for each, entry in zip(found, reversed(ENTRIES), strict=True)
        )


def test_a_node_that_hangs_up_is_reached_again(nodes: list[FakeRedis], store: RedisStore) -> None:
    for node in nodes:
        node.hang_up()
    eventually(lambda: None not in store.find(KEYS, soon()))


def test_a_node_that_hangs_up_misses_only_unanswered_keys(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    seen: list[bytes] = []

    def hang_up(command: list[bytes]) -> bytes | None:
        if command[0] == b"GET":
            seen.append(command[1])
            if len(seen) == 5:
                raise HangUp
        return None

    nodes[2].fault = hang_up
    outcomes = fetch(store, soon())
    assert outcomes.count(Outcome.DONE) == len(KEYS) - share_of(nodes[2]) + 4
    assert outcomes.count(Outcome.UNAVAILABLE) == share_of(nodes[2]) - 4


@pytest.mark.parametrize(
    "rubbish", [b"!?\r\n", b"$x\r\n", b":\r\n", b"*1\r\n$1\r\na\r\n", b"x" * 5000]
)
def test_an_invalid_reply_is_a_miss(
    nodes: list[FakeRedis], store: RedisStore, rubbish: bytes
) -> None:
    expected = len(KEYS) - share_of(nodes[0])
    nodes[0].fault = lambda command: rubbish if command[0] == b"GET" else None
    assert fetch(store, soon()).count(Outcome.DONE) == expected
    nodes[0].fault = lambda _: None
    eventually(lambda: set(fetch(store, soon())) == {Outcome.DONE})


@pytest.mark.parametrize("rubbish", [b"$5\r\n", b"\0" * 100, b"$99999999999\r\n", b"$-1\r\n"])
def test_an_incomplete_reply_ends_with_the_deadline(
    nodes: list[FakeRedis], store: RedisStore, rubbish: bytes
) -> None:
    nodes[0].fault = lambda command: rubbish if command[0] == b"GET" else None
    fetch(store, monotonic() + 0.1)  # it checks the payloads of all hits
    nodes[0].fault = lambda _: None
    eventually(
        lambda: None not in store.find([key for key in KEYS if is_stored(nodes, key)], soon())
    )


def is_stored(nodes: list[FakeRedis], key: Key) -> bool:
    return any(key.hex().encode() in name for node in nodes for name in node.values)


def test_a_full_engine_refuses(nodes: list[FakeRedis], store: RedisStore) -> None:
    full = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
    nodes[1].fault = lambda command: full if command[0] == b"SET" else None
    outcomes = store.put(offers(), soon())
    assert outcomes.count(Outcome.REFUSED) == share_of(nodes[1])
    assert outcomes.count(Outcome.DONE) == len(KEYS) - share_of(nodes[1])
    assert set(fetch(store, soon())) == {Outcome.DONE}, "a refused save removed an entry"
    assert counts(store, nodes[1])[1:] == (0, share_of(nodes[1]))


def test_a_cluster_that_wants_all_its_slots_is_a_miss_and_is_counted(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    for node in nodes:
        node.fault = lambda c: b"-CLUSTERDOWN\r\n" if c[0] in (b"GETRANGE", b"SET") else None
    assert store.find(KEYS, soon()) == [None] * len(KEYS)
    assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
    assert all(counts(store, node)[2] == 2 * share_of(node) for node in nodes)


def test_entries_of_another_epoch_are_not_there(nodes: list[FakeRedis], store: RedisStore) -> None:
    with closing(RedisStore([nodes[0].url], "another", 2)) as other:
        assert other.nodes.wait_until_reached(PATIENCE_S)
        assert other.find(KEYS, soon()) == [None] * len(KEYS)
        assert set(fetch(other, soon())) == {Outcome.ABSENT}
        other.drop(KEYS, soon())
    assert store.find(KEYS, soon()) == ENTRIES


def test_values_of_another_form_are_misses_and_are_dropped(
    nodes: list[FakeRedis], store: RedisStore
) -> None:
    for node in nodes:
        for name, (value, until_ms) in node.values.items():
            node.values[name] = (b"pxs2" + value[4:], until_ms)
    assert store.find(KEYS, soon()) == [None] * len(KEYS)
    assert set(fetch(store, soon())) == {Outcome.DAMAGED}
    assert not any(node.values for node in nodes)


def test_slots_that_move_are_asked_for_again(nodes: list[FakeRedis], store: RedisStore) -> None:
    """One of three nodes is removed, and the others take its keys."""
    gone = nodes[0]
    for node in nodes[1:]:
        node.values |= gone.values
    share_slots(nodes[1:])
    gone.slots = nodes[1].slots
    gone.fault = lambda c: b"-MOVED 1 127.0.0.1:1\r\n" if c[0] in (b"GETRANGE", b"GET") else None
    for node in nodes[1:]:
        node.values |= {name: value for other in nodes for name, value in other.values.items()}
    assert store.find(KEYS, soon()).count(None) == share_of(gone)
    eventually(lambda: None not in store.find(KEYS, soon()))
    assert len(store.nodes.all()) == 2


def test_a_wrong_password_is_reported_and_nothing_is_found() -> None:
    node = FakeRedis("right")
    with closing(node), closing(RedisStore([node.url.replace("right", "wrong")], "t", 1)) as store:
        eventually(lambda: "slots are not known" not in store.health().get("slots", ""))
        assert "password" in store.health()["slots"]
        assert "wrong" not in str(store.health()), "the password is in the message"
        assert store.find(KEYS, soon()) == [None] * len(KEYS)


def test_the_right_password_is_accepted() -> None:
    node = FakeRedis("right")
    with closing(node), closing(RedisStore([node.url], "t", 1)) as store:
        assert store.nodes.wait_until_reached(PATIENCE_S)
        assert set(store.put(offers(), soon())) == {Outcome.DONE}


def test_an_unreachable_engine_misses_at_once_and_is_used_when_it_starts() -> None:
    node = FakeRedis()
    url = node.url
    node.close()
    with closing(RedisStore([url], "t", 1)) as store:
        assert store.find(KEYS, soon()) == [None] * len(KEYS)
        assert set(store.put(offers(), soon())) == {Outcome.UNAVAILABLE}
        eventually(lambda: "not known yet" not in store.health()["slots"])


def test_settings_that_make_a_bad_cache_are_named(nodes: list[FakeRedis]) -> None:
    for node in nodes:
        node.settings |= {"maxmemory-policy": "noeviction"}
    with closing(RedisStore([nodes[0].url], "test", 1)) as store:
        assert store.nodes.wait_until_reached(PATIENCE_S)
        problems = store.problems()
    assert len(problems) == 3
    assert all("noeviction" in problem and "volatile-ttl" in problem for problem in problems)


@pytest.mark.parametrize(
    ("ahead_s", "told"), [(3600, "3600 s ahead of"), (-90, "90 s behind"), (0, None)]
)
def test_a_clock_that_is_wrong_is_named(ahead_s: float, told: str | None) -> None:
    node = FakeRedis()
    node.ahead_s = ahead_s
    with closing(node), closing(RedisStore([node.url], "t", 1)) as store:
        assert store.nodes.wait_until_reached(PATIENCE_S)
        problems = store.problems()
    if told is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"127.0.0.1:{node.port}: its clock is")
        assert told in problem


def test_a_slow_answer_is_no_wrong_clock() -> None:
    ours = iter([1000.0, 1060.0])
    assert clock_problems("node", lambda: (1030, 0), lambda: next(ours)) == []
    ours = iter([1000.0, 1060.0])
    (problem,) = clock_problems("node", lambda: (1080, 0), lambda: next(ours))
    assert "20 s ahead" in problem


def test_each_setting_is_looked_at() -> None:
    good = {
        "maxmemory": "1",
        "maxmemory-policy": "volatile-ttl",
        "maxmemory-samples": "10",
        "cluster-enabled": "yes",
        "cluster-require-full-coverage": "no",
        "cluster-node-timeout": "2000",
    }
    assert bad_settings(good) == []
    bad = {
        "maxmemory": "0",
        "maxmemory-policy": "allkeys-lru",
        "maxmemory-samples": "5",
        "cluster-require-full-coverage": "yes",
        "cluster-node-timeout": "15000",
    }
    bad_values = [*bad.items(), *((name, "rubbish") for name in good if "enabled" not in name)]
    for name, value in bad_values:
        if (name, value) == ("cluster-require-full-coverage", "rubbish"):
            continue  # here only "yes" is bad
        problems = bad_settings(good | {name: value})
        assert len(problems) == 1, name
        assert name in problems[0]


@pytest.mark.parametrize("ranges", [[], [[0, 5]], [["a"]], None, [[0, 99999, [b"h", 1]]], 7])
def test_rubbish_instead_of_slots_is_refused_or_serves_nothing(ranges: object) -> None:
    try:
        slots = slots_of(ranges, "here")
    except ValueError:
        return
    assert set(slots) == {None}


@pytest.mark.parametrize("role", [b"*0", b":1", b"$-1", b"*3\r\n$5\r\nslave\r\n$-1\r\n:1"])
def test_an_engine_that_does_not_say_its_role_is_used(role: bytes) -> None:
    with fake_redis(1) as (node,):

        def answer(command: list[bytes]) -> bytes | None:
            if command[0] == b"CLUSTER":
                return b"-ERR This instance has cluster support disabled\r\n"
            return role + b"\r\n" if command[0] == b"ROLE" else None

        node.fault = answer
        with closing(RedisStore([node.url], "test", 2)) as store:
            assert store.nodes.wait_until_reached(PATIENCE_S)
            assert store.put(offers(), soon()) == [Outcome.DONE] * len(ENTRIES)


@pytest.mark.parametrize("urls", [[], ["http://x"], ["redis://host:port"]])
def test_addresses_that_are_none_are_refused(urls: list[str]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # redis-py's own messages
        RedisStore(urls, "t")
