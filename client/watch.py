"""A watch: follows which keys a daemon has, as a cache-aware router does.

    with Watch(address) as watch:
        keys = ResidentKeys()
        for event in watch:
            keys.apply(event)

A broken connection is made again. It continues after the last event if the daemon still knows what
followed; if not, the daemon lists everything anew. Watching is for operators and for holders of a
token that allows it, because any client that knows a key can read its entry. It needs no session.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Self, TypeAlias, TypeVar

import grpc

from ..proto import prefixd_pb2 as pb
from ..proto.endpoints import ADMIN_ADDRESS_VARIABLE, default_addresses, normalize_address
from ..proto.errors import (
    ConfigError,
    DaemonUnavailable,
    MalformedMessage,
    NotAuthenticated,
    NotPermitted,
    PrefixdError,
    UnknownTier,
    from_grpc,
)
from ..proto.keys import Key
from ..proto.limits import MAX_MESSAGE_BYTES, WATCH_BEAT_MS
from ..proto.namespaces import TenantNamespace
from ..proto.prefixd_pb2_grpc import AdminStub
from ..proto.vocabulary import SaveReason, Tier
from .wire.messages import understanding
from .wire.reach import reach
from .wire.security import open_channel, operators_of
from .wire.session import Backoff

T = TypeVar("T")

#: Trying again does not help against these.
_FINAL: Final = (ConfigError, MalformedMessage, NotAuthenticated, NotPermitted, UnknownTier)
#: How long a ping may go unanswered before the connection is given up. The daemon refuses pings
#: that come more often than its own messages.
_PING_MS: Final = 2 * WATCH_BEAT_MS
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A connection of its own, so that a slow reader delays no other.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
#: How long a daemon may take to accept a connection.
_CONNECT_S: Final = 1.0
#: Messages that the thread of an `AsyncWatch` reads ahead of its iterator.
_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class Published:
    """The key can be found from now on; before `Synced`: it may have been there earlier."""

    key: Key
    tier: Tier
    sequence: int
    generation: int
    payload_bytes: int
    token_count: int
    reason: SaveReason
    #: The key before it in the chain that it was saved with, empty for the first. None: not known,
    #: because the key was there before the watch.
    parent: bytes | None = None
    #: The label of the client that saved it; empty when an earlier start of the daemon did.
    namespace: str = ""
    #: u32 little-endian; empty unless they were requested and saved.
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The key can't be found any more, for any reason; it may never have been reported."""

    key: Key
    tier: Tier
    sequence: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget every key; those that exist follow, up to `Synced`. `why`: empty at the beginning."""

    why: str


@dataclass(frozen=True, slots=True)
class Synced:
    """All existing keys have been reported, or the stream continues where it ended."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The state of the daemon is unknown until `Cleared` or `Synced`. The watch reconnects."""

    why: str


WatchEvent: TypeAlias = Published | Evicted | Cleared | Synced | Disconnected


class WatchPosition(NamedTuple):
    """The last event that a watcher got, and the start of the daemon that it is from."""

    incarnation: bytes = b""
    sequence: int = 0


class Watch:
    """An iterator over events, which ends when it is closed. For one thread at a time; any thread
    may call `close`. A context manager. Connects when the first event is read.

    Iterating raises what trying again can't mend: UnknownTier, NotAuthenticated, NotPermitted,
    ConfigError; MalformedMessage from a daemon that can't be watched.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        tiers: Sequence[Tier] = (),
        token_ids: bool = False,
        operators: str | None = None,
        position: WatchPosition | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        """`address` names the daemon, as for `Client`; `operators` is its address for operators,
        unless that follows from `address`. `tiers`: empty for all. `token_ids`: report each
        published key with the token ids that were saved with it, unless there are more than 8,192.
        `position`: continue there. Raises ConfigError, and DaemonUnavailable where the daemon can't
        be watched."""
        daemons = (normalize_address(address),) if address else default_addresses()
        #: Of the daemon, or of the places where it is looked for.
        self.address: Final = " or ".join(daemons)
        operators = operators or os.environ.get(ADMIN_ADDRESS_VARIABLE)
        found = [normalize_address(operators)] if operators else map(operators_of, daemons)
        self._operators = [each for each in found if each is not None]
        if not self._operators:
            raise DaemonUnavailable(
                f"without TLS nobody can watch {self.address}: give the daemon's Unix socket, or "
                "set $PREFIXD_TLS_CA and $PREFIXD_TOKEN_FILE"
            )
        self._tiers = tuple(tiers)
        self._token_ids = token_ids
        #: After the last message whose events were all taken.
        self.position = position or WatchPosition()
        self._backoff = backoff or Backoff()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The iterator ends. Idempotent."""
        self._closed.set()
        self.cut()

    def cut(self) -> None:
        """Drop the present connection; the iterator makes another one."""
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def __iter__(self) -> Iterator[WatchEvent]:
        for events in self.batches():
            yield from events

    def batches(self) -> Iterator[list[WatchEvent]]:
        """The events of one message of the daemon at a time, which may be none."""
        for events in self._decoded(_events_of):
            yield [events] if isinstance(events, Disconnected) else events

    def messages(self) -> Iterator[pb.WatchResponse | Disconnected]:
        """The messages of the daemon as they came: much faster than `batches`, for a reader who
        needs little of each event."""
        return self._decoded(lambda response: response)

    def _decoded(self, decode: Callable[[pb.WatchResponse], T]) -> Iterator[T | Disconnected]:
        while not self._closed.wait(self._backoff.next_s()):
            try:
                yield from self._connection(decode)
                problem = PrefixdError("the daemon ended the stream")
            except PrefixdError as raised:
                problem = raised
            if self._closed.is_set():
                return
            if isinstance(problem, _FINAL):
                raise problem
            yield Disconnected(str(problem))

    def _connection(self, decode: Callable[[pb.WatchResponse], T]) -> Iterator[T]:
        """One stream, to its end. Raises PrefixdError."""
        request = pb.WatchRequest(
            tiers=[pb.Tier.ValueType(tier) for tier in self._tiers],
            incarnation=self.position.incarnation,
            sequence=self.position.sequence,
            token_ids=self._token_ids,
        )
        reached = reach(self._operators, _CONNECT_S)
        channel = open_channel(reached.target, _OPTIONS)
        call = AdminStub(channel).Watch(request)
        with self._lock:
            self._call = call
        if self._closed.is_set():
            call.cancel()
        try:
            for response in call:
                self._backoff.reset()
                with understanding():
                    decoded = decode(response)
                # During a list there is nothing to continue from.
                if not response.sequence:
                    self.position = WatchPosition()
                yield decoded
                if response.sequence:
                    self.position = WatchPosition(response.incarnation, response.sequence)
        except grpc.RpcError as failure:
            raise from_grpc(failure) from None
        finally:
            with self._lock:
                self._call = None
            call.cancel()
            channel.close()
            reached.close()


