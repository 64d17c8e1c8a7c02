"""A bucket behind an engine: what is asked for, what is written, and failures of either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import pytest
from obstore.store import MemoryStore

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing import behind, object_store
from prefixd.server.sharing.behind import FIRST_ROUND, IN_BUCKET, LOG_READ_WITHIN_S, Behind
from prefixd.server.sharing.delete_log import NO_STAMP
from prefixd.server.sharing.engine_link import RETRY_EVERY
from prefixd.server.sharing.engine_record import HEADER_BYTES, encode_header
from prefixd.server.sharing.engine_store import (
    LogPage,
    NodeState,
    NodeStatus,
    Offer,
    Outcome,
    SharedEntry,
    Wanted,
)
from prefixd.server.sharing.object_store import ObjectStore
from tests.server.sharing.test_object_store import Bucket, break_off, bucket
from tests.support.daemon import eventually
from tests.support.running import key
from tests.support.stores import LogInMemory

PATIENCE_S = 30.0
STAMP = 7
DONE, ABSENT, DAMAGED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED
UNAVAILABLE, REFUSED = Outcome.UNAVAILABLE, Outcome.REFUSED


def data_of(number: int) -> bytes:
    return bytes([number % 256]) * (100 + number)


def entry(number: int, stamp: int = STAMP, data: bytes | None = None) -> SharedEntry:
    data = data_of(number) if data is None else data
    return SharedEntry(key(number), Content(len(data), 16), crc32c(data), stamp)


def offer(number: int, stamp: int = STAMP) -> Offer:
    return Offer(entry(number, stamp), [memoryview(data_of(number))], 2**50)


def soon() -> float:
    return monotonic() + PATIENCE_S


class Near(LogInMemory):
    """An engine, or nodes if it `needs_payloads` not, with faults on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Key, tuple[SharedEntry, bytes]] = {}
        #: The outcomes of all gets and puts that are not as usual.
        self.gets: Outcome | None = None
        self.puts: Outcome | None = None
        self.drops = True
        self.deadlines_s: list[float] = []
        self.before_find: Callable[[float], None] = lambda _: None
        self.before_get: Callable[[], object] = lambda: None
        self.closed = False

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        self.deadlines_s.append(deadline_s)
        self.before_find(deadline_s)
        return [self.values[each][0] if each in self.values else None for each in keys]

    def get(self, wanted: Sequence[Wanted], _deadline_s: float) -> list[Outcome]:
        self.before_get()
        outcomes = []
        for want in wanted:
            value = self.values.get(want.entry.key)
            outcomes.append(self.gets or (ABSENT if value is None else DONE))
            if outcomes[-1] is DONE and value is not None:
                want.room[:] = value[1]
        return outcomes

    def put(self, offers: Sequence[Offer], _deadline_s: float) -> list[Outcome]:
        if self.puts is None:
            for each in offers:
                self.values[each.entry.key] = (each.entry, b"".join(each.pieces))
        return [self.puts or DONE] * len(offers)

    def keeps(self, _entry: SharedEntry) -> bool:
        return self.needs_payloads

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        return [each for each, _ in expiries_ms if each not in self.values]

    def drop(self, keys: Sequence[Key], _deadline_s: float) -> list[Key]:
        if not self.drops:
            return list(keys)
        for each in keys:
            self.values.pop(each, None)
        return []

    def problems(self) -> list[str]:
        return ["near: bad"]

    def health(self) -> dict[str, str]:
        return {"engine": "unwell"}

    def counts(self) -> dict[str, int]:
        return super().counts() | {"second_came": 3}

    def node_of(self, _entry: SharedEntry) -> str:
        return "engine"

    def close(self) -> None:
        self.closed = True


