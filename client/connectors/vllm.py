"""vLLM: a secondary tier of its tiered offloading.

    --kv-transfer-config with a secondary tier
    {"type": "PrefixdTier", "module_path": "prefixd.connectors.vllm", "address": "unix:/...",
     "tier": "shm", "fingerprint": "llama-3.1-8b 0e9e39f, bfloat16"}

A lookup reads the daemon's shared index and answers in the same scheduler step. From another host
it can't: it says RETRY while a thread asks the daemon, then HIT or MISS. Threads do the jobs. A
chunk is a row of the primary tier's memory, saved and restored where it lies.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from time import monotonic
from typing import Any, Final

from ...proto.errors import CallerError, InvalidSize
from ...proto.keys import ForeignNamespace, Key
from ...proto.vocabulary import Tier
from .. import Client
from ..config_values import plain
from ..hits import Hit
from ..identity import Dimension, Part, StateIdentity
from ..saves import SaveItem
from .engine import Engine, attach, fingerprint_of, weights_dimension

ENGINE: Final = Engine("vLLM", "vllm", "0.30 to 0.33")
#: Most answers of the daemon to keep, for keys that vLLM looks up again.
_MAX_ANSWERS: Final = 65_536
_ANSWER_TTL_S: Final = 1.0
#: How long a key whose load failed is a miss. The same request would load it again and again.
_FAILED_TTL_S: Final = 10.0
_LOG_DRAIN_EVERY_S: Final = 5.0

logger = logging.getLogger("prefixd.client.connectors")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: which hashes succeeded, and how much was copied."""

    job: int
    hashes: Sequence[bytes]
    good: list[bool]
    seconds: float
    moved_bytes: int

    @property
    def ok(self) -> bool:
        return all(self.good)

    @property
    def good_hashes(self) -> list[bytes]:
        return [each for each, good in zip(self.hashes, self.good, strict=True) if good]


