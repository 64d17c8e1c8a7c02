"""The events of a Watch in the format of vLLM's KV cache events, over ZMQ.

A message is three frames, as vLLM 0.33 publishes them: the topic, a sequence number of 8 bytes,
big-endian, from 0 on without gaps, and msgpack of `[timestamp, [event, ...], rank]`. Whoever missed
some asks at the replay socket with the number to begin at, and is sent what is still there, then a
message with the number -1.

What an indexer does with a block it does by its tokens and by the block before it. So only entries
that were saved with their token ids are told, and only behind a block that is known.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import msgspec
import zmq

from ...proto.errors import ConfigError
from ...proto.keys import TOKEN_BYTES, Key
from ...proto.vocabulary import Tier
from ..watch import Cleared, Disconnected, Evicted, Published, Synced, WatchEvent

#: Where vLLM's indexers think that a block is, seen from the GPU.
MEDIUMS: Final = {Tier.RAM: "CPU", Tier.SHM: "CPU", Tier.DISK: "STORAGE"}
#: Blocks whose parents are remembered: those that were there before are told without theirs.
_MAX_PARENTS: Final = 2_000_000
#: Blocks that wait for the one before them.
_MAX_WAITING: Final = 10_000
#: Blocks that one event tells of at most.
_MAX_BLOCKS: Final = 256
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE: Final = struct.Struct(">Q")
_LINGER_MS: Final = 1_000
#: What is longer is no request for a replay.
_MAX_REQUEST_BYTES: Final = 1_024


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks of one size, each behind the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that are not there any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """No block is there; those that are follow."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: bytes) -> int:
    """What an indexer calls the block: 64 bits, as vLLM's do by default. Taken from the
    beginning of its key: all keys of a namespace end alike."""
    return int.from_bytes(key[:8], "big")


class Blocks:
    """Translates events. Pure, but for what it remembers.

    A block is told behind the one before it, however the events come: one whose parent has not
    been told waits for it.
    """

    def __init__(self, *, block_tokens: int | None = None, namespace: str | None = None) -> None:
        """Of entries of this size, and of this label, only; None: of all."""
        self._block_tokens = block_tokens
        self._namespace = namespace
        #: what was told, and where it is
        self._told: dict[Key, str] = {}
        #: what of it came again since everything is told anew; None: nothing is
        self._again: set[Key] | None = None
        self._begun = False
        #: the parents of what was published while this watched, also of what left since
        self._parents: OrderedDict[Key, bytes] = OrderedDict()
        #: by parent, and the other way: what waits for it
        self._waiting: dict[bytes, dict[Key, Published]] = {}
        self._waits_for: dict[Key, bytes] = {}
        #: entries that were not told, for they have no token ids, or no known place
        self.without_ids = 0
        self.without_parent = 0

    def translated(self, events: Iterable[WatchEvent]) -> list[KvEvent]:
        """The events in vLLM's words, in order; those that it has no word for are left out."""
        told = _Told()
        for event in events:
            match event:
                case Published():
                    self._published(event, told)
                case Evicted():
                    self._forget_waiting(event.key)
                    self._gone(event.key, told)
                case Cleared() if self._begun:
                    self._again = set()
                    self._waiting.clear()
                    self._waits_for.clear()
                case Cleared():
                    # What another publisher said before is not known here.
                    self._begun = True
                    told.events.append(AllBlocksCleared())
                case Synced():
                    stale = () if self._again is None else self._told.keys() - self._again
                    self._again = None
                    for key in stale:
                        self._gone(key, told)
                case Disconnected():
                    pass
        told.finish()
        return told.events

    def _published(self, event: Published, told: _Told) -> None:
        key = event.key
        if event.parent is not None:
            self._parents[key] = event.parent
            self._parents.move_to_end(key)
            if len(self._parents) > _MAX_PARENTS:
                self._parents.popitem(last=False)
        there = self._told.get(key)
        if there == MEDIUMS[event.tier]:
            if self._again is not None:
                self._again.add(key)
            return
        if there is not None:
            self._gone(key, told)
        if self._namespace is not None and event.namespace != self._namespace:
            return
        tokens = event.token_count
        if self._block_tokens is not None and tokens != self._block_tokens:
            return
        if not tokens or len(event.token_ids) != TOKEN_BYTES * tokens:
            self.without_ids += 1
            return
        parent = self._parents.get(key)
        if parent is None:
            self.without_parent += 1
        elif not parent or parent in self._told:
            self._tell(event, parent, told)
        elif len(self._waits_for) < _MAX_WAITING:
            self._waits_for[key] = parent
            self._waiting.setdefault(parent, {})[key] = event

    def _tell(self, event: Published, parent: bytes, told: _Told) -> None:
        """Tell of a block, then of the blocks that waited for it."""
        coming = [(event, parent)]
        while coming:
            block, before = coming.pop()
            self._told[block.key] = MEDIUMS[block.tier]
            if self._again is not None:
                self._again.add(block.key)
            told.stored(block, before)
            for key, child in self._waiting.pop(block.key, {}).items():
                del self._waits_for[key]
                coming.append((child, block.key))

    def _gone(self, key: Key, told: _Told) -> None:
        medium = self._told.pop(key, None)
        if medium is not None:
            told.removed(key, medium)

    def _forget_waiting(self, key: Key) -> None:
        parent = self._waits_for.pop(key, None)
        if parent is not None:
            children = self._waiting[parent]
            del children[key]
            if not children:
                del self._waiting[parent]


