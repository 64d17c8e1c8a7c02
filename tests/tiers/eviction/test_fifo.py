"""FIFO: hits change nothing, pins keep their place."""

from prefixd.tiers.eviction.fifo import FIFO


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
    for key in "dbc":  # another order than theirs
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