class Far(ObjectStore):
    """A bucket in memory, with faults on demand."""

    def __init__(self, memory: MemoryStore | None = None) -> None:
        super().__init__("", "test", memory or MemoryStore())
        #: The keys of each look-up, and those that were written.
        self.looked_up: list[list[Key]] = []
        self.written: list[Key] = []
        self.put_deadlines_s: list[float] = []
        self.cut_off = False
        #: Whether drops alone are carried out.
        self.drops = True
        self.rests = False
        self.before_find: Callable[[float], None] = lambda _: None
        self.before_get: Callable[[], object] = lambda: None

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        self.looked_up.append(list(keys))
        self.before_find(deadline_s)
        return [None] * len(keys) if self.cut_off else super().find(keys, deadline_s)

    def get_stamped(self, wanted: Sequence[Wanted], deadline_s: float) -> list[tuple[Outcome, int]]:
        self.before_get()
        if self.cut_off:
            return [(UNAVAILABLE, 0)] * len(wanted)
        return super().get_stamped(wanted, deadline_s)

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        self.put_deadlines_s.append(deadline_s)
        if self.cut_off:
            return [UNAVAILABLE] * len(offers)
        self.written += [each.entry.key for each in offers]
        return super().put(offers, deadline_s)

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        reached = self.drops and not self.cut_off
        return super().drop(keys, deadline_s) if reached else list(keys)

    def health(self) -> dict[str, str]:
        return {"objects": "cut off"} if self.cut_off else super().health()

    def statuses(self) -> list[NodeStatus]:
        state = NodeState.RESTING if self.rests else NodeState.SERVING
        return [NodeStatus("objects", state)]


@dataclass
class Both:
    near: Near
    far: Far
    store: Behind

    def fill(self, *numbers: int, stamp: int = STAMP) -> None:
        """Put entries into the bucket alone."""
        ObjectStore.put(self.far, [offer(number, stamp) for number in numbers], soon())

    def find(self, *numbers: int, deadline_s: float | None = None) -> list[SharedEntry | None]:
        return self.store.find([key(n) for n in numbers], deadline_s or soon())

    def get(self, *entries: SharedEntry) -> list[Outcome]:
        """Also checks the bytes of those that came."""
        wanted = [Wanted(each, memoryview(bytearray(each.payload_bytes))) for each in entries]
        outcomes = self.store.get(wanted, soon())
        for want, outcome in zip(wanted, outcomes, strict=True):
            number = int.from_bytes(want.entry.key, "big")
            assert outcome is not DONE or want.room == data_of(number)
        return outcomes

    def put(self, *numbers: int, stamp: int = STAMP) -> list[Outcome]:
        return self.store.put([offer(number, stamp) for number in numbers], soon())

    def touch(self, *numbers: int) -> list[Key]:
        return self.store.touch([(key(number), 2**50) for number in numbers], soon())


@pytest.fixture
def both() -> Iterator[Both]:
    near, far = Near(), Far()
    with closing(Behind(near, far)) as store:
        store.read_log(b"", soon())
        yield Both(near, far, store)


