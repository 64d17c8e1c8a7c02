"""A few threads: how many, in which order, and their end."""

from __future__ import annotations

import threading

import pytest

from prefixd.client.threads import Threads
from tests.support.fakes import PATIENCE_S


def test_work_is_done_by_so_many_at_most_and_in_order() -> None:
    threads, gate, begun = Threads("few", 2), threading.Event(), threading.Semaphore(0)
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
    threads, names = Threads("one", 8), []
    for _ in range(3):
        done = threading.Event()

        def work(done: threading.Event = done) -> None:
            names.append(threading.current_thread().name)
            done.set()

        assert threads.submit(work)
        assert done.wait(PATIENCE_S)
    assert len(set(names)) <= 2  # one that has just said so may not be idle yet
    threads.close()
    assert threads.join(PATIENCE_S)


def test_a_closed_one_does_what_it_has_taken_and_takes_no_more() -> None:
    threads, gate, done = Threads("closed", 1), threading.Event(), threading.Event()
    assert threads.submit(lambda: gate.wait(PATIENCE_S) and None)
    assert threads.submit(done.set)
    threads.close()
    assert not threads.submit(lambda: None)
    assert not threads.join(0.001)
    gate.set()
    assert threads.join(PATIENCE_S)
    assert done.is_set()


def test_one_of_them_does_not_wait_for_itself() -> None:
    threads = Threads("inside", 1)
    seen: list[bool] = []

    def work() -> None:
        threads.close()
        seen.extend((threads.inside, threads.join(PATIENCE_S)))

    assert threads.submit(work)
    assert threads.join(PATIENCE_S)
    assert seen == [True, True]
    assert not threads.inside


def test_where_no_thread_can_be_started_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads("none", 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not threads.submit(lambda: None)
