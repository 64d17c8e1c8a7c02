"""Live replays: traces through real daemons, with real bytes."""

from __future__ import annotations

import json
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.ctl.views.stats import total_usage
from prefixd.client.lab.convert import Converter
from prefixd.client.lab.live_replay import LiveReplay, Totals
from prefixd.client.lab.replayer import LiveOptions, keys_of_ids, replay_namespace
from prefixd.client.lab.simulate import Cell, TouchOrder
from prefixd.client.lab.simulate import replay as replay_offline
from prefixd.client.lab.trace import Request, TraceColumns
from prefixd.client.lab.workloads import generate
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import CallerError
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.support.daemon import eventually, private_daemon, problems_of
from tests.support.lengths import times

SLOTS = 80


@pytest.fixture(scope="module")
def running() -> Iterator[PrivateDaemon]:
    """Every tier holds exactly 80 blocks of 4 KiB: ram by its budget, the others by number."""
    caps = (f"--shm.max_entries={SLOTS}", f"--disk.max_entries={SLOTS}")
    with private_daemon(*caps, ram=f"{4 * SLOTS}KiB") as daemon:
        yield daemon


@pytest.fixture
def daemon(running: PrivateDaemon) -> Iterator[PrivateDaemon]:
    """Empty at first; in the end nobody holds anything and everything adds up."""
    with running.admin() as admin:
        yield running
        assert problems_of(admin) == []
        eventually(lambda: holds_nothing(admin))
        admin.evict(2**40, [])


def holds_nothing(admin: AdminConnection) -> bool:
    """Did the daemon see all workers leave, and with them whatever they held?"""
    stats = admin.stats()
    return not (stats.sessions or stats.claims or stats.reservations or stats.waiters)


def replay(
    daemon: PrivateDaemon,
    requests: Iterable[Request],
    on_progress: Callable[[Totals], None] = lambda _: None,
    **options: Any,
) -> Totals:
    return LiveReplay(requests, LiveOptions(daemon.address, **options), on_progress).run()


