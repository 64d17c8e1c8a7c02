"""vLLM's own tiered offloading on CPU, without a model or a GPU: its manager, primary tier and
factory."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

MODULE: Final = "prefixd.client.connectors.vllm"


def spec(
    *,
    rank: int = 0,
    tp_size: int = 1,
    parallelism_agnostic: bool = False,
    replicated: bool = False,
    events: bool = False,
) -> Any:
    """The description of its engine that vLLM gives to a tier."""
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    parallel = OffloadingParallelConfig(
        rank=rank,
        world_size=tp_size,
        tp_size=tp_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=parallelism_agnostic,
    )
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(name="test/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=replicated,
    )
    kv_events = OffloadingKVEventsConfig(
        enable_kv_cache_events=events, self_describing_kv_events=False
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=kv_events)


def tier(view: memoryview, of: Any = None, **options: Any) -> Any:
    """A secondary tier, made by vLLM's factory from these options."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    return SecondaryTierFactory.create_secondary_tier(options, view, of or spec())


def prefixd(address: str, name: str, **options: Any) -> dict[str, Any]:
    """The options of prefixd's tier."""
    return {
        "type": "PrefixdTier",
        "module_path": MODULE,
        "address": address,
        "fingerprint": "test weights",
        "tier": name,
    } | options


def keys(count: int, salt: bytes = b"") -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(salt + number.to_bytes(8, "big"), 0) for number in range(count)]


def context(name: str = "request") -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def job(number: int, of: list[Any], chunks: Any, *, is_promotion: bool = False) -> Any:
    import numpy as np
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(
        job_id=number,
        keys=of,
        chunk_ids=np.array(list(chunks), dtype=np.int64),
        is_promotion=is_promotion,
        req_context=context(),
    )


def wait(of: Any) -> None:
    """Wait for all jobs. `drain_jobs` is what vLLM calls when it resets its caches, after which
    prefixd's tier uses other keys."""
    if hasattr(of, "_core"):
        of._core.drain()
    else:
        of.drain_jobs()


def ended(of: Any) -> Any:
    """The result of the only job in progress, once it has ended."""
    wait(of)
    (result,) = of.get_finished_jobs()
    return result


class Region:
    """Replaces the shared memory of vLLM's workers."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self._rows)

    def cleanup(self) -> None:
        pass


def manager(rows: Any, make_tier: Any) -> Any:
    """`TieringOffloadingManager` with one secondary tier. `make_tier` makes it from a view of the
    primary tier's memory."""
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    primary = CPUPrimaryTierOffloadingManager(num_chunks=len(rows), mmap_region=Region(rows))  # type: ignore[arg-type]
    second = make_tier(primary.get_kv_memoryview())
    return TieringOffloadingManager(primary_tier=primary, secondary_tiers=[second])


def step(of: Any) -> None:
    """End a step of the scheduler."""
    from vllm.v1.kv_offload.base import ScheduleEndContext

    of.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
    list(of.take_events())


def settle(of: Any) -> None:
    """Wait for all jobs, and end two steps, after which no work may be pending."""
    for secondary in of.secondary_tiers:
        wait(secondary)
    step(of)
    step(of)
    assert not of.has_pending_work()


def shut_down(of: Any) -> None:
    # Views of the test's own memory may still be exported.
    with suppress(BufferError):
        of.shutdown()
