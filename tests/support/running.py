"""A daemon that runs in the test's process: real stores in a temporary directory, a real gRPC
server on a Unix socket, and a clock that stands still until a test moves it.

    @in_loop
    async def test_something(tmp_path: Path) -> None:
        async with running(tmp_path) as daemon:
            session = await daemon.open()
            await session.save({key(1): b"bytes"})

A test ends with `daemon.assert_sound()`.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import grpc
from google.protobuf.descriptor import MethodDescriptor

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import prefixd_pb2_grpc as rpc
from prefixd.proto.errors import BY_NAME, ERROR_METADATA, RETRY_METADATA, grpc_code
from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server import assembly
from prefixd.server.api.front import Front
from prefixd.server.config import sources
from prefixd.server.config.budgets import resolve
from prefixd.server.config.loading import PROGRAM, load_config
from prefixd.server.config.machine import Machine
from prefixd.server.config.options import Config
from prefixd.server.core.events import ArenaGrown, Tick
from prefixd.server.runtime.clock import Clock
from prefixd.server.runtime.index import IndexWriter
from prefixd.server.runtime.listeners import Tracing
from prefixd.server.runtime.loop import Core
from prefixd.server.runtime.recovery import Recovery
from prefixd.server.runtime.resizing import fit
from prefixd.tiers.store import Store
from tests.support.columns import Item, columns
from tests.support.framing import Frames

SLAB: Final = 4096
STAGING_BYTES: Final = 2**20
HEARTBEAT_NS: Final = 2_000_000_000
CLAIM_LEASE_MS: Final = 300_000
RESERVATION_TTL_MS: Final = 60_000
MACHINE: Final = Machine(2**34, 2**34, 2**34, 2**34, 2**34, 0)

Wrap = Callable[[Store], Store]


class ManualClock(Clock):
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_ns = super().now_ns()
        self._monotonic_ns = 0

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        """The clock of a loop that is never late, except after `stall`."""
        return self._monotonic_ns

    def forward(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)

    def stall(self, seconds: float) -> None:
        """Let time pass in which the loop does not run."""
        self.forward(seconds)
        self.forward_monotonic(seconds)

    def forward_monotonic(self, seconds: float) -> None:
        """Move only the clock that measures durations, so that nothing expires."""
        self._monotonic_ns += round(seconds * 1e9)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


#: A byte for each position. Repeats after 64 KiB.
_PLACES = bytes((place * 7 + (place >> 8)) % 256 for place in range(2**16))
_COUNTED = bytes(range(256)) * 2


def payload(number: int, length_bytes: int = 5000) -> bytes:
    """Bytes that differ by number and by position."""
    first = number % 256
    places = (_PLACES * (1 + length_bytes // 2**16))[:length_bytes]
    return places.translate(_COUNTED[first : first + 256])


def item(of: bytes, data: bytes, **fields: Any) -> Item:
    fields = {"token_count": 16} | fields
    return Item(of, len(data), **fields)


def part(number: int, data: bytes, *, offset: int = 0, last: bool = True, **fields: Any) -> Any:
    """One part of a Save stream: by default a whole payload."""
    fields = {"payload_crc32c": crc32c(data)} | fields
    return pb.WritePart(item=number, offset_bytes=offset, data=data, last=last, **fields)


class Refused(Exception):
    """A failed rpc, with the error that the contract describes."""

    def __init__(self, error: grpc.aio.AioRpcError | pb.Failure) -> None:
        if isinstance(error, pb.Failure):
            self.code = grpc_code(BY_NAME[error.error])
            self.name, self.retry = error.error, "1" if error.retry else "0"
            self.sentence = error.message
        else:
            metadata = dict(error.trailing_metadata() or ())
            self.code = error.code()
            self.name = metadata.get(ERROR_METADATA)
            self.retry = metadata.get(RETRY_METADATA)
            self.sentence = error.details() or ""
        super().__init__(f"{self.code.name} {self.name} retry={self.retry}: {self.sentence}")


async def answer(call: Any) -> Any:
    """The response of an rpc, or the list of its responses. Raises Refused."""
    try:
        if hasattr(call, "__aiter__"):
            return [response async for response in call]
        return await call
    except grpc.aio.AioRpcError as error:
        raise Refused(error) from None


async def next_of(call: Any) -> Any:
    """The next message of a stream of responses. Raises Refused, EOFError."""
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise Refused(error) from None
    if message is grpc.aio.EOF:
        raise EOFError
    return message


async def rest_of(call: Any) -> list[Any]:
    """The remaining responses of a stream. Raises Refused."""
    messages = []
    with suppress(EOFError):
        while True:
            messages.append(await next_of(call))
    return messages


class OpenSession:
    """A client's side of one session."""

    def __init__(self, daemon: Outside, call: Any, welcome: pb.Welcome) -> None:
        self.daemon = daemon
        self.call = call
        self.welcome = welcome
        self.number: int = welcome.session_id
        self.ref = pb.SessionRef(
            incarnation=welcome.incarnation,
            session_id=self.number,
            secret=welcome.session_secret,
        )

    async def send(self, **kind: Any) -> None:
        await self.call.write(pb.SessionRequest(**kind))

    async def event(self) -> pb.SessionEvent:
        """The next event that the daemon sends."""
        event = await next_of(self.call)
        assert isinstance(event, pb.SessionEvent)
        return event

    async def beat(self, sequence: int = 1) -> None:
        """Send a heartbeat, and wait for its ack: the daemon has handled all earlier messages."""
        await self.send(heartbeat=pb.Heartbeat(sequence=sequence))
        while (event := await self.event()).heartbeat_ack.sequence != sequence:
            self.daemon.other_events.append(event)

    async def close(self) -> None:
        """End the session, and wait until the daemon has ended its side."""
        await self.call.done_writing()
        await rest_of(self.call)

    # ---- reading

    async def claim(
        self,
        keys: Iterable[bytes],
        mode: pb.ClaimMode.ValueType = pb.CLAIM_MODE_RUN,
        **fields: Any,
    ) -> pb.ClaimResponse:
        request = pb.ClaimRequest(session=self.ref, keys=keys, mode=mode, **fields)
        return await answer(self.daemon.cache.Claim(request))

    async def release(self, *claims: int) -> list[int]:
        request = pb.ReleaseRequest(session=self.ref, claim_ids=claims)
        return list((await answer(self.daemon.cache.Release(request))).results)

    async def read(self, claim: int, *ranges: pb.ReadRange) -> list[bytes]:
        """The bytes of each range. Without ranges: the whole first entry."""
        ranges = ranges or (pb.ReadRange(index=0),)
        request = pb.ReadRequest(session=self.ref, claim_id=claim, ranges=ranges)
        found = [b""] * len(ranges)
        for response in await answer(self.daemon.cache.Read(request)):
            for one in response.parts:
                assert one.status == pb.READ_STATUS_OK
                assert one.offset_bytes == len(found[one.range])
                found[one.range] += one.data
        return found

    async def restore(self, of: bytes) -> bytes:
        """Claim, read and release one entry."""
        claimed = await self.claim([of])
        assert claimed.claim_id, "the entry could not be claimed"
        (data,) = await self.read(claimed.claim_id)
        assert await self.release(claimed.claim_id) == [pb.RELEASE_STATUS_RELEASED]
        return data

    # ---- writing

    def header(
        self,
        items: Iterable[Item],
        tier: Tier = Tier.RAM,
        reason: int = SaveReason.FINISH,
        **fields: Any,
    ) -> pb.SaveHeader:
        return pb.SaveHeader(
            session=self.ref, tier=tier, reason=reason, **(columns(items) | fields)
        )

    async def reserve(
        self, items: Iterable[Item], tier: Tier = Tier.RAM, **fields: Any
    ) -> list[pb.ReserveResult]:
        request = pb.ReserveRequest(header=self.header(items, tier, **fields))
        return list((await answer(self.daemon.cache.Reserve(request))).results)

    async def granted(
        self, items: Iterable[Item], tier: Tier = Tier.RAM, **fields: Any
    ) -> list[int]:
        """Reserve, which must be granted. Returns the tokens."""
        results = await self.reserve(items, tier, **fields)
        assert all(r.status == pb.RESERVE_STATUS_GRANTED for r in results), results
        return [r.token for r in results]

    def reserved(self, *tokens: int) -> pb.GrantedReservations:
        return pb.GrantedReservations(session=self.ref, tokens=tokens)

    async def write(self, token: int, *parts: pb.WritePart) -> pb.SaveResult:
        """Save what was reserved, each part in a message of its own."""
        messages = [pb.SaveRequest(parts=[part]) for part in parts]
        messages[0].reserved.CopyFrom(self.reserved(token))
        (result,) = (await answer(self.daemon.cache.Save(stream(messages)))).results
        return result

    async def save(
        self, payloads: Mapping[Key, bytes], tier: Tier = Tier.RAM, **fields: Any
    ) -> list[int]:
        """One Save with everything in its first message. Returns the statuses."""
        items = [item(of, data) for of, data in payloads.items()]
        parts = [part(number, data) for number, data in enumerate(payloads.values())]
        first = pb.SaveRequest(header=self.header(items, tier, **fields), parts=parts)
        results = (await answer(self.daemon.cache.Save(stream([first])))).results
        return [result.status for result in results]


