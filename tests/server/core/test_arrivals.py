"""Which connection goes when there are too many that have proved nothing."""

from __future__ import annotations

import random

from prefixd.server.core.arrivals import Arrivals, Sign, places_for_arrivals


def test_the_host_that_has_most_loses_its_oldest() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.add("honest", "a")
    for number in range(3):
        arrivals.add(f"flood {number}", "b")
    for number in range(3):
        arrivals.spoke(f"flood {number}")
    assert [arrivals.take_worst() for _ in range(2)] == ["flood 0", "flood 1"]
    assert list(arrivals) == ["honest", "flood 2"]


def test_of_one_host_the_refused_go_first_then_those_that_sent_nothing() -> None:
    arrivals: Arrivals[int] = Arrivals()
    for number in range(6):
        arrivals.add(number, "a")
    for number in (0, 1, 4, 5):
        arrivals.spoke(number)
    for number in (5, 4, 4):
        arrivals.refused(number)
    arrivals.spoke(4)  # it has said enough
    assert [arrivals.take_worst() for _ in range(6)] == [5, 4, 2, 3, 0, 1]
    assert not arrivals


def test_whatever_comes_and_goes_the_counts_add_up() -> None:
    """Against a list of what is there, in the order in which it got its sign."""
    for seed in range(30):
        chance, arrivals = random.Random(seed), Arrivals[int]()
        there: dict[int, tuple[str, Sign]] = {}

        def sign(one: int, new: Sign, there: dict[int, tuple[str, Sign]] = there) -> None:
            host, _ = there.pop(one)
            there[one] = host, new

        for number in range(400):
            known = chance.choice([*there, -1])
            match chance.randrange(6):
                case 0 | 1 | 2:
                    host = chance.choice("abc")
                    arrivals.add(number, host)
                    there[number] = host, Sign.SILENT
                case 3:
                    arrivals.spoke(known)
                    if known in there and there[known][1] is Sign.SILENT:
                        sign(known, Sign.SPOKE)
                case 4:
                    arrivals.refused(known)
                    if known in there and there[known][1] is not Sign.REFUSED:
                        sign(known, Sign.REFUSED)
                case _:
                    arrivals.remove(known)
                    there.pop(known, None)
            assert set(arrivals) == set(there)
        while there:
            held = [host for host, _ in there.values()]
            worst = arrivals.take_worst()
            host, its = there[worst]
            assert held.count(host) == max(map(held.count, held))
            of_host = {one: sign_of for one, (at, sign_of) in there.items() if at == host}
            assert its == min(of_host.values())
            assert worst == next(one for one, sign_of in of_host.items() if sign_of == its)
            del there[worst]
        assert not arrivals


def test_arrivals_may_have_what_others_do_not_need() -> None:
    assert [places_for_arrivals(64, proved) for proved in (0, 10, 56, 64)] == [64, 54, 8, 8]
    assert places_for_arrivals(1, 1) == 1
