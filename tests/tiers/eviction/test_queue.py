"""Queues: order, weight, and the place of pinned keys, against a list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.tiers.eviction.base import Looks
from prefixd.tiers.eviction.queue import PinnableQueue, Queue

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
@settings(deadline=None, max_examples=300)
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
            while original.pop():  # shares nothing with its copy
                pass
        assert list(queue) == model
        assert (len(queue), queue.weight) == (len(model), sum(10 + k for k in model))
        assert all((k in queue) is (k in model) for k in range(10))
        assert not (queue.plain and pinned)
