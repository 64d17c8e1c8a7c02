"""A short run finds no problem, and reports of problems are bad."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from prefixd.client import Tier
from tests.support.lengths import times

from .history import History, Seen
from .keyspace import key, payload, version_of, versions_in
from .run import Damage, Faults, Report, run


def test_a_short_run_finds_nothing() -> None:
    faults = Faults(
        kill_daemon=1,
        end_daemon=1,
        kill_worker=1,
        stop_worker=1,
        resize=2,
        hang=1,
        read_only=1,
        flip=40,
    )
    # The other seed gives a run with twice the operations while a worker is stopped.
    report = run(random.Random(times(28, 7)), faults, workers=3)
    assert not report.harm, json.dumps(report.as_dict())
    assert report.history.counts["save: saved"]
    assert report.history.counts["delete: deleted"]


def test_bytes_tell_which_save_they_are_of() -> None:
    one, other = "00" * 8, "0a" * 8
    assert version_of(3, payload(3, one)) == one
    assert version_of(3, payload(3, other)) == other
    assert version_of(4, payload(3, one)) is None
    cut = payload(3, one)[:-1]
    assert version_of(3, cut) is None
    damaged = bytearray(payload(3, one))
    damaged[8] ^= 1
    assert version_of(3, bytes(damaged)) is None
    assert one in versions_in(3, bytes(damaged))


class Told:
    """A history of one key, told second by second."""

    def __init__(self) -> None:
        self.history = History()

    def begins(self, at_s: float, what: str, tier: Tier = Tier.DISK) -> None:
        """`what`: the version of a save, or "delete"."""
        begin = {"op": "begin", "worker": 7, "numbers": [1], "begun_s": at_s}
        if what != "delete":
            begin |= {"versions": [what], "tier": int(tier)}
        self.history.add(begin)

    def ends(self, at_s: float, outcome: str) -> None:
        ended = {"op": "save", "worker": 7, "changed": [1], "outcomes": [outcome]}
        self.history.add(ended | {"ended_s": at_s})

    def does(self, at_s: float, what: str, outcome: str, tier: Tier = Tier.DISK) -> None:
        self.begins(at_s, what, tier)
        self.ends(at_s + 1, outcome)

    def sees(self, at_s: float, version: str | None) -> tuple[int, int, int]:
        """Reads, and judges it. Returns how much is wrong, stale and lost by now."""
        self.history.saw(Seen(1, version, at_s, at_s + 0.5))
        self.history.judge()
        return len(self.history.wrong), len(self.history.stale), len(self.history.lost)


def test_what_was_never_saved_is_wrong() -> None:
    assert Told().sees(1, "a") == (1, 0, 0)


def test_the_latest_save_is_right_and_an_earlier_one_is_stale() -> None:
    told = Told()
    told.does(0, "a", "saved")
    assert told.sees(5, "a") == (0, 0, 0)
    told.does(10, "delete", "deleted")
    told.does(20, "b", "saved", Tier.SHM)
    assert told.sees(25, "b") == (0, 0, 0)
    assert told.sees(26, "a") == (0, 1, 0)
    assert Report(told.history).harm


@pytest.mark.parametrize(
    ("outcome", "stale"),
    [("deleted", 1), ("absent", 1), ("erasing", 0), ("failed", 0), ("pinned", 0)],
)
def test_what_was_deleted_does_not_come_back(outcome: str, stale: int) -> None:
    told = Told()
    told.does(0, "a", "saved")
    told.begins(9, "delete")
    assert told.sees(9.2, "a") == (0, 0, 0), "the delete has not ended"
    told.ends(10, outcome)
    assert told.sees(11, "a") == (0, stale, 0)


def test_a_save_of_unknown_end_may_come_at_any_time() -> None:
    told = Told()
    told.begins(0, "a")  # its worker was killed
    told.does(5, "b", "saved")
    assert told.sees(50, "a") == (0, 0, 0)


@pytest.mark.parametrize(("tier", "lost"), [(Tier.RAM, 0), (Tier.SHM, 1), (Tier.DISK, 1)])
def test_what_was_saved_to_a_durable_tier_is_there(tier: Tier, lost: int) -> None:
    told = Told()
    told.does(0, "a", "saved", tier)
    told.does(3, "b", "present")
    told.does(5, "delete", "pinned")
    assert told.sees(10, None) == (0, 0, lost)


@pytest.mark.parametrize("outcome", ["deleted", "absent", "erasing", "failed"])
def test_a_miss_after_a_delete_is_no_loss(outcome: str) -> None:
    told = Told()
    told.does(0, "a", "saved")
    told.does(5, "delete", outcome)
    assert told.sees(10, None) == (0, 0, 0)


def test_a_delete_that_may_come_late_excuses_a_miss_for_a_while() -> None:
    told = Told()
    told.does(0, "delete", "failed")
    told.does(2, "a", "saved")
    assert told.sees(3, None) == (0, 0, 0)
    told.does(20, "delete", "deleted")
    told.does(22, "b", "saved")
    assert told.sees(30, None) == (0, 0, 1)


def test_a_faulty_disk_excuses_misses_of_its_tier_only() -> None:
    told = Told()
    told.history.faults.append((5, 15))
    told.does(0, "a", "saved")
    assert told.sees(10, None) == (0, 0, 0)
    assert told.sees(16, None) == (0, 0, 1)
    shm = Told()
    shm.history.faults.append((5, 15))
    shm.does(0, "a", "saved", Tier.SHM)
    assert shm.sees(10, None) == (0, 0, 1)


def test_nothing_is_judged_before_all_reports_of_its_time_have_come() -> None:
    told = Told()
    told.does(0, "a", "saved")
    told.history.saw(Seen(1, None, 5, 6))
    assert told.history.judge(before_s=6) == 0
    assert not told.history.lost
    assert told.history.judge(explained=lambda number, begun_s: (number, begun_s) == (1, 0)) == 1
    assert not told.history.lost, "damage explains it"
    assert told.sees(10, None) == (0, 0, 0), "once"


@pytest.mark.parametrize(
    ("begun_s", "dropped_s", "explained"),
    [(1.0, (2.0,), True), (3.0, (2.0,), False), (3.0, (2.0, 4.0), True), (1.0, (), False)],
)
def test_damage_explains_losses_of_calls_that_began_before_it(
    begun_s: float, dropped_s: tuple[float, ...], explained: bool, tmp_path: Path
) -> None:
    damage = Damage(_log(tmp_path, key(79).hex(), dropped_s))
    damage.read()
    assert damage.explains(79, begun_s) == explained
    # A late report of the same loss is explained as well.
    assert damage.explains(79, begun_s) == explained
    assert not damage.explains(80, begun_s)


def test_damage_without_a_key_explains_one_entry(tmp_path: Path) -> None:
    damage = Damage(_log(tmp_path, "00" * 32, (2.0,)))
    damage.read()
    damage.read()
    assert not damage.explains(1, 3.0)
    assert damage.explains(1, 1.0)
    assert damage.explains(1, 1.0)
    assert not damage.explains(2, 1.0)


def _log(directory: Path, key_hex: str, dropped_s: tuple[float, ...]) -> Path:
    times = [datetime.fromtimestamp(at_s, UTC).isoformat() for at_s in dropped_s]
    drops = [{"event": "entry_damaged", "key": key_hex, "timestamp": at} for at in times]
    path = directory / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"event": "ready"}, *drops]))
    return path


@pytest.mark.parametrize("harm", ["wrong", "stale", "lost", "raised"])
def test_a_report_of_harm_is_bad(harm: str) -> None:
    history = History()
    assert not Report(history).harm
    getattr(history, harm).append("something")
    assert Report(history).harm


def test_a_problem_of_the_daemon_is_bad() -> None:
    assert Report(History(), problems=["it died"]).harm


def test_an_exception_in_an_engine_is_bad() -> None:
    history = History()
    history.add({"op": "raised", "why": "Traceback"})
    assert Report(history).harm