def _events_of(response: pb.WatchResponse) -> list[WatchEvent]:
    """Raises ValueError as `event_of` does."""
    return [event_of(event) for event in response.events]


def event_of(event: pb.WatchEvent) -> WatchEvent:
    """Raises ValueError for an event that only a later version knows."""
    match event.kind:
        case pb.WATCH_KIND_PUBLISHED:
            return Published(
                Key(event.key),
                Tier(event.tier),
                event.sequence,
                event.generation,
                event.payload_bytes,
                event.token_count,
                SaveReason(event.reason),
                event.parent if event.HasField("parent") else None,
                event.namespace,
                event.token_ids,
            )
        case pb.WATCH_KIND_EVICTED:
            return Evicted(Key(event.key), Tier(event.tier), event.sequence)
        case pb.WATCH_KIND_CLEARED:
            return Cleared(event.why)
        case pb.WATCH_KIND_SYNCED:
            return Synced(event.sequence)
    raise ValueError(f"{event.kind} is no kind of event")


class AsyncWatch:
    """`Watch` for asyncio: an asynchronous iterator, with a thread that reads ahead of it.

        async with AsyncWatch(Watch(address)) as watch:
            async for event in watch:
                ...

    For one event loop, and one iteration at a time.
    """

    def __init__(self, watch: Watch) -> None:
        """Takes over `watch`, and closes it in the end."""
        self.watch: Final = watch
        #: How many messages the thread may still read ahead.
        self._room = threading.Semaphore(_AHEAD)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The iterator ends. Idempotent."""
        self.watch.close()
        self._room.release()

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        loop = asyncio.get_running_loop()
        batches: asyncio.Queue[list[WatchEvent] | Exception | None] = asyncio.Queue()

        def put(batch: list[WatchEvent] | Exception | None) -> None:
            try:
                loop.call_soon_threadsafe(batches.put_nowait, batch)
            except RuntimeError:
                self.watch.close()  # the loop has ended, and nothing iterates any more

        threading.Thread(target=self._read, args=(put,), name="prefixd-watch", daemon=True).start()
        while (batch := await batches.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            for event in batch:
                yield event
            self._room.release()

    def _read(self, put: Callable[[list[WatchEvent] | Exception | None], None]) -> None:
        try:
            for batch in self.watch.batches():
                self._room.acquire()
                put(batch)
        except Exception as problem:
            put(problem)
        else:
            put(None)


class ResidentKeys:
    """The keys that a daemon can find, from the events of a `Watch` in their order. Pure.

    While the daemon lists everything anew, the earlier keys stay, and `exact` is False.
    """

    def __init__(self, namespace: str | None = None) -> None:
        """`namespace`: the one that the clients' tokens are bound to, if any. The daemon stores and
        reports other keys than such clients name; `in` takes the clients' keys, not the daemon's.
        Raises ValueError for what is no namespace."""
        self._namespace = None if namespace is None else TenantNamespace(namespace)
        self._keys: dict[Key, Published] = {}
        self._coming: dict[Key, Published] | None = None
        #: Are these exactly the daemon's keys, as of the last event?
        self.exact = False

    def apply(self, event: WatchEvent) -> None:
        """Take the next event."""
        keys = self._keys if self._coming is None else self._coming
        match event:
            case Published():
                keys[event.key] = event
            case Evicted():
                keys.pop(event.key, None)
            case Cleared():
                self._coming = {}
                self.exact = False
            case Synced():
                self._keys, self._coming = keys, None
                self.exact = True
            case Disconnected():
                self.exact = False

    def __contains__(self, key: object) -> bool:
        if self._namespace is not None and isinstance(key, bytes):
            key = self._namespace.stored([Key(key)])[0]
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    @property
    def entries(self) -> Mapping[Key, Published]:
        """What was reported of each key. A view, valid until the next `Synced`."""
        return MappingProxyType(self._keys)

    def of_tier(self, tier: Tier) -> set[Key]:
        """The keys of one tier."""
        return {key for key, event in self._keys.items() if event.tier is tier}
