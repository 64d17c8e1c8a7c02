"""Group commit: every token gets one result, whatever the store does, and the thread lives on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
from structlog.testing import capture_logs

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import EntryRecord
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import Tier
from prefixd.server.runtime.committer import CommitResult, Committer, Committers
from prefixd.tiers.arena_stores import DiskStore, RamStore, ShmStore
from prefixd.tiers.store import EntryWriter, Store, StoreError, StoreFull, Usage
from tests.contract.faulty import Crash, Fault, FaultyStore
from tests.support.daemon import eventually
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import SLAB, key, payload, running
from tests.support.stores import held, make_ready, record_of, sealed

DATA = payload(1, 100)


class Bench:
    """A committer in front of a store with records. `results`: those of `done`, in order."""

    def __init__(self, directory: Path, *, shm: bool = False, retry_s: float = 3600) -> None:
        kind = ShmStore if shm else DiskStore
        self.directory = directory
        self.store = FaultyStore(kind(directory, 2**20, SLAB), on_call=self._on_call)
        make_ready(self.store)
        self.results: SimpleQueue[CommitResult] = SimpleQueue()
        #: what the next calls of `apply` raise; None: they succeed
        self.raises: deque[BaseException | None] = deque()
        self.applies = 0
        #: the names of the threads that called `apply`
        self.threads: set[str] = set()
        self._entered = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._tokens = 0
        self.committer = Committer(self.store, self.results.put, retry_s=retry_s)

    def _on_call(self, operation: str) -> None:
        if operation == "apply":
            self.applies += 1
            self.threads.add(threading.current_thread().name)
            self._entered.set()
            assert self._gate.wait(PATIENCE_S)
            problem = self.raises.popleft() if self.raises else None
            if problem is not None:
                raise problem

    def writer(self, of: Key) -> EntryWriter:
        """A sealed write of a new entry, whose generation and slab are its token."""
        self._tokens += 1
        location = (self._tokens * SLAB, SLAB)
        return sealed(
            self.store, record_of(self.store, of, len(DATA), self._tokens, location), DATA
        )

    def commit(self, *keys: Key) -> list[int]:
        """Commit new writes, without waiting. Returns their tokens."""
        writes = []
        for of in keys:
            writer = self.writer(of)
            writes.append((self._tokens, writer))
        self.committer.commit(writes)
        return [token for token, _ in writes]

    def result(self) -> CommitResult:
        return self.results.get(timeout=PATIENCE_S)

    def saved(self, *keys: Key) -> list[EntryRecord]:
        """Commit, and wait for the success."""
        writes = []
        for of in keys:
            writer = self.writer(of)
            writes.append((self._tokens, writer))
        self.committer.commit(writes)
        assert self.result() == CommitResult(tuple(token for token, _ in writes), None)
        return [writer.entry for _, writer in writes]

    def forget(self, *entries: EntryRecord) -> None:
        self.store.forget(entries)
        self.committer.erase()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Around calls for one batch: meanwhile the thread is busy with a commit of key 99."""
        self._entered.clear()
        self._gate.clear()
        (token,) = self.commit(key(99))
        assert self._entered.wait(PATIENCE_S)
        yield
        self._gate.set()
        assert self.result() == CommitResult((token,), None)

    def failure(self) -> str | None:
        """Its failure once everything that was pending is done."""
        with self.held_up():
            return self.committer.failure

    def keys(self) -> set[Key]:
        return held(self.store).keys() - {key(99)}

    def close(self) -> None:
        self._gate.set()
        self.committer.close()
        self.store.close()


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*, shm: bool = False, retry_s: float = 3600) -> Bench:
        made.append(Bench(tmp_path / "tier", shm=shm, retry_s=retry_s))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(new: Callable[..., Bench]) -> Bench:
    return new()


# ---- when all is well


def test_what_waits_while_the_store_is_busy_goes_into_one_batch(bench: Bench) -> None:
    with bench.held_up():
        tokens = bench.commit(key(2), key(3)) + bench.commit(key(4))
    assert bench.result() == CommitResult(tuple(tokens), None)
    assert bench.applies == 2
    assert bench.keys() == {key(2), key(3), key(4)}
    assert bench.failure() is None