async def let_others_run() -> None:
    """Let the loop's other tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def stream(messages: Iterable[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


class LocalConnection:
    """A client's side of one connection to the local socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = Frames(pb.FramedResponse.FromString)

    async def ask(self, **kind: Any) -> pb.FramedResponse:
        await self.send(**kind)
        return await self.response()

    async def send(self, **kind: Any) -> None:
        self._writer.write(frames.frame(pb.FramedRequest(**kind)))
        await self._writer.drain()

    async def response(self) -> pb.FramedResponse:
        """The next response. Raises Refused, EOFError."""
        while (response := self._frames.next()) is None:
            data = await self._reader.read(2**16)
            if not data:
                raise EOFError
            self._frames.feed(data)
        if response.HasField("failure"):
            raise Refused(response.failure)
        return response

    def close(self) -> None:
        """Close the connection at once, even in the middle of a request."""
        self._writer.transport.abort()


class StagedCall:
    """A save through staging memory, with the methods of a gRPC stream."""

    def __init__(self, connection: LocalConnection) -> None:
        self._connection = connection

    async def write(self, request: pb.SaveStagedRequest) -> None:
        await self._connection.send(save_staged=request)

    async def done_writing(self) -> None:
        await self.write(pb.SaveStagedRequest(last=True))

    async def read(self) -> pb.SaveStagedResponse:
        return (await self._connection.response()).save_staged

    def cancel(self) -> None:
        self._connection.close()


