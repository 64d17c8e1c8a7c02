"""The events of a Watch in the format of vLLM's KV cache events, over ZMQ.

A message is three frames, as vLLM 0.33 publishes them: the topic, a sequence number of 8 bytes,
big-endian, from 0 on without gaps, and msgpack of `[timestamp, [event, ...], rank]`. A subscriber
that missed messages sends the first missing number to the replay socket. The answer is the messages
that are still kept, then one with the number -1.

An indexer identifies a block by its tokens and by the block before it. So an entry is published
only if it was saved with its token ids, and only after the block before it.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Self, TypeAlias

import msgspec
import zmq

from ...proto.errors import ConfigError
from ...proto.keys import Key
from ...proto.tokens import TOKEN_BYTES
from ...proto.vocabulary import Tier
from ..watch import Cleared, Disconnected, Evicted, Published, Synced, WatchEvent

#: The medium of a block as vLLM's indexers name it, seen from the GPU.
MEDIUMS: Final = {Tier.RAM: "CPU", Tier.SHM: "CPU", Tier.DISK: "STORAGE"}
#: How many blocks have their parents remembered. A block that was there before the watch began
#: comes without its parent.
_MAX_PARENTS: Final = 2_000_000
#: How many blocks may wait for the block before them.
_MAX_WAITING: Final = 10_000
#: The most blocks in one event.
_MAX_BLOCKS: Final = 256
_END: Final = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE: Final = struct.Struct(">Q")
_LINGER_MS: Final = 1_000
#: A longer message is no request for a replay.
_MAX_REQUEST_BYTES: Final = 1_024


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Consecutive blocks of one chain, all of the same size."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that are no longer there."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """Forget every block. The blocks that are there follow."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


def hash_of(key: bytes) -> int:
    """The 64-bit hash of a block, as long as vLLM's default. Taken from the beginning of its key,
    because all keys of a namespace have the same end."""
    return int.from_bytes(key[:8], "big")


class Blocks:
    """Translates events of a watch to vLLM's. Does no I/O.

    A block is published after the block before it, whatever the order of the events: until its
    parent is published, it waits.
    """

    def __init__(self, *, block_tokens: int | None = None, namespace: str | None = None) -> None:
        """Translates only entries of this size and label; None means any."""
        self._block_tokens = block_tokens
        self._namespace = namespace
        #: Published blocks, and the medium of each.
        self._media: dict[Key, str] = {}
        #: While the watch lists everything anew: the published blocks that it listed. Else None.
        self._listed: set[Key] | None = None
        self._begun = False
        #: The parents of blocks that were saved during the watch, evicted ones included.
        self._parents: OrderedDict[Key, bytes] = OrderedDict()
        #: Blocks that wait for their parent, by parent; and the parent of each.
        self._waiting: dict[bytes, dict[Key, Published]] = {}
        self._waits_for: dict[Key, bytes] = {}
        #: Entries that are not published because they have no token ids, or no known parent.
        self.without_ids = 0
        self.without_parent = 0

    def translated(self, events: Iterable[WatchEvent]) -> list[KvEvent]:
        """The events for vLLM's indexers, in order. Some events have no counterpart there."""
        batch = _Batch()
        for event in events:
            match event:
                case Published():
                    self._published(event, batch)
                case Evicted():
                    self._forget_waiting(event.key)
                    self._gone(event.key, batch)
                case Cleared() if self._begun:
                    self._listed = set()
                    self._waiting.clear()
                    self._waits_for.clear()
                case Cleared():
                    # An earlier publisher may have published blocks that are gone.
                    self._begun = True
                    batch.events.append(AllBlocksCleared())
                case Synced():
                    stale = () if self._listed is None else self._media.keys() - self._listed
                    self._listed = None
                    for key in stale:
                        self._gone(key, batch)
                case Disconnected():
                    pass
        batch.finish()
        return batch.events

    def _published(self, event: Published, batch: _Batch) -> None:
        key = event.key
        if event.parent is not None:
            self._parents[key] = event.parent
            self._parents.move_to_end(key)
            if len(self._parents) > _MAX_PARENTS:
                self._parents.popitem(last=False)
        there = self._media.get(key)
        if there == MEDIUMS[event.tier]:
            if self._listed is not None:
                self._listed.add(key)
            return
        if there is not None:
            self._gone(key, batch)
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
        elif not parent or parent in self._media:
            self._publish(event, parent, batch)
        elif len(self._waits_for) < _MAX_WAITING:
            self._waits_for[key] = parent
            self._waiting.setdefault(parent, {})[key] = event

    def _publish(self, event: Published, parent: bytes, batch: _Batch) -> None:
        """Publish a block, then the blocks that waited for it."""
        ready = [(event, parent)]
        while ready:
            block, before = ready.pop()
            self._media[block.key] = MEDIUMS[block.tier]
            if self._listed is not None:
                self._listed.add(block.key)
            batch.stored(block, before)
            for key, child in self._waiting.pop(block.key, {}).items():
                del self._waits_for[key]
                ready.append((child, block.key))

    def _gone(self, key: Key, batch: _Batch) -> None:
        medium = self._media.pop(key, None)
        if medium is not None:
            batch.removed(key, medium)

    def _forget_waiting(self, key: Key) -> None:
        parent = self._waits_for.pop(key, None)
        if parent is not None:
            children = self._waiting[parent]
            del children[key]
            if not children:
                del self._waiting[parent]


