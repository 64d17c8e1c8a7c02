"""The transport over sockets: sessions and rare calls over gRPC, small calls and payloads over the
daemon's local or data socket. What can't be reached there goes over gRPC, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from ...proto import prefixd_pb2 as pb
from ...proto.endpoints import UNIX_SCHEME, default_addresses, normalize_address
from ...proto.errors import (
    ClaimLost,
    DaemonUnavailable,
    DeadlineExceeded,
    PrefixdError,
    StaleIncarnation,
    UnknownEntry,
    UnknownReservation,
    UnknownSession,
    from_grpc,
)
from ...proto.keys import Key
from ...proto.limits import CHUNK_BYTES, DEFAULT_CONNECT_TIMEOUT_MS, MAX_BATCH_KEYS
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, DeleteStatus, Tier
from ..counters import ClientCounters
from ..results import Entries, Found, SaveOutcome
from . import messages
from .deadline import Deadline
from .framed_calls import FramedCalls
from .framed_connection import FramedEndpoint, NoConnection, TcpPlace, UnixPlace
from .greenlets import prepare_grpc
from .grpc_connection import GrpcConnection, unanswered
from .link import Link
from .security import Security
from .session import Backoff, LookupRecorders, SessionKeeper, check_answering, hello_of
from .trace_context import CallSpans
from .transport import (
    SOME_TIER,
    Claimed,
    Granted,
    Holding,
    Item,
    Range,
    SaveTerms,
    Saving,
    SessionShare,
    Sink,
    Transport,
)

T = TypeVar("T")

#: What small calls and payloads go over. "fast": the local socket of a daemon on this host, the
#: data socket of one on another. "data": the data socket of a daemon on this host, to measure it.
#: "grpc": gRPC alone.
Wire: TypeAlias = Literal["fast", "data", "grpc"]


class RemoteTransport(Transport):
    """`transport.Transport` over one session, which is opened again when it breaks.

    When the daemon refuses a call because it does not know the session, the call is repeated once
    in a new session: the first attempt had no effect. No other failure is retried.
    """

    def __init__(
        self,
        address: str | None = None,
        name: str | None = None,
        *,
        label: str | None = None,
        counters: ClientCounters,
        connect_timeout_ms: int = DEFAULT_CONNECT_TIMEOUT_MS,
        backoff: Backoff | None = None,
        security: Security | None = None,
        wire: Wire = "fast",
        recorders: LookupRecorders | None = None,
    ) -> None:
        """`address` None: the default ones, in their order. `name` None: that of the program.
        `label`: see `Client`. `security`: see `security.open_channel`. `recorders`: told when the
        daemon asks for what is looked up. Raises ConfigError for a malformed address, InvalidSize
        for a malformed name or label."""
        prepare_grpc()
        self._wire = wire
        #: The calls of the latest session that has a local or data socket.
        self._framed: FramedCalls | None = None
        self.counters: Final = counters
        #: Makes a span of each rpc. None when tracing is off.
        self.spans: CallSpans | None = None
        self._prepare()
        addresses = default_addresses() if address is None else (normalize_address(address),)
        self._keeper = SessionKeeper(
            addresses,
            hello_of(name, label),
            counters=counters,
            connect_timeout_ms=connect_timeout_ms,
            backoff=backoff,
            when_opened=self._session_opened,
            security=security,
            recorders=recorders,
        )

    def _prepare(self) -> None:
        """Make what `_session_opened` needs of a subclass: a session may open at any time after."""

    def _session_opened(self, link: Link) -> None:
        """Called before a session is used, in the keeper's thread; must not block. `_keeper` may
        not be set yet."""
        place = None if self._wire == "grpc" else place_of(link, near=self._wire == "data")
        if place is not None:
            self._framed = FramedCalls(place, link.connection, self.counters, self._framed)
            link.go_over(self._framed)

    @property
    def max_batch_keys(self) -> int:
        link = self._keeper.current
        return (link.welcome.max_batch_keys if link else 0) or MAX_BATCH_KEYS

    def _batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """`items`, as many at a time as one call takes."""
        size = self.max_batch_keys
        return (items[start : start + size] for start in range(0, len(items), size))

    @property
    def connected(self) -> bool:
        return self._keeper.connected

    @property
    def why_down(self) -> str:
        """Why there is no session at this moment; empty: there is one."""
        return self._keeper.why_down

    @property
    def under_pressure(self) -> bool:
        link = self._keeper.current
        return link is not None and link.under_pressure

    @property
    def framed(self) -> bool:
        """Whether the session in use has a local or data socket to go over."""
        link = self._keeper.current
        return link is not None and link.framed is not None

    def local_calls(self, link: Link) -> FramedCalls | None:
        """Calls over the daemon's local socket, however it was reached. None: it is not on this
        host, or has none for this client."""
        if link.framed is not None and link.framed.local:
            return link.framed
        path = link.welcome.local_socket
        if not path or not Path(path).is_socket():
            return None
        return FramedCalls(UnixPlace(path, link.ref), link.connection, self.counters)

    @property
    def current(self) -> Link | None:
        """The session in use, if there is one at this moment."""
        return self._keeper.current

    def link(self, deadline: Deadline) -> Link:
        """The session in use; waits for the first one. Raises PrefixdError."""
        return self._keeper.link(deadline)

    def wait(self, deadline: Deadline) -> bool:
        return self._keeper.wait(deadline)

    def close(self, within_s: float) -> None:
        self._keeper.close(within_s)

    def share(self, tier: Tier, deadline: Deadline) -> SessionShare | None:
        for limits in self._keeper.link(deadline).welcome.tiers:
            if limits.tier == int(tier) and limits.max_reserved_bytes and limits.slab_bytes:
                return SessionShare(limits.max_reserved_bytes, limits.slab_bytes)
        return None

    # ---- read side

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        found: list[Found] = []
        for batch in self._batches(keys):
            response = self._lookup(pb.LookupRequest(keys=batch, wait_ms=wait_ms), deadline)
            with messages.understanding():
                found += [
                    messages.found_of(key, result)
                    for key, result in zip(batch, response.results, strict=True)
                ]
        return found

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        found: list[int] = []
        for batch in self._batches(keys):
            response = self._lookup(pb.LookupRequest(keys=batch, brief=True), deadline)
            present = messages.present_of(batch, response)
            found += [SOME_TIER if there else 0 for there in present]
        return found

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        run = 0
        for batch in self._batches(keys):
            request = pb.LookupRequest(keys=batch, stop_at_first_absent=True, brief=True)
            presences = self._lookup(request, deadline).presences
            present = [presence == pb.PRESENCE_PRESENT for presence in presences]
            found = present.index(False) if False in present else len(present)
            run += found
            if found < len(batch):
                break
        return [SOME_TIER] * run

    def _lookup(self, request: pb.LookupRequest, deadline: Deadline) -> pb.LookupResponse:
        def ask(link: Link, timeout_s: float) -> pb.LookupResponse:
            return link.calls.call("Lookup", request, pb.LookupResponse, timeout_s)

        return self._call("Lookup", deadline, ask)[1]

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        request = pb.ClaimRequest(
            keys=keys, mode=pb.ClaimMode.ValueType(mode), wait_ms=wait_ms, lease_ms=lease_ms
        )
        link, response = self._call_as_session("Claim", request, pb.ClaimResponse, deadline)
        number = response.claim_id
        holding = link.claims.hold(link, number) if number else None
        try:
            positions, entries, in_flight = messages.claimed_of(keys, response)
        except PrefixdError:
            if holding is not None:
                self.forget(holding)
            raise
        if holding is not None:
            holding.entries = entries
        return Claimed(holding, positions, entries, in_flight)

    def claim_known(self, entries: Entries, lease_ms: int, deadline: Deadline) -> Holding | None:
        """Pin entries that were found in an index. None: some of them have changed since, and
        nothing is pinned."""
        request = pb.ClaimRequest(
            keys=entries.keys,
            mode=pb.CLAIM_MODE_ANY,
            lease_ms=lease_ms,
            brief=True,
        )
        link, response = self._call_as_session("Claim", request, pb.ClaimResponse, deadline)
        if not response.claim_id:
            return None
        holding = link.claims.hold(link, response.claim_id)
        holding.entries = entries
        if list(response.generations) == list(entries.generations):
            return holding
        self.give_back([holding])
        return None

    def streams(self, payload_bytes: int) -> int:
        link = self._keeper.current
        return 1 if link is None or link.framed is None else link.framed.streams(payload_bytes)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        link = self._holder(claim)
        request = messages.read_request(claim, ranges)

        def read(over: FramedCalls | GrpcConnection) -> None:
            timeout_s = deadline.left_s()
            self._call_held("Read", link, lambda: over.read(request, len(ranges), sink, timeout_s))

        try:
            read(_framed(link))
        except NoConnection:
            read(link.connection)
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        def fetch(link: Link, framed: FramedCalls, timeout_s: float) -> None:
            request = pb.FetchRequest(
                session=link.ref,
                keys=[each.entry.key for each in ranges],
                generations=[each.entry.generation for each in ranges],
                ranges=map(messages.range_of, ranges),
            )
            framed.fetch(request, len(ranges), sink, timeout_s)

        try:
            self._call_framed("Fetch", deadline, fetch)
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

        def fetch(link: Link, framed: FramedCalls, timeout_s: float) -> None:
            request = pb.FetchRequest(
                session=link.ref,
                keys=keys,
                mode=pb.ClaimMode.ValueType(mode),
                room_bytes=room_bytes,
            )
            framed.fetch_found(request, begin_with, timeout_s)

        try:
            self._call_framed("Fetch", deadline, fetch)
        except NoConnection:
            return False
        return True

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        link = self._keeper.current
        held = [claim for claim in claims if claim.link is link]
        if not held or link is None:
            return [False] * len(claims)
        outcomes: dict[int, int] = {}
        for numbers in self._batches([claim.number for claim in held]):
            request = pb.ReleaseRequest(session=link.ref, claim_ids=numbers)
            response = self._call_as_holder("Release", request, pb.ReleaseResponse, link, deadline)
            with messages.understanding():
                outcomes.update(zip(numbers, response.results, strict=True))
        return [
            claim.link is link
            and outcomes[claim.number] == pb.RELEASE_STATUS_RELEASED
            and claim.why_lost is None
            for claim in claims
        ]

    def give_back(self, claims: Sequence[Holding]) -> None:
        """Release claims of the current session without waiting for the response."""
        link = self._keeper.current
        if link is not None:
            for numbers in self._batches([c.number for c in claims if c.link is link]):
                link.send(pb.SessionRequest(give_back=pb.GiveBack(claim_ids=numbers)))

    def forget(self, claim: Holding) -> None:
        give_back = pb.GiveBack(claim_ids=[claim.number])
        claim.link.send(pb.SessionRequest(give_back=give_back))

    def forget_reservation(self, reservation: Holding) -> None:
        give_back = pb.GiveBack(tokens=[reservation.number])
        reservation.link.send(pb.SessionRequest(give_back=give_back))

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        request = pb.DeleteRequest(keys=keys)
        _, response = self._call_as_session(
            "Delete", request, pb.DeleteResponse, deadline, over_grpc=True
        )
        with messages.understanding():
            return [DeleteStatus(status) for _, status in zip(keys, response.results, strict=True)]

    @property
    def shares(self) -> bool:
        link = self._keeper.current
        return link is not None and link.welcome.shares

    def pull(self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, deadline: Deadline) -> int:
        request = pb.PullRequest(keys=keys, mode=pb.ClaimMode.ValueType(mode), wait_ms=wait_ms)
        _, response = self._call_as_session(
            "Pull", request, pb.PullResponse, deadline, over_grpc=True
        )
        return response.pulled

    def touch(self, keys: Sequence[Key]) -> None:
        link = self._keeper.current
        if link is not None:
            for batch in self._batches(keys):
                link.send(pb.SessionRequest(touch=pb.Touch(keys=batch)))

    def announce(self, digest: bytes, engine: str, words: str) -> None:
        self._keeper.announce(pb.Identity(digest=digest, engine=engine, words=words))

    def suspect(self, keys: Sequence[Key]) -> None:
        link = self._keeper.current
        if link is not None:
            link.send(pb.SessionRequest(suspect=pb.Suspect(keys=keys)))

    # ---- write side

    def reserve(self, items: Sequence[Item], terms: SaveTerms, deadline: Deadline) -> list[Granted]:
        request = pb.ReserveRequest(header=messages.header_of(items, terms))

        def ask(link: Link, timeout_s: float) -> pb.ReserveResponse:
            request.header.session.CopyFrom(link.ref)
            return link.calls.call("Reserve", request, pb.ReserveResponse, timeout_s)

        link, response = self._call("Reserve", deadline, ask)
        with messages.understanding():
            return [
                messages.granted_of(link, result)
                for _, result in zip(items, response.results, strict=True)
            ]

    def cancel(self, reservations: Sequence[Holding], deadline: Deadline) -> list[bool]:
        link = self._keeper.current
        held = [reservation for reservation in reservations if reservation.link is link]
        if not held or link is None:
            return [False] * len(reservations)
        request = pb.CancelRequest(session=link.ref, tokens=[each.number for each in held])
        response = self._call_as_holder("Cancel", request, pb.CancelResponse, link, deadline)
        with messages.understanding():
            cancelled = dict(zip((each.number for each in held), response.cancelled, strict=True))
        return [each.link is link and cancelled[each.number] for each in reservations]

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        link = self._writer(reservations, deadline)
        reserved, timeout_s = messages.reserved_of(link.ref, reservations), deadline.left_s()

        def send_framed(framed: FramedCalls) -> Sequence[pb.SaveResult]:
            return framed.save(pb.RawSaveRequest(reserved=reserved), payloads, timeout_s)

        def send() -> Sequence[pb.SaveResult]:
            opening = pb.SaveRequest(reserved=reserved)
            return link.connection.save(_packed(link, opening, payloads), timeout_s).results

        try:
            results = self._call_held("Save", link, partial(send_framed, _framed(link)))
        except NoConnection:
            results = self._call_held("Save", link, send)
        return messages.outcomes_of([key for _, key in reservations], results)

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        keys = [saving.item.key for saving in items]
        payloads = [saving.payload for saving in items]

        def send_framed(link: Link, framed: FramedCalls, timeout_s: float) -> list[pb.SaveResult]:
            request = pb.RawSaveRequest(header=messages.header_in(link, items, terms))
            return framed.save(request, payloads, timeout_s)

        with suppress(NoConnection):
            return messages.outcomes_of(keys, self._call_framed("Save", deadline, send_framed))

        def send(link: Link, timeout_s: float) -> pb.SaveResponse:
            opening = pb.SaveRequest(header=messages.header_in(link, items, terms))
            return link.connection.save(_packed(link, opening, payloads), timeout_s)

        _, response = self._call("Save", deadline, send)
        return messages.outcomes_of(keys, response.results)

    def _writer(self, reservations: Sequence[tuple[Holding, Key]], deadline: Deadline) -> Link:
        """The session in use. Raises UnknownReservation if a reservation is of another one."""
        link = self._keeper.link(deadline)
        if any(holding.link is not link for holding, _ in reservations):
            raise UnknownReservation("it was made in a session that has ended")
        return link

    # ---- calling

    def _call(
        self, name: str, deadline: Deadline, ask: Callable[[Link, float], T]
    ) -> tuple[Link, T]:
        """Make a call in the current session; again in a new one if the daemon does not know that
        session."""
        try:
            return self._ask(name, deadline, ask)
        except (UnknownSession, StaleIncarnation):
            return self._ask(name, deadline, ask)

    def _ask(
        self, name: str, deadline: Deadline, ask: Callable[[Link, float], T]
    ) -> tuple[Link, T]:
        link = self._keeper.link(deadline, opening=True)
        timeout_s = deadline.left_s()
        return link, self._call_held(name, link, lambda: ask(link, timeout_s))

    def _call_framed(
        self, name: str, deadline: Deadline, ask: Callable[[Link, FramedCalls, float], T]
    ) -> T:
        """`_call` over the local or data socket. Raises NoConnection, before the call is counted,
        when this session uses none."""
        _framed(self.link(deadline))
        _, result = self._call(
            name, deadline, lambda link, timeout_s: ask(link, _framed(link), timeout_s)
        )
        return result

    def _call_as_session(
        self,
        name: str,
        request: Any,
        response: type[T],
        deadline: Deadline,
        *,
        over_grpc: bool = False,
    ) -> tuple[Link, T]:
        """`_call` with a request that names its session. `over_grpc`: the framed protocol does not
        have this rpc."""

        def ask(link: Link, timeout_s: float) -> T:
            request.session.CopyFrom(link.ref)
            calls = link.connection if over_grpc else link.calls
            return calls.call(name, request, response, timeout_s)

        return self._call(name, deadline, ask)

    def _call_as_holder(
        self, name: str, request: Message, response: type[T], link: Link, deadline: Deadline
    ) -> T:
        """Make a call about what only this session can hold. Raises PrefixdError."""
        timeout_s = deadline.left_s()
        return self._call_held(
            name, link, lambda: link.calls.call(name, request, response, timeout_s)
        )

    def _call_held(self, name: str, link: Link, ask: Callable[[], T]) -> T:
        """Make a call that only this session can make. Raises PrefixdError."""
        check_answering(link)
        silent = False
        try:
            with link.calling():
                answer = ask() if self.spans is None else self.spans.call(name, ask)
        except NoConnection:  # it goes another way, and is counted there
            raise
        except grpc.RpcError as problem:
            error, silent = from_grpc(problem), unanswered(problem)
        except PrefixdError as problem:  # from the local or data socket
            error, silent = problem, isinstance(problem, DeadlineExceeded)
        except ValueError as problem:
            # Another thread closed the channel after this one had looked it up.
            error = DaemonUnavailable(f"the connection closed: {problem}")
        else:
            self.counters.rpc(name)
            return answer
        self.counters.rpc(name)
        if isinstance(error, UnknownSession | StaleIncarnation):
            self._keeper.renew(link, str(error))
        elif silent:
            link.call_timed_out()
        raise error

    def _holder(self, claim: Holding) -> Link:
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)
        link: Link = claim.link
        return link


def _packed(link: Link, opening: pb.SaveRequest, payloads: Sequence[FlatBytes]) -> Iterator[bytes]:
    return messages.pack(
        opening.SerializeToString(),
        payloads,
        chunk_bytes=link.welcome.chunk_bytes or CHUNK_BYTES,
        max_message_bytes=link.max_message_bytes,
    )


def _framed(link: Link) -> FramedCalls:
    """Raises NoConnection."""
    if link.framed is None:
        raise NoConnection("this session uses no local or data socket")
    return link.framed


def place_of(link: Link, *, near: bool = False) -> FramedEndpoint | None:
    """Where the daemon of this session speaks the framed protocol: on this host on its local
    socket, unless `near` asks for its data socket; elsewhere on its data socket. None: nowhere."""
    address, welcome = link.connection.address, link.welcome
    here = address.startswith(UNIX_SCHEME)
    if here and not near:
        return UnixPlace(welcome.local_socket, link.ref) if welcome.local_socket else None
    host = "127.0.0.1" if near else address.rpartition(":")[0].rpartition("/")[2].strip("[]")
    if not welcome.data_port or not host:
        return None
    return TcpPlace(host, welcome.data_port, link.ref, link.connection.security)
