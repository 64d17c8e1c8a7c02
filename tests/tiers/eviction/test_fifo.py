"""FIFO and its queues: hits change nothing, pins keep their place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction.base import Looks
from prefixd.tiers.eviction.fifo import FIFO, PinnableQueue, Queue
from tests.support.lengths import times


def test_hits_and_refreshes_change_nothing() -> None:
    fifo = FIFO[str](3)
    for key in "abc":
        fifo.access(key)
    assert fifo.access("a")
    fifo.refresh("a")
    assert not fifo.access("d")
    assert list(fifo.keys()) == ["b", "c", "d"]


def test_a_pinned_key_gets_its_place_back() -> None:
    fifo = FIFO[str](6)
    for key in "abcdef":
        fifo.access(key)
    for key in "abcd":
        fifo.pin(key)
    assert fifo.evict() == "e"
    for key in "dbc":  # not in the order of the queue
        fifo.unpin(key)
    assert list(fifo.victims()) == ["b", "c", "d", "f"]
    fifo.pin("c")
    assert [fifo.evict() for _ in range(4)] == ["b", "d", "f", None]
    fifo.unpin("c")
    fifo.unpin("a")
    assert [fifo.evict() for _ in range(3)] == ["a", "c", None]


def test_capacity_zero_admits_nothing() -> None:
    fifo = FIFO[int](0)
    assert fifo.access_run([1, 1]) == 0
    assert (len(fifo), fifo.used, fifo.moves) == (0, 0, 0)


STEPS = ("append", "pop", "head", "remove", "pin", "unpin", "copy")
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=150)


def test_a_plain_queue() -> None:
    queue = Queue[str]()
    queue.append("a", 3)
    queue.append("b", 4)
    queue.append("c", 5)
    assert (list(queue), len(queue), queue.weight, "b" in queue) == (["a", "b", "c"], 3, 12, True)
    assert queue.remove("b") == 4
    assert (queue.pop(), queue.pop(), queue.pop(), queue.weight) == (("a", 3), ("c", 5), None, 0)


@given(steps)
@settings(deadline=None, max_examples=times(100, 1_000))
def test_pinned_keys_keep_their_place(steps: list[tuple[str, int]]) -> None:
    pinned: set[int] = set()
    queue, model = PinnableQueue(pinned, Looks()), list[int]()
    for step, key in steps:
        free = [k for k in model if k not in pinned]
        head = (free[0], 10 + free[0]) if free else None
        if step == "append" and key not in model:
            queue.append(key, 10 + key)
            model.append(key)
        elif step == "pop":
            assert queue.pop() == head
            model = [k for k in model if head is None or k != head[0]]
        elif step == "head":
            assert queue.head() == head
        elif step == "remove" and key in model:
            pinned.discard(key)
            assert queue.remove(key) == 10 + key
            model.remove(key)
        elif step == "pin" and key in model:
            pinned.add(key)
        elif step == "unpin" and key in pinned:
            pinned.remove(key)
            queue.unpin(key)
        elif step == "copy":
            original, pinned = queue, set(pinned)
            queue = original.copy(pinned, Looks())
            while original.pop():  # the copy is independent
                pass
        assert list(queue) == model
        assert (len(queue), queue.weight) == (len(model), sum(10 + k for k in model))
        assert all((k in queue) is (k in model) for k in range(10))
        assert not (queue.plain and pinned)
