"""Group commit: every token is answered once, whatever the store does, and the thread lives on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.record import RecordHead
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.committer import CommitResult, Committer
from prefixd.tiers.disk import DiskStore
from prefixd.tiers.store import EntryWriter, StoreError, StoreFull, Usage

from .contract.faulty import Crash, Fault, FaultyStore
from .daemon import eventually
from .running import PATIENCE_S, in_loop, key, payload, running

DATA = payload(1, 100)


class Bench:
    """A committer in front of a disk store. `results` come in the order of `done`."""

    def __init__(self, directory: Path, retry_s: float = 3600) -> None:
        inner = DiskStore(directory, 2**20, sync=False)
        self.store = FaultyStore(inner, on_call=self._on_call)
        self.results: SimpleQueue[CommitResult] = SimpleQueue()
        #: what the next calls of `apply` raise; None: nothing
        self.raises: deque[BaseException | None] = deque()
        self.applies = 0
        self._entered = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._tokens = 0
        self.committer = Committer(self.store, self.results.put, retry_s=retry_s)

    def _on_call(self, operation: str) -> None:
        if operation == "apply":
            self.applies += 1
            self._entered.set()
            assert self._gate.wait(PATIENCE_S)
            problem = self.raises.popleft() if self.raises else None
            if problem is not None:
                raise problem

    def writer(self, of: Key, data: bytes = DATA) -> EntryWriter:
        self._tokens += 1
        head = RecordHead(of, self._tokens, len(data), 16, 0, SaveReason.COLD, Tier.DISK, 1)
        writer = self.store.writer(head, ())
        writer.write(data)
        writer.seal()
        return writer

    def commit(self, *keys: Key) -> list[int]:
        """Order the commit of new writes; their tokens."""
        writes = []
        for of in keys:
            writer = self.writer(of)
            writes.append((self._tokens, writer))
        self.committer.commit(writes)
        return [token for token, _ in writes]

    def result(self) -> CommitResult:
        return self.results.get(timeout=PATIENCE_S)

    def saved(self, *keys: Key) -> None:
        """Commit, successfully."""
        tokens = self.commit(*keys)
        assert self.result() == CommitResult(tuple(tokens), None)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """The thread is in a commit, of key 99; what is ordered meanwhile is its next batch."""
        self._entered.clear()
        self._gate.clear()
        (token,) = self.commit(key(99))
        assert self._entered.wait(PATIENCE_S)
        yield
        self._gate.set()
        assert self.result() == CommitResult((token,), None)

    def failure(self) -> str | None:
        """What it says of itself once everything that was ordered is done."""
        with self.held_up():
            return self.committer.failure

    def keys(self) -> set[Key]:
        held = self.store.held_keys()
        assert held is not None
        return held - {key(99)}

    def close(self) -> None:
        self._gate.set()
        self.committer.close()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


# ---- when all is well


def test_what_waits_while_the_store_is_busy_goes_into_one_transaction(bench: Bench) -> None:
    with bench.held_up():
        tokens = bench.commit(key(2), key(3)) + bench.commit(key(4))
    assert bench.result() == CommitResult(tuple(tokens), None)
    assert bench.applies == 2
    assert bench.keys() == {key(2), key(3), key(4)}
    assert bench.failure() is None


def test_an_erasure_happens_before_a_save_that_was_ordered_after_it(bench: Bench) -> None:
    bench.saved(key(1))
    with bench.held_up():
        bench.committer.erase([key(1)])
        tokens = bench.commit(key(1))
    assert bench.result() == CommitResult(tuple(tokens), None)
    assert bench.keys() == {key(1)}


def test_use_is_recorded(bench: Bench) -> None:
    bench.saved(key(1))
    bench.committer.record_usage([Usage(key(1), 77, 5), Usage(key(2), 78, 6)])
    bench.committer.close()
    (entry,) = bench.store.recover({}).entries
    assert (entry.last_used_ns, entry.hits) == (77, 5)


def test_closing_finishes_what_is_pending(bench: Bench) -> None:
    bench.saved(key(1))
    with bench.held_up():
        bench.commit(key(2))
        bench.committer.erase([key(1)])
        closing = threading.Thread(target=bench.committer.close)
        closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert bench.keys() == {key(2)}


# ---- when the store fails


@pytest.mark.parametrize("problem", [StoreFull("no room"), StoreError("it broke")], ids=str)
def test_one_entry_that_is_refused_takes_no_other_with_it(
    bench: Bench, problem: StoreError
) -> None:
    with bench.held_up():
        tokens = bench.commit(key(1), key(2), key(3))
        # The batch of three, then the second of them by itself.
        bench.raises.extend([None, problem, None, problem])
    results = [bench.result() for _ in tokens]
    assert [(one.tokens, one.error) for one in results] == [
        ((tokens[0],), None),
        ((tokens[1],), problem),
        ((tokens[2],), None),
    ]
    assert bench.keys() == {key(1), key(3)}


@pytest.mark.parametrize(
    "problem",
    [
        StoreError("it broke"),
        KeyError("a bug"),
        MemoryError(),
        SystemExit(1),
        KeyboardInterrupt(),
        Crash(),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_no_exception_ends_the_thread(bench: Bench, problem: BaseException) -> None:
    """Saves would wait for ever, and health would stay green."""
    bench.raises.append(problem)
    (token,) = bench.commit(key(1))
    failed = bench.result()
    assert failed.tokens == (token,)
    assert isinstance(failed.error, StoreError)
    assert not isinstance(failed.error, StoreFull)
    assert bench.failure() == str(failed.error) != ""
    bench.saved(key(2))
    assert bench.failure() is None
    assert bench.keys() == {key(2)}


def test_a_full_device_is_an_answer_and_no_illness(bench: Bench) -> None:
    bench.store.arm(Fault.FULL)
    bench.commit(key(1))
    assert isinstance(bench.result().error, StoreFull)
    assert bench.failure() is None


@pytest.mark.parametrize(
    ("problem", "failure"),
    [(KeyError("a bug"), "KeyError: 'a bug'"), (StoreFull("no room"), None)],
    ids=["bug", "full"],
)
def test_use_that_cannot_be_recorded_is_judged_alike(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, problem: Exception, failure: str | None
) -> None:
    asked = threading.Event()

    def fail(_usages: object) -> None:
        asked.set()
        raise problem

    monkeypatch.setattr(bench.store, "record_usage", fail)
    bench.committer.record_usage([Usage(key(1), 1, 1)])
    assert asked.wait(PATIENCE_S)
    assert bench.failure() == failure


def test_a_store_that_failed_is_tried_again_without_traffic(tmp_path: Path) -> None:
    """A daemon that is ill gets no requests: it has to find out by itself that it is well."""
    bench = Bench(tmp_path, retry_s=0.001)
    bench.raises.extend([StoreError("it broke"), StoreError("still"), StoreError("and still")])
    bench.commit(key(1))
    assert bench.result().error is not None
    eventually(lambda: bench.committer.failure is None)
    assert not bench.raises
    assert bench.applies == 4
    bench.close()


def test_a_store_that_is_well_is_not_tried(tmp_path: Path) -> None:
    bench = Bench(tmp_path, retry_s=0.001)
    bench.saved(key(1))
    bench.committer.close()
    assert bench.applies == 1
    bench.close()


# ---- erasures that fail


def test_an_erasure_that_failed_happens_with_whatever_comes_next(bench: Bench) -> None:
    bench.saved(key(1))
    with bench.held_up():
        bench.committer.erase([key(1)])
        bench.raises.extend([None, StoreError("not now")])
    bench.saved(key(2))
    bench.saved(key(3))
    assert bench.keys() == {key(2), key(3)}


def test_an_erasure_that_failed_is_tried_again_by_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path, retry_s=0.001)
    bench.saved(key(1))
    bench.raises.extend([StoreFull("no room"), StoreFull("no room")])
    bench.committer.erase([key(1)])
    eventually(lambda: bench.keys() == set())
    bench.close()


def test_an_erasure_that_failed_is_tried_again_at_the_end(bench: Bench) -> None:
    bench.saved(key(1))
    bench.raises.append(StoreError("not now"))
    bench.committer.erase([key(1)])
    bench.committer.close()
    assert bench.keys() == set()


def test_an_erasure_that_failed_never_takes_what_was_saved_since(bench: Bench) -> None:
    """Its key was saved again, with it or later, and that was acknowledged."""
    bench.saved(key(1), key(2))
    with bench.held_up():
        bench.committer.erase([key(1), key(2)])
        tokens = bench.commit(key(1))
        # Both together, then the erasures by themselves; the save succeeds.
        bench.raises.extend([None, StoreError("not now"), StoreError("not now")])
    assert bench.result() == CommitResult(tuple(tokens), None)
    bench.saved(key(3))
    assert bench.keys() == {key(1), key(3)}


# ---- in a daemon


@in_loop
async def test_a_save_that_a_store_refuses_is_told_so_and_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, wrap={Tier.DISK: FaultyStore}) as daemon:
        session = await daemon.open()
        store = daemon.core.stores[Tier.DISK]
        assert isinstance(store, FaultyStore)
        for fault, status in (
            (Fault.FULL, pb.SAVE_STATUS_DEVICE_FULL),
            (Fault.WRITE_ERROR, pb.SAVE_STATUS_FAILED),
        ):
            store.arm(fault)
            assert await session.save({key(1): DATA}, Tier.DISK) == [status]
            assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
            ledger = daemon.tables.ledgers[Tier.DISK]
            assert (ledger.reserved_bytes, ledger.published_bytes) == (0, 0)
            assert daemon.core.state.check() == []
        assert "disk commit" in daemon.core.ill()
        stats = await daemon.admin.Stats(pb.StatsRequest())
        assert "a failed write, on purpose" in stats.health
        assert daemon.tables.counters.failed_saves == 2
        # It works again, and health says so with the next save at the latest.
        assert await session.save({key(1): DATA}, Tier.DISK) == [pb.SAVE_STATUS_SAVED]
        await daemon.until(lambda: not daemon.core.ill())
        assert (await daemon.admin.Stats(pb.StatsRequest())).health == "serving"
        assert await session.restore(key(1)) == DATA
        await daemon.assert_idle()
