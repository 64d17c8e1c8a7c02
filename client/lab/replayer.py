"""Replays the requests of a trace through one client, with real bytes that are all verified.

A trace has ids, not tokens. An id stands for its block and everything before it, like the key of a
block in a chain. So the key of a block is

    SHA-256( root || u64le(id) )

where `root` is the prefix key of no tokens in a namespace of replays (its fingerprint is the
SHA-256 of "prefixd/replay/v1"). The namespace depends on the block size, in bytes and in tokens,
and on the salt, so replays that would disagree about the bytes of a block share no keys. The
payload of a block is a fixed function of its id and its size (`BlockPayloads`).
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from ...proto.errors import CallerError
from ...proto.keys import Key, Namespace, context_hash
from ...proto.limits import DEFAULT_BLOCK_TOKENS, MAX_PAYLOAD_BYTES
from ...proto.vocabulary import MissReason, SaveReason, SaveStatus, Tier
from ..client import Client
from ..hits import Hit
from ..saves import SaveItem
from .trace import Request
from .trace_file import STDIN, TraceError

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Small, because generating a tile takes most of the time of a small payload.
TILE_BYTES: Final = 512


_LABEL: Final = b"prefixd/replay/v1"


#: A salt depends on so much of a trace, and on its length.
_SALTED_BYTES: Final = 1 << 20


_SEED: Final = struct.Struct("<QQ")


_U64: Final = struct.Struct("<Q")


_MAX_ID: Final = 2**64 - 1


def replay_namespace(block_bytes: int, block_tokens: int, salt: str = "") -> Namespace:
    """The namespace of a replay with these blocks."""
    return Namespace(
        fingerprint=hashlib.sha256(_LABEL).digest(),
        quantisation=b"",
        context_params=context_hash({"block_bytes": block_bytes, "block_tokens": block_tokens}),
        salt=salt,
    )


def content_salt(path: str) -> str:
    """A salt for the replays of a file: traces that number their blocks alike share nothing, and a
    trace shares with itself. Standard input, which can't be read twice, has another salt each
    time."""
    if path == STDIN:
        return token_hex(8)
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            digest.update(file.read(_SALTED_BYTES))
            digest.update(_U64.pack(file.seek(0, os.SEEK_END)))
    except OSError as error:
        raise TraceError(path, 0, f"cannot be opened: {(error.strerror or '').lower()}") from None
    return digest.hexdigest()[:16]


def keys_of_ids(root: Key, ids: Sequence[int]) -> list[Key]:
    """The keys of blocks with these ids. Raises CallerError for an id outside 0 ... 2^64 - 1."""
    prefix = hashlib.sha256(root)
    keys: list[Key] = []
    try:
        for block_id in ids:
            digest = prefix.copy()
            digest.update(_U64.pack(block_id))
            keys.append(Key(digest.digest()))
    except struct.error:
        raise CallerError(f"a block id is in 0 ... {_MAX_ID}, not {block_id}") from None
    return keys


class BlockPayloads:
    """The bytes of blocks, `block_bytes` each: cheap to make and compare, and all different.

    The first tile of 512 bytes is SHAKE-128 of the id and the block's size, so that neither two
    blocks nor blocks of two sizes agree anywhere. The other tiles repeat it, with their own number
    as u32le in place of the first 4 bytes, so that no tile equals another one of its block.
    Swapped, shifted, stale or truncated bytes are therefore all found.
    """

    def __init__(self, block_bytes: int) -> None:
        if not 1 <= block_bytes <= MAX_PAYLOAD_BYTES:
            raise CallerError(f"a block has 1 ... {MAX_PAYLOAD_BYTES} bytes, not {block_bytes}")
        self.block_bytes = block_bytes
        self._tiles = -(-block_bytes // TILE_BYTES)
        numbers = array("I", range(1, self._tiles))
        if sys.byteorder == "big":
            numbers.byteswap()
        #: Of the numbers of all tiles after the first: their first bytes, their second bytes, ...
        self._columns = [numbers.tobytes()[byte::4] for byte in range(4)]

    def payload(self, block_id: int) -> bytearray:
        """The bytes of a block, in a new buffer."""
        seed = _LABEL + _SEED.pack(block_id, self.block_bytes)
        payload = bytearray(hashlib.shake_128(seed).digest(TILE_BYTES)) * self._tiles
        if self._tiles > 1:
            for byte, column in enumerate(self._columns):
                payload[TILE_BYTES + byte :: TILE_BYTES] = column
        del payload[self.block_bytes :]
        return payload

    def matches(self, block_id: int, data: Buffer) -> bool:
        """Whether `data`, any contiguous buffer, holds exactly the bytes of that block."""
        # A bytearray compares itself with any buffer by memcmp; a memoryview on the left would
        # compare item by item.
        return self.payload(block_id) == data


#: The timed steps of a request, in order.
STEPS: Final = ("walk", "claim", "restore", "save", "release")


@dataclass(slots=True)
class ReplayCounts:
    """What a replay counts, for one request or for all."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    #: Claimed, but lost or unreadable before all bytes arrived. These are misses, not mismatches.
    lost_blocks: int = 0
    #: Bytes that were compared with the expected payload, and were right.
    verified_bytes: int = 0
    #: Number of blocks by the status of their save.
    saves: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0


