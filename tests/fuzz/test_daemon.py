"""Random requests over every transport, in any order. Each is answered or refused as the contract
says, other clients are not affected, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from tests.proto.test_contract import METHODS
from tests.server.api.test_grpc_adapter import raw_call
from tests.support.bad_input import ERRORS
from tests.support.data_client import HOST
from tests.support.event_loop import shared_loop
from tests.support.running import OpenSession, Refused, answer, key, payload, running

from .ends import Ends, is_unsent
from .messages import damaged, pieces, requests

#: The longest that any call may take. A request may wait for at most a minute, and these requests
#: need next to nothing.
BOUND_S: Final = 30.0
#: Not called: operators' calls that stop the daemon or change how it handles the next requests, and
#: those that do not end.
_NOT_CALLED: Final = ("Drain", "Resize", "SetLogLevel", "Configure", "Watch", "Record")
CALLED: Final = [method for method in METHODS if method.name not in _NOT_CALLED]
#: Log levels that no request may cause.
_GRAVE: Final = ("error", "critical", "exception")
WITNESS: Final = key(1000)


class Daemon(RuleBasedStateMachine):
    """A daemon for each example, with a well-behaved session and hostile connections."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="pd-", dir="/tmp"))
        self._logged: list[dict[str, Any]] = []
        structlog.configure(processors=[self._log], cache_logger_on_first_use=False)
        self._ends = Ends()
        self._context = running(self._directory, tiers=(Tier.RAM,))
        self._daemon = self._do(self._context.__aenter__())
        self._session = self._witness = self._do(self._open())
        self._do(self._save_witness())
        self._port = self._daemon.front.data.start(HOST, 0)
        self._local: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._remote: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def _log(self, _logger: Any, method: str, event: Any) -> Any:
        if method in _GRAVE:
            self._logged.append(dict(event))
        raise structlog.DropEvent

    def _do(self, action: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(BOUND_S):
                return await action

        return shared_loop().run_until_complete(bounded())

    async def _open(self) -> OpenSession:
        return await self._daemon.open()

    async def _save_witness(self) -> None:
        statuses = await self._witness.save({WITNESS: payload(1)})
        assert statuses == [pb.SAVE_STATUS_SAVED]

    # ---- over gRPC

    @rule(data=st.data(), method=st.sampled_from(CALLED))
    def call(self, data: st.DataObject, method: MethodDescriptor) -> None:
        self._do(self._answered(data, method))

    async def _answered(self, data: st.DataObject, method: MethodDescriptor) -> None:
        many = data.draw(st.integers(1, 3)) if method.client_streaming else 1
        sent = []
        for _ in range(many):
            request = data.draw(requests(method.input_type, self._session.ref))
            sent.append(data.draw(damaged(request.SerializeToString())))
        self._ends.noted.clear()
        unknown = None
        try:
            await answer(raw_call(self._daemon.channel_of(method), method, sent))
        except Refused as refused:
            known = refused.name in ERRORS
            if is_unsent(method, len(sent), refused):
                ends = set(self._ends.noted)
                known = bool(ends) and ends <= {"", *ERRORS}
            unknown = None if known else str(refused)
        assert unknown is None

    # ---- over the sockets

    @rule()
    def connect(self) -> None:
        path = self._daemon.config.server.local_socket
        self._local.append(self._do(asyncio.open_unix_connection(path)))

    @precondition(lambda self: self._local)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        """Send a frame, whole or damaged and in pieces, on a connection to the local socket."""
        reader, writer = data.draw(st.sampled_from(self._local))
        request = data.draw(requests(pb.FramedRequest.DESCRIPTOR, self._session.ref))
        raw = data.draw(damaged(frames.frame(request)))  # type: ignore[arg-type]
        self._do(self._sent(reader, writer, data.draw(pieces(raw))))

    @rule()
    def connect_to_data(self) -> None:
        self._remote.append(self._do(asyncio.open_connection(HOST, self._port)))

    @precondition(lambda self: self._remote)
    @rule(data=st.data(), attach=st.booleans())
    def send_data(self, data: st.DataObject, attach: bool) -> None:
        """Send a frame to the data socket, perhaps followed by payload bytes."""
        reader, writer = data.draw(st.sampled_from(self._remote))
        request = data.draw(requests(pb.FramedRequest.DESCRIPTOR, self._session.ref))
        if attach:
            request = pb.FramedRequest(attach=self._session.ref)
        raw = data.draw(damaged(_framed(request)))
        raw += data.draw(st.sampled_from([b"", b"", b"a" * 104, b"b" * 5004]))
        self._do(self._sent(reader, writer, data.draw(pieces(raw))))

    async def _sent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parts: list[bytes]
    ) -> None:
        """Responses are read only briefly, as the frame may be incomplete."""
        with suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.01):
                await reader.read(2**20)

    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        connections = self._local + self._remote
        if connections:
            connection = data.draw(st.sampled_from(connections))
            connection[1].transport.abort()
            for open_ones in (self._local, self._remote):
                if connection in open_ones:
                    open_ones.remove(connection)

    # ---- the well-behaved session

    @rule(number=st.integers(1, 5))
    def save_and_restore(self, number: int) -> None:
        self._do(self._saved_and_restored(key(100 + number), payload(number)))

    async def _saved_and_restored(self, of: Any, content: bytes) -> None:
        (status,) = await self._witness.save({of: content})
        assert status in (pb.SAVE_STATUS_SAVED, pb.SAVE_STATUS_PRESENT)
        assert await self._witness.restore(of) == content

    @rule()
    def another_session(self) -> None:
        """Open a session that requests name from now on. The well-behaved one stays open."""
        self._session = self._do(self._open())

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def time_passes(self, seconds: float) -> None:
        async def passes() -> None:
            self._daemon.forward(seconds)
            await self._witness.beat()  # its session must not expire

        self._do(passes())

    @invariant()
    def the_accounting_holds(self) -> None:
        assert self._daemon.core.state.check() == []
        assert self._logged == []

    def teardown(self) -> None:
        try:
            for _, writer in self._local + self._remote:
                writer.transport.abort()
            self._do(self._ended())
        finally:
            self._do(self._context.__aexit__(None, None, None))
            self._ends.close()
            structlog.reset_defaults()
            shutil.rmtree(self._directory)

    async def _ended(self) -> None:
        tables = self._daemon.tables
        if WITNESS in tables.entries:  # an operator's call may have removed it
            again = await self._daemon.open()
            assert await again.restore(WITNESS) == payload(1)
        # Silent sessions expire and release what they hold.
        self._daemon.forward(100_000)
        await self._daemon.assert_idle()
        assert not tables.claims
        assert self._logged == []


def _framed(request: Any) -> bytes:
    return frames.frame(request)


#: Each example needs a daemon, so shrinking would take longer than reading the whole example.
Daemon.TestCase.settings = settings(
    settings.get_profile("fuzz"),
    max_examples=settings.get_profile("fuzz").max_examples // 4,
    stateful_step_count=25,
    phases=[Phase.explicit, Phase.generate],
)
TestDaemon = Daemon.TestCase
