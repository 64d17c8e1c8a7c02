"""Following which keys a daemon has, as a cache-aware router does.

    with Watch(address) as watch:
        keys = ResidentKeys()
        for event in watch:
            keys.apply(event)

A connection that breaks is made again, and goes on behind the last event if the daemon still knows
what came after it; if not, everything is told anew. Watching is the operators', and
that of who has a token for it, and takes no session: a client that knows a key can read its entry.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Self, TypeAlias

import grpc

from ..proto import prefixd_pb2 as pb
from ..proto.endpoints import ADMIN_ADDRESS_VARIABLE, default_address, normalize_address
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
from ..proto.namespaces import Namespace
from ..proto.prefixd_pb2_grpc import AdminStub
from ..proto.vocabulary import SaveReason, Tier
from .wire.messages import understanding
from .wire.security import open_channel, operators_of
from .wire.session import Backoff

#: Time does not help against these.
_FINAL: Final = (ConfigError, MalformedMessage, NotAuthenticated, NotPermitted, UnknownTier)
#: How long the other end of a connection may not even answer a ping before it is given up. The
#: daemon lets nobody ping more often than it sends.
_PING_MS: Final = 2 * WATCH_BEAT_MS
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted daemon is found at once, not after a back-off of minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A connection of its own: what this one does not read delays no other.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
#: Messages that the thread of an `AsyncWatch` reads ahead.
_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class Published:
    """The key can be found from now on, or (before `Synced`) could be already."""

    key: Key
    tier: Tier
    sequence: int
    generation: int
    payload_bytes: int
    token_count: int
    reason: SaveReason
    #: the key before it in the chain that it was saved with, empty for the first; None: not known,
    #: for it was there before
    parent: bytes | None = None
    #: the label of the client that saved it; empty: an earlier start of the daemon did
    namespace: str = ""
    #: u32 little-endian; empty unless they were asked for and saved
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The key can't be found any more, for whatever reason; it may never have been told."""

    key: Key
    tier: Tier
    sequence: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget every key: what there is follows, up to `Synced`. `why`: empty at the beginning."""

    why: str


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything that there is has been told, or the stream goes on where it ended."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Nothing is known of the daemon until `Cleared` or `Synced` comes. It is tried again."""

    why: str


WatchEvent: TypeAlias = Published | Evicted | Cleared | Synced | Disconnected


class WatchPosition(NamedTuple):
    """Up to where a watcher was told, in which start of the daemon."""

    incarnation: bytes = b""
    sequence: int = 0


class Watch:
    """An iterator over events, without an end until it is closed. For one thread at a time;
    `close` may come from any. A context manager. Connects when it is asked for the first event.

    Iterating raises what repeating can't mend: UnknownTier, NotAuthenticated, NotPermitted,
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
        """`address` names the daemon, as for `Client`; `operators` is where its operators are
        served, if that is not beside it. `tiers`: empty for all. `token_ids`: with each published
        key those that were saved with it, unless there are more than 8,192. `position`: go on
        there. Raises ConfigError, DaemonUnavailable where operators can't be served."""
        self.address: Final = normalize_address(address or default_address())
        self._operators = (
            operators or os.environ.get(ADMIN_ADDRESS_VARIABLE) or operators_of(self.address)
        )
        if self._operators is None:
            raise DaemonUnavailable(
                f"without TLS nobody can watch {self.address}: give the daemon's Unix socket, or "
                "set $PREFIXD_TLS_CA and $PREFIXD_TOKEN_FILE"
            )
        self._tiers = tuple(tiers)
        self._token_ids = token_ids
        #: behind the last message whose events were all taken
        self.position = position or WatchPosition()
        self._backoff = backoff or Backoff()
        self._channel = open_channel(normalize_address(self._operators), _OPTIONS)
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
        self._channel.close()

    def cut(self) -> None:
        """Give the present connection up; the iterator makes another one."""
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def __iter__(self) -> Iterator[WatchEvent]:
        for events in self.batches():
            yield from events

    def batches(self) -> Iterator[list[WatchEvent]]:
        """The events in lists: as many as one message of the daemon brought, which may be none."""
        while not self._closed.wait(self._backoff.next_s()):
            try:
                yield from self._connection()
                problem = PrefixdError("the daemon ended the stream")
            except PrefixdError as raised:
                problem = raised
            if self._closed.is_set():
                return
            if isinstance(problem, _FINAL):
                raise problem
            yield [Disconnected(str(problem))]

    def _connection(self) -> Iterator[list[WatchEvent]]:
        """One stream, to its end. Raises PrefixdError."""
        request = pb.WatchRequest(
            tiers=[pb.Tier.ValueType(tier) for tier in self._tiers],
            incarnation=self.position.incarnation,
            sequence=self.position.sequence,
            token_ids=self._token_ids,
        )
        try:
            call = AdminStub(self._channel).Watch(request)
        except ValueError:
            return  # the channel was closed in this moment
        with self._lock:
            self._call = call
        try:
            for response in call:
                self._backoff.reset()
                with understanding():
                    events = [event_of(event) for event in response.events]
                if any(isinstance(event, Cleared) for event in events):
                    self.position = WatchPosition()
                yield events
                if response.sequence:
                    self.position = WatchPosition(response.incarnation, response.sequence)
        except grpc.RpcError as failure:
            raise from_grpc(failure) from None
        finally:
            with self._lock:
                self._call = None
            call.cancel()