def test_a_save_takes_the_place_of_an_entry_that_was_forgotten(bench: Bench) -> None:
    (old,) = bench.saved(key(1))
    with bench.held_up():
        bench.forget(old)
        tokens = bench.commit(key(1))
    assert bench.result() == CommitResult(tuple(tokens), None)
    assert held(bench.store)[key(1)] == tokens[0]
    assert bench.store.unerased == 0


def test_what_is_forgotten_is_erased_without_any_save(bench: Bench) -> None:
    entries = bench.saved(key(1), key(2))
    bench.forget(*entries)
    eventually(lambda: bench.store.unerased == 0)
    assert bench.keys() == set()


def test_use_is_recorded(bench: Bench) -> None:
    (entry,) = bench.saved(key(1))
    bench.committer.record_usage([Usage(entry, 77, 5)])
    bench.committer.close()
    bench.store.close()
    again = DiskStore(bench.directory, 2**20, SLAB)
    ((found,),) = [batch.entries for batch in again.recover()]
    again.close()
    assert (found.last_used_ns, found.hits) == (77, 5)


def test_closing_finishes_what_is_pending(bench: Bench) -> None:
    (old,) = bench.saved(key(1))
    with bench.held_up():
        bench.commit(key(2))
        bench.forget(old)
        closing = threading.Thread(target=bench.committer.close)
        closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert bench.keys() == {key(2)}


# ---- when the store fails


@pytest.mark.parametrize("shm", [False, True], ids=["disk", "shm"])
@pytest.mark.parametrize("problem", [StoreFull("no room"), StoreError("it broke")], ids=str)
def test_one_entry_that_is_refused_takes_no_other_with_it(
    new: Callable[..., Bench], problem: StoreError, *, shm: bool
) -> None:
    bench = new(shm=shm)
    # Fails the batch of three (in memory also the first attempt), then its second write.
    bench.raises.extend([*[problem] * (1 + shm), None, problem, None])
    tokens = bench.commit(key(1), key(2), key(3))
    results = [bench.result() for _ in tokens]
    assert [(one.tokens, one.error) for one in results] == [
        ((tokens[0],), None),
        ((tokens[1],), problem),
        ((tokens[2],), None),
    ]
    assert bench.keys() == {key(1), key(3)}
    # The later writes that succeeded do not clear the failure.
    eventually(lambda: str(problem) in (bench.committer.full, bench.committer.failure))


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


def test_a_full_device_is_an_answer_and_does_not_make_the_store_unhealthy(bench: Bench) -> None:
    bench.store.arm(Fault.FULL)
    bench.commit(key(1))
    assert isinstance(bench.result().error, StoreFull)
    assert bench.failure() is None


@pytest.mark.parametrize(
    ("problem", "failure"),
    [(KeyError("a bug"), "KeyError: 'a bug'"), (StoreFull("no room"), "no room")],
    ids=["bug", "full"],
)
def test_use_that_cannot_be_recorded_is_judged_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, problem: Exception, failure: str
) -> None:
    """Usage lies in a file of its own: a probe of the other file proves nothing about it."""
    (entry,) = bench.saved(key(1))
    tried, problems = SimpleQueue[None](), [problem]

    def record(_usages: object) -> None:
        tried.put(None)
        if problems:
            raise problems.pop()

    monkeypatch.setattr(bench.store, "record_usage", record)
    bench.committer.record_usage([Usage(entry, 1, 1)])
    tried.get(timeout=PATIENCE_S)
    assert bench.failure() is None
    assert bench.committer.usage_failure == failure
    bench.saved(key(2))
    assert bench.committer.usage_failure == failure, "a save says nothing of it"
    bench.committer.record_usage([Usage(entry, 1, 1)])
    tried.get(timeout=PATIENCE_S)
    assert bench.failure() is None
    assert bench.committer.usage_failure is None