class _Told:
    """The events of one message: blocks that follow each other are one event."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self._run: list[Published] = []
        #: the key before the first of them
        self._before: bytes = b""
        self._gone: list[int] = []
        self._medium = ""

    def stored(self, block: Published, before: bytes) -> None:
        run = self._run
        if not (
            run
            and before == run[-1].key
            and len(run) < _MAX_BLOCKS
            and block.token_count == run[-1].token_count
            and MEDIUMS[block.tier] == MEDIUMS[run[-1].tier]
        ):
            self.finish()
            self._before = before
        self._run.append(block)

    def removed(self, key: Key, medium: str) -> None:
        if self._run or medium != self._medium:
            self.finish()
        self._medium = medium
        self._gone.append(hash_of(key))

    def finish(self) -> None:
        """Nothing more belongs to the last event."""
        run, self._run = self._run, []
        gone, self._gone = self._gone, []
        if gone:
            self.events.append(BlockRemoved(gone, self._medium))
        if run:
            raw = b"".join(block.token_ids for block in run)
            stored = BlockStored(
                block_hashes=[hash_of(block.key) for block in run],
                parent_block_hash=hash_of(self._before) if self._before else None,
                token_ids=list(struct.unpack(f"<{len(raw) // TOKEN_BYTES}I", raw)),
                block_size=run[0].token_count,
                lora_id=None,
                medium=MEDIUMS[run[0].tier],
                lora_name=None,
            )
            self.events.append(stored)


def encode(events: Sequence[KvEvent], rank: int, at_s: float, *, as_map: bool = True) -> bytes:
    """A batch, as vLLM's `KVEventBatch`. `as_map`: False for decoders that want arrays."""
    written: Sequence[Any] = events
    if not as_map:
        written = [(type(event).__name__, *msgspec.structs.astuple(event)) for event in events]
    return msgspec.msgpack.encode((at_s, written, rank))


class Publisher:
    """Two sockets, and the last messages. A context manager. For one thread; a thread of its own
    answers at the replay socket. ZMQ keeps up to 100,000 messages for a subscriber that is slow,
    and drops what is more, which the subscriber sees by the numbers."""

    def __init__(
        self,
        bind: str,
        replay: str | None = None,
        topic: str = "",
        *,
        rank: int = 0,
        buffer: int = 10_000,
        as_map: bool = True,
    ) -> None:
        """Raises ConfigError where it can't listen."""
        self._topic = topic.encode()
        self._rank = rank
        self._as_map = as_map
        self.next_number = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._publishing = self._context.socket(zmq.PUB)
        self._publishing.set_hwm(100_000)
        self._publishing.setsockopt(zmq.LINGER, _LINGER_MS)
        self._thread: threading.Thread | None = None
        try:
            self._publishing.bind(bind)
            #: where it listens, with the ports that the system chose
            self.bound = self._publishing.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_bound = ""
            if replay is not None:
                replaying = self._context.socket(zmq.ROUTER)
                # A whole replay and its end fit, also for one that reads slowly.
                replaying.setsockopt(zmq.SNDHWM, 2 * (buffer + 1))
                replaying.setsockopt(zmq.LINGER, 0)
                replaying.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
                replaying.bind(replay)
                self.replay_bound = replaying.getsockopt_string(zmq.LAST_ENDPOINT)
                self._thread = threading.Thread(
                    target=self._replay, args=(replaying,), name="prefixctl-replay", daemon=True
                )
                self._thread.start()
        except zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ConfigError(f"can't publish at {bind}, replay at {replay}: {problem}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """One message; none if there is nothing to tell."""
        if not events:
            return
        payload = encode(events, self._rank, time.time(), as_map=self._as_map)
        number = _SEQUENCE.pack(self.next_number)
        self.next_number += 1
        with self._lock:
            self._buffer.append((number, payload))
        self._publishing.send_multipart((self._topic, number, payload))

    def close(self) -> None:
        """What was published is sent for a second. Idempotent."""
        self._publishing.close()
        # Ends the replaying thread too, wherever it waits, once it has closed its socket.
        self._context.term()

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                frames = socket.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == _SEQUENCE.size:
                    self._send_again(socket, frames[0], frames[2])

    def _send_again(self, socket: zmq.Socket[bytes], peer: bytes, wanted: bytes) -> None:
        with self._lock:
            buffered = list(self._buffer)
        for number, payload in buffered:
            if number >= wanted:  # big-endian: in the order of the numbers
                socket.send_multipart((peer, b"", self._topic, number, payload))
        socket.send_multipart((peer, b"", b"", _END, b""))
