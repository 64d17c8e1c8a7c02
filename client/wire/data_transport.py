"""The transport for a daemon on another host: payloads and small calls over its data socket,
sessions and the rest over gRPC. When there is no data socket, or it can't be reached, everything
goes over gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...proto import prefixd_pb2 as pb
from ...proto.endpoints import UNIX_SCHEME
from ...proto.errors import ClaimLost, UnknownEntry
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode
from ..results import SaveOutcome
from . import messages
from .deadline import Deadline
from .framed_calls import FramedCalls
from .framed_connection import NoConnection, TcpPlace
from .grpc_transport import GrpcTransport
from .link import Holding, Link
from .transport import Claimed, Range, SaveTerms, Saving, Sink

T = TypeVar("T")


class DataTransport(GrpcTransport):
    """`transport.Transport` that prefers the data socket."""

    #: Host of the data socket. None: that of the daemon's address, if it is TCP. A client that
    #: reaches the daemon over a Unix socket need not be on the daemon's network.
    data_host: str | None = None

    @property
    def why_down(self) -> str:
        """Why there is no session at this moment; empty: there is one."""
        return self._keeper.why_down

    def _opened(self, link: Link) -> None:
        address, port = link.connection.address, link.welcome.data_port
        host = self.data_host
        if host is None and not address.startswith(UNIX_SCHEME):
            host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
        if not port or not host:
            return
        place = TcpPlace(host, port, link.ref, link.connection.security)
        link.data = FramedCalls(place, link.connection, self.counters)
        link.calls = link.data
        link.on_end.append(link.data.hang_up)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        link = self._holder(claim)
        timeout_s = deadline.left_s()
        try:
            data = _data_of(link)
            request = messages.read_request(claim, ranges)
            self._call_held("Read", link, lambda: data.read(request, len(ranges), sink, timeout_s))
        except NoConnection:
            super().read(claim, ranges, sink, deadline)
            return
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        def fetch(link: Link, data: FramedCalls, timeout_s: float) -> None:
            request = pb.FetchRequest(
                session=link.ref,
                keys=[each.entry.key for each in ranges],
                generations=[each.entry.generation for each in ranges],
                ranges=map(messages.range_of, ranges),
            )
            data.fetch(request, len(ranges), sink, timeout_s)

        try:
            self._call_data("Fetch", deadline, fetch)
        except (NoConnection, UnknownEntry):
            return False
        return True

    def fetch_found(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        room_bytes: Sequence[int],
        begin: Callable[[Claimed], Sink],
        deadline: Deadline,
    ) -> bool:
        def begin_with(response: pb.ClaimResponse) -> Sink:
            return begin(Claimed(None, *messages.claimed_of(keys, response)))

        def fetch(link: Link, data: FramedCalls, timeout_s: float) -> None:
            request = pb.FetchRequest(
                session=link.ref,
                keys=keys,
                mode=pb.ClaimMode.ValueType(mode),
                room_bytes=room_bytes,
            )
            data.fetch_found(request, begin_with, timeout_s)

        try:
            self._call_data("Fetch", deadline, fetch)
        except NoConnection:
            return False
        return True

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        payloads = [saving.payload for saving in items]

        def send(link: Link, data: FramedCalls, timeout_s: float) -> list[pb.SaveResult]:
            header = messages.header_in(link, items, terms)
            return data.save(pb.RawSaveRequest(header=header), payloads, timeout_s)

        try:
            results = self._call_data("Save", deadline, send)
        except NoConnection:
            return super().save(items, terms, deadline)
        return messages.outcomes_of([saving.item.key for saving in items], results)

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        link = self._writer(reservations, deadline)
        timeout_s = deadline.left_s()
        try:
            data = _data_of(link)
            request = pb.RawSaveRequest(reserved=messages.reserved_of(link.ref, reservations))
            results = self._call_held(
                "Write", link, lambda: data.save(request, payloads, timeout_s)
            )
        except NoConnection:
            return super().write(reservations, payloads, deadline)
        return messages.outcomes_of([key for _, key in reservations], results)

    def _call_data(
        self, name: str, deadline: Deadline, ask: Callable[[Link, FramedCalls, float], T]
    ) -> T:
        """`_call` over the data socket. Raises NoConnection, before the call is counted, when the
        session has none."""
        _data_of(self.link(deadline))
        _, result = self._call(
            name, deadline, lambda link, timeout_s: ask(link, _data_of(link), timeout_s)
        )
        return result


def _data_of(link: Link) -> FramedCalls:
    """Raises NoConnection."""
    if link.data is None:
        raise NoConnection("the daemon of this session has no data socket")
    return link.data