def test_a_full_device_is_told_once_until_it_has_room(bench: Bench) -> None:
    """It is not logged for every save."""
    with capture_logs() as logs:
        bench.raises += [StoreFull("no room"), StoreFull("no room")]
        for number in (1, 2):
            bench.commit(key(number))
            assert isinstance(bench.result().error, StoreFull)
        bench.saved(key(3))
        bench.saved(key(4))
    assert bench.committer.full is None
    assert [line["event"] for line in logs] == ["device_full", "commits_succeed"]


def test_that_there_is_room_again_is_found_out_without_a_save(new: Callable[..., Bench]) -> None:
    bench = new(retry_s=0.001)
    bench.raises.append(StoreFull("no room"))
    bench.commit(key(1))
    assert isinstance(bench.result().error, StoreFull)
    eventually(lambda: bench.committer.full is None)


def test_a_committer_that_dies_says_so(tmp_path: Path) -> None:
    """Otherwise saves would wait for ever."""
    store = DiskStore(tmp_path, 2**20, SLAB)
    make_ready(store)
    died = SimpleQueue[BaseException]()

    def told(_result: CommitResult) -> None:
        raise KeyError("a bug in what is told")

    committer = Committer(store, told, died=died.put)
    record = record_of(store, key(1), len(DATA), 1, (SLAB, SLAB))
    committer.commit([(1, sealed(store, record, DATA))])
    assert isinstance(died.get(timeout=PATIENCE_S), KeyError)
    committer.close()
    store.close()


# ---- until it works again


def test_a_store_that_failed_is_tried_again_without_traffic(new: Callable[..., Bench]) -> None:
    """An unhealthy daemon gets no requests: it has to notice by itself that it is well again."""
    bench = new(retry_s=0.001)
    faults = [Fault.WRITE_ERROR, *[Fault.PROBE_ERROR] * 3]
    for fault in faults:
        bench.store.arm(fault)
    bench.commit(key(1))
    assert bench.result().error is not None
    eventually(lambda: bench.store.happened == faults and bench.committer.failure is None)
    assert bench.applies == 1, "the probe is a write by itself"


def test_a_store_that_failed_gets_no_save_before_a_real_write_succeeds(bench: Bench) -> None:
    bench.store.arm(Fault.WRITE_ERROR)
    bench.commit(key(1))
    assert str(bench.result().error) == "a failed write, on purpose"
    for _ in range(3):
        bench.store.arm(Fault.PROBE_ERROR)
        tokens = bench.commit(key(1), key(2))
        refused = bench.result()
        assert refused.tokens == tuple(tokens)
        assert str(refused.error) == "a failed probe, on purpose"
    assert bench.applies == 1
    assert bench.failure() == "a failed probe, on purpose"
    assert bench.failure() is None
    assert bench.keys() == set()


def test_a_store_that_is_well_is_not_tried(new: Callable[..., Bench]) -> None:
    bench = new(retry_s=0.001)
    bench.store.arm(Fault.PROBE_ERROR)
    bench.saved(key(1))
    bench.committer.close()
    assert bench.applies == 1
    assert bench.store.happened == []


# ---- erasures that fail


@pytest.mark.parametrize("fault", [Fault.FULL, Fault.WRITE_ERROR])
def test_an_erasure_that_failed_is_tried_again_by_itself(
    new: Callable[..., Bench], fault: Fault
) -> None:
    bench = new(retry_s=0.001)
    entries = bench.saved(key(1))
    for _ in range(3):
        bench.store.arm(fault)
    bench.forget(*entries)
    eventually(lambda: bench.store.unerased == 0)
    assert bench.store.happened == [fault] * 3
    assert bench.keys() == set()
    eventually(lambda: bench.committer.failure is None)


@pytest.mark.parametrize("problem", [StoreFull("no room"), StoreError("it broke")], ids=str)
def test_an_erasure_that_failed_happens_with_the_next_save(
    bench: Bench, problem: StoreError
) -> None:
    """And erases nothing that was saved since."""
    entries = bench.saved(key(1), key(2))
    # Before `forget`, because the first byte of a write also erases.
    writer = bench.writer(key(1))
    bench.raises.append(problem)
    bench.forget(*entries)
    eventually(lambda: bench.applies == 2)
    assert bench.store.unerased == 2
    bench.committer.commit([(1000, writer)])
    assert bench.result() == CommitResult((1000,), None)
    assert bench.store.unerased == 0
    assert bench.keys() == {key(1)}
    assert held(bench.store)[key(1)] == writer.entry.generation