def event_of(event: pb.WatchEvent) -> WatchEvent:
    """Raises ValueError for what a later version may tell."""
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
    """`Watch` for asyncio: an asynchronous iterator, and a thread that reads ahead of it.

        async with AsyncWatch(Watch(address)) as watch:
            async for event in watch:
                ...

    One loop's, and iterated once at a time.
    """

    def __init__(self, watch: Watch) -> None:
        """`watch` belongs to this one from now on, which closes it."""
        self.watch: Final = watch
        #: how far the thread may read ahead
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
        came = asyncio.Event()
        batches: deque[list[WatchEvent] | BaseException | None] = deque()

        def put(batch: list[WatchEvent] | BaseException | None) -> None:
            batches.append(batch)
            came.set()

        def tell(batch: list[WatchEvent] | BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(put, batch)
            except RuntimeError:
                self.watch.close()  # the loop is gone, and with it whoever wanted to know

        threading.Thread(target=self._read, args=(tell,), name="prefixd-watch", daemon=True).start()
        while True:
            while batches:
                batch = batches.popleft()
                if batch is None:
                    return
                if isinstance(batch, BaseException):
                    raise batch
                for event in batch:
                    yield event
                self._room.release()
            came.clear()
            await came.wait()

    def _read(self, tell: Callable[[list[WatchEvent] | BaseException | None], None]) -> None:
        try:
            for batch in self.watch.batches():
                self._room.acquire()
                tell(batch)
        except Exception as problem:
            tell(problem)
        else:
            tell(None)


class ResidentKeys:
    """The keys that a daemon can find, from the events of a `Watch` in their order. Pure.

    While everything is told anew, what was known before stays, and `exact` is False.
    """

    def __init__(self, namespace: str | None = None) -> None:
        """`namespace`: what the tokens of the clients are bound to, if they are. The daemon stores,
        and reports, other keys than such clients name; ask whether the clients' keys are `in` this,
        not the daemon's. Raises ValueError for what is no namespace."""
        self._namespace = None if namespace is None else Namespace(namespace)
        self._keys: dict[Key, Published] = {}
        self._coming: dict[Key, Published] | None = None
        #: is it what the daemon says, as of the last event?
        self.exact = False

    def apply(self, event: WatchEvent) -> None:
        """The next event."""
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
        """What was told of each. A view until `Synced` comes next."""
        return MappingProxyType(self._keys)

    def of_tier(self, tier: Tier) -> set[Key]:
        """The keys of one tier."""
        return {key for key, event in self._keys.items() if event.tier is tier}
