"""One worker process of a live replay: a client that works on one request after the other."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final, cast

from ...proto.errors import CallerError
from ...proto.keys import Key
from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from ..client import Client
from ..hits import Hit
from ..saves import SaveItem
from .blocks import BlockPayloads, keys_of_ids, replay_namespace
from .outcome import Outcome
from .trace import Request

#: Misses that say nothing of the cache, only that it did not answer.
_NO_ANSWER: Final = frozenset((MissReason.UNAVAILABLE, MissReason.DEADLINE))


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How to replay.

    `tiers`: where to save; of several, the request's first missing block chooses one.
    `speed` 0: as fast as possible; 1: as the timestamps say; 10: ten times faster.
    `in_place`: walk and read without asking the daemon, where it hands its memory over; else
    everything over gRPC, under claims. `reconnect_wait_s`: how long a worker waits, in all, for
    a daemon that went away.
    Raises CallerError for what is out of range.
    """

    address: str
    workers: int = 1
    tiers: tuple[Tier, ...] = (Tier.RAM,)
    reason: SaveReason = SaveReason.FINISH
    block_bytes: int = 4096
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    salt: str = ""
    speed: float = 0.0
    in_place: bool = False
    reconnect_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.tiers:
            raise CallerError("a replay needs at least one tier to save to")
        for name, value, least in (
            ("workers", self.workers, 1),
            ("block_tokens", self.block_tokens, 1),
            ("block_bytes", self.block_bytes, 1),
            ("speed", self.speed, 0),
            ("reconnect_wait_s", self.reconnect_wait_s, 0),
        ):
            if value < least:
                raise CallerError(f"{name} is at least {least}, not {value}")


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker can take requests."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be replayed at all; nothing else is wrong."""

    why: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker's last word."""

    rpcs: dict[str, int] = field(default_factory=dict)
    #: Sessions opened after the first.
    reconnects: int = 0
    #: No daemon answered for longer than the worker may wait.
    gave_up: bool = False


def work(pipe: Connection, options: LiveOptions, number: int) -> None:
    """The worker's process: takes requests from `pipe` until None, answers each by its Outcome."""
    # Ctrl-C goes to everybody on the terminal; the parent says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent is gone: there is no process to answer to.
    with contextlib.suppress(EOFError, BrokenPipeError):
        _work(pipe, options, number)


def _work(pipe: Connection, options: LiveOptions, number: int) -> None:
    gave_up = False
    name = f"replay-{number}"
    with Client(options.address, name=name, local=options.in_place) as client:
        replayer = Replayer(client, options)
        # Connecting is no part of the first request, which notices a daemon that is not there.
        client.wait_connected()
        pipe.send(Ready())
        while not gave_up and (request := pipe.recv()) is not None:
            try:
                outcome = replayer.replay(request)
            except CallerError as problem:
                pipe.send(Refused(str(problem)))
                break
            pipe.send(outcome)
            gave_up = outcome.unavailable and not replayer.wait_for_daemon()
        counted = client.counters
    rpcs = cast(dict[str, int], counted["rpcs"])
    pipe.send(Finished(rpcs, max(0, cast(int, counted["sessions"]) - 1), gave_up))