def test_an_erasure_that_failed_is_tried_again_at_the_end(bench: Bench) -> None:
    entries = bench.saved(key(1))
    bench.raises.append(StoreError("not now"))
    bench.forget(*entries)
    eventually(lambda: bench.applies == 2)
    bench.committer.close()
    assert bench.keys() == set()


# ---- a store in memory


def test_a_store_in_memory_commits_at_once(new: Callable[..., Bench]) -> None:
    bench = new(shm=True)
    tokens = bench.commit(key(1), key(2))
    assert bench.results.get_nowait() == CommitResult(tuple(tokens), None)
    assert bench.threads == {threading.current_thread().name}
    assert bench.keys() == {key(1), key(2)}


def test_a_store_in_memory_that_fails_is_left_to_the_thread(new: Callable[..., Bench]) -> None:
    bench = new(shm=True)
    bench.raises.extend([StoreError("it broke"), StoreError("again")])
    bench.commit(key(1))
    assert str(bench.result().error) == "again"
    assert bench.threads == {threading.current_thread().name, "prefixd-shm-commit"}
    eventually(lambda: bench.committer.failure == "again")
    # It is unhealthy: the thread probes the store before anything else.
    bench.store.arm(Fault.PROBE_ERROR)
    bench.commit(key(1))
    assert str(bench.result().error) == "a failed probe, on purpose"
    bench.saved(key(1))
    eventually(lambda: bench.committer.failure is None)
    bench.saved(key(2))
    assert bench.keys() == {key(1), key(2)}


# ---- in a daemon


@pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)
@in_loop
async def test_a_save_that_a_store_refuses_is_told_so_and_leaves_nothing(
    tmp_path: Path, tier: Tier
) -> None:
    async with running(tmp_path, wrap={tier: FaultyStore}) as daemon:
        session = await daemon.open()
        store = daemon.core.stores[tier]
        assert isinstance(store, FaultyStore)
        for fault, status in (
            (Fault.FULL, pb.SAVE_STATUS_DEVICE_FULL),
            (Fault.WRITE_ERROR, pb.SAVE_STATUS_FAILED),
        ):
            # A store in memory is tried twice.
            for _ in range(1 if store.blocking else 2):
                store.arm(fault)
            assert await session.save({key(1): DATA}, tier) == [status]
            assert await daemon.presence(key(1)) == [pb.PRESENCE_ABSENT]
            ledger = daemon.tables.ledgers[tier]
            assert (ledger.reserved_bytes, ledger.published_bytes) == (0, 0)
            assert daemon.core.state.check() == []
        await daemon.until(lambda: f"{tier.label} commit" in daemon.core.unhealthy())
        stats = await daemon.admin.Stats(pb.StatsRequest())
        assert "a failed write, on purpose" in stats.health
        assert daemon.tables.counters.failed_saves == 2
        # It works again, and health shows it after the next save at the latest.
        assert await session.save({key(1): DATA}, tier) == [pb.SAVE_STATUS_SAVED]
        await daemon.until(lambda: not daemon.core.unhealthy())
        assert (await daemon.admin.Stats(pb.StatsRequest())).health == "serving"
        assert await session.restore(key(1)) == DATA
        await daemon.assert_idle()


@in_loop
async def test_the_device_is_timed_apart(tmp_path: Path) -> None:
    """Its sync is timed; shm has none."""
    async with running(tmp_path) as daemon:
        session = await daemon.open()
        for tier in Tier:
            assert await session.save({key(tier): DATA}, tier) == [pb.SAVE_STATUS_SAVED]
        committers = daemon.core.committers
        assert committers.syncs().keys() == {Tier.DISK}
        sync, commit = committers.syncs()[Tier.DISK], committers.latencies()[Tier.DISK]
        assert sum(sync.counts) == sum(commit.counts) == 1
        assert sync.total <= commit.total


