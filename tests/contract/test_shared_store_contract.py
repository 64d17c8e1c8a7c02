"""The contract of every shared store: what was put comes back, or is a miss before the deadline."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any
from unittest.mock import patch

import obstore
import pytest
from obstore.store import MemoryStore, from_url

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing import object_store, redis_store
from prefixd.server.sharing.behind import IN_BUCKET, Behind
from prefixd.server.sharing.engine_record import HEADER_BYTES, MAX_VALUE_BYTES
from prefixd.server.sharing.engine_store import (
    LogPage,
    Offer,
    Outcome,
    SharedEntry,
    SharedStore,
    Wanted,
)
from prefixd.server.sharing.object_store import ObjectStore
from prefixd.server.sharing.redis_store import RedisStore
from tests.support.lengths import times

from ..support.fake_redis import FakeRedis, fake_redis
from ..support.redis_servers import needs_redis, redis_servers
from ..support.s3 import S3_URL, moto_s3

PATIENCE_S = 30.0
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Engine:
    """A store, and access to the value that its engine holds for an entry: `raw` reads it, `spoil`
    replaces it."""

    store: SharedStore
    raw: Callable[[Key], bytes | None]
    spoil: Callable[[Key, bytes], None]
    #: False: the engine deletes objects by rules of its own.
    expires: bool = True
    #: The number of repetitions in tests that repeat their steps.
    repetitions: int = times(400, 2_000)


def head_of(key: Key) -> bytes:
    return b"px1:test:{%b}" % key.hex().encode()


def of_objects(store: ObjectStore, bucket: Any, repetitions: int) -> Iterator[Engine]:
    def path(key: Key) -> str:
        return f"test/{key.hex()[:2]}/{key.hex()}"

    def raw(key: Key) -> bytes | None:
        try:
            return bytes(obstore.get(bucket, path(key)).bytes())
        except FileNotFoundError:
            return None

    def spoil(key: Key, value: bytes) -> None:
        obstore.put(bucket, path(key), value)

    with closing(store):
        yield Engine(store, raw, spoil, expires=False, repetitions=repetitions)


def of_memory() -> Iterator[Engine]:
    memory = MemoryStore()
    yield from of_objects(ObjectStore("", "test", memory), memory, repetitions=times(400, 2_000))


def of_redis(store: SharedStore, nodes: Sequence[FakeRedis]) -> Engine:
    def raw(key: Key) -> bytes | None:
        values = [node.values.get(head_of(key)) for node in nodes]
        return next((value[0] for value in values if value is not None), None)

    def spoil(key: Key, value: bytes) -> None:
        for node in nodes:
            if head_of(key) in node.values:
                node.values[head_of(key)] = (value, node.values[head_of(key)][1])

    return Engine(store, raw, spoil)


def of_s3(url: str) -> Iterator[Engine]:
    """A store made as the daemon makes it, from environment variables. The bucket is emptied."""
    bucket = from_url(url, client_options={"allow_http": True})
    yield from of_objects(ObjectStore(url, "test"), bucket, repetitions=times(40, 200))
    for batch in obstore.list(bucket):
        obstore.delete(bucket, [each["path"] for each in batch])


class Emptied(Behind):
    """Forgets what the engine was given, so that all is in the bucket. Hides what entries of the
    bucket look like: they have a stamp, and are not where the engine says."""

    def __init__(self, near: RedisStore, far: ObjectStore, forget: Callable[[], None]) -> None:
        super().__init__(near, far)
        self._forget = forget

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        stamped = [replace(each, entry=replace(each.entry, stamp=1)) for each in offers]
        self.drop([each.entry.key for each in offers], deadline_s)  # or it writes nothing again
        outcomes = super().put(stamped, deadline_s)
        self._forget()
        return outcomes

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        self.read_log(b"", deadline_s)
        found = super().find(keys, deadline_s)
        assert all(entry is None or self.node_of(entry) == "objects" for entry in found)
        return [entry and replace(entry, stamp=0, location="") for entry in found]

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        self.read_log(b"", deadline_s)
        located = [Wanted(replace(want.entry, location=IN_BUCKET), want.room) for want in wanted]
        return super().get(located, deadline_s)


def behind(bucket: Iterator[Engine], *, emptied: bool) -> Iterator[Engine]:
    """An engine with a bucket behind it. `emptied`: all is in the bucket, else in the engine."""
    far = next(bucket)
    assert isinstance(far.store, ObjectStore)
    with fake_redis(1) as (node,):
        near = RedisStore([node.url], "test", 2)
        assert near.nodes.wait_until_reached(PATIENCE_S)
        if emptied:
            with closing(Emptied(near, far.store, node.values.clear)) as store:
                yield replace(far, store=store)
        else:
            with closing(Behind(near, far.store)) as both:
                yield of_redis(both, [node])
    next(bucket, None)


#: `s3`: the server that `python -m tests.contract.against_s3` starts or is given.
OF_S3 = ["s3", "engine before s3", "s3 behind"] if S3_URL in os.environ else []
ENGINES = ["fake", "fake cluster", "objects", "moto", "engine before objects", "objects behind"]
ENGINES += OF_S3


@pytest.fixture(scope="module")
def moto() -> Iterator[tuple[str, Mapping[str, str]]]:
    """One server for the module, because stopping it takes half a second."""
    with moto_s3() as made:
        yield made


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if "before" in request.param or "behind" in request.param:
        far = of_s3(os.environ[S3_URL]) if "s3" in request.param else of_memory()
        yield from behind(far, emptied="behind" in request.param)
        return
    if request.param == "objects":
        yield from of_memory()
        return
    if request.param == "moto":
        url, variables = request.getfixturevalue("moto")
        with patch.dict(os.environ, variables):
            yield from of_s3(url)
        return
    if request.param == "s3":
        yield from of_s3(os.environ[S3_URL])
        return
    with (
        fake_redis(3 if "cluster" in request.param else 1) as nodes,
        closing(RedisStore([nodes[0].url], "test", 2)) as store,
    ):
        assert store.nodes.wait_until_reached(PATIENCE_S)
        yield of_redis(store, nodes)


@pytest.fixture(params=["one", "cluster"])
def real_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    import redis

    masters = 3 if request.param == "cluster" else 1
    with redis_servers(tmp_path, masters) as servers:
        client = (redis.RedisCluster if masters > 1 else redis.Redis).from_url(servers[0].url)
        with client, closing(RedisStore([servers[0].url], "test", 2)) as store:
            assert store.nodes.wait_until_reached(PATIENCE_S)

            def spoil(key: Key, value: bytes) -> None:
                client.set(head_of(key), value, keepttl=True)

            yield Engine(store, lambda key: client.get(head_of(key)), spoil)


def payload(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def entry(number: int, data: bytes) -> SharedEntry:
    return SharedEntry(key(number), Content(len(data), 16 * number), crc32c(data))


def offer(number: int, data: bytes, lives_ms: int = HOUR_MS) -> Offer:
    return Offer(entry(number, data), [memoryview(data)], int(time() * 1000) + lives_ms)


def soon() -> float:
    return monotonic() + PATIENCE_S


def fetch(store: SharedStore, entries: list[SharedEntry]) -> tuple[list[Outcome], list[bytes]]:
    rooms = [memoryview(bytearray(each.payload_bytes)) for each in entries]
    wanted = [Wanted(each, room) for each, room in zip(entries, rooms, strict=True)]
    return store.get(wanted, soon()), [bytes(room) for room in rooms]


PART_BYTES = MAX_VALUE_BYTES - HEADER_BYTES
SIZES = [1, HEADER_BYTES, 65_536, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5]


def round_trip(engine: Engine) -> None:
    data = [payload(number, size) for number, size in enumerate(SIZES)]
    offers = [offer(number, each) for number, each in enumerate(data)]
    assert engine.store.put(offers, soon()) == [Outcome.DONE] * len(data)
    keys = [key(number) for number in range(len(data) + 2)]
    found = engine.store.find(keys, soon())
    assert found == [*(each.entry for each in offers), None, None]
    present = [each for each in found if each is not None]
    assert fetch(engine.store, present) == ([Outcome.DONE] * len(data), data)


def test_entries_are_found_and_come_back(engine: Engine) -> None:
    round_trip(engine)


@needs_redis
def test_a_real_engine_does_the_same(real_engine: Engine) -> None:
    round_trip(real_engine)
    assert real_engine.store.health() == {}
    flips(real_engine, 20)
    expiry(real_engine)
    logs(real_engine)


def test_a_payload_is_put_from_several_buffers(engine: Engine) -> None:
    data = payload(1, PART_BYTES + 1000)
    view = memoryview(data)
    pieces = [view[:3], view[3:PART_BYTES], view[PART_BYTES : PART_BYTES + 7], view[-993:]]
    pieced = Offer(entry(1, data), pieces, int(time() * 1000) + HOUR_MS)
    assert engine.store.put([pieced], soon()) == [Outcome.DONE]
    assert fetch(engine.store, [entry(1, data)]) == ([Outcome.DONE], [data])


def test_many_small_entries_in_one_call(engine: Engine) -> None:
    data = [payload(number, 100 + number) for number in range(engine.repetitions)]
    offers = [offer(number, each) for number, each in enumerate(data)]
    assert set(engine.store.put(offers, soon())) == {Outcome.DONE}
    assert None not in engine.store.find([each.entry.key for each in offers], soon())
    outcomes, bytes_ = fetch(engine.store, [each.entry for each in offers])
    assert set(outcomes) == {Outcome.DONE}
    assert bytes_ == data


def test_an_entry_that_is_dropped_after_it_was_found_is_absent(engine: Engine) -> None:
    offers = [offer(number, payload(number, 500)) for number in range(3)]
    engine.store.put(offers, soon())
    assert engine.store.drop([key(1), key(9)], soon()) == [], "also what is not there"
    outcomes, _ = fetch(engine.store, [each.entry for each in offers])
    assert outcomes == [Outcome.DONE, Outcome.ABSENT, Outcome.DONE]
    assert engine.store.find([key(1)], soon()) == [None]


def test_empty_batches_return_at_once(engine: Engine) -> None:
    assert engine.store.find([], 0.0) == []
    assert engine.store.get([], 0.0) == []
    assert engine.store.put([], 0.0) == []
    engine.store.touch([], 0.0)
    assert engine.store.drop([], 0.0) == []


def test_a_newer_save_of_the_key_is_not_served_for_an_older_entry(engine: Engine) -> None:
    old, new = offer(1, payload(1, 500)), offer(1, payload(2, 500))
    engine.store.put([old], soon())
    engine.store.put([new], soon())
    assert fetch(engine.store, [old.entry])[0] == [Outcome.DAMAGED]


def flips(engine: Engine, count: int) -> None:
    data = payload(1, 300)
    chance = random.Random(2)
    for _ in range(count):
        engine.store.put([offer(1, data)], soon())
        value = engine.raw(key(1))
        assert value is not None
        spoilt = bytearray(value)
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        engine.spoil(key(1), bytes(spoilt))
        found = engine.store.find([key(1)], soon())
        assert found in ([None], [entry(1, data)])
        if found[0] is not None:
            assert fetch(engine.store, [found[0]])[0] == [Outcome.DAMAGED]
            assert engine.raw(key(1)) is None, "a damaged value is dropped"


def test_no_flipped_bit_is_served(engine: Engine) -> None:
    """In the header or the payload. Further parts of a payload are under the same checksum."""
    flips(engine, engine.repetitions)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 299])
def test_a_value_that_was_cut_off_is_not_served(engine: Engine, length: int) -> None:
    data = payload(1, 300)
    engine.store.put([offer(1, data), offer(2, data)], soon())
    value = engine.raw(key(1))
    assert value is not None
    engine.spoil(key(1), value[:length])
    outcomes, _ = fetch(engine.store, [entry(1, data), entry(2, data)])
    # An object store has no range of an empty object to return.
    assert outcomes[0] is Outcome.DAMAGED or (not length and not engine.expires)
    assert outcomes[1] is Outcome.DONE


def test_another_entrys_value_is_not_served(engine: Engine) -> None:
    engine.store.put([offer(number, payload(number, 300)) for number in (1, 2)], soon())
    value = engine.raw(key(2))
    assert value is not None
    engine.spoil(key(1), value)
    assert engine.store.find([key(1)], soon()) == [None]
    assert fetch(engine.store, [entry(1, payload(1, 300))])[0] == [Outcome.DAMAGED]


def expiry(engine: Engine) -> None:
    data = payload(100, 300)
    now_ms = int(time() * 1000)
    engine.store.put([offer(100, data), offer(101, data, -1000)], soon())
    assert engine.store.find([key(101)], soon()) == [None], "it has already expired"
    engine.store.touch([(key(100), now_ms - 1000), (key(102), now_ms + HOUR_MS)], soon())
    assert engine.store.find([key(100), key(102)], soon()) == [entry(100, data), None]


def test_a_touch_never_shortens_a_lifetime_and_creates_nothing(engine: Engine) -> None:
    if not engine.expires:
        pytest.skip("objects expire by a rule of their bucket")
    expiry(engine)


def logs(engine: Engine) -> None:
    store = engine.store
    assert store.read_log(b"", soon()) == LogPage([])
    assert store.log([b"one", b"two\r\n\0"], soon()) == 2
    page = store.read_log(b"", soon())
    assert page is not None
    assert [each.record for each in page.records] == [b"one", b"two\r\n\0"]
    assert not page.trimmed
    last = page.records[-1]
    assert store.log([b"three"], soon()) == 1
    page = store.read_log(last.place, soon())
    assert page is not None
    assert page.records[0] == last
    assert [each.record for each in page.records[1:]] == [b"three"]
    assert store.log([], soon()) == 0


def test_a_log_keeps_its_order(engine: Engine) -> None:
    logs(engine)


def test_an_engine_keeps_only_the_latest_of_the_log(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (redis_store, object_store):
        monkeypatch.setattr(module, "MAX_RECORDS", 3)
    assert engine.store.log([b"0"], soon()) == 1
    page = engine.store.read_log(b"", soon())
    assert page is not None
    first = page.records[0]
    assert engine.store.log([b"%d" % number for number in range(1, 6)], soon()) == 5
    page = engine.store.read_log(first.place, soon())
    assert page is not None
    assert page.trimmed
    assert [each.record for each in page.records] == [b"3", b"4", b"5"], "its place is gone"


def test_a_log_that_does_not_answer(engine: Engine) -> None:
    late = monotonic() - 1
    assert engine.store.log([b"late"], late) in (0, 1)
    engine.store.close()
    assert engine.store.log([b"closed"], soon()) == 0
    assert engine.store.read_log(b"", soon()) is None


def test_a_deadline_that_is_over_is_a_miss(engine: Engine) -> None:
    data = payload(1, 300)
    assert engine.store.put([offer(1, data)], soon()) == [Outcome.DONE]
    late = monotonic() - 1
    room = memoryview(bytearray(300))
    # A result that needs no wait may still be returned.
    assert engine.store.get([Wanted(entry(1, data), room)], late)[0] in (
        Outcome.UNAVAILABLE,
        Outcome.DONE,
    )
    assert engine.store.find([key(1)], late)[0] in (None, entry(1, data))


def test_a_closed_store_has_nothing(engine: Engine) -> None:
    data = payload(1, 300)
    engine.store.put([offer(1, data)], soon())
    engine.store.close()
    assert engine.store.find([key(1)], soon()) == [None]
    assert engine.store.put([offer(1, data)], soon()) == [Outcome.UNAVAILABLE]
    assert fetch(engine.store, [entry(1, data)])[0] == [Outcome.UNAVAILABLE]
    assert engine.store.drop([key(1)], soon()) == [key(1)], "the engine may still have it"