class _Batch:
    """The events of one message. Consecutive blocks of a chain become one event."""

    def __init__(self) -> None:
        self.events: list[KvEvent] = []
        self._run: list[Published] = []
        #: The key of the block before the first block of `_run`.
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
        """Complete the last event."""
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
    """A message as vLLM's `KVEventBatch`. With `as_map` False, events are arrays."""
    written: Sequence[Any] = events
    if not as_map:
        written = [(type(event).__name__, *msgspec.structs.astuple(event)) for event in events]
    return msgspec.msgpack.encode((at_s, written, rank))


class Publisher:
    """Publishes messages, and keeps the last ones for replays. A context manager.

    For one thread. A thread of its own answers at the replay socket. ZMQ keeps up to 100,000
    messages for a slow subscriber and drops the others, which leaves a gap in the numbers.
    """

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
        """Raises ConfigError when it can't listen."""
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
            #: The addresses it listens at, with the ports that the system chose.
            self.bound = self._publishing.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_bound = ""
            if replay is not None:
                replaying = self._context.socket(zmq.ROUTER)
                # A whole replay and its end fit, even if the peer reads slowly.
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
            places = bind if replay is None else f"{bind}, or replay at {replay}"
            why = os.strerror(problem.errno or 0).lower()
            raise ConfigError(
                f"can't publish at {places}: {why}; write tcp://HOST:PORT or ipc://PATH"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Publish the events as one message. Without events, publish nothing."""
        if not events:
            return
        payload = encode(events, self._rank, time.time(), as_map=self._as_map)
        number = _SEQUENCE.pack(self.next_number)
        self.next_number += 1
        with self._lock:
            self._buffer.append((number, payload))
        self._publishing.send_multipart((self._topic, number, payload))

    def close(self) -> None:
        """Wait up to a second for unsent messages, then close. Idempotent."""
        self._publishing.close()
        # Interrupts the replay thread, and returns when that has closed its socket.
        self._context.term()

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                frames = socket.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == _SEQUENCE.size:
                    self._send_again(socket, frames[0], frames[2])

    def _send_again(self, socket: zmq.Socket[bytes], peer: bytes, first: bytes) -> None:
        with self._lock:
            buffered = list(self._buffer)
        for number, payload in buffered:
            if number >= first:  # big-endian, so bytes compare as the numbers do
                socket.send_multipart((peer, b"", self._topic, number, payload))
        socket.send_multipart((peer, b"", b"", _END, b""))
