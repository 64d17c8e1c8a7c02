"""The client's own threads, and the bounded queue of calls for them."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from prefixd.client.thread_pool import CallQueue, ThreadPool
from tests.support.fakes import PATIENCE_S

# ---- threads


def test_work_is_done_by_so_many_at_most_and_in_order() -> None:
    threads, gate, begun = ThreadPool("few", 2), threading.Event(), threading.Semaphore(0)
    order: list[int] = []
    names: set[str] = set()

    def work(number: int) -> None:
        names.add(threading.current_thread().name)
        begun.release()
        assert gate.wait(PATIENCE_S)
        order.append(number)

    for number in range(2):
        assert threads.submit(lambda number=number: work(number))  # type: ignore[misc]
    assert all(begun.acquire(timeout=PATIENCE_S) for _ in range(2))
    for number in range(2, 6):
        assert threads.submit(lambda number=number: work(number))  # type: ignore[misc]
    gate.set()
    threads.close()
    assert threads.join(PATIENCE_S)
    assert sorted(order) == list(range(6))
    assert names == {"few-0", "few-1"}


def test_an_idle_thread_is_used_again() -> None:
    threads, names = ThreadPool("one", 8), []
    for _ in range(3):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            names.append(threading.current_thread().name)
            done.set()

        assert threads.submit(work)
        assert done.wait(PATIENCE_S)
    assert len(set(names)) <= 2  # a thread that has just finished may not be idle yet
    threads.close()
    assert threads.join(PATIENCE_S)


def test_a_closed_one_does_what_it_has_taken_and_takes_no_more() -> None:
    threads, gate, done = ThreadPool("closed", 1), threading.Event(), threading.Event()
    assert threads.submit(lambda: gate.wait(PATIENCE_S) and None)
    assert threads.submit(done.set)
    threads.close()
    assert not threads.submit(lambda: None)
    assert not threads.join(0.001)
    gate.set()
    assert threads.join(PATIENCE_S)
    assert done.is_set()


def test_one_of_them_does_not_wait_for_itself() -> None:
    threads = ThreadPool("inside", 1)
    seen: list[bool] = []

    def work() -> None:
        threads.close()
        seen.extend((threads.inside, threads.join(PATIENCE_S)))

    assert threads.submit(work)
    assert threads.join(PATIENCE_S)
    assert seen == [True, True]
    assert not threads.inside


def test_where_no_thread_can_be_started_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = ThreadPool("none", 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not threads.submit(lambda: None)


# ---- the queue of calls


class Saves:
    """Saves that wait for `let_go`; each returns its number, or is dropped."""

    def __init__(self, queue: CallQueue) -> None:
        self.queue = queue
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.order: list[int] = []

    def submit(self, number: int) -> Future[str]:
        def save() -> str:
            self.begun.release()
            assert self.let_go.wait(PATIENCE_S)
            self.order.append(number)
            return f"saved {number}"

        return self.queue.submit(save, lambda: f"dropped {number}")


@pytest.fixture
def saves() -> Saves:
    return Saves(CallQueue(3))


def test_saves_are_done_in_order_and_dropped_when_too_many_wait(saves: Saves) -> None:
    futures = [saves.submit(number) for number in range(5)]
    assert [future.done() for future in futures] == [False, False, False, True, True]
    assert futures[3].result() == "dropped 3"
    saves.let_go.set()
    assert [future.result(PATIENCE_S) for future in futures[:3]] == [
        "saved 0",
        "saved 1",
        "saved 2",
    ]
    assert saves.order == [0, 1, 2]
    assert saves.queue.flush(PATIENCE_S)
    assert saves.submit(6).result(PATIENCE_S) == "saved 6"
    saves.queue.close(PATIENCE_S)


def test_flush_waits_only_so_long(saves: Saves) -> None:
    saves.submit(0)
    assert not saves.queue.flush(0.001)
    saves.let_go.set()
    assert saves.queue.flush(PATIENCE_S)
    saves.queue.close(PATIENCE_S)


def test_pending_saves_can_be_dropped(saves: Saves) -> None:
    futures = [saves.submit(number) for number in range(3)]
    assert saves.begun.acquire(timeout=PATIENCE_S)
    saves.queue.drop_pending()
    assert saves.submit(3).result(0) == "dropped 3"
    saves.let_go.set()
    assert [future.result(PATIENCE_S) for future in futures] == [
        "saved 0",
        "dropped 1",
        "dropped 2",
    ]
    saves.queue.close(PATIENCE_S)


def test_a_save_that_is_cancelled_in_time_is_not_done(saves: Saves) -> None:
    first, second = saves.submit(0), saves.submit(1)
    assert saves.begun.acquire(timeout=PATIENCE_S)
    assert second.cancel()
    assert not first.cancel()
    saves.let_go.set()
    assert saves.queue.flush(PATIENCE_S)
    assert saves.order == [0]
    with pytest.raises(CancelledError):
        second.result()
    saves.queue.close(PATIENCE_S)


def test_what_a_save_raises_is_the_futures(saves: Saves) -> None:
    def fail() -> str:
        raise ValueError("broken")

    future = saves.queue.submit(fail, lambda: "dropped")
    with pytest.raises(ValueError, match="broken"):
        future.result(PATIENCE_S)
    saves.let_go.set()
    assert saves.submit(1).result(PATIENCE_S) == "saved 1"
    saves.queue.close(PATIENCE_S)


def test_a_queue_may_take_nothing() -> None:
    queue = CallQueue(0)
    assert queue.submit(lambda: "saved", lambda: "dropped").result(0) == "dropped"
    queue.close(PATIENCE_S)


def test_no_thread_is_left(saves: Saves) -> None:
    saves.let_go.set()
    saves.submit(0).result(PATIENCE_S)
    saves.queue.close(PATIENCE_S)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefixd-saver")]


@pytest.mark.parametrize("act", ["flush", "close"])
def test_a_done_callback_may_flush_and_close(saves: Saves, act: str) -> None:
    """Otherwise both would wait for the thread that they run in."""
    flushed: list[bool] = []

    def in_callback(_: Future[str]) -> None:
        flushed.append(saves.queue.flush(PATIENCE_S))
        if act == "close":
            saves.queue.drop_pending()
            flushed.append(saves.queue.close(PATIENCE_S))

    futures = [saves.submit(number) for number in range(3)]
    futures[0].add_done_callback(in_callback)
    saves.let_go.set()
    assert [future.result(PATIENCE_S) for future in futures] == ["saved 0", "saved 1", "saved 2"]
    assert saves.order == [0, 1, 2]
    assert saves.queue.flush(PATIENCE_S)
    assert all(flushed)
    saves.queue.close(PATIENCE_S)


def test_what_waits_is_bounded_in_bytes_too() -> None:
    queue = CallQueue(10, 100)
    go = threading.Event()

    def save() -> str:
        assert go.wait(PATIENCE_S)
        return "saved"

    assert queue.takes(10**9), "alone, anything"
    first = queue.submit(save, lambda: "dropped", 60)
    assert queue.pending == (1, 60)
    assert (queue.takes(40), queue.takes(41)) == (True, False)
    assert queue.submit(save, lambda: "dropped", 41).result(0) == "dropped"
    second = queue.submit(save, lambda: "dropped", 40)
    go.set()
    assert [each.result(PATIENCE_S) for each in (first, second)] == ["saved"] * 2
    assert queue.flush(PATIENCE_S)
    assert queue.pending == (0, 0)
    queue.close(PATIENCE_S)


def test_several_threads_work_side_by_side() -> None:
    queue = CallQueue(10, threads=2)
    both = threading.Barrier(2)
    futures = [queue.submit(lambda: both.wait(PATIENCE_S), lambda: -1) for _ in range(2)]
    assert sorted(each.result(PATIENCE_S) for each in futures) == [0, 1]
    queue.close(PATIENCE_S)
