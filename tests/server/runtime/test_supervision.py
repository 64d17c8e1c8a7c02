"""No background task ends unnoticed; conditions last until they are over, faults for a while."""

from __future__ import annotations

import asyncio
import threading

from prefixd.server.runtime.supervision import FAULT_SHOWN_NS, Health, Supervisor, ended_within
from tests.support.event_loop import PATIENCE_S, in_loop
from tests.support.running import ManualClock


class Watched:
    def __init__(self) -> None:
        self.health = Health(ManualClock())
        self.given_up: asyncio.Queue[str] = asyncio.Queue()
        self.supervisor = Supervisor(self.health, self.given_up.put_nowait)


async def dies() -> None:
    raise KeyError("a bug")


@in_loop
async def test_a_task_that_dies_is_a_condition_with_its_name() -> None:
    watched = Watched()
    await asyncio.wait([watched.supervisor.task("some task", dies())])
    await asyncio.sleep(0)
    assert "KeyError('a bug')" in watched.health.unhealthy()["some task"]
    assert watched.given_up.empty()


@in_loop
async def test_the_daemon_does_not_go_on_without_what_is_vital() -> None:
    watched = Watched()
    watched.supervisor.task("vital task", dies(), vital=True)
    assert await watched.given_up.get() == "vital task died: KeyError('a bug')"

    def thread() -> None:
        raise KeyError("another bug")

    watched.supervisor.thread("vital thread", thread, vital=True)
    assert await watched.given_up.get() == "vital thread died: KeyError('another bug')"
    assert watched.health.conditions.keys() == {"vital task", "vital thread"}


@in_loop
async def test_what_ends_or_is_cancelled_is_no_condition() -> None:
    watched = Watched()
    task = watched.supervisor.task("ends", asyncio.sleep(0))
    waits = watched.supervisor.task("waits", asyncio.Event().wait())  # type: ignore[arg-type]
    await task
    watched.supervisor.cancel()
    await asyncio.wait([waits])
    assert watched.health.unhealthy() == {}


@in_loop
async def test_a_callback_that_raises_is_a_fault() -> None:
    watched = Watched()
    loop = asyncio.get_running_loop()
    watched.supervisor.failed(loop, {"message": "in a callback", "exception": KeyError("a bug")})
    assert watched.health.unhealthy() == {"event loop": "in a callback: KeyError('a bug')"}


@in_loop
async def test_what_does_not_end_is_not_waited_for() -> None:
    gate, ended = threading.Event(), threading.Event()
    assert await ended_within(PATIENCE_S, [ended.set, lambda: None])
    assert ended.is_set()
    assert not await ended_within(0, [gate.wait])  # type: ignore[list-item]
    gate.set()
    assert await ended_within(PATIENCE_S, [])


# ---- health


def test_a_fault_is_shown_for_a_while_after_it_happened_last() -> None:
    clock = ManualClock()
    health = Health(clock)
    assert health.unhealthy() == {}
    health.fault("effects", "it failed")
    clock.forward(FAULT_SHOWN_NS / 2e9)
    health.fault("effects", "it failed again")
    clock.forward(FAULT_SHOWN_NS / 2e9)
    assert health.unhealthy() == {"effects": "it failed again"}
    clock.forward(FAULT_SHOWN_NS / 2e9)
    assert health.unhealthy() == {}


def test_what_works_again_is_no_fault() -> None:
    health = Health(ManualClock())
    health.fault("disk reads", "EIO")
    health.succeeded("shm reads")
    assert health.unhealthy() == {"disk reads": "EIO"}
    health.succeeded("disk reads")
    assert health.unhealthy() == {}


def test_a_condition_lasts() -> None:
    clock = ManualClock()
    health = Health(clock)
    health.conditions["shm arena"] = "no room"
    clock.forward(2 * FAULT_SHOWN_NS / 1e9)
    assert health.unhealthy() == {"shm arena": "no room"}
    del health.conditions["shm arena"]
    assert health.unhealthy() == {}