# ---- the committers of all tiers


RECORDED = pytest.mark.parametrize("tier", [Tier.SHM, Tier.DISK], ids=lambda tier: tier.label)


class ThreeStores:
    """Three faulty stores, their committers, and the results of their commits."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stores = {store.tier: FaultyStore(store) for store in self._open()}
        for store in self.stores.values():
            make_ready(store)
        self.results: SimpleQueue[CommitResult] = SimpleQueue()
        self.committers = Committers(self.stores, self.results.put)

    def _open(self) -> list[Store]:
        return [
            RamStore(16 * SLAB, SLAB),
            ShmStore(self.directory / "shm", 2**20, SLAB),
            DiskStore(self.directory / "disk", 2**20, SLAB, sync=False),
        ]

    def saved(self, tier: Tier) -> EntryRecord:
        store = self.stores[tier]
        writer = sealed(store, record_of(store, key(1), 4, 1, (SLAB, SLAB)), b"1234")
        self.committers.commit(tier, [(7, writer)])
        assert self.results.get(timeout=PATIENCE_S) == CommitResult((7,), None)
        return writer.entry

    def reopened(self) -> dict[Tier, Store]:
        """The stores that the next start of the daemon opens."""
        self.close()
        self.stores = {store.tier: FaultyStore(store) for store in self._open()}
        return dict(self.stores)

    def close(self) -> None:
        for close in self.committers.closings():
            close()
        for store in self.stores.values():
            store.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeStores]:
    made = ThreeStores(tmp_path)
    yield made
    made.close()


@RECORDED
def test_saves_and_their_use_are_written(three: ThreeStores, tier: Tier) -> None:
    entry = three.saved(tier)
    three.committers.record_usage(tier, (Usage(entry, 77, 5),))
    ((found,),) = [batch.entries for batch in three.reopened()[tier].recover()]
    assert (found.record, found.last_used_ns, found.hits) == (entry, 77, 5)


@RECORDED
def test_what_is_forgotten_is_erased_soon(three: ThreeStores, tier: Tier) -> None:
    entry = three.saved(tier)
    assert held(three.stores[tier]) == {key(1): 1}
    three.committers.forget(tier, [entry])
    eventually(lambda: three.stores[tier].unerased == 0)
    assert held(three.stores[tier]) == {}


def test_a_tier_without_records_has_nothing_to_write(three: ThreeStores) -> None:
    store = three.stores[Tier.RAM]
    entry = record_of(store, key(1), 4, 1, (0, SLAB))
    three.committers.forget(Tier.RAM, [entry])
    three.committers.record_usage(Tier.RAM, (Usage(entry, 77, 5),))
    for close in three.committers.closings():
        close()
    assert store.happened == []
    assert three.committers.unhealthy() == {}


@RECORDED
def test_a_store_that_fails_is_unhealthy_by_its_name(three: ThreeStores, tier: Tier) -> None:
    entry = three.saved(tier)
    three.stores[tier].arm(Fault.USAGE_ERROR)
    three.committers.record_usage(tier, (Usage(entry, 77, 5),))
    eventually(three.committers.notices)
    assert three.committers.notices() == {
        f"{tier.label} usage": "usage that is not recorded, on purpose"
    }
    assert three.committers.unhealthy() == {}, "they are hints"
    three.committers.record_usage(tier, (Usage(entry, 77, 5),))
    eventually(lambda: not three.committers.notices())


def test_a_shm_tier_whose_files_were_deleted_is_unhealthy(three: ThreeStores) -> None:
    """Everything that is written there is lost, even if each write succeeds."""
    entry = three.saved(Tier.SHM)
    for file in (three.directory / "shm").iterdir():
        file.unlink()
    three.committers.forget(Tier.SHM, [entry])
    eventually(three.committers.unhealthy)
    assert "was deleted while it was in use" in three.committers.unhealthy()["shm commit"]
