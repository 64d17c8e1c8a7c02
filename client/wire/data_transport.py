"""The client's way to a daemon elsewhere: payloads and small calls over its data socket, sessions
and the rest over gRPC; all of it over gRPC where the daemon has none, or it can't be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...proto import prefixd_pb2 as pb
from ...proto.endpoints import UNIX_SCHEME
from ...proto.errors import ClaimLost, UnknownEntry
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode
from ..results import SaveOutcome
from . import messages
from .data_line import DataCalls
from .data_wire import NoLine, Place
from .deadline import Deadline
from .link import Holding, Link
from .packing import check_header
from .remote import RemoteTransport
from .transport import Claimed, Range, SaveTerms, Saving, Sink


class DataTransport(RemoteTransport):
    """`transport.Transport` over the data socket as far as that goes."""

    #: Where the data socket is. None: where the daemon was reached, if that was over TCP; whoever
    #: shares a Unix socket with it need not share a network.
    data_host: str | None = None

    @property
    def why_down(self) -> str:
        """Why there is no session at this moment; empty: there is one."""
        return self._keeper.why_down

    def _opened(self, link: Link) -> None:
        address, port = self._address, link.welcome.data_port
        host = self.data_host
        if host is None and not address.startswith(UNIX_SCHEME):
            host = address.rpartition(":")[0].rpartition("/")[2].strip("[]")
        if not port or not host:
            return
        place = Place(host, port, link.ref, link.connection.security)
        link.data = DataCalls(place, link.connection, self._counters)
        link.calls = link.data
        link.on_end.append(link.data.hang_up)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        link = self._holder(claim)
        data = link.data
        if data is not None:
            request = pb.ReadRequest(
                session=link.ref, claim_id=claim.number, ranges=map(messages.range_of, ranges)
            )
            timeout_s = deadline.left_s()
            try:
                self._call_held(
                    "Read", link, lambda: data.read(request, len(ranges), sink, timeout_s)
                )
            except NoLine:
                pass
            else:
                if claim.why_lost is not None:
                    raise ClaimLost(claim.why_lost)
                return
        super().read(claim, ranges, sink, deadline)

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        if self.link(deadline).data is None:
            return False
        request = pb.FetchRequest(
            keys=[wanted.entry.key for wanted in ranges],
            generations=[wanted.entry.generation for wanted in ranges],
            ranges=map(messages.range_of, ranges),
        )

        def ask(link: Link, timeout_s: float) -> None:
            if link.data is None:
                raise NoLine("the daemon of this session has no data socket")
            request.session.CopyFrom(link.ref)
            link.data.fetch(request, len(ranges), sink, timeout_s)

        try:
            self._call("Fetch", deadline, ask)
        except (NoLine, UnknownEntry):
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
        if self.link(deadline).data is None:
            return False
        request = pb.FetchRequest(
            keys=keys, mode=pb.ClaimMode.ValueType(mode), room_bytes=room_bytes
        )

        def take(response: pb.ClaimResponse) -> Sink:
            return begin(Claimed(None, *messages.claimed_of(keys, response)))

        def ask(link: Link, timeout_s: float) -> None:
            if link.data is None:
                raise NoLine("the daemon of this session has no data socket")
            request.session.CopyFrom(link.ref)
            link.data.fetch_found(request, take, timeout_s)

        try:
            self._call("Fetch", deadline, ask)
        except NoLine:
            return False
        return True

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        if self.link(deadline).data is None:
            return super().save(items, terms, deadline)
        header = messages.header_of([saving.item for saving in items], terms)
        payloads = [saving.payload for saving in items]

        def send(link: Link, timeout_s: float) -> list[pb.SaveResult]:
            if link.data is None:
                raise NoLine("the daemon of this session has no data socket")
            header.session.CopyFrom(link.ref)
            check_header(header, link.max_message_bytes)
            return link.data.save(pb.RawSaveRequest(header=header), payloads, timeout_s)

        try:
            _, results = self._call("Save", deadline, send)
        except NoLine:
            return super().save(items, terms, deadline)
        return messages.outcomes_of([saving.item.key for saving in items], results)

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        link = self._writer(reservations, deadline)
        data = link.data
        if data is None:
            return super().write(reservations, payloads, deadline)
        tokens = [holding.number for holding, _ in reservations]
        reserved = pb.StagedReservations(session=link.ref, tokens=tokens)
        request = pb.RawSaveRequest(reserved=reserved)
        timeout_s = deadline.left_s()
        try:
            results = self._call_held(
                "Write", link, lambda: data.save(request, payloads, timeout_s)
            )
        except NoLine:
            return super().write(reservations, payloads, deadline)
        return messages.outcomes_of([key for _, key in reservations], results)