@dataclass(slots=True)
class RequestOutcome(ReplayCounts):
    """The result of one request. `Totals` adds them up."""

    #: A sentence for each block whose bytes were wrong.
    mismatches: list[str] = field(default_factory=list)
    #: Whether the daemon did not answer some call.
    unavailable: bool = False
    #: Step -> duration. A step that was not needed is absent.
    durations_ns: dict[str, int] = field(default_factory=dict)


#: Misses of a daemon that did not answer, which say nothing about the cache.
_NO_ANSWER: Final = frozenset((MissReason.UNAVAILABLE, MissReason.DEADLINE))


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """How to replay.

    `tiers`: where to save; of several, the key of the request's first missing block selects one.
    `speed`: 0 as fast as possible, 1 as the timestamps say, 10 ten times faster.
    `in_place`: search and read in the daemon's memory, if it is shared, instead of with claims
    over gRPC. `reconnect_wait_s`: how long a worker waits, in total, for a daemon that went away.
    Raises CallerError for a value out of range.
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


class Replayer:
    """Replays requests through one client, one after the other.

    The order of the steps makes the hit tokens exact: claim the longest run, read and verify it
    while it is pinned, save the blocks after it with the run as their ancestors, so that the
    daemon touches the whole chain leaf first, and release. In place nothing is claimed: an entry
    that changes while it is copied is read again.
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
        """Wait for a daemon that went away, for what is left of `reconnect_wait_s`. False if it did
        not come back."""
        if self._patience_s <= 0:
            return False
        started_s = time.monotonic()
        connected = self._client.wait_connected(deadline_ms=round(1e3 * self._patience_s))
        self._patience_s -= time.monotonic() - started_s
        return connected

    def replay(self, request: Request) -> RequestOutcome:
        """Replay one request. Raises CallerError if its ids are no block ids."""
        outcome = RequestOutcome(prompt_tokens=request.input_length, blocks=len(request.hash_ids))
        if not request.hash_ids:
            return outcome
        with _timed(outcome, "walk"):
            # A batch may name a key only once; an id that the trace repeats is the same block.
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

    def _restore(self, hit: Hit, ids: Sequence[int], outcome: RequestOutcome) -> int:
        """Read the hit and compare every byte. Returns the length of the run of right blocks."""
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
        """Zeroed buffers, so that bytes that never arrive can't look right."""
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
        outcome: RequestOutcome,
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
        """The tier for the blocks from `key` on, which depends only on the key."""
        tiers = self._options.tiers
        return tiers[key[0] % len(tiers)]


@contextmanager
def _timed(outcome: RequestOutcome, step: str) -> Iterator[None]:
    started_ns = time.perf_counter_ns()
    yield
    outcome.durations_ns[step] = time.perf_counter_ns() - started_ns
