"""vLLM itself: its tiering manager, primary tier and factory, and those tests of its file tier that
are not about files. `make engines-vllm` runs this file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prefixd.client.ctl.private import PrivateDaemon
from prefixd.connectors.plugins import register_vllm
from tests.engines import vllm_tiering as tiering
from tests.support.daemon import private_daemon

pytest.importorskip("vllm")
# The engine's own warnings are not errors here.
pytestmark = pytest.mark.filterwarnings("default")

CHUNKS, CHUNK_BYTES = 8, 64 * 1024


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="64MiB", shm="64MiB", disk="64MiB") as daemon:
        yield daemon


@pytest.fixture
def rows() -> Any:
    return np.random.default_rng(1).integers(-100, 100, (CHUNKS, CHUNK_BYTES), np.int8)


@pytest.fixture(params=["ram", "shm", "disk"])
def tier(daemon: PrivateDaemon, rows: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    made = tiering.tier(memoryview(rows), **tiering.prefixd(daemon.address, request.param))
    yield made
    made.shutdown()


def results() -> Any:
    from vllm.v1.kv_offload.base import LookupResult

    return LookupResult


def look_up(tier: Any, keys: list[Any]) -> list[Any]:
    return [tier.lookup(key, tiering.context()) for key in keys]


@pytest.mark.parametrize("name", ["ram", "shm", "disk"])
def test_store_start_again_look_up_promote(daemon: PrivateDaemon, rows: Any, name: str) -> None:
    """All steps through vLLM's manager. The loaded bytes are those that were stored, by the engine
    before this one."""
    options = tiering.prefixd(daemon.address, name)
    made = tiering.manager(rows, lambda view: tiering.tier(view, **options))
    keys, ctx = tiering.keys(4, os.urandom(4)), tiering.context()
    found = results()
    made.on_new_request(ctx)
    stored = made.prepare_store(keys, ctx)
    assert len(stored.keys_to_store) == 4
    places = [int(place) for place in stored.store_spec.block_ids]
    expected = rows[places].copy()
    made.complete_store(keys, ctx, success=True)
    tiering.settle(made)
    made.on_request_finished(ctx)
    tiering.shut_down(made)
    rows[:] = 0
    made = tiering.manager(rows, lambda view: tiering.tier(view, **options))
    made.on_new_request(ctx)
    absent = tiering.keys(1, b"none")[0]
    assert made.lookup(absent, ctx) is found.MISS
    # Within the step that finds them, the entries are still being promoted.
    assert {made.lookup(key, ctx) for key in keys} == {found.HIT_PENDING}
    tiering.step(made)
    tiering.settle(made)
    assert [made.lookup(key, ctx) for key in keys] == [found.HIT] * 4
    loaded = made.prepare_load(keys, ctx)
    now = [int(place) for place in loaded.block_ids]
    assert (rows[now] == expected).all()
    made.complete_load(keys, ctx)
    made.on_request_finished(ctx)
    tiering.shut_down(made)


def test_after_a_reset_nothing_from_before_is_found(daemon: PrivateDaemon, rows: Any) -> None:
    """vLLM resets its caches after an update of weights in place, and keeps its tiers' entries."""
    options = tiering.prefixd(daemon.address, "ram")
    made = tiering.manager(rows, lambda view: tiering.tier(view, **options))
    keys, ctx, found = tiering.keys(2, os.urandom(4)), tiering.context(), results()
    (second,) = made.secondary_tiers
    second.submit_store(tiering.job(1, keys, [0, 1]))
    assert tiering.ended(second).success
    assert look_up(second, keys) == [found.HIT] * 2
    made.on_new_request(ctx)
    made.reset_cache()
    made.on_reset_flushed()
    assert look_up(second, keys) == [found.MISS] * 2
    assert [made.lookup(key, ctx) for key in keys] == [found.MISS] * 2
    made.on_request_finished(ctx)
    tiering.shut_down(made)


def test_vllms_factory_knows_the_name_of_the_tier(daemon: PrivateDaemon, rows: Any) -> None:
    register_vllm()
    register_vllm()
    made = tiering.tier(memoryview(rows), type="prefixd", address=daemon.address)
    assert type(made).__name__ == "PrefixdTier"
    made.shutdown()


def test_keys_that_were_not_stored_are_misses(tier: Any) -> None:
    assert look_up(tier, tiering.keys(2, os.urandom(4))) == [results().MISS] * 2


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_bytes_go_to_other_chunks_than_they_came_from(tier: Any, rows: Any, count: int) -> None:
    keys, expected = tiering.keys(count, os.urandom(4)), rows[:count].copy()
    tier.submit_store(tiering.job(1, keys, range(count)))
    assert tiering.ended(tier).success
    assert look_up(tier, keys) == [results().HIT] * count
    rows[:] = 0
    chunks = range(CHUNKS - count, CHUNKS)
    tier.submit_load(tiering.job(2, keys, chunks, is_promotion=True))
    assert tiering.ended(tier).success
    assert (rows[CHUNKS - count :] == expected).all()
    assert look_up(tier, keys) == [results().HIT] * count, "the tier keeps what it has loaded"


def test_a_load_with_an_absent_key_fails(tier: Any) -> None:
    salt = os.urandom(4)
    keys = tiering.keys(3, salt)
    tier.submit_load(tiering.job(1, keys[2:], [0], is_promotion=True))
    result = tiering.ended(tier)
    assert (result.success, result.successful_keys) == (False, None)
    tier.submit_store(tiering.job(2, keys[:2], [0, 1]))
    assert tiering.ended(tier).success
    tier.submit_load(tiering.job(3, keys, [0, 1, 2], is_promotion=True))
    result = tiering.ended(tier)
    assert (result.job_id, result.success) == (3, False)
    assert list(result.successful_keys) == keys[:2]
    assert look_up(tier, keys) == [results().HIT, results().HIT, results().MISS]