class Clock:
    """The time of the stores, as long as a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = monotonic()
        for module in (behind, object_store):
            patch.setattr(module, "monotonic", lambda: self.now_s)


# ---- look-ups


def test_the_bucket_is_asked_for_what_the_engine_lacks(both: Both) -> None:
    both.put(1, 2, 3)
    del both.near.values[key(2)]
    found = both.find(1, 2, 3)
    assert found == [entry(1), replace(entry(2), location=IN_BUCKET), entry(3)]
    assert both.far.looked_up == [[key(2)]]
    assert [both.store.node_of(each) for each in found if each] == ["engine", "objects", "engine"]
    both.find(1, 3)
    assert len(both.far.looked_up) == 1, "the engine has all of them"


def test_look_ups_grow_and_end_with_one_that_finds_nothing(both: Both) -> None:
    both.fill(*range(30))
    found = both.find(*range(200))
    assert [each is not None for each in found] == [n < 30 for n in range(200)]
    assert [len(keys) for keys in both.far.looked_up] == [8, 16, 32, 64]
    assert FIRST_ROUND == 8
    both.far.looked_up.clear()
    assert both.find(*range(100, 200)) == [None] * 100
    assert both.far.looked_up == [[key(n) for n in range(100, 108)]]


def test_an_engine_that_hangs_leaves_half_of_the_time(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    both.store.read_log(b"", soon())

    def hang(until_s: float) -> None:
        clock.now_s = until_s

    both.near.before_find = hang
    both.fill(1)
    began_s = clock.now_s
    assert both.find(1, deadline_s=began_s + 2) == [replace(entry(1), location=IN_BUCKET)]
    assert both.near.deadlines_s == [began_s + 1]
    assert both.store.trip_s(1.0) is None, "that was no trip to the engine"
    both.near.before_find = lambda _: None
    both.far.rests = True
    both.find(1, deadline_s=clock.now_s + 2)
    assert both.near.deadlines_s[1] == clock.now_s + 2, "nobody else is asked"


def test_trips_to_the_engine_are_measured_without_those_to_the_bucket(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    both.store.read_log(b"", soon())

    def take(seconds: float) -> Callable[[float], None]:
        def step(_: float) -> None:
            clock.now_s += seconds

        return step

    both.near.before_find, both.far.before_find = take(0.25), take(1.0)
    both.find(1)
    assert both.store.trip_s(1.25) == 0.25


def test_the_bucket_is_not_asked_where_two_trips_take_too_long(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    both.store.read_log(b"", soon())
    asked = threading.Event()

    def trip(_: float) -> None:
        clock.now_s += 0.01
        asked.set()

    both.far.before_find = trip
    both.find(1, deadline_s=clock.now_s + 1)
    for _ in range(RETRY_EVERY - 1):
        both.find(1, deadline_s=clock.now_s + 0.015)
    assert len(both.far.looked_up) == 1
    asked.clear()
    both.far.before_find = lambda _: asked.set()  # it has become faster
    both.find(1, 2, deadline_s=clock.now_s + 0.015)
    assert asked.wait(PATIENCE_S)
    eventually(lambda: not both.store._probes)
    assert both.far.looked_up[1:] == [[key(1)]], "one key, and nobody waited for it"
    both.find(1, deadline_s=clock.now_s + 0.015)
    assert len(both.far.looked_up) == 3


def test_errors_are_neither_fast_trips_nor_missing_objects(both: Both) -> None:
    both.put(1)
    both.near.values.clear()
    both.far.cut_off = True
    assert both.find(1) == [None]
    both.far.cut_off = False
    assert not both.store._trips._took_s
    both.put(1)
    assert both.far.written == [key(1)]


def test_only_what_is_vouched_for_is_found(both: Both) -> None:
    both.fill(1, 2)
    both.fill(3, stamp=NO_STAMP)
    both.store.allows = lambda of, _: of != key(2)
    assert both.near.allows is both.store.allows
    assert both.find(1, 2, 3) == [replace(entry(1), location=IN_BUCKET), None, None]


def test_the_bucket_has_what_the_engine_is_not_believed(both: Both) -> None:
    both.near.values[key(1)] = (entry(1, 5), data_of(1))
    both.fill(1, stamp=6)
    both.store.allows = lambda _, stamp: stamp == 6
    assert both.find(1) == [replace(entry(1, 6), location=IN_BUCKET)]


def test_a_bucket_whose_log_can_not_be_read_is_not_read(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    both.fill(1)
    both.put(2)
    both.store.read_log(b"", soon())
    clock.now_s += LOG_READ_WITHIN_S + 0.01
    assert both.find(1) == [None]
    both.near.gets = UNAVAILABLE
    assert both.get(entry(2)) == [UNAVAILABLE]
    both.near.records = []
    both.store.log([b"one", b"two"], soon())
    both.store.read_log(b"", soon())
    assert both.find(1) == [None], "that was not its end"
    both.store.read_log(b"1", soon())
    assert both.find(1) != [None]


def test_a_log_that_does_not_answer_is_not_read(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Behind(both.near, both.far)) as store:
        monkeypatch.setattr(both.near, "read_log", lambda *_: None)
        assert store.read_log(b"", soon()) is None
        both.fill(1)
        assert store.find([key(1)], soon()) == [None]
        monkeypatch.setattr(both.near, "read_log", lambda *_: LogPage([]))
        assert store.read_log(b"", soon()) == LogPage([])
        assert store.find([key(1)], soon()) != [None]


# ---- payloads


def test_both_are_read_at_the_same_time(both: Both) -> None:
    both.put(1, 2)
    del both.near.values[key(2)]
    found = [each for each in both.find(1, 2) if each]
    meeting = threading.Barrier(2)
    both.near.before_get = both.far.before_get = lambda: meeting.wait(PATIENCE_S)
    assert both.get(*found) == [DONE, DONE]
    assert both.store.counts()["bucket_fetched"] == 1


@pytest.mark.parametrize("missed", [ABSENT, UNAVAILABLE, DAMAGED])
def test_what_the_engine_does_not_deliver_comes_from_the_bucket(
    both: Both, missed: Outcome
) -> None:
    both.put(1, 2)
    both.near.gets = missed
    assert both.get(entry(1), entry(2), entry(3)) == [DONE, DONE, min_of(missed, ABSENT)]
    assert both.store.node_of(entry(1)) == "objects"
    assert not both.store.keeps(entry(1)), "the engine gets it again"
    both.near.gets = None
    assert both.get(entry(1)) == [DONE]
    assert both.store.node_of(entry(1)) == "engine"
    assert both.store.keeps(entry(1))


def min_of(*outcomes: Outcome) -> Outcome:
    return UNAVAILABLE if UNAVAILABLE in outcomes else outcomes[0]


def test_other_bytes_of_the_bucket_are_not_served(both: Both) -> None:
    """The engine vouches for bytes that the bucket has not."""
    both.fill(1)
    newer = entry(1, data=b"other bytes")
    both.near.values[key(1)] = (newer, b"other bytes")
    both.near.gets = UNAVAILABLE
    assert both.get(newer) == [UNAVAILABLE]


def test_nodes_that_are_followed_by_a_bucket_are_not_waited_for_to_the_end(both: Both) -> None:
    assert both.near.followed()
    both.far.rests = True
    assert not both.near.followed()


# ---- offers


@pytest.mark.parametrize("near", [None, UNAVAILABLE, REFUSED])
@pytest.mark.parametrize("far", [True, False])
def test_an_offer_is_done_if_one_of_them_took_it(
    both: Both, near: Outcome | None, far: bool
) -> None:
    both.near.puts, both.far.cut_off = near, not far
    assert both.put(1) == [DONE if far or near is None else near]
    counts = both.store.counts()
    assert (counts["bucket_offered"], counts["bucket_missed"]) == ((1, 0) if far else (0, 1))
    assert counts["second_came"] == 3


def test_a_bucket_that_has_an_entry_gets_it_no_second_time(both: Both) -> None:
    both.put(1, 2)
    both.put(1, 2, 3)
    both.fill(4)
    both.find(4)
    both.put(4)
    assert both.far.written == [key(1), key(2), key(3)]
    both.near.values[key(5)] = (entry(5), data_of(5))
    assert both.get(entry(5)) == [DONE]
    both.put(5)
    assert key(5) not in both.far.written, "it came from a node that gave it to the bucket, too"


@pytest.mark.parametrize("how", ["gone", "damaged", "dropped", "looked up", "not allowed"])
def test_what_the_bucket_lost_it_gets_again(both: Both, how: str) -> None:
    both.put(1)
    path = both.far._path(key(1))
    match how:
        case "gone" | "looked up":
            ObjectStore.drop(both.far, [key(1)], soon())
        case "damaged":
            object_store.obstore.put(both.far._store, path, b"nonsense" * 30)
        case "dropped":
            assert both.store.drop([key(1)], soon()) == []
        case _:
            both.store.allows = lambda _, stamp: stamp == 8
    if how in ("gone", "damaged"):
        assert both.get(replace(entry(1), location=IN_BUCKET)) != [DONE]
    elif how == "looked up":
        both.near.values.clear()
        assert both.find(1) == [None]
    both.put(1, stamp=8)
    assert both.far.written == [key(1)] * 2
    both.near.values.clear()
    assert both.find(1) == [replace(entry(1, 8), location=IN_BUCKET)]


def test_what_is_remembered_of_the_bucket_is_bounded(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.store._has.most = both.store._partly.most = 3
    monkeypatch.setattr(behind, "MAX_FELL_BACK", 3)
    both.put(*range(10))
    both.near.gets = UNAVAILABLE
    for number in range(10):
        assert both.get(entry(number)) == [DONE]
    both.far.cut_off = True
    both.put(*range(20, 30))
    assert len(both.store._has) == len(both.store._partly) == 3
    assert len(both.store._fell_back) <= 4


def test_payloads_are_needed_only_where_somebody_takes_them(both: Both) -> None:
    near = Near()
    near.needs_payloads = False
    with closing(Behind(near, both.far)) as store:
        nodes = Both(near, both.far, store)
        assert not store.needs_payloads
        assert store.takes_payload(key(1)), "the bucket does"
        nodes.put(1)
        assert not store.takes_payload(key(1)), "it has it"
        both.far.rests = True
        assert not store.takes_payload(key(2)), "it takes nothing now"
        assert store.put([Offer(entry(2), [memoryview(b"")], 2**50)], soon()) == [DONE]
        assert both.far.written == [key(1)], "no object without its payload"
        assert not store.keeps(entry(2))
    assert both.store.takes_payload(key(1))


def test_nothing_is_written_without_a_stamp(both: Both) -> None:
    assert both.put(1, stamp=NO_STAMP) == [DONE]
    assert both.far.written == []


def test_a_bucket_that_was_down_gets_what_is_used_once_it_takes_offers_again(both: Both) -> None:
    both.far.cut_off = True
    both.put(1, 2)
    assert both.touch(1, 2, 3) == [key(3)], "to offer it again would not help"
    both.far.cut_off = False
    both.put(3)
    assert both.touch(1, 3) == [key(1)]
    both.put(1)
    assert both.touch(1, 2, 3) == [key(2)]
    assert both.far.written == [key(3), key(1)]


def test_a_slow_bucket_has_half_of_what_is_left(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    deadline_s = clock.now_s + 10
    both.store.put([offer(1)], deadline_s)
    assert both.far.put_deadlines_s == [clock.now_s + 5]
    clock.now_s = deadline_s
    assert both.store.put([offer(2)], deadline_s) == [DONE]
    assert both.far.written == [key(1)]
    assert not both.store.health().get("objects"), "it is not blamed for the time of others"


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("far", [True, False])
def test_a_drop_is_done_if_both_did_it(both: Both, near: bool, far: bool) -> None:
    both.put(1, 2)
    both.near.drops, both.far.cut_off = near, not far
    left = both.store.drop([key(1), key(2)], soon())
    assert left == ([] if near and far else [key(1), key(2)])


# ---- the whole


def test_what_is_said_is_said_of_both(both: Both) -> None:
    assert both.store.problems() == ["near: bad"]
    assert both.store.health() == {"engine": "unwell"}
    both.far.cut_off = True
    assert both.store.health() == {"engine": "unwell", "objects": "cut off"}
    assert [node.name for node in both.store.statuses()] == ["engine", "objects"]
    assert both.store.log_every_s == both.near.log_every_s
    both.store.close()
    assert both.near.closed
    assert both.find(1) == [None]
    assert both.put(1) == [DONE], "the engine of this test does not mind"
    assert both.store.drop([key(1)], soon()) == [key(1)]


def answers(of: Callable[[bytes], bytes] = lambda value: value) -> Callable[[Bucket], bool]:
    """A server that has every object, as `of` changes it."""

    def answer(request: Bucket) -> bool:
        if request.command == "PUT":
            return False
        number = int.from_bytes(bytes.fromhex(request.path.rpartition("/")[2]), "big")
        value = encode_header(entry(number)) + data_of(number)
        last = min(int(request.headers["Range"].rpartition("-")[2]), len(value) - 1)
        body = of(value[: last + 1])
        size = f"bytes 0-{last}/{len(value)}"
        request.answer(206, body, **{"Content-Range": size})
        return True

    return answer


def throttled(request: Bucket) -> bool:
    request.answer(503, b"<Error><Code>SlowDown</Code></Error>")
    return True


def flipped(value: bytes) -> bytes:
    """In the payload, so that only a read of all of it tells."""
    if len(value) <= HEADER_BYTES:
        return value
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize("fault", ["none", "slow", "throttled", "truncated", "flipped", "down"])
def test_a_bucket_with_faults_is_a_miss_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ends = threading.Event()
    faults: dict[str, Any] = {
        "none": answers(),
        "slow": lambda _: not ends.wait(PATIENCE_S),
        "throttled": throttled,
        "truncated": break_off,
        "flipped": answers(flipped),
        "down": answers(),
    }
    near = Near()
    with bucket(monkeypatch) as (handler, far), closing(Behind(near, far)) as store:
        if fault == "down":
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            far = store._far = ObjectStore("s3://bucket/prefix", "test")  # type: ignore[misc]
        handler.fault = staticmethod(faults[fault])
        near.put([offer(1)], soon())
        store.read_log(b"", soon())
        waits_s = 0.3 if fault == "slow" else PATIENCE_S
        found = store.find([key(1), key(2), key(3)], monotonic() + waits_s)
        assert found[0] == entry(1)
        good = fault in ("none", "flipped")
        assert [each is not None for each in found[1:]] == [good, good]
        at_far = [replace(entry(number), location=IN_BUCKET) for number in (2, 3)]
        wanted = [
            Wanted(each, memoryview(bytearray(each.payload_bytes))) for each in (entry(1), *at_far)
        ]
        outcomes = store.get(wanted, monotonic() + waits_s)
        assert outcomes[0] is DONE
        assert wanted[0].room == data_of(1)
        expected = {"none": DONE, "flipped": DAMAGED}.get(fault, UNAVAILABLE)
        assert outcomes[1:] == [expected] * 2
        assert (wanted[1].room == data_of(2)) is (fault == "none")
        before = len(near.values)
        assert store.put([offer(9)], soon() if fault != "slow" else monotonic() + 0.3) == [DONE]
        assert len(near.values) == before + 1
        if fault in ("slow", "throttled", "truncated", "down"):
            assert "objects" in store.health()
            assert store.counts()["bucket_missed"] == 1
        ends.set()
        far.close()
