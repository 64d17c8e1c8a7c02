"""The vLLM tier against hand-written twins of its few types, and a real daemon."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.client.connectors import vllm
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import ConfigError
from tests.support.daemon import eventually, private_daemon

CHUNKS, CHUNK_BYTES = 6, 4_096


class LookupResult(Enum):
    MISS, HIT, HIT_PENDING, RETRY = range(4)


class SecondaryTierManager(ABC):
    def __init__(self, _spec: Any, _view: memoryview, tier_type: str, _of: Any = None) -> None:
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...
    @abstractmethod
    def drain_jobs(self) -> None: ...


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass
class JobResultOf030:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


class Medium(Enum):
    CPU, STORAGE = "CPU", "STORAGE"


class Locality(Enum):
    LOCAL, REMOTE = "LOCAL", "REMOTE"


class FileMapper:
    @classmethod
    def from_offloading_spec(
        cls,
        root_dir: str,
        offloading_spec: Any,
        blocks_per_file: int = 1,
        parallel_agnostic: bool = False,
    ) -> FileMapper:
        assert not root_dir
        assert parallel_agnostic
        made = cls()
        made.fields = {"model_name": offloading_spec.model, "groups": [1, blocks_per_file]}
        made.rank = offloading_spec.config.parallel.rank
        return made

    def get_run_config(self) -> dict[str, Any]:
        return self.fields


def install(monkeypatch: pytest.MonkeyPatch, base: type = SecondaryTierManager) -> None:
    contents: dict[str, dict[str, Any]] = {
        "vllm.v1.kv_offload.tiering.base": {
            "SecondaryTierManager": base,
            "TransferJob": SimpleNamespace,
            "JobResult": JobResult,
            "LookupResult": LookupResult,
        },
        "vllm.v1.kv_offload.file_mapper": {"FileMapper": FileMapper},
        "vllm.v1.kv_offload.base": {
            "RequestOffloadingContext": SimpleNamespace,
            "OffloadingEvent": lambda **fields: SimpleNamespace(**fields),
            "Medium": Medium,
            "Locality": Locality,
        },
    }
    for name, values in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            each = ".".join(parts[:end])
            if each not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, each, ModuleType(each))
        for attribute, value in values.items():
            setattr(sys.modules[name], attribute, value)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch)
    yield
    vars(vllm).pop("PrefixdTier", None)


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


def spec(model: str = "m", rank: int = 0, *, events: bool = True) -> Any:
    parallel = SimpleNamespace(rank=rank)
    return SimpleNamespace(
        model=model,
        blocks_per_chunk=2,
        config=SimpleNamespace(parallel=parallel),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )


@pytest.fixture
def memory() -> Any:
    made = np.zeros((CHUNKS, CHUNK_BYTES), np.int8)
    made[:3] = [[1], [2], [3]]
    return made


def tier_of(address: str, memory: Any, of: Any = None, **options: Any) -> Any:
    view = memoryview(memory)
    options = {"address": address, "fingerprint": "test weights", **options}
    return vllm.PrefixdTier(of or spec(), view, "prefixd", **options)


def job(number: int, keys: list[bytes], chunks: list[int]) -> Any:
    return SimpleNamespace(job_id=number, keys=keys, chunk_ids=np.array(chunks))


def ended(tier: Any) -> Any:
    """The result of the only job, once it has ended. `drain_jobs` is what vLLM calls to reset."""
    tier._core.drain()
    (result,) = tier.get_finished_jobs()
    assert not tier.has_pending_work()
    return result


def keys_of(count: int) -> list[bytes]:
    return [os.urandom(36) for _ in range(count)]


def test_store_look_up_promote(daemon: PrivateDaemon, memory: Any) -> None:
    tier, keys = tier_of(daemon.address, memory), keys_of(3)
    assert tier.lookup(keys[0], None) is LookupResult.MISS
    tier.submit_store(job(1, keys[:2], [0, 2]))
    result = ended(tier)
    assert (result.job_id, result.success, result.successful_keys) == (1, True, None)
    assert result.transfer_bytes == 2 * CHUNK_BYTES
    looked = [tier.lookup(key, None) for key in keys]
    assert looked == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    tier.touch(keys[:2], None)
    tier.submit_load(job(2, keys[:2], [4, 5]))
    assert ended(tier).success
    assert (memory[4] == 1).all()
    assert (memory[5] == 3).all()
    tier.submit_load(job(3, keys, [3, 4, 5]))
    result = ended(tier)
    assert (result.success, result.successful_keys) == (False, keys[:2])
    assert tier.on_new_request(None) is not None
    tier.shutdown()


def test_what_can_t_be_loaded_is_a_miss_until_it_is_stored_again(
    daemon: PrivateDaemon, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = tier_of(daemon.address, memory), keys_of(2)
    tier.submit_store(job(1, keys, [0, 1]))
    assert ended(tier).success
    core = tier._core
    with monkeypatch.context() as patch:
        patch.setattr(core._client._reader, "restore", lambda *_: 1 / 0)
        tier.submit_load(job(2, keys, [4, 5]))
        result = ended(tier)
    assert (result.success, result.successful_keys) == (False, None)
    # It is there, but its load would fail again and again.
    assert [tier.lookup(key, None) for key in keys] == [LookupResult.MISS] * 2
    tier.submit_store(job(3, keys[:1], [0]))
    assert ended(tier).success
    looked = [tier.lookup(key, None) for key in keys]
    assert looked == [LookupResult.HIT, LookupResult.MISS]
    tier.shutdown()


def test_stores_are_events_if_both_want_them(daemon: PrivateDaemon, memory: Any) -> None:
    keys = keys_of(2)
    for of, wanted, told in (
        (spec(), True, [keys]),
        (spec(), False, []),
        (spec(events=False), 1, []),
    ):
        tier = tier_of(daemon.address, memory, of, enable_kv_events=bool(wanted), locality="LOCAL")
        tier.submit_store(job(1, keys, [0, 1]))
        assert ended(tier).success
        tier.submit_load(job(2, keys, [4, 5]))
        assert ended(tier).success
        events = tier.take_events()
        assert [each.keys for each in events] == told
        assert all(each.medium is Medium.STORAGE and not each.removed for each in events)
        assert all(each.locality is Locality.LOCAL for each in events)
        assert tier.take_events() == []
        tier.shutdown()
    with pytest.raises(ValueError, match="NEAR"):
        tier_of(daemon.address, memory, locality="NEAR")


def test_from_another_host_a_lookup_is_asked_again(daemon: PrivateDaemon, memory: Any) -> None:
    """Here with a client that does nothing in place."""
    tier, keys = tier_of(daemon.address, memory), keys_of(2)
    tier.submit_store(job(1, keys[:1], [0]))
    assert ended(tier).success
    core = tier._core
    core._client._transport.peek = lambda _keys: None
    assert [tier.lookup(key, None) for key in keys] == [LookupResult.RETRY] * 2
    eventually(lambda: core.look_up(keys[0]) is not None and core.look_up(keys[1]) is not None)
    assert [tier.lookup(key, None) for key in keys] == [LookupResult.HIT, LookupResult.MISS]
    tier.shutdown()


def test_a_look_up_that_is_under_way_is_not_asked_again(
    daemon: PrivateDaemon, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the daemon takes; it ends with the client's deadline."""
    tier, (key,) = tier_of(daemon.address, memory), keys_of(1)
    client, asked = tier._core._client, []
    monkeypatch.setattr(client._transport, "peek", lambda _keys: None)

    def slow(_keys: list[bytes], **_options: Any) -> Future[Any]:
        asked.append(Future[Any]())
        return asked[-1]

    monkeypatch.setattr(client, "claim_async", slow)
    now_s = monotonic()
    monkeypatch.setattr(vllm, "monotonic", lambda: now_s)
    for _ in range(3):
        assert tier.lookup(key, None) is LookupResult.RETRY
        now_s += 2
    assert len(asked) == 1
    asked[0].set_exception(TimeoutError())
    assert tier.lookup(key, None) is LookupResult.MISS
    now_s += 2
    assert tier.lookup(key, None) is LookupResult.RETRY
    assert len(asked) == 2
    assert asked[1].cancel()
    assert tier.lookup(key, None) is LookupResult.MISS
    tier.shutdown()


