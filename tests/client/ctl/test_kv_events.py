"""vLLM's KV events: what a subscriber with vLLM's types decodes, and in which order."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import (
    Cleared,
    Client,
    Disconnected,
    Evicted,
    Published,
    SaveItem,
    SaveReason,
    Synced,
    Tier,
)
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.keys import Key
from tests.support.daemon import private_daemon
from tests.support.vllm_events import BlockRemoved, BlockStored, Indexer, KVEventBatch
from tests.support.warm import WARM

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed (prefixd[kv-events])")
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (prefixd[kv-events])")

from prefixd.client.ctl import kv_events  # noqa: E402  # needs both
from prefixd.client.ctl.kv_events import Blocks, Publisher, encode  # noqa: E402


def key(number: int) -> Key:
    return Key(number.to_bytes(8, "big") + b"of no importance here !!")


def ids(number: int, tokens: int = 2) -> bytes:
    return b"".join((10 * number + n).to_bytes(4, "little") for n in range(tokens))


def block(number: int, parent: int | None = None, **fields: Any) -> Published:
    """A block. `parent` 0: it is the first of its chain. None: its parent is not known."""
    given = {
        "tier": Tier.RAM, "token_count": 2, "token_ids": ids(number), "namespace": "m",
        "parent": None if parent is None else key(parent) if parent else b"",
    } | fields  # fmt: skip
    given.setdefault("key", key(number))
    return Published(sequence=1, generation=1, payload_bytes=5, reason=SaveReason.COLD, **given)


def gone(number: int, tier: Tier = Tier.RAM) -> Evicted:
    return Evicted(key(number), tier, 1)


def told(blocks: Blocks, *events: Any) -> list[Any]:
    """The message as vLLM's types decode it."""
    payload = encode(blocks.translated(events), 3, 1.5)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    return list(batch.events)


def begun(**options: Any) -> Blocks:
    blocks = Blocks(**options)
    (cleared,) = told(blocks, Cleared(""), Synced(1))
    assert type(cleared).__name__ == "AllBlocksCleared"
    return blocks


def test_a_chain_is_one_event() -> None:
    (stored,) = told(begun(), block(1, 0), block(2, 1), block(3, 2))
    assert stored.block_hashes == [1, 2, 3]
    assert stored.parent_block_hash is None
    assert stored.token_ids == [10, 11, 20, 21, 30, 31]
    assert (stored.block_size, stored.medium, stored.lora_id) == (2, "CPU", None)


def test_what_does_not_follow_is_an_event_of_its_own() -> None:
    blocks = begun()
    stored = told(
        blocks,
        block(1, 0),
        block(5, 0),
        block(6, 5, tier=Tier.DISK),
        block(7, 6, tier=Tier.DISK, token_count=3, token_ids=ids(7, 3)),
    )
    assert [one.block_hashes for one in stored] == [[1], [5], [6], [7]]
    assert [one.parent_block_hash for one in stored] == [None, None, 5, 6]
    assert [one.medium for one in stored] == ["CPU", "CPU", "STORAGE", "STORAGE"]
    (stored,) = told(blocks, *(block(n, n - 1 if n > 100 else 1) for n in range(100, 100 + 256)))
    assert len(stored.block_hashes) == 256


def test_a_hash_is_the_beginning_of_a_key() -> None:
    """All keys of a tenant have the same end."""
    number = 2**64 - 5
    (stored,) = told(begun(), block(1, 0, key=key(number)))
    assert stored.block_hashes == [2**64 - 5]


def test_what_leaves_is_told_if_it_was_told() -> None:
    blocks = begun()
    told(blocks, block(1, 0), block(2, 1), block(3, 2, tier=Tier.DISK))
    events = told(blocks, gone(2), gone(1), gone(9), gone(3, Tier.DISK))
    assert [(one.block_hashes, one.medium) for one in events] == [
        ([2, 1], "CPU"), ([3], "STORAGE")
    ]  # fmt: skip
    assert told(blocks, gone(1)) == []
    events = told(blocks, block(1, 0), gone(1), block(1, 0))
    assert [type(one) for one in events] == [BlockStored, BlockRemoved, BlockStored]


