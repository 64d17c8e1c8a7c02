"""Work that comes at once is begun over several rounds of the loop, in its order."""

from __future__ import annotations

import asyncio

from prefixd.server.runtime import rounds
from prefixd.server.runtime.rounds import Rounds
from tests.support.event_loop import in_loop


class Begun:
    """What has begun, in its order."""

    def __init__(self) -> None:
        self.rounds = Rounds()
        self.numbers: list[int] = []

    def start(self, *numbers: int, rounds_after: int = 0) -> list[asyncio.Task[None]]:
        return [asyncio.ensure_future(self._begin(number, rounds_after)) for number in numbers]

    async def _begin(self, number: int, rounds_after: int) -> None:
        await self.rounds.begin(rounds_after)
        self.numbers.append(number)

    async def each_round(self, count: int) -> list[int]:
        """How many begin in each of the next rounds."""
        began = []
        for _ in range(count):
            before = len(self.numbers)
            await asyncio.sleep(0)
            began.append(len(self.numbers) - before)
        return began


@in_loop
async def test_what_comes_alone_begins_at_once_and_again() -> None:
    begun = Begun()
    for number in range(3):
        begun.start(number)
        assert await begun.each_round(3) == [1, 0, 0], "no round is lost"


@in_loop
async def test_what_comes_together_begins_in_its_order_and_a_part_in_each_round() -> None:
    begun = Begun()
    count = 1 + 4 * rounds._SPREAD
    tasks = begun.start(*range(count))
    parts = await begun.each_round(3 * rounds._SPREAD)
    await asyncio.gather(*tasks)
    assert begun.numbers == list(range(count))
    assert max(parts) == 4
    assert sum(parts) == count


@in_loop
async def test_who_has_begun_goes_behind_those_who_wait() -> None:
    begun = Begun()
    tasks = begun.start(*range(30))
    while not begun.numbers:
        await asyncio.sleep(0)
    tasks += begun.start(100)
    await asyncio.gather(*tasks)
    assert begun.numbers == [*range(30), 100]


@in_loop
async def test_who_takes_rounds_afterwards_counts_as_so_much_earlier() -> None:
    begun = Begun()
    tasks = begun.start(*range(60))
    await begun.each_round(3)
    soon = len(begun.numbers) + 4 * 4  # its task begins, it waits, and goes on
    tasks += begun.start(100, rounds_after=2) + begun.start(101, rounds_after=4)
    await asyncio.gather(*tasks)
    assert [number for number in begun.numbers if number != 101] == [*range(60), 100]
    assert begun.numbers.index(101) < soon, "as if it had come before all others"


@in_loop
async def test_nobody_is_overtaken_for_long() -> None:
    """However many come that take rounds afterwards."""
    begun = Begun()
    tasks = begun.start(*range(rounds._SPREAD))
    late: list[int] = []
    for round_ in range(rounds._SPREAD):
        numbers = [1000 + 10 * round_ + n for n in range(4)]
        tasks += begun.start(*numbers, rounds_after=3)
        late += numbers if round_ > 4 else []
        await begun.each_round(1)
    await asyncio.gather(*tasks)
    last = begun.numbers.index(rounds._SPREAD - 1)
    assert all(begun.numbers.index(number) > last for number in late)


@in_loop
async def test_who_gives_up_takes_nobodys_round() -> None:
    begun = Begun()
    first, *others = begun.start(*range(2 * rounds._SPREAD + 1))
    await first
    for task in others[:-1]:
        task.cancel()
    await others[-1]
    await asyncio.gather(*others, return_exceptions=True)
    assert begun.numbers == [0, 2 * rounds._SPREAD]
    begun.start(200)
    assert sum(await begun.each_round(3)) == 1, "and the next one is served as ever"
