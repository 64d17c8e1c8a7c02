"""vLLM itself: its tiering manager, primary tier and factory, and those tests of its file tier that
are not about files. `make engines-vllm` runs this file."""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.client.connectors.plugins import register_vllm
from prefixd.client.connectors.vllm import identity_of
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.identity import StateIdentity
from tests.engines import vllm_tiering as tiering
from tests.engines.page_commands import command, option
from tests.support.daemon import private_daemon
from tests.support.decisions import InKey, Irrelevant, check_decided

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


def test_the_daemon_shows_the_ratio_that_vllm_sees(rows: Any) -> None:
    """Of random chunks, of which some were stored."""
    from vllm.v1.kv_offload.config import OffloadingGroupConfig

    chance = random.Random(3)
    with private_daemon(ram="64MiB", shm="0", disk="0") as daemon:
        of = tiering.spec()
        of.config = replace(of.config, groups=(OffloadingGroupConfig(16, ("layer",), 0),))
        made = tiering.tier(memoryview(rows), of, **tiering.prefixd(daemon.address, "ram"))
        keys = tiering.keys(40, os.urandom(4))
        stored = keys[:CHUNKS]
        made.submit_store(tiering.job(1, stored, range(CHUNKS)))
        assert tiering.ended(made).success
        answers = look_up(made, chance.choices(keys, k=200))
        hits = answers.count(results().HIT)
        made.shutdown()
        with daemon.admin() as admin:
            (told,) = (each for each in admin.stats().usage.values() if each.lookups)
    assert (told.lookups, told.hits) == (200, hits)
    assert told.lookup_tokens == 200 * 16
    assert sum(tier.hit_tokens for tier in told.tiers) == hits * 16
    assert 0 < hits < 200


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


def test_the_page_followed_literally(daemon: PrivateDaemon, rows: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    register_vllm()
    given = json.loads(option(command("vllm.md", "vllm", "serve"), "--kv-transfer-config"))
    config = KVTransferConfig(**given)
    assert knows_connector(config.kv_connector)
    extra = config.kv_connector_extra_config
    assert OffloadingSpecFactory.get_spec_cls(extra).__name__ == "TieringOffloadingSpec"
    (options,) = extra["secondary_tiers"]
    keys = tiering.keys(1, os.urandom(4))
    one, other = (
        tiering.tier(memoryview(rows), **options, address=daemon.address) for _ in range(2)
    )
    one.submit_store(tiering.job(1, keys, [0]))
    assert tiering.ended(one).success
    assert look_up(other, keys) == [results().HIT], "the page's fingerprint lets others share"
    one.shutdown()
    other.shutdown()


def test_the_page_of_lmcache_names_a_connector_of_vllm() -> None:
    given = json.loads(option(command("lmcache.md", "vllm", "serve"), "--kv-transfer-config"))
    assert knows_connector(given["kv_connector"])


def knows_connector(name: str | None) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return name in KVConnectorFactory._registry


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


# ---- what vLLM tells its tiers about its engine: every field is decided about

_MAPPER = InKey("file tier's fields")
_SHARE = "tests/engines/test_vllm.py::test_engines_that_differ_elsewhere_share"
_DATA_PARALLEL = Irrelevant("replicas have the same weights", _SHARE)
_DECIDED = {
    "config": {
        "groups": InKey("groups"),
        "worker_kv_bytes_per_block": Irrelevant("the size of the chunk is in the key", _SHARE),
        "enable_kv_cache_events": Irrelevant("what is told about stores", _SHARE),
        "extra_config": Irrelevant("the options themselves", _SHARE),
        "engine_id": Irrelevant("a name of this engine", _SHARE),
        "model": InKey("file tier's fields"),
        "cache": InKey("file tier's fields"),
        "parallel": InKey("file tier's fields"),
        "replicated_layout": InKey("replicated layout"),
        "canonical_layout": InKey("canonical layout"),
        "kv_cache_layout": InKey("kv cache layout"),
    },
    "model": {"name": _MAPPER, "dtype": InKey("dtype"), "max_model_len": InKey("max model len")},
    "cache": {"tokens_per_hash": _MAPPER, "blocks_per_chunk": _MAPPER},
    "parallel": {
        "rank": InKey("rank"),
        "world_size": Irrelevant("the sizes that make it up are in the key", _SHARE),
        **dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), _MAPPER),
        "data_parallel_index": _DATA_PARALLEL,
        "data_parallel_size": _DATA_PARALLEL,
        "data_parallel_rank_local": _DATA_PARALLEL,
        "is_parallelism_agnostic": InKey("is parallelism agnostic"),
    },
    "group": dict.fromkeys(
        ("tokens_per_block", "layer_names", "group_id", "sliding_window_size_in_chunks"),
        InKey("groups"),
    ),
}


