"""What is counted, and that every counter is present from the start."""

from __future__ import annotations

import threading
from typing import get_type_hints

from prefixd.client.counters import ClientCounters, Snapshot
from prefixd.client.results import Entries, Entry, SaveOutcome
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier

KEY = Key(b"k" * 32)


def entry(tier: Tier, payload_bytes: int) -> Entry:
    return Entry(KEY, tier, Content(payload_bytes, 512), 0, 1, SaveReason.COLD)


def test_everything_is_there_from_the_start() -> None:
    snapshot = ClientCounters().snapshot()
    assert snapshot["misses"] == {reason.value: 0 for reason in MissReason}
    assert snapshot["saves"] == {status.label: 0 for status in SaveStatus}
    rpcs = {*pb.DESCRIPTOR.services_by_name["Cache"].methods_by_name, "SaveStaged", "Fetch"}
    assert snapshot["rpcs"] == dict.fromkeys(rpcs - {"Session"}, 0), "sessions are counted apart"
    scalars = [value for value in snapshot.values() if not isinstance(value, dict)]
    assert scalars
    assert not any(scalars)


def test_a_snapshot_is_what_its_type_says() -> None:
    kinds = {
        name: dict if kind is not int else int for name, kind in get_type_hints(Snapshot).items()
    }
    assert {name: type(value) for name, value in ClientCounters().snapshot().items()} == kinds


def test_each_count_goes_where_it_belongs() -> None:
    counters = ClientCounters()
    counters.rpc("Claim")
    counters.miss(MissReason.SLOW, 700)
    counters.failure(MissReason.LOST)
    counters.hit(Entries([entry(Tier.RAM, 10), entry(Tier.DISK, 20)]), [100, 200], 400)
    counters.restored(Entries([entry(Tier.SHM, 5), entry(Tier.SHM, 6)]), "copy")
    counters.viewed(Entries([entry(Tier.RAM, 9)]))
    counters.saves(
        [SaveOutcome(KEY, SaveStatus.SAVED), SaveOutcome(KEY, SaveStatus.PRESENT)],
        [7, 8],
        [(Tier.RAM, SaveReason.COLD)] * 2,
    )
    snapshot = counters.snapshot()
    expected = {
        "lookups": 2,
        "hits": 1,
        "hit_entries": 2,
        "hit_tokens": 300,
        "lookup_tokens": 1_100,
        "restored_entries": 2,
        "restored_bytes": 11,
        "saved_entries": 1,
        "saved_bytes": 7,
    }
    assert {name: snapshot[name] for name in expected} == expected
    assert snapshot["rpcs"]["Claim"] == 1
    assert snapshot["misses"]["slow"] == 1
    assert snapshot["hit_tokens_by_tier"] == {"ram": 100, "shm": 0, "disk": 200}
    assert snapshot["restored_bytes_by_tier"] == {"ram": 0, "shm": 11, "disk": 0}
    assert snapshot["restored_bytes_by_path"] == {"view": 9, "copy": 11, "stream": 0}
    assert snapshot["failures"]["lost"] == 1
    assert snapshot["saves"]["saved"] == snapshot["saves"]["present"] == 1


def test_what_is_found_one_by_one_is_counted_as_any_look_up() -> None:
    """Also in a tier of a later version, and once in each report."""
    counters, others = ClientCounters(), ClientCounters()
    for tier in (Tier.RAM, Tier.RAM, Tier.DISK, 9):
        counters.found_one(tier)
        others.looked((int(tier),), 1, 0, None)
    assert counters.to_report
    assert counters.snapshot() == others.snapshot()
    assert counters.snapshot()["lookups"] == 4
    assert counters.take_report().amounts == others.take_report().amounts
    assert not counters.to_report
    assert not counters.take_report().amounts
    counters.found_one(Tier.SHM)
    assert dict(counters.take_report().amounts) == {
        ("lookups",): 1,
        ("hits",): 1,
        ("hit_entries", Tier.SHM): 1,
    }


def test_a_snapshot_is_the_callers_own() -> None:
    counters = ClientCounters()
    snapshot = counters.snapshot()
    snapshot["rpcs"]["Claim"] = 99
    counters.rpc("Claim")
    assert counters.snapshot()["rpcs"]["Claim"] == 1


def test_threads_lose_no_count() -> None:
    counters = ClientCounters()

    def count() -> None:
        for _ in range(2_000):
            counters.add("lookups")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot()["lookups"] == 8_000