class Replayer:
    """Replays requests through one client, one after the other.

    The order of a request is what makes the hit tokens exact: claim the longest run that is
    there, read and verify it while it is pinned, save the blocks behind it and name the run as
    their ancestors, so that the daemon touches the whole chain leaf first, and release. In place
    nothing is claimed: what is read stays the same while it is copied, or is read again.
    """

    def __init__(self, client: Client, options: LiveOptions) -> None:
        self._client = client
        self._options = options
        self._root = replay_namespace(options.block_bytes, options.block_tokens, options.salt).root
        self._payloads = BlockPayloads(options.block_bytes)
        self._buffers: list[bytearray] = []
        self._zeros = bytes(options.block_bytes)
        self._patience_s = options.reconnect_wait_s

    def wait_for_daemon(self) -> bool:
        """Wait for a daemon that went away, with what is left of the patience for the whole
        replay. False: none of it is left."""
        if self._patience_s <= 0:
            return False
        started_s = time.monotonic()
        connected = self._client.wait_connected(deadline_ms=round(1e3 * self._patience_s))
        self._patience_s -= time.monotonic() - started_s
        return connected

    def replay(self, request: Request) -> Outcome:
        """One request. Raises CallerError when its ids are no block ids."""
        outcome = Outcome(prompt_tokens=request.input_length, blocks=len(request.hash_ids))
        if not request.hash_ids:
            return outcome
        with _timed(outcome, "walk"):
            # A batch names a key once; an id that a trace repeats is the same block again.
            ids = list(dict.fromkeys(request.hash_ids))
            keys = keys_of_ids(self._root, ids)
        with _timed(outcome, "claim"):
            hit = self._client.longest_run(
                keys, claim=not self._options.in_place, prompt_tokens=request.input_length
            )
        with hit:
            outcome.unavailable = hit.miss in _NO_ANSWER
            good = self._restore(hit, ids, outcome)
            if good < len(ids):
                self._save(request, ids, keys, good, outcome)
            if hit.claimed:
                with _timed(outcome, "release"):
                    hit.release()
        present = set(ids[:good])
        run = 0
        while run < len(request.hash_ids) and request.hash_ids[run] in present:
            run += 1
        outcome.hit_blocks = run
        outcome.hit_tokens = min(run * self._options.block_tokens, request.input_length)
        return outcome

    def _restore(self, hit: Hit, ids: Sequence[int], outcome: Outcome) -> int:
        """Read the hit and compare every byte. Returns how many blocks from the first on are
        there and right."""
        if not hit:
            return 0
        buffers = self._wiped_buffers(len(hit))
        with _timed(outcome, "restore"):
            result = hit.restore_into(buffers)
        outcome.unavailable |= result.miss in _NO_ANSWER
        right = [
            whole and self._payloads.matches(block_id, buffer)
            for whole, block_id, buffer in zip(result.restored, ids, buffers, strict=False)
        ]
        for index, whole in enumerate(result.restored):
            if whole and not right[index]:
                outcome.mismatches.append(f"block {ids[index]} at {index} has other bytes")
        if result.miss is MissReason.CORRUPT:
            outcome.mismatches.append(f"block {ids[result.run]} does not match its checksum")
        outcome.verified_bytes = sum(right) * self._options.block_bytes
        outcome.lost_blocks = result.restored.count(False)
        return right.index(False) if False in right else len(right)

    def _wiped_buffers(self, count: int) -> list[bytearray]:
        """Buffers that hold nothing, so that bytes that never arrive can't look right."""
        while len(self._buffers) < count:
            self._buffers.append(bytearray(self._options.block_bytes))
        for buffer in self._buffers[:count]:
            buffer[:] = self._zeros
        return self._buffers[:count]

    def _save(
        self,
        request: Request,
        ids: Sequence[int],
        keys: Sequence[Key],
        good: int,
        outcome: Outcome,
    ) -> None:
        """Save the blocks from `good` on."""
        options = self._options
        first = {block_id: i for i, block_id in reversed(list(enumerate(request.hash_ids)))}
        items = []
        for block_id, key in zip(ids[good:], keys[good:], strict=True):
            left_tokens = request.input_length - first[block_id] * options.block_tokens
            token_count = max(0, min(options.block_tokens, left_tokens))
            payload = self._payloads.payload(block_id)
            items.append(SaveItem(key, payload, token_count or None))
        with _timed(outcome, "save"):
            saved = self._client.save_many(
                items,
                tier=self._tier(keys[good]),
                reason=options.reason,
                ancestors=keys[:good],
            )
        outcome.saves = Counter(one.status.label for one in saved)
        outcome.saved_bytes = outcome.saves[SaveStatus.SAVED.label] * options.block_bytes
        outcome.unavailable |= any(one.status is SaveStatus.UNAVAILABLE for one in saved)

    def _tier(self, key: Key) -> Tier:
        """Where the blocks from `key` on are saved: always the same for the same key."""
        tiers = self._options.tiers
        return tiers[key[0] % len(tiers)]


@contextmanager
def _timed(outcome: Outcome, step: str) -> Iterator[None]:
    started_ns = time.perf_counter_ns()
    yield
    outcome.durations_ns[step] = time.perf_counter_ns() - started_ns