def identity(config: Any, mapped: Any = None) -> StateIdentity:
    """As the tier makes it. `mapped`: what vLLM's file tier is made of, if not of the same."""
    from vllm.v1.kv_offload.file_mapper import FileMapper

    of, files = (SimpleNamespace(config=each) for each in (config, mapped or config))
    blocks = config.cache.blocks_per_chunk
    made = FileMapper.from_offloading_spec("", files, blocks, parallel_agnostic=True)  # type: ignore[arg-type]
    return identity_of(of, made.get_run_config(), made.rank, 4096, {"fingerprint": "test"})


def configuration(part: str, config: Any) -> Any:
    """A part of vLLM's configuration."""
    return {"config": config, "group": config.groups[0]}.get(part) or getattr(config, part)


def with_groups() -> Any:
    from vllm.v1.kv_offload.config import OffloadingGroupConfig

    group = OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0)
    return replace(tiering.spec().config, groups=(group,), kv_cache_layout="LBNHC")


def changed(part: str, field: str, config: Any) -> Any:
    """The configuration with another value in this field."""
    owner = configuration(part, config)
    value = getattr(owner, field)
    match value:
        case bool():
            value = not value
        case int():
            value += 1
        case str():
            value += "x"
        case tuple():
            value = (*value, *value)
        case None:
            value = 7
        case _:
            value = {"another": 1}
    owner = replace(owner, **{field: value})
    if part == "config":
        return owner
    return replace(config, **({"groups": (owner,)} if part == "group" else {part: owner}))


@pytest.mark.parametrize("part", _DECIDED)
def test_every_field_of_vllms_description_is_decided(part: str) -> None:
    config = with_groups()
    check_decided(configuration(part, config), _DECIDED[part], identity(config))


FIELDS = [
    (part, field, isinstance(decision, InKey))
    for part, decisions in _DECIDED.items()
    for field, decision in decisions.items()
    if not (part == "config" and field in ("model", "cache", "parallel"))  # parts themselves
]


@pytest.mark.parametrize(("part", "field"), [(p, f) for p, f, in_key in FIELDS if in_key])
def test_engines_that_differ_here_share_nothing(part: str, field: str) -> None:
    config = with_groups()
    assert identity(config).digest == identity(with_groups()).digest
    # vLLM makes file tiers of a canonical layout only for engines that it has certified.
    mapped = config if field == "canonical_layout" else None
    assert identity(changed(part, field, config), mapped).digest != identity(config).digest


@pytest.mark.parametrize(("part", "field"), [(p, f) for p, f, in_key in FIELDS if not in_key])
def test_engines_that_differ_elsewhere_share(part: str, field: str) -> None:
    config = with_groups()
    assert identity(changed(part, field, config)).digest == identity(config).digest


def test_vllms_hashes_name_adapters_salts_and_images() -> None:
    """What the connector's table leaves to them."""
    from vllm.v1.core import kv_cache_utils

    source = inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
    for each in ("lora_extra_keys", "mm_extra_keys", "cache_salt_keys", "prompt_embeds_keys"):
        assert each in source


def test_hashes_are_equal_in_two_processes_without_a_seed() -> None:
    script = (
        "from vllm.v1.core import kv_cache_utils as u\n"
        "from vllm.utils.hashing import get_hash_fn_by_name\n"
        "for name in ('sha256', 'sha256_cbor'):\n"
        "    f = get_hash_fn_by_name(name); u.init_none_hash(f)\n"
        "    print(u.hash_block_tokens(f, None, list(range(16)), None).hex())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    printed = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    # Behind whatever vLLM logs there.
    one, other = (each.split()[-2:] for each in printed)
    assert one == other
    assert len(set(one)) == 2