class Outside:
    """A daemon as clients and operators see it: stubs for its two services."""

    def __init__(self, address: str, operators: str | None) -> None:
        """`operators`: the address of the Admin service. None: `address` is TCP, which serves
        workers only."""
        self.address = address
        self._operators = operators
        #: Events that sessions received while they waited for a heartbeat's ack.
        self.other_events: list[pb.SessionEvent] = []
        self.connect()

    def connect(self) -> None:
        """Open new channels, like a new client."""
        options = [
            # Otherwise the channels of one process share their connections.
            ("grpc.use_local_subchannel_pool", 1),
            # Keeps the flow-control window small, so that little is sent to a client that does
            # not read.
            ("grpc.http2.bdp_probe", 0),
        ]
        self.channel = grpc.aio.insecure_channel(self.address, options=options)
        self.cache: Any = rpc.CacheStub(self.channel)
        operators = self._operators or self.address
        self.admin_channel = grpc.aio.insecure_channel(operators, options=options)
        self.admin: Any = rpc.AdminStub(self.admin_channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.admin_channel.close()

    def channel_of(self, method: MethodDescriptor) -> grpc.aio.Channel:
        """The channel to the service of an rpc."""
        workers = method.containing_service.name == "Cache"
        return self.channel if workers else self.admin_channel

    async def open(self, name: str = "tester", label: str = "", version: str = "") -> OpenSession:
        call = self.cache.Session()
        hello = pb.Hello(client_name=name, pid=1, host="here", label=label, client_version=version)
        await call.write(pb.SessionRequest(hello=hello))
        first = await call.read()
        return OpenSession(self, call, first.welcome)

    @property
    def tiers(self) -> list[int]:
        """The numbers of the tiers that it has."""
        return [tier.value for tier in self.tables.ledgers]

    async def lookup(self, *keys: bytes, **fields: Any) -> list[pb.LookupResult]:
        return list(
            (await answer(self.cache.Lookup(pb.LookupRequest(keys=keys, **fields)))).results
        )

    async def verify(self, *tiers: Tier) -> pb.VerifyResponse:
        """Read these tiers back, or all tiers, and return everything that was found."""
        messages = await answer(self.admin.Verify(pb.VerifyRequest(tiers=tiers)))
        assert [message.done for message in messages] == [False] * (len(messages) - 1) + [True]
        last = messages[-1]
        assert isinstance(last, pb.VerifyResponse)
        last.problems[:] = [problem for message in messages for problem in message.problems]
        return last

    async def problems(self) -> list[str]:
        """What is inconsistent in the daemon, and which entries can't be read back."""
        checked = await answer(self.admin.Check(pb.CheckRequest()))
        return [*checked.problems, *(await self.verify()).problems]

    async def presence(self, *keys: bytes) -> list[int]:
        return [result.presence for result in await self.lookup(*keys)]


class Running(Outside):
    """See the module. `core` and `front` are the daemon's own objects."""

    def __init__(self, core: Core, front: Front, address: str, operators: str) -> None:
        super().__init__(address, operators)
        self.core = core
        self.front = front
        self.local_server = front.local
        self.local_connections: list[LocalConnection] = []
        #: The session that was opened last.
        self.latest: OpenSession | None = None
        self.config = front.config

    async def open(self, name: str = "tester", label: str = "", **hello: Any) -> OpenSession:
        self.latest = await super().open(name, label, **hello)
        return self.latest

    async def connect_locally(self, session: OpenSession | None = None) -> LocalConnection:
        """A connection to the local socket, which is closed with the daemon at the latest. It
        belongs to `session`, or to the one that was opened last."""
        session = session or self.latest or await self.open()
        opened = await asyncio.open_unix_connection(self.config.server.local_socket)
        connection = LocalConnection(*opened)
        await connection.send(attach=session.ref)
        self.local_connections.append(connection)
        return connection

    async def save_staged(self, session: OpenSession | None = None) -> StagedCall:
        return StagedCall(await self.connect_locally(session))

    @property
    def tables(self) -> Any:
        return self.core.state.tables

    def forward(self, seconds: float) -> None:
        """Let time pass, and apply what is due by then."""
        assert isinstance(self.core.clock, ManualClock)
        self.core.clock.forward(seconds)
        self.core.post(Tick(self.core.clock.now_ns()))

    async def until(self, condition: Callable[[], object]) -> None:
        """Send the daemon rpcs until the condition holds."""
        while not condition():
            await self.admin.Stats(pb.StatsRequest())

    async def assert_sound(self) -> None:
        """The state is consistent, the index agrees, all parts are healthy, every byte is right."""
        assert self.core.state.check() == []
        assert await self.problems() == []
        assert self.core.unhealthy() == {}

    async def assert_idle(self) -> None:
        """`assert_sound`, once no reservation, waiting request or write is left."""
        t = self.tables
        await self.until(lambda: not (t.reservations or t.waiting or self.core.writes))
        await self.assert_sound()


#: The parser of a daemon's command line. Making it takes longer than using it.
_parser = functools.cache(functools.partial(sources.parser, Config, PROGRAM))


def _config(flags: Sequence[str]) -> Config:
    with mock.patch.object(sources, "parser", lambda _model, _program, **how: _parser(**how)):
        return load_config(flags, {})


@asynccontextmanager
async def running(
    directory: Path,
    *flags: str,
    wrap: Mapping[Tier, Wrap] | None = None,
    make_index: Callable[[bytes, int], IndexWriter] = IndexWriter,
    tiers: Sequence[Tier] = tuple(Tier),
    clock: Clock | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[Running]:
    """A daemon on `directory`, stopped at the end. `wrap`: wraps the stores of these tiers."""
    config = _config(
        [
            *(f"--{tier.label}.budget={'1MiB' if tier in tiers else 0}" for tier in Tier),
            # Many tests have a single client, which may use all of a tiny tier.
            "--sessions.max_pinned_share=1",
            "--sessions.max_reserved_share=1",
            *(f"--{tier.label}.slab={SLAB}" for tier in Tier),
            f"--server.address=unix:{directory / 's'}",
            f"--shm.directory={directory / 'shm'}",
            f"--disk.directory={directory / 'disk'}",
            "--disk.sync=false",
            f"--server.staging={STAGING_BYTES}",
            *flags,
        ]
    )
    plan = resolve(config, MACHINE)
    incarnation, clock = secrets.token_bytes(16), clock or ManualClock()
    with ExitStack() as closing:
        stores: dict[Tier, Store] = {}
        for tier, tier_plan in plan.tiers.items():
            store = assembly.make_store(tier_plan, verify_at_start=True, sync=False)
            closing.callback(store.close)
            stores[tier] = (wrap or {}).get(tier, lambda same: same)(store)
        index = make_index(incarnation, assembly.max_entries(plan, stores))
        closing.callback(index.close)
        executor = ThreadPoolExecutor(2, "worker")
        closing.callback(executor.shutdown, cancel_futures=True)
        core = assembly.make_core(plan, stores, index, executor, clock, tracing)
        front = Front(core, config, incarnation, config.server.max_connections)
        closing.callback(front.close)
        try:
            for tier, store in stores.items():
                core.post(ArenaGrown(tier, store.secured_bytes, clock.now_ns()))
            recovery = Recovery(core, incarnation)
            for store in stores.values():
                await recovery.recover(store)
                await fit(core, store, plan.tiers[store.tier].budget_bytes)
                await recovery.end(store)
            for tier, store in stores.items():
                for secured_bytes in store.secure_segments():
                    core.post(ArenaGrown(tier, secured_bytes, clock.now_ns()))
            front.workers.add_insecure_port(config.server.address)
            front.operators.add_insecure_port(config.server.operators())
            await front.workers.start()
            await front.operators.start()
            await front.local.start()
            daemon = Running(core, front, config.server.address, config.server.operators())
            try:
                yield daemon
            finally:
                await daemon.close()
                for connection in daemon.local_connections:
                    connection.close()
                await asyncio.gather(front.workers.stop(grace=0), front.operators.stop(grace=0))
                await front.local.close()
                await front.data.close()
        finally:
            await core.close()


#: A daemon with its RAM tier alone: without the disk tier's processes it starts in half the time.
in_ram = functools.partial(running, tiers=(Tier.RAM,))
