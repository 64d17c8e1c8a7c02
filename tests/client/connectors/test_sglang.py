"""The SGLang backend against hand-written twins of its few types, and a real daemon."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from prefixd.client.connectors import sglang
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import ConfigError
from tests.support.daemon import private_daemon

LAYERS, PAGES, PAGE_BYTES = 3, 8, 512
HOME = "sglang.srt.mem_cache.hicache_storage"


class HiCacheStorage(ABC):
    @abstractmethod
    def get(self, key: str) -> Any: ...
    @abstractmethod
    def exists(self, key: str) -> bool: ...


class PoolTransferResult(NamedTuple):
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class PoolName(str, Enum):  # noqa: UP042  (as the engine has it)
    KV = "kv"
    INDEXER = "indexer"


class Pool:
    """Page-first: a page has two pieces, K and V. Layer-first: two pieces for each layer."""

    page_size, dtype = 64, "bf16"

    def __init__(self, layout: str) -> None:
        self.layout = layout
        pieces = 2 if layout == "page_first" else 2 * LAYERS
        self.pieces = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(pieces)]

    def fill(self, page: int) -> None:
        for number, piece in enumerate(self.pieces):
            piece[page] = 10 * page + number + 1

    def page(self, page: int) -> list[int]:
        return [int(piece[page, -1]) for piece in self.pieces]

    def get_page_buffer_meta(self, pages: list[int]) -> tuple[list[int], list[int]]:
        pointers = [piece[page].ctypes.data for page in pages for piece in self.pieces]
        return pointers, [PAGE_BYTES] * len(pointers)


def install(monkeypatch: pytest.MonkeyPatch, base: type = HiCacheStorage) -> None:
    parts = HOME.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[HOME].HiCacheStorage = base  # type: ignore[attr-defined]
    sys.modules[HOME].PoolTransferResult = PoolTransferResult  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch)
    yield
    vars(sglang).pop("PrefixdStorage", None)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


def config(address: str, **changes: Any) -> Any:
    extra = {"interface_v1": 1, "address": address, "deadline_ms": 2_000}
    extra["fingerprint"] = "test weights"
    fields = {"model_name": "m", "tp_rank": 0, "tp_size": 1, "is_mla_model": False}
    extra |= {name: changes.pop(name) for name in ("salt", "interface_v1") if name in changes}
    return SimpleNamespace(**fields | changes, extra_config=extra)


def hashes(count: int) -> list[str]:
    return [os.urandom(32).hex() for _ in range(count)]


@pytest.fixture(params=["page_first", "layer_first"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(layout: str) -> Pool:
    return Pool(layout)


@pytest.fixture
def storage(daemon: PrivateDaemon, pool: Pool) -> Iterator[Any]:
    made = sglang.PrefixdStorage(config(daemon.address), {})
    made.register_mem_pool_host(pool)
    yield made
    made.close()


def test_pages_come_back_one_entry_each(storage: Any, pool: Pool, daemon: PrivateDaemon) -> None:
    keys = hashes(3)
    for page in range(3):
        pool.fill(page)
    expected = [pool.page(page) for page in range(3)]
    assert storage.batch_set_v1(keys, [0, 1, 2]) == [True] * 3
    assert storage.batch_set_v1(keys, [0, 1, 2]) == [True] * 3, "they are there"
    assert storage.batch_exists(keys) == 3
    assert storage.batch_get_v1(keys, [5, 6, 7]) == [True] * 3
    assert [pool.page(page) for page in (5, 6, 7)] == expected
    with daemon.admin() as admin:
        assert sum(tier.entries for tier in admin.stats().tiers) >= 3
    with storage._client.claim(storage._pools["kv"][1]._namespace.keys(keys)) as hit:
        assert list(hit.token_counts) == [64] * 3
    assert storage.batch_get_v1([], []) == storage.batch_set_v1([], []) == []


def test_a_hole_ends_the_run_and_is_a_page_that_is_not_there(storage: Any, pool: Pool) -> None:
    keys = hashes(4)
    pool.fill(0)
    assert storage.batch_set_v1([keys[0], keys[1], keys[3]], [0, 0, 0]) == [True] * 3
    assert storage.batch_exists(keys) == 2
    assert storage.batch_get_v1(keys, [4, 5, 6, 7]) == [True, True, False, True]
    assert storage.exists(keys[0])
    assert not storage.exists(keys[2])


def test_several_pools(storage: Any, pool: Pool, layout: str) -> None:
    other, keys = Pool(layout), hashes(3)
    storage.register_mem_host_pool_v2(other, PoolName.INDEXER)
    storage.on_host_pools_registered()
    pool.fill(0)
    other.fill(1)

    def transfer(name: PoolName, count: int, pages: list[int], policy: str = "all_pages") -> Any:
        policy_of = SimpleNamespace(value=policy)
        return SimpleNamespace(
            name=name, keys=keys[:count], host_indices=pages, hit_policy=policy_of
        )

    kv, indexer = PoolName.KV, PoolName.INDEXER
    saved = storage.batch_set_v2([transfer(kv, 3, [0, 0, 0]), transfer(indexer, 1, [1])])
    assert saved == {kv: [True] * 3, indexer: [True]}
    found = storage.batch_exists_v2(keys, [transfer(indexer, 3, [1, 1, 1])])
    assert found == PoolTransferResult(1, {indexer: 1}, [1])
    last = storage._pools["indexer"][1]
    assert last.set(keys[2:], [bytes(8)]) == [True]
    window = transfer(indexer, 1, [1], "trailing_pages")
    assert storage.batch_exists_v2(keys, [window]) == PoolTransferResult(3, {indexer: 3}, [1, 3])
    groups = transfer(indexer, 1, [1], "block_groups")
    assert storage.batch_exists_v2(keys, [groups]) == PoolTransferResult(3, {indexer: 0}, [1, 2, 3])
    unknown = SimpleNamespace(name="swa", keys=None, hit_policy=window.hit_policy)
    assert storage.batch_exists_v2(keys, [unknown]) == PoolTransferResult(0, {"swa": 0}, [])
    loaded = storage.batch_get_v2([transfer(kv, 1, [7]), transfer(indexer, 2, [6, 7])])
    assert loaded == {kv: [True], indexer: [True, False]}
    assert other.page(6) == other.page(1)


def test_sglang_0_5_16_asks_for_no_lengths(
    monkeypatch: pytest.MonkeyPatch, daemon: PrivateDaemon, pool: Pool
) -> None:
    class Of0516(NamedTuple):
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]

    monkeypatch.setattr(sys.modules[HOME], "PoolTransferResult", Of0516)
    vars(sglang).pop("PrefixdStorage", None)
    storage = sglang.PrefixdStorage(config(daemon.address))
    storage.register_mem_pool_host(pool)
    keys = hashes(2)
    assert storage.batch_exists_v2(keys) == (0, {})
    assert storage.batch_set_v1(keys, [0, 1]) == [True] * 2
    assert storage.batch_exists_v2(keys) == (2, {})
    storage.close()


def test_which_prefixes_the_pages_of_a_pool_allow() -> None:
    there = [True, True, False, True, True]
    assert sglang.restorable_lengths(there, None) == [1, 2]
    assert sglang.restorable_lengths(there, 1) == [1, 2, 4, 5]
    assert sglang.restorable_lengths(there, 2) == [1, 2, 5]
    assert sglang.restorable_lengths([], 1) == sglang.restorable_lengths([], None) == []


def test_ranks_that_have_the_same_share_it(pool: Pool) -> None:
    def root(rank: int, mla: bool, name: str) -> bytes:
        of = config("unix:/none", tp_rank=rank, is_mla_model=mla)
        return sglang.identity_of(of, of.extra_config, pool, name).digest

    assert root(0, True, "kv") == root(1, True, "kv")
    assert root(0, True, "mamba") != root(1, True, "mamba")
    assert root(0, False, "kv") != root(1, False, "kv")


@pytest.mark.parametrize(
    "changes", [{"model_name": "n"}, {"tp_rank": 1}, {"salt": "tenant"}], ids=str
)
def test_another_model_rank_or_tenant_is_another_namespace(
    daemon: PrivateDaemon, storage: Any, pool: Pool, changes: dict[str, Any]
) -> None:
    keys = hashes(1)
    assert storage.batch_set_v1(keys, [0]) == [True]
    other = sglang.PrefixdStorage(config(daemon.address, **changes))
    other.register_mem_pool_host(pool)
    assert (other.batch_exists(keys), other.batch_get_v1(keys, [1])) == (0, [False])
    other.close()


def test_single_values(storage: Any) -> None:
    (key,) = hashes(1)
    value, target = bytearray(b"v" * 100), bytearray(100)
    assert storage.get(key, target) is None
    assert storage.set(key, value)
    assert storage.get(key, target) is target
    assert target == value
    assert storage.batch_get([key], [target]) == [target]
    assert storage.batch_set([key], [value])
    assert not storage.set(key)
    assert storage.get(key) is None


@pytest.mark.parametrize("how", ["clear", "weights_updated"])
def test_from_then_on_nothing_from_before_is_found(
    daemon: PrivateDaemon, storage: Any, pool: Pool, how: str
) -> None:
    other = sglang.PrefixdStorage(config(daemon.address))
    other.register_mem_pool_host(pool)
    (old, new) = hashes(2)
    assert storage.batch_set_v1([old], [0]) == [True]
    assert storage.batch_exists([old]) == other.batch_exists([old]) == 1
    getattr(storage, how)()
    assert (storage.batch_exists([old]), storage.batch_get_v1([old], [1])) == (0, [False])
    assert storage.batch_set_v1([new], [0]) == [True]
    assert storage.batch_exists([new]) == 1
    assert other.batch_exists([new]) == 0, "it may still have the old weights"
    assert other.batch_exists([old]) == 1
    other.close()


def test_a_flush_after_an_update_of_weights_leaves_nothing_of_before(storage: Any) -> None:
    """Until then requests with pages of the old weights may have gone on."""
    (key,) = hashes(1)
    assert storage.batch_set_v1([key], [0]) == [True]
    storage.cache_flushed()
    assert storage.batch_exists([key]) == 1, "no weights were updated"
    storage.weights_updated()
    assert storage.batch_set_v1([key], [0]) == [True]
    storage.cache_flushed()
    assert storage.batch_exists([key]) == 0


def test_hashes_that_do_not_tell_adapters_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch, storage: Any, pool: Pool
) -> None:
    """Those of SGLang before it had names of requests in them."""
    arguments = SimpleNamespace(enable_lora=True)
    monkeypatch.setattr(sglang, "server_arguments", lambda: arguments)
    with pytest.raises(UnsupportedEngine, match="do not tell adapters apart"):
        storage.register_mem_pool_host(pool)
    utils = ModuleType("sglang.srt.mem_cache.utils")
    utils.storage_namespace_seed = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    storage.register_mem_pool_host(pool)


def test_a_server_that_does_not_tell_of_updates_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, storage: Any, pool: Pool
) -> None:
    monkeypatch.setattr(sglang, "server_arguments", SimpleNamespace)
    for watched in (True, False):
        monkeypatch.setattr(sglang, "_watched", watched)
        storage.register_mem_pool_host(pool)
        assert ("clear the storage after each" in caplog.text) is not watched


def test_nothing_raises_without_a_daemon(tmp_path: os.PathLike[str], pool: Pool) -> None:
    storage = sglang.PrefixdStorage(config(f"unix:{tmp_path}/none.sock"))
    keys = hashes(2)
    assert storage.batch_exists(keys) == 0, "no pool yet"
    assert storage.batch_get_v1(keys, [0, 1]) == [False] * 2
    storage.register_mem_pool_host(pool)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, [0, 1]) == [False] * 2
    assert storage.batch_set_v1(keys, [0, 1]) == [False] * 2
    assert storage.batch_exists(["no hash"]) == 0
    assert storage.batch_get_v1(["no hash"], [0]) == [False]
    assert storage.get("no hash", bytearray(8)) is None
    assert not storage.set("no hash", bytes(8))
    storage.clear()
    assert storage.get_stats() is None
    storage.close()
    assert storage.batch_set_v1(keys, [0, 1]) == [False] * 2


def test_a_pool_that_fails_is_absent_alone(
    monkeypatch: pytest.MonkeyPatch, storage: Any, layout: str
) -> None:
    keys = hashes(2)
    assert storage.batch_set_v1(keys, [0, 1]) == [True] * 2
    storage.register_mem_host_pool_v2(Pool(layout), PoolName.INDEXER)

    def transfer(name: str) -> Any:
        return SimpleNamespace(name=name, keys=keys, hit_policy=SimpleNamespace(value="all_pages"))

    monkeypatch.setattr(storage._pools["indexer"][1], "exist", lambda _: 1 / 0)
    found = storage.batch_exists_v2(keys, [transfer("kv"), transfer("indexer")])
    assert found == PoolTransferResult(0, {"kv": 2, "indexer": 0}, [])


def test_what_pools_ask_in_a_way_that_is_not_known_is_nothing(storage: Any) -> None:
    assert storage.batch_exists_v2(hashes(1), [object()]) == PoolTransferResult(0, {}, [])


def test_what_it_can_t_work_with_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, daemon: PrivateDaemon
) -> None:
    with pytest.raises(ConfigError, match="interface_v1"):
        sglang.PrefixdStorage(config(daemon.address, interface_v1=0))
    vars(sglang).pop("PrefixdStorage")

    class Later(HiCacheStorage):
        @abstractmethod
        def batch_get_v3(self) -> None: ...

    install(monkeypatch, Later)
    with pytest.raises(UnsupportedEngine, match="it asks for batch_get_v3; it was made for"):
        _ = sglang.PrefixdStorage