def test_what_an_indexer_can_not_place_is_not_told() -> None:
    blocks = begun()
    assert told(blocks, block(1, 0, token_ids=b""), block(2, 0, token_count=3)) == []
    assert told(blocks, block(3), block(4, 0, token_count=0, token_ids=b"")) == []
    assert (blocks.without_ids, blocks.without_parent) == (3, 1)
    sized = begun(block_tokens=2, namespace="m")
    others = block(5, 0, token_count=1, token_ids=ids(5, 1)), block(6, 0, namespace="other")
    assert told(sized, *others) == []
    assert len(told(sized, block(7, 0))) == 1


def test_a_block_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = begun()
    assert told(blocks, block(3, 2), block(2, 1)) == []
    (stored,) = told(blocks, block(1, 0))
    assert stored.block_hashes == [1, 2, 3]
    assert told(blocks, block(6, 5), gone(6)) == []
    (stored,) = told(blocks, block(5, 0))
    assert stored.block_hashes == [5], "what left does not come back"
    monkeypatch.setattr(kv_events, "_MAX_WAITING", 1)
    assert told(blocks, block(8, 7), block(9, 7)) == []
    (stored,) = told(blocks, block(7, 0))
    assert stored.block_hashes == [7, 8]


def test_what_is_told_anew_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resync, subscribers hear of the blocks that left and came meanwhile, each once. The
    daemon does not send parents then, so they are remembered."""
    blocks = begun()
    told(blocks, block(1, 0), block(2, 1), block(3, 2), block(4, 3, tier=Tier.DISK))
    told(blocks, gone(3))
    events = told(
        blocks,
        Disconnected("gone"),
        Cleared("resync"),
        block(3),
        block(1),
        block(4),  # now in another tier
        Synced(9),
    )
    kinds = [(type(one), one.block_hashes) for one in events]
    assert kinds == [
        (BlockStored, [3]),
        (BlockRemoved, [4]),
        (BlockStored, [4]),
        (BlockRemoved, [2]),
    ]
    monkeypatch.setattr(kv_events, "_MAX_PARENTS", 1)
    blocks = begun()
    told(blocks, block(20, 0), block(21, 20))
    told(blocks, gone(21), gone(20))
    assert told(blocks, block(20)) == [], "forgotten"


def test_older_decoders_get_arrays() -> None:
    blocks = begun()
    events = blocks.translated([block(1, 0), gone(1)])
    ts, (stored, removed), rank = msgspec.msgpack.decode(encode(events, 0, 2.5, as_map=False))
    assert (ts, rank) == (2.5, 0)
    assert stored == ["BlockStored", [1], None, [10, 11], 2, None, "CPU", None]
    assert removed == ["BlockRemoved", [1], "CPU"]
    cleared = Blocks().translated([Cleared("")])
    assert msgspec.msgpack.decode(encode(cleared, 0, 0.0, as_map=False))[1] == [
        ["AllBlocksCleared"]
    ]


def test_any_order_of_events_leaves_an_indexer_right() -> None:
    """An indexer that accepts a block only after the one before it ends up with every block that
    can be reached."""
    for seed in range(200):
        draw = random.Random(seed)
        blocks, indexer, there = begun(), Indexer(), dict[int, int]()
        known_parents: set[int] = set()
        for _ in range(draw.randrange(40)):
            events: list[Any] = []
            for _ in range(draw.randrange(1, 5)):
                number = draw.randrange(1, 9)
                match draw.randrange(5):
                    case 0 | 1:
                        there[number] = number // 2
                        known_parents.add(number)
                        events.append(block(number, number // 2))
                    case 2:
                        if there.pop(number, None) is not None:
                            events.append(gone(number))
                    case 3:
                        events.append(Disconnected("cut"))
                        events.append(Cleared("resync"))
                        if draw.random() < 0.5:
                            there.pop(number, None)
                        snapshot = [block(one) for one in there]
                        draw.shuffle(snapshot)
                        events += [*snapshot, Synced(1)]
            indexer.apply(told(blocks, *events))
            assert indexer.known.keys() <= there.keys(), seed
            for number in there:
                chain = [number]
                while chain[-1] // 2:
                    chain.append(chain[-1] // 2)
                if all(one in there for one in chain):
                    assert number in indexer.known, seed
                    assert indexer.known[number] == [10 * number, 10 * number + 1]


# ---- over ZMQ


class Subscriber:
    """As in vLLM's documentation: SUB for events, and a request for missed messages."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)

    def receive(self) -> tuple[str, int, Any]:
        topic, number, payload = self.socket.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        return topic.decode(), int.from_bytes(number, "big"), batch

    def replay(self, endpoint: str, start: int) -> list[tuple[int, Any]]:
        asking = self._context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.connect(endpoint)
        asking.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            _, _, number, payload = asking.recv_multipart()
            if not payload:
                assert number == (-1).to_bytes(8, "big", signed=True)
                asking.close(linger=0)
                return found
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            found.append((int.from_bytes(number, "big"), batch))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with Publisher(*endpoints, "kv@pod@model", rank=1, buffer=4) as publisher:
        yield publisher