def test_with_a_closed_client_nothing_is_asked_again(
    daemon: PrivateDaemon, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, (key,) = tier_of(daemon.address, memory), keys_of(1)
    monkeypatch.setattr(tier._core._client._transport, "peek", lambda _keys: None)
    tier.shutdown()
    for _ in range(2):
        assert tier.lookup(key, None) is LookupResult.MISS


@pytest.mark.parametrize("other", [spec("n"), spec(rank=1)], ids=["model", "rank"])
def test_another_model_or_rank_is_another_namespace(
    daemon: PrivateDaemon, memory: Any, other: Any
) -> None:
    tier, keys = tier_of(daemon.address, memory), keys_of(1)
    tier.submit_store(job(1, keys, [0]))
    assert ended(tier).success
    stranger = tier_of(daemon.address, memory, other)
    assert stranger.lookup(keys[0], None) is LookupResult.MISS
    tier.shutdown()
    stranger.shutdown()


def test_a_chunk_that_is_none_fails_its_job(daemon: PrivateDaemon, memory: Any) -> None:
    tier, keys = tier_of(daemon.address, memory), keys_of(1)
    for submit in (tier.submit_store, tier.submit_load):
        for chunk in (-1, CHUNKS):
            submit(job(1, keys, [chunk]))
            assert not ended(tier).success
    tier.shutdown()
    tier.submit_store(job(2, keys, [0]))
    tier.submit_load(job(3, keys, [0]))
    assert [each.success for each in tier.get_finished_jobs()] == [False, False]
    assert tier.lookup(keys[0], None) is LookupResult.MISS
    tier.touch(keys, None)


def test_a_daemon_that_is_killed_fails_the_jobs(daemon: PrivateDaemon, memory: Any) -> None:
    tier, keys = tier_of(daemon.address, memory, deadline_ms=500), keys_of(1)
    daemon.kill()
    tier.submit_store(job(1, keys, [0]))
    assert not ended(tier).success
    tier.submit_load(job(2, keys, [0]))
    assert not ended(tier).success
    assert tier.lookup(keys[0], None) in (LookupResult.RETRY, LookupResult.MISS)
    tier.shutdown()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(SecondaryTierManager):
        @abstractmethod
        def submit_swap(self) -> None: ...

    install(monkeypatch, Later)
    with pytest.raises(UnsupportedEngine, match="it asks for submit_swap; it was made for"):
        _ = vllm.PrefixdTier


def test_what_it_can_t_be_told_is_refused_at_the_start(daemon: PrivateDaemon, memory: Any) -> None:
    for wrong in ({"tier": "nvme"}, {"deadline": 5}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}"):
            tier_of(daemon.address, memory, **wrong)


def test_a_vllm_that_calls_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(SecondaryTierManager):
        def submit_store(self, job_metadata: Any, priority: int) -> None: ...

    install(monkeypatch, Later)
    with pytest.raises(UnsupportedEngine, match=r"it calls submit_store\(self, job_metadata, prio"):
        _ = vllm.PrefixdTier


def test_after_a_reset_of_its_caches_nothing_from_before_is_found(
    daemon: PrivateDaemon, memory: Any
) -> None:
    """vLLM resets them after an update of weights in place, among others."""
    tier, other = tier_of(daemon.address, memory), tier_of(daemon.address, memory)
    keys = [b"one", b"two"]
    tier.submit_store(job(1, keys, [0, 1]))
    assert ended(tier).success
    assert tier.lookup(keys[0], None) is other.lookup(keys[0], None) is LookupResult.HIT
    tier.drain_jobs()
    assert [tier.lookup(key, None) for key in keys] == [LookupResult.MISS] * 2
    tier.submit_load(job(2, keys, [4, 5]))
    assert not ended(tier).success
    tier.submit_store(job(3, [b"new"], [2]))
    assert ended(tier).success
    assert tier.lookup(b"new", None) is LookupResult.HIT
    assert other.lookup(b"new", None) is LookupResult.MISS, "it does not know the new weights"
    assert other.lookup(keys[0], None) is LookupResult.HIT, "it still has the old ones"
    for each in (tier, other):
        each.shutdown()


def test_vllm_0_30_has_no_detector_and_counts_no_bytes(
    monkeypatch: pytest.MonkeyPatch, daemon: PrivateDaemon, memory: Any
) -> None:
    class Of030(SecondaryTierManager):
        def __init__(self, _spec: Any, _view: memoryview, tier_type: str) -> None:
            self.tier_type = tier_type

    install(monkeypatch, Of030)
    monkeypatch.setattr(sys.modules["vllm.v1.kv_offload.tiering.base"], "JobResult", JobResultOf030)
    vars(vllm).pop("PrefixdTier", None)
    tier = tier_of(daemon.address, memory)
    tier.submit_store(job(1, [b"one"], [0]))
    assert ended(tier).success
    tier.shutdown()


def test_a_vllm_before_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.v1.kv_offload.tiering.base"], "TransferJob")
    vars(vllm).pop("PrefixdTier", None)
    with pytest.raises(UnsupportedEngine, match=r"it has no TransferJob; it was made for 0\.30"):
        _ = vllm.PrefixdTier
