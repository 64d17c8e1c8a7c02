"""vLLM: a secondary tier of its tiered offloading.

    --kv-transfer-config with a secondary tier
    {"type": "PrefixdTier", "module_path": "prefixd.connectors.vllm", "address": "unix:/...",
     "tier": "shm"}

A lookup reads the daemon's shared index and answers in the same scheduler step. From another host
it can't: it says RETRY while a thread asks, and HIT or MISS then. Jobs are done by threads; a chunk
is a row of the primary tier's memory, saved and restored where it lies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from ..client.client import Client
from ..client.hits import Hit
from ..client.saves import SaveItem
from ..proto.errors import InvalidSize
from ..proto.keys import ForeignNamespace, Key
from ..proto.vocabulary import Tier
from . import compat

ENGINE: Final = "vLLM"
PACKAGE: Final = "vllm"
TESTED: Final = "0.33.0"
#: Answers of the daemon that are remembered for keys that a request asks for again.
_MAX_ANSWERS: Final = 65_536
_ANSWER_TTL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: what of it is good, and what it moved."""

    job: int
    hashes: Sequence[bytes]
    good: list[bool]
    seconds: float
    moved_bytes: int

    @property
    def ok(self) -> bool:
        return all(self.good)


class TierCore:
    """Lookups and jobs over rows of one memory. Called by one thread; jobs end in others."""

    def __init__(
        self, client: Client, namespace: ForeignNamespace, rows: memoryview, tier: Tier
    ) -> None:
        """`rows`: two dimensions that lie together; row i is chunk i. Owns the client from now
        on. Raises InvalidSize for any other memory."""
        if rows.ndim != 2 or not rows.c_contiguous:
            raise InvalidSize("the chunks of the primary tier are the rows of one block of memory")
        self._client = client
        self._namespace = namespace
        self._row_bytes = rows.nbytes // len(rows) if len(rows) else 0
        self._count = len(rows)
        self._memory = rows.cast("B")
        self._tier = tier
        self._changed = threading.Condition()
        self._jobs: set[int] = set()
        self._ended: list[Ended] = []
        self._asked: OrderedDict[Key, tuple[float, bool | None]] = OrderedDict()

    def key(self, block_hash: bytes) -> Key:
        return self._namespace.key(block_hash)

    # ---- lookups

    def look_up(self, block_hash: bytes) -> bool | None:
        """Is it there? None: ask again, somebody is finding out. Never blocks."""
        key = self.key(block_hash)
        if self._client.in_place:
            return self._client.exists_one(key, in_place_only=True)
        with self._changed:
            asked = self._asked.get(key)
            if asked is not None and monotonic() - asked[0] < _ANSWER_TTL_S:
                return asked[1]
            self._asked[key] = monotonic(), None
            if len(self._asked) > _MAX_ANSWERS:
                self._asked.popitem(last=False)
        # A claim pins; it is let go at once. What is evicted until the load is a failed job.
        self._client.claim_async([key]).add_done_callback(lambda done: self._answered(key, done))
        return None

    def _answered(self, key: Key, claiming: Future[Hit]) -> None:
        there = not claiming.exception() and bool(claiming.result())
        if there:
            claiming.result().release()
        with self._changed:
            self._asked[key] = monotonic(), there

    # ---- jobs

    def store(self, job: int, hashes: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Save these chunks under these hashes."""
        began = self._begin(job)
        rows = self._rows(chunks)
        if rows is None:
            self._end(job, hashes, [False] * len(hashes), began)
            return
        items = [SaveItem(self.key(each), row) for each, row in zip(hashes, rows, strict=True)]
        try:
            saving = self._client.save_many_async(items, tier=self._tier)
        except Exception:
            # A closed client: the job ends, as every job does.
            self._end(job, hashes, [False] * len(hashes), began)
            return

        def ended(done: Future[Any]) -> None:
            failed = [False] * len(hashes)
            good = failed if done.exception() else [each.ok for each in done.result()]
            self._end(job, hashes, good, began)

        saving.add_done_callback(ended)

    def load(self, job: int, hashes: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Restore these hashes into these chunks."""
        began = self._begin(job)
        rows = self._rows(chunks)
        if rows is None:
            self._end(job, hashes, [False] * len(hashes), began)
            return

        def claimed(done: Future[Hit]) -> None:
            """In a thread of the client's, which goes on with the copy."""
            good = [False] * len(hashes)
            try:
                with done.result() as hit:
                    result = hit.restore_into([rows[position] for position in hit.positions])
                    for position, restored in zip(hit.positions, result.restored, strict=True):
                        good[position] = restored
            except Exception:
                good = [False] * len(hashes)
            self._end(job, hashes, good, began)

        try:
            claiming = self._client.claim_async([self.key(each) for each in hashes])
        except Exception:
            self._end(job, hashes, [False] * len(hashes), began)
            return
        claiming.add_done_callback(claimed)

    def finished(self) -> list[Ended]:
        """Jobs that ended since this was asked last."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    @property
    def pending(self) -> bool:
        with self._changed:
            return bool(self._jobs or self._ended)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended. False: it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def touch(self, hashes: Iterable[bytes]) -> None:
        self._client.touch([self.key(each) for each in hashes])

    @property
    def deadline_s(self) -> float:
        return self._client.deadline_ms / 1e3

    @property
    def counters(self) -> Mapping[str, Any]:
        return self._client.counters

    def close(self) -> None:
        self._client.close()

    def _rows(self, chunks: Sequence[int]) -> list[memoryview] | None:
        """None: one of them is none."""
        if not all(0 <= chunk < self._count for chunk in chunks):
            return None
        size = self._row_bytes
        return [self._memory[chunk * size : (chunk + 1) * size] for chunk in chunks]

    def _begin(self, job: int) -> float:
        with self._changed:
            self._jobs.add(job)
        return monotonic()

    def _end(self, job: int, hashes: Sequence[bytes], good: list[bool], began: float) -> None:
        moved_bytes = sum(good) * self._row_bytes
        with self._changed:
            self._jobs.discard(job)
            self._ended.append(Ended(job, hashes, good, monotonic() - began, moved_bytes))
            self._changed.notify_all()


def namespace_of(config: Mapping[str, Any], rank: int, chunk_bytes: int) -> ForeignNamespace:
    """`config`: what vLLM's own file tier tells its directories apart by."""
    plain = {
        str(name): value
        if value is None or isinstance(value, bool | int | float | str)
        else str(value)
        for name, value in config.items()
    }
    return ForeignNamespace("vllm", {**plain, "rank": rank, "chunk_bytes": chunk_bytes})


# ---- the adapter


def _tier() -> type:
    names = ["SecondaryTierManager", "JobResult", "LookupResult"]
    base = compat.require(ENGINE, PACKAGE, TESTED, "vllm.v1.kv_offload.tiering.base", names)
    mapper = compat.require(
        ENGINE, PACKAGE, TESTED, "vllm.v1.kv_offload.file_mapper", ["FileMapper"]
    )
    offload = compat.require(
        ENGINE, PACKAGE, TESTED, "vllm.v1.kv_offload.base", ["RequestOffloadingContext"]
    )

    class PrefixdTier(base.SecondaryTierManager):  # type: ignore[misc, name-defined]
        """Options: `address`, `tier` (ram, shm, disk), `deadline_ms`, `salt`."""

        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: memoryview,
            tier_type: str,
            backpressure_detector: object = None,
            **config: Any,
        ) -> None:
            super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
            found = mapper.FileMapper.from_offloading_spec(
                root_dir="", offloading_spec=offloading_spec
            )
            rows = memoryview(primary_kv_view)
            namespace = namespace_of(
                {**found.get_run_config(), "salt": config.get("salt")},
                offloading_spec.config.parallel.rank,
                rows.nbytes // max(1, len(rows)),
            )
            client = Client(
                config.get("address"),
                name="vllm",
                deadline_ms=int(config.get("deadline_ms", 5_000)),
                max_pending_saves=int(config.get("max_pending_saves", 1_024)),
            )
            # So that the first lookup can be done in place.
            if client.wait_connected():
                client.exists_one(namespace.key(b"none"))
            tier = Tier[str(config.get("tier", "ram")).upper()]
            self._core = TierCore(client, namespace, rows, tier)

        def lookup(self, key: Any, req_context: object) -> Any:
            del req_context
            there = self._core.look_up(bytes(key))
            results = base.LookupResult
            return results.RETRY if there is None else results.HIT if there else results.MISS

        def submit_store(self, job: Any) -> None:
            self._core.store(job.job_id, [bytes(key) for key in job.keys], list(job.chunk_ids))

        def submit_load(self, job: Any) -> None:
            self._core.load(job.job_id, [bytes(key) for key in job.keys], list(job.chunk_ids))

        def get_finished_jobs(self) -> list[Any]:
            return [
                base.JobResult(
                    job_id=each.job,
                    success=each.ok,
                    successful_keys=[
                        key for key, good in zip(each.hashes, each.good, strict=True) if good
                    ],
                    transfer_time=each.seconds,
                    transfer_bytes=each.moved_bytes,
                )
                for each in self._core.finished()
            ]

        def has_pending_work(self) -> bool:
            return self._core.pending

        def on_new_request(self, req_context: object) -> Any:
            del req_context
            return offload.RequestOffloadingContext()

        def touch(self, keys: Iterable[Any], req_context: object = None) -> None:
            del req_context
            self._core.touch(bytes(key) for key in keys)

        def drain_jobs(self) -> None:
            self._core.drain(2 * self._core.deadline_s)

        def shutdown(self) -> None:
            self._core.close()

    compat.check_abstract(ENGINE, PACKAGE, TESTED, PrefixdTier)
    return PrefixdTier


def __getattr__(name: str) -> Any:
    if name != "PrefixdTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["PrefixdTier"] = _tier()
    return made