def publish_until_heard(publisher: Publisher, subscriber: Subscriber) -> int:
    """Publish until the subscriber has connected, because it hears nothing from before. Returns the
    number of the last message."""
    stored = Blocks().translated([Cleared("")])
    subscriber.socket.setsockopt(zmq.RCVTIMEO, 0)
    while True:
        publisher.publish(stored)
        try:
            _, number, _ = subscriber.receive()
        except zmq.Again:
            continue
        break
    subscriber.socket.setsockopt(zmq.RCVTIMEO, 60_000)
    last = publisher.next_number - 1
    while number < last:
        _, number, _ = subscriber.receive()
    return last


def test_a_subscriber_hears_and_asks_again(publisher: Publisher) -> None:
    subscriber = Subscriber(publisher.bound, "kv@")
    last = publish_until_heard(publisher, subscriber)
    blocks = begun()
    publisher.publish([])
    for number in range(1, 7):
        publisher.publish(blocks.translated([block(number, number - 1)]))
        topic, sequence, batch = subscriber.receive()
        assert (topic, sequence) == ("kv@pod@model", last + number)
        assert batch.data_parallel_rank == 1
        assert batch.events[0].block_hashes == [number]
    replayed = subscriber.replay(publisher.replay_bound, last + 4)
    assert [number for number, _ in replayed] == [last + 4, last + 5, last + 6]
    assert [batch.events[0].block_hashes for _, batch in replayed] == [[4], [5], [6]]
    # Only the last four messages are kept.
    assert len(subscriber.replay(publisher.replay_bound, 0)) == 4
    assert subscriber.replay(publisher.replay_bound, last + 7) == []
    subscriber.close()


def test_a_request_that_is_none_does_no_harm(publisher: Publisher) -> None:
    subscriber = Subscriber(publisher.bound)
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(publisher.replay_bound)
    for frames in ([b"x"], [b"", b"1234567"], [b"", b"12345678", b""], [b"", bytes(2000)]):
        asking.send_multipart(frames)
    assert subscriber.replay(publisher.replay_bound, 0) == []
    context.destroy(linger=0)
    subscriber.close()


def items(numbers: Iterable[int]) -> list[SaveItem]:
    return [SaveItem(key(n), b"bytes", 2, token_ids=[10 * n, 10 * n + 1]) for n in numbers]


def save(daemon: PrivateDaemon, numbers: Iterable[int], tier: Tier = Tier.RAM) -> None:
    with Client(daemon.address) as client:
        assert all(client.save_many(items(numbers), tier=tier, reason=SaveReason.EVICT))


def test_what_a_daemon_has_is_published(tmp_path: Path) -> None:
    """The program itself, a daemon, and a subscriber."""
    main = "from prefixd.client.ctl.main import main; main()"
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with private_daemon() as daemon:
        save(daemon, [90])
        with subprocess.Popen(
            [*WARM, "-c", main, "publish-kv-events", "--address", daemon.address,
             "--bind", endpoints[0], "--replay", endpoints[1]],
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            assert process.stderr.readline() == f"KV events at {endpoints[0]}\n"
            assert "1 of an unknown place" in process.stderr.readline()
            subscriber, indexer = Subscriber(endpoints[0]), Indexer()
            save(daemon, range(1, 6))
            with daemon.admin() as admin:
                admin.drop([key(5)])
            replayed: list[tuple[int, Any]] = []
            while 5 not in indexer.removed:
                replayed = subscriber.replay(endpoints[1], 0)
                indexer = Indexer()
                for _, batch in replayed:
                    indexer.apply(batch.events)
            assert [number for number, _ in replayed] == list(range(len(replayed)))
            assert indexer.known == {n: [10 * n, 10 * n + 1] for n in range(1, 5)}
            subscriber.close()
            process.kill()