def test_each_job_has_its_own_result(tier: Any) -> None:
    keys = tiering.keys(2, os.urandom(4))
    for number, key in enumerate(keys):
        tier.submit_store(tiering.job(number, [key], [number]))
    tiering.wait(tier)
    assert {each.job_id: each.success for each in tier.get_finished_jobs()} == {0: True, 1: True}
    assert look_up(tier, keys) == [results().HIT] * 2


def test_a_chunk_out_of_bounds_fails_its_job(tier: Any) -> None:
    keys = tiering.keys(1, os.urandom(4))
    tier.submit_store(tiering.job(1, keys, [CHUNKS]))
    assert not tiering.ended(tier).success
    tier.submit_load(tiering.job(2, keys, [CHUNKS], is_promotion=True))
    assert not tiering.ended(tier).success


def test_a_shutdown_with_jobs_under_way_returns(daemon: PrivateDaemon, rows: Any) -> None:
    made = tiering.tier(memoryview(rows), **tiering.prefixd(daemon.address, "ram"))
    for number in range(10):
        made.submit_store(tiering.job(number, tiering.keys(1, os.urandom(4)), [number % CHUNKS]))
    made.shutdown()
    tiering.wait(made)
    assert len(list(made.get_finished_jobs())) == 10


def test_events_name_the_stored_keys(daemon: PrivateDaemon, rows: Any) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium

    options = tiering.prefixd(daemon.address, "ram", enable_kv_events=True, locality="LOCAL")
    keys = tiering.keys(2, os.urandom(4))
    for enabled in (True, False):
        made = tiering.tier(memoryview(rows), tiering.spec(events=enabled), **options)
        assert made.locality is Locality.LOCAL
        made.submit_store(tiering.job(1, keys, [0, 1]))
        assert tiering.ended(made).success
        events = list(made.take_events())
        assert [list(each.keys) for each in events] == [keys] * enabled
        assert all(each.medium is Medium.STORAGE and not each.removed for each in events)
        made.submit_store(tiering.job(2, keys, [CHUNKS, 0]))
        assert not tiering.ended(made).success
        assert list(made.take_events()) == []
        made.shutdown()
    for locality in ("local", ""):
        with pytest.raises(ValueError, match="Locality"):
            tiering.tier(memoryview(rows), **(options | {"locality": locality}))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({"tp_size": 2}, {"tp_size": 4}, False),
        ({"tp_size": 2, "rank": 0}, {"tp_size": 2, "rank": 1}, False),
        (
            {"tp_size": 2, "rank": 1, "parallelism_agnostic": True},
            {"tp_size": 4, "rank": 3, "parallelism_agnostic": True},
            True,
        ),
        ({"tp_size": 2, "replicated": True}, {"tp_size": 2, "rank": 1, "replicated": True}, True),
        ({"tp_size": 2, "replicated": True}, {"tp_size": 2}, False),
        ({"parallelism_agnostic": True}, {}, False),
    ],
)
def test_parallel_layouts_share_identical_chunks(
    daemon: PrivateDaemon, rows: Any, one: dict[str, Any], other: dict[str, Any], shared: bool
) -> None:
    options, keys = tiering.prefixd(daemon.address, "ram"), tiering.keys(1, os.urandom(4))
    writer = tiering.tier(memoryview(rows), tiering.spec(**one), **options)
    writer.submit_store(tiering.job(1, keys, [0]))
    assert tiering.ended(writer).success
    reader = tiering.tier(memoryview(rows), tiering.spec(**other), **options)
    assert look_up(reader, keys) == [results().HIT if shared else results().MISS]
    for made in (writer, reader):
        made.shutdown()


def test_another_chunk_size_is_another_namespace(daemon: PrivateDaemon, rows: Any) -> None:
    options, keys = tiering.prefixd(daemon.address, "ram"), tiering.keys(1, os.urandom(4))
    writer = tiering.tier(memoryview(rows), **options)
    writer.submit_store(tiering.job(1, keys, [0]))
    assert tiering.ended(writer).success
    halves = rows.reshape(2 * CHUNKS, CHUNK_BYTES // 2)
    reader = tiering.tier(memoryview(halves), **options)
    assert look_up(reader, keys) == [results().MISS]
    for made in (writer, reader):
        made.shutdown()


def test_a_daemon_that_is_killed_mid_job(rows: Any) -> None:
    with private_daemon(ram="64MiB") as daemon:
        options = tiering.prefixd(daemon.address, "ram", deadline_ms=1_000)
        made = tiering.manager(rows, lambda view: tiering.tier(view, **options))
        (second,) = made.secondary_tiers
        keys = tiering.keys(4, os.urandom(4))
        second.submit_store(tiering.job(1, keys, range(4)))
        assert tiering.ended(second).success
        for number in range(2, 34):
            second.submit_store(tiering.job(number, tiering.keys(4, os.urandom(4)), range(4)))
            second.submit_load(tiering.job(number + 100, keys, range(4, 8), is_promotion=True))
        daemon.kill()
        second.submit_store(tiering.job(200, tiering.keys(4, os.urandom(4)), range(4)))
        second.submit_load(tiering.job(201, keys, range(4, 8), is_promotion=True))
        tiering.wait(second)
        results_of = {each.job_id: each.success for each in second.get_finished_jobs()}
        assert len(results_of) == 66, "every job ends"
        assert not results_of[200]
        assert not second.has_pending_work()
        tiering.shut_down(made)