class TierCore:
    """Lookups, and jobs on the rows of one block of memory. One thread calls it; jobs end in
    others."""

    def __init__(
        self,
        client: Client,
        namespace: ForeignNamespace,
        rows: memoryview,
        tier: Tier,
        chunk_tokens: int = 0,
    ) -> None:
        """`rows`: contiguous, with two dimensions; row i is chunk i. `chunk_tokens`: what a chunk
        stands for; 0: not known. Takes over the client. Raises InvalidSize for any other memory."""
        if rows.ndim != 2 or not rows.c_contiguous:
            raise InvalidSize("the chunks of the primary tier are the rows of one block of memory")
        self._client = client
        self._namespace = namespace
        self._row_bytes = rows.nbytes // len(rows) if len(rows) else 0
        self._count = len(rows)
        self._memory = rows.cast("B")
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._changed = threading.Condition()
        self._jobs: set[int] = set()
        self._ended: list[Ended] = []
        self._asked: OrderedDict[Key, tuple[float, bool | None]] = OrderedDict()
        #: Keys whose load failed -> until when they are misses.
        self._failed: OrderedDict[Key, float] = OrderedDict()

    def key(self, block_hash: bytes) -> Key:
        return self._namespace.key(block_hash)

    def use(self, namespace: ForeignNamespace) -> None:
        """Look for and save nothing under the keys of before, from now on."""
        self._namespace = namespace

    # ---- lookups

    def look_up(self, block_hash: bytes) -> bool | None:
        """Whether the entry is there. None: a look-up is in progress, ask again. Never blocks."""
        key = self.key(block_hash)
        if self._failed and monotonic() < self._failed.get(key, 0.0):
            return False
        try:
            return self._look(key)
        except CallerError:  # a closed client
            return False

    def _look(self, key: Key) -> bool | None:
        if self._client.in_place:
            return self._client.exists_one(
                key, in_place_only=True, prompt_tokens=self._chunk_tokens
            )
        with self._changed:
            since, answer = self._asked.get(key, (0.0, None))
            # A look-up in progress ends within the client's deadline.
            if since and (answer is None or monotonic() - since < _ANSWER_TTL_S):
                return answer
            self._asked[key] = monotonic(), None
            if len(self._asked) > _MAX_ANSWERS:
                self._asked.popitem(last=False)
        # The claim is released at once. If the entry is evicted before its load, that job fails.
        try:
            claiming = self._client.claim_async([key], prompt_tokens=self._chunk_tokens)
        except CallerError:
            with self._changed:
                self._asked.pop(key, None)
            raise
        claiming.add_done_callback(lambda done: self._answered(key, done))
        return None

    def _answered(self, key: Key, claiming: Future[Hit]) -> None:
        there = False
        # If the client was closed meanwhile, the claim has failed, which is a miss.
        with suppress(Exception), claiming.result() as hit:
            there = bool(hit)
        with self._changed:
            self._asked[key] = monotonic(), there

    # ---- jobs

    def store(self, job: int, hashes: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to save these chunks under these hashes."""
        began = self._begin(job)
        failed = [False] * len(hashes)
        try:
            rows = self._rows(chunks)
            tokens = self._chunk_tokens or None
            items = [
                SaveItem(self.key(each), row, tokens)
                for each, row in zip(hashes, rows, strict=True)
            ]
            saving = self._client.save_many_async(items, tier=self._tier)
        except Exception:
            # No such chunk, or a closed client. The job ends, as every job has to.
            self._end(job, hashes, failed, began)
            return

        def ended(done: Future[Any]) -> None:
            good = failed if done.exception() else [each.ok for each in done.result()]
            with self._changed:
                for item, saved in zip(items, good, strict=True):
                    if saved:
                        self._failed.pop(item.key, None)
            self._end(job, hashes, good, began)

        saving.add_done_callback(ended)

    def load(self, job: int, hashes: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to restore these hashes into these chunks."""
        began = self._begin(job)
        try:
            rows = self._rows(chunks)
            # They were counted when vLLM looked them up.
            claiming = self._client.claim_async([self.key(each) for each in hashes], counted=False)
        except Exception:
            self._end(job, hashes, [False] * len(hashes), began)
            return

        def claimed(done: Future[Hit]) -> None:
            """Runs in a thread of the client, and copies there."""
            good = [False] * len(hashes)
            try:
                with done.result() as hit:
                    result = hit.restore_into([rows[position] for position in hit.positions])
                    for position, restored in zip(hit.positions, result.restored, strict=True):
                        good[position] = restored
            except Exception:
                good = [False] * len(hashes)
            self._load_failed(each for each, there in zip(hashes, good, strict=True) if not there)
            self._end(job, hashes, good, began)

        claiming.add_done_callback(claimed)

    def _load_failed(self, hashes: Iterable[bytes]) -> None:
        until = monotonic() + _FAILED_TTL_S
        for each in hashes:
            key = self.key(each)
            with self._changed:
                self._failed[key] = until
                self._failed.move_to_end(key)
                if len(self._failed) > _MAX_ANSWERS:
                    self._failed.popitem(last=False)

    def finished(self) -> list[Ended]:
        """Jobs that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    @property
    def pending(self) -> bool:
        with self._changed:
            return bool(self._jobs or self._ended)

    def drain(self) -> None:
        """Wait until every job has ended, and none uses the rows any more. A job ends within the
        client's deadlines, whatever the daemon does."""
        with self._changed:
            while not self._changed.wait_for(lambda: not self._jobs, _LOG_DRAIN_EVERY_S):
                logger.warning("%d jobs have not ended yet", len(self._jobs))

    def touch(self, hashes: Iterable[bytes]) -> None:
        with suppress(CallerError):  # a closed client
            self._client.touch([self.key(each) for each in hashes])

    def close(self) -> None:
        self._client.close()

    def _rows(self, chunks: Sequence[int]) -> list[memoryview]:
        """The memory of chunks. Raises IndexError if one of them does not exist."""
        if not all(0 <= chunk < self._count for chunk in chunks):
            raise IndexError(f"there are {self._count} chunks")
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


def identity_of(
    spec: Any, fields: Mapping[str, Any], rank: int, chunk_bytes: int, options: Mapping[str, Any]
) -> StateIdentity:
    """Everything that the bytes of a chunk depend on, beside vLLM's hash of it.

    `spec`: vLLM's description of its engine. `fields`: what vLLM's own file tier distinguishes its
    directories by. vLLM does not tell its tiers which weights it runs, nor `--revision`,
    `--quantization`, `--hf-overrides`, RoPE and what is in LoRA adapters, of which its hashes have
    the names. The option `fingerprint` has to name them all; without it nothing is shared beyond
    this process.
    """
    config, context = spec.config, Part.CONTEXT
    model = getattr(config, "model", None)
    parallel = getattr(config, "parallel", None)

    def of(owner: Any, name: str, source: str, part: Part = context) -> Dimension:
        value = getattr(owner, name, None)
        return Dimension(name.replace("_", " "), plain(value), f"{source}.{name}", part)

    return StateIdentity(
        f"vllm {ENGINE.version}",
        (
            weights_dimension(fingerprint_of("vllm", options)),
            of(model, "dtype", "offloading_spec.config.model", Part.QUANTISATION),
            of(model, "max_model_len", "offloading_spec.config.model"),
            of(config, "kv_cache_layout", "offloading_spec.config"),
            of(config, "canonical_layout", "offloading_spec.config"),
            of(config, "replicated_layout", "offloading_spec.config"),
            of(config, "groups", "offloading_spec.config"),
            Dimension("file tier's fields", plain(fields), "FileMapper.get_run_config()", context),
            Dimension("chunk bytes", chunk_bytes, "the rows of the primary tier", context),
            Dimension("rank", rank, "FileMapper.rank; 0 where ranks share", Part.SHARD),
            of(parallel, "is_parallelism_agnostic", "offloading_spec.config.parallel"),
            Dimension("salt", options.get("salt"), "the option salt", Part.SALT),
            Dimension(
                "tokens, LoRA's name, cache_salt, images",
                None,
                "vLLM's block hashes have them",
                Part.BLOCKS,
            ),
        ),
    )


def _chunk_tokens(spec: Any) -> int:
    """What a chunk stands for; 0 if it can't be told, as with groups that each have their own
    chunks of the same tokens."""
    groups: Sequence[Any] = getattr(spec.config, "groups", None) or ()
    if len(groups) != 1:
        return 0
    block_tokens = getattr(groups[0], "tokens_per_block", None) or 0
    return int(block_tokens) * int(getattr(spec, "blocks_per_chunk", None) or 0)


# ---- the adapter


def _tier() -> type:
    """Make the class that vLLM constructs. Raises UnsupportedEngine."""
    names = ["SecondaryTierManager", "TransferJob", "JobResult", "LookupResult"]
    base = ENGINE.require("vllm.v1.kv_offload.tiering.base", names)
    mapper = ENGINE.require("vllm.v1.kv_offload.file_mapper", ["FileMapper"])
    offload = ENGINE.require(
        "vllm.v1.kv_offload.base",
        ["RequestOffloadingContext", "OffloadingEvent", "Medium.STORAGE", "Locality"],
    )

    counts_bytes = "transfer_bytes" in signature(base.JobResult).parameters  # since vLLM 0.31

    class PrefixdTier(base.SecondaryTierManager):  # type: ignore[misc, name-defined]
        """Options: `address`, `tier` (ram, shm, disk), `deadline_ms`, `max_pending_saves`, `salt`,
        `fingerprint` (see `identity_of`), and vLLM's own `enable_kv_events` and `locality`."""

        medium = offload.Medium.STORAGE

        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: memoryview,
            tier_type: str,
            backpressure_detector: object = None,
            **config: Any,
        ) -> None:
            # vLLM 0.30 has no such argument.
            detector = () if backpressure_detector is None else (backpressure_detector,)
            super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
            locality = config.get("locality")
            self.locality = None if locality is None else offload.Locality(locality)
            # Parallel layouts in which a chunk has the same bytes share it, as in vLLM's file tier.
            found = mapper.FileMapper.from_offloading_spec(
                root_dir="",
                offloading_spec=offloading_spec,
                blocks_per_file=offloading_spec.blocks_per_chunk,
                parallel_agnostic=True,
            )
            rows = memoryview(primary_kv_view)
            chunk_bytes = rows.nbytes // max(1, len(rows))
            fields = found.get_run_config()
            identity = identity_of(offloading_spec, fields, found.rank, chunk_bytes, config)
            self._identity = identity
            namespace = identity.foreign_namespace("vllm")
            events = config.get("enable_kv_events", False)
            self._events: list[Any] | None = None
            if events and offloading_spec.kv_events_config.enable_kv_cache_events:
                self._events = []
            elif events:
                logger.warning("no KV events: vLLM has them switched off")
            self._stores: set[int] = set()
            ours = ["salt", "enable_kv_events", "locality"]
            client, tier = attach("vllm", config, ours)
            client.announce(identity)
            self._client = client
            # So that the hand-over is done, and the first lookup works in place.
            if client.wait_connected():
                client.exists_one(namespace.key(b"none"), counted=False)
            tokens = _chunk_tokens(offloading_spec)
            self._core = TierCore(client, namespace, rows, tier, tokens)

        def lookup(self, key: Any, req_context: object) -> Any:
            del req_context
            there = self._core.look_up(bytes(key))
            results = base.LookupResult
            return results.RETRY if there is None else results.HIT if there else results.MISS

        def submit_store(self, job_metadata: Any) -> None:
            job = job_metadata
            if self._events is not None:
                self._stores.add(job.job_id)
            self._core.store(job.job_id, [bytes(key) for key in job.keys], list(job.chunk_ids))

        def submit_load(self, job_metadata: Any) -> None:
            job = job_metadata
            self._core.load(job.job_id, [bytes(key) for key in job.keys], list(job.chunk_ids))

        def get_finished_jobs(self) -> list[Any]:
            ended = self._core.finished()
            for each in ended if self._events is not None else ():
                self._event(each)
            return [
                base.JobResult(
                    job_id=each.job,
                    success=each.ok,
                    successful_keys=None if each.ok else each.good_hashes or None,
                    transfer_time=each.seconds,
                    **({"transfer_bytes": each.moved_bytes} if counts_bytes else {}),
                )
                for each in ended
            ]

        def _event(self, ended: Ended) -> None:
            """Record what was stored. The daemon does not report what it evicts."""
            if ended.job in self._stores:
                self._stores.discard(ended.job)
                if self._events is not None and ended.good_hashes:
                    stored = offload.OffloadingEvent(
                        keys=ended.good_hashes,
                        medium=self.medium,
                        removed=False,
                        locality=self.locality,
                    )
                    self._events.append(stored)

        def take_events(self) -> list[Any]:
            taken = list(self._events or ())
            if self._events:
                self._events.clear()
            return taken

        def has_pending_work(self) -> bool:
            return self._core.pending

        def on_new_request(self, req_context: object) -> Any:
            del req_context
            return offload.RequestOffloadingContext()

        def touch(self, keys: Iterable[Any], req_context: object = None) -> None:
            del req_context
            self._core.touch(bytes(key) for key in keys)

        def drain_jobs(self) -> None:
            """Wait for all jobs, and use other keys from now on.

            vLLM calls this only when it resets its caches, as after an update of weights in place,
            and does not say why. Whatever was saved before may be of other weights.
            """
            self._core.drain()
            self._identity = self._identity.renewed("vLLM reset its caches")
            self._core.use(self._identity.foreign_namespace("vllm"))
            self._client.announce(self._identity)

        def shutdown(self) -> None:
            self._core.close()

    ENGINE.check_interface(PrefixdTier)
    return PrefixdTier


def __getattr__(name: str) -> Any:
    if name != "PrefixdTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["PrefixdTier"] = _tier()
    return made