def lru_hit_tokens(requests: Iterable[Request], slots: int, block_tokens: int = 512) -> int:
    """The same by hand: claim the run, save the rest, touch the chain leaf first, root last.

    Blocks of the run are pinned while the others are saved, so nothing evicts them.
    """
    resident: OrderedDict[int, None] = OrderedDict()
    hit_tokens = 0
    for request in requests:
        ids = request.hash_ids
        run = next((i for i, block in enumerate(ids) if block not in resident), len(ids))
        hit_tokens += min(run * block_tokens, request.input_length)
        for block in ids:
            resident.pop(block, None)
        while len(resident) + len(ids) > slots:
            resident.popitem(last=False)
        resident.update(dict.fromkeys(reversed(ids)))
    return hit_tokens


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Far more blocks than a tier has room for leave it again."""
    return list(generate("multi-turn", requests=times(60, 90), seed=3, block_tokens=512))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tier", list(Tier))
def test_one_worker_hits_exactly_what_lru_hits(
    daemon: PrivateDaemon, requests: list[Request], tier: Tier, in_place: bool
) -> None:
    with daemon.admin() as admin:
        before = admin.stats()
        totals = replay(daemon, requests, tiers=(tier,), in_place=in_place)
        after = admin.stats()
    assert totals.hit_tokens == lru_hit_tokens(requests, SLOTS) > 0
    assert totals.mismatches == 0
    assert totals.requests == len(requests)
    assert totals.prompt_tokens == sum(request.input_length for request in requests)
    assert totals.verified_bytes == totals.hit_blocks * 4096
    assert set(totals.saves) == {"saved"}
    told = {t.tier: t for t in after.tiers}[tier.value]  # type: ignore[index]  # the same number
    first = {t.tier: t for t in before.tiers}[tier.value]  # type: ignore[index]
    assert told.hit_tokens - first.hit_tokens == totals.hit_tokens, "the daemon says the same"
    assert told.saves - first.saves == totals.saves["saved"]
    assert told.evictions - first.evictions == totals.saves["saved"] - SLOTS


@pytest.mark.parametrize("in_place", [False, True])
def test_a_recorded_replay_gives_the_live_hits_offline(
    daemon: PrivateDaemon,
    requests: list[Request],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_place: bool,
) -> None:
    monkeypatch.setenv("PREFIXD_RECORD", str(tmp_path))
    totals = replay(daemon, requests, in_place=in_place)
    converter = Converter(tmp_path)
    recorded = list(converter)
    assert len(recorded) == sum(1 for request in requests if request.hash_ids)
    block_tokens = LiveOptions(daemon.address).block_tokens
    lru = Cell("lru", SLOTS, TouchOrder.ROOT_MRU)
    offline = replay_offline(TraceColumns.load(recorded), lru)
    assert offline.total_hit_tokens == totals.hit_tokens > 0
    assert converter.block_tokens == block_tokens
    text = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    lines = [json.loads(line) for line in text.splitlines()]
    assert sum(line["hit_blocks"] for line in lines) == totals.hit_blocks


def usage_of(admin: AdminConnection) -> pb.Usage:
    return total_usage(admin.stats().usage.values())


@pytest.mark.parametrize("in_place", [False, True])
def test_the_misses_by_reason_add_up(
    daemon: PrivateDaemon, requests: list[Request], in_place: bool
) -> None:
    """Over a whole replay with evictions: what the workers count arrives with their last word."""
    with daemon.admin() as admin:
        before = usage_of(admin)
        totals = replay(daemon, requests, workers=2, tiers=tuple(Tier), in_place=in_place)
        looked = [r for r in requests if r.hash_ids]
        eventually(lambda: usage_of(admin).lookups - before.lookups == len(looked))
        after = usage_of(admin)
    misses = {reason: n - before.misses[reason] for reason, n in after.misses.items()}
    assert sum(misses.values()) == len(looked) - (after.hits - before.hits)
    assert misses["absent"] > 0
    assert after.lookup_tokens - before.lookup_tokens == totals.prompt_tokens
    assert after.restored_tokens - before.restored_tokens == totals.hit_tokens > 0
    restores = sum(after.restore_times) - sum(before.restore_times)
    assert restores == after.hits - before.hits, "each hit is restored at once"
    found = [sum(t.hit_tokens for t in usage.tiers) for usage in (before, after)]
    assert found[1] - found[0] >= totals.hit_tokens, "what left before it was read was found, too"
    path = "copy" if in_place else "stream"
    moved = [sum(t.restored_bytes[path] for t in u.tiers) for u in (before, after)]
    assert moved[1] - moved[0] >= totals.verified_bytes if in_place else moved[1] > 0


def test_a_request_costs_at_most_one_rpc_of_each_kind(
    daemon: PrivateDaemon, requests: list[Request]
) -> None:
    totals = replay(daemon, requests)
    counted = {name: count for name, count in totals.rpcs.items() if count}
    assert set(counted) <= {"Claim", "Read", "Save", "SaveStaged", "Release"}
    assert (
        counted.get("Save", 0) + counted.get("SaveStaged", 0)
        == totals.latencies["save"].count
        <= len(requests)
    )
    assert all(count <= len(requests) for count in counted.values())
    assert totals.latencies["claim"].count == len(requests)


def test_workers_share_what_they_saved(daemon: PrivateDaemon, requests: list[Request]) -> None:
    totals = replay(daemon, requests, workers=3, tiers=tuple(Tier), reason=SaveReason.EVICT)
    assert totals.requests == len(requests)
    assert totals.mismatches == 0
    assert totals.hit_tokens > 0
    assert totals.good
    with daemon.admin() as admin:
        assert all(tier.entries for tier in admin.stats().tiers), "all tiers were used"


def test_the_tier_is_chosen_by_the_first_missing_block(daemon: PrivateDaemon) -> None:
    """The same key, the same tier, in any replay."""
    requests = [Request(0, 512, 1, (block,)) for block in range(60)]
    (root,) = {replay_namespace(4096, 512, salt).root for salt in [""]}
    replay(daemon, requests, tiers=tuple(Tier))
    expected: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    for key in keys_of_ids(root, range(60)):
        expected[tuple(Tier)[key[0] % 3]].add(key)
    with daemon.admin() as admin:
        for tier in Tier:
            assert {entry.key for entry in admin.all_entries(tier)} == expected[tier]


def test_blocks_may_be_of_any_size(daemon: PrivateDaemon) -> None:
    """Also of sizes that end within a tile, a slab, a chunk."""
    requests = [
        Request(0, 1000, 1, (1, 2)),
        Request(1, 1500, 1, (1, 2, 3)),
        Request(2, 512, 1, (1,)),
    ]
    for block_bytes in (1, 100, 5000, 300_000):
        totals = replay(daemon, requests, block_bytes=block_bytes, tiers=(Tier.SHM,))
        assert totals.hit_tokens == 1024 + 512
        assert totals.verified_bytes == 3 * block_bytes
        assert totals.mismatches == 0


def test_replays_with_other_salts_share_nothing(daemon: PrivateDaemon) -> None:
    requests = [Request(0, 512, 1, (1,))]
    assert replay(daemon, requests, salt="a").hit_tokens == 0
    assert replay(daemon, requests, salt="a").hit_tokens == 512
    assert replay(daemon, requests, salt="b").hit_tokens == 0


def test_odd_requests(daemon: PrivateDaemon) -> None:
    """No blocks at all, a repeated block, lengths that disagree with the number of ids."""
    requests = [
        Request(0, 700, 1, ()),
        Request(1, 2000, 1, (1, 2, 1, 3)),
        Request(2, 2000, 1, (1, 2, 1, 4)),
        Request(3, 10, 1, (1, 2)),
        Request(4, 0, 1, (9,)),
    ]
    totals = replay(daemon, requests)
    assert totals.hit_blocks == 3 + 2
    assert totals.hit_tokens == 3 * 512 + 10
    assert totals.prompt_tokens == 700 + 2000 + 2000 + 10
    assert totals.saves == {"saved": 5}
    assert totals.requests == 5


def test_an_id_that_is_no_block_id_stops_the_replay(daemon: PrivateDaemon) -> None:
    requests = [Request(0, 512, 1, (1,)), Request(1, 512, 1, (-7,))]
    with pytest.raises(CallerError, match="-7"):
        replay(daemon, requests)


def test_what_reading_the_trace_raises_is_raised(daemon: PrivateDaemon) -> None:
    def broken() -> Iterator[Request]:
        yield Request(0, 512, 1, (1,))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        replay(daemon, broken())


def test_timestamps_are_kept_at_their_speed(daemon: PrivateDaemon) -> None:
    """300 ms of a trace, three times slower and a thousand times faster."""
    requests = [Request(1_000_000 + 100 * number, 512, 1, (number,)) for number in range(4)]
    slow = replay(daemon, requests, speed=1 / 3)
    assert slow.wall_seconds >= 0.9
    assert slow.requests == 4
    fast = replay(daemon, requests, speed=1000)
    assert fast.requests == 4
    assert fast.hit_tokens == 4 * 512


def test_stopping_keeps_what_was_done(daemon: PrivateDaemon, requests: list[Request]) -> None:
    replaying = LiveReplay(
        requests,
        LiveOptions(daemon.address, workers=2),
        lambda totals: replaying.stop() if totals.requests >= 20 else None,
    )
    totals = replaying.run()
    assert totals.interrupted
    assert 20 <= totals.requests < len(requests)
    assert totals.good
    assert sum(totals.rpcs.values()) > 0, "the workers said goodbye"


def test_ctrl_c_stops_and_a_second_one_gives_up(
    daemon: PrivateDaemon, requests: list[Request]
) -> None:
    def interrupt(totals: Totals) -> None:
        if totals.requests >= 10 and not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    interrupted: list[bool] = []
    totals = replay(daemon, requests, interrupt)
    assert totals.interrupted
    assert 10 <= totals.requests < len(requests)

    def insist(totals: Totals) -> None:
        if totals.requests >= 10:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        replay(daemon, requests, insist)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_worker_that_dies_is_missed_and_the_others_go_on(
    daemon: PrivateDaemon, requests: list[Request]
) -> None:
    def kill_one(totals: Totals) -> None:
        if totals.requests >= 20 and not killed:
            process = replaying._workers[0].process
            assert process.pid is not None
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    killed: list[int] = []
    replaying = LiveReplay(requests, LiveOptions(daemon.address, workers=2), kill_one)
    totals = replaying.run()
    assert totals.workers_lost == 1
    assert not totals.good
    assert len(requests) - 2 <= totals.requests <= len(requests)
    assert totals.mismatches == 0


def test_a_daemon_that_stays_away_ends_the_replay(requests: list[Request]) -> None:
    with private_daemon() as doomed:

        def kill(totals: Totals) -> None:
            if totals.requests >= 20 and not killed:
                killed.append(True)
                doomed.kill()

        killed: list[bool] = []
        totals = replay(doomed, requests, kill, workers=2, reconnect_wait_s=0.5)
    assert totals.gave_up
    assert not totals.good
    assert totals.unavailable_requests >= 1
    assert totals.requests < len(requests)
    assert totals.mismatches == 0


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"tiers": ()}, {"block_bytes": 0}, {"block_tokens": 0}, {"speed": -1.0},
     {"reconnect_wait_s": -1.0}],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        LiveOptions("unix:/nowhere", **wrong)


def test_the_reference_above_is_the_naive_one() -> None:
    """Against an LRU that touches block by block, for chains that never exceed the slots."""
    random = Random(5)
    requests = []
    for number in range(300):
        length = random.randint(1, 6)
        requests.append(Request(number, 512 * length, 1, tuple(range(length))))
    assert lru_hit_tokens(requests, 6) == sum(
        512 * min(len(r.hash_ids), max((len(q.hash_ids) for q in requests[:i]), default=0))
        for i, r in enumerate(requests)
    )
