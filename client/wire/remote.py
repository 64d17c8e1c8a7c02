"""The client's way to the daemon over gRPC: any host, a Unix socket or TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import grpc

from ...proto import prefixd_pb2 as pb
from ...proto.endpoints import default_address, normalize_address
from ...proto.errors import (
    ClaimLost,
    DaemonUnavailable,
    DeadlineExceeded,
    PrefixdError,
    StaleIncarnation,
    UnknownReservation,
    UnknownSession,
    UnknownStaging,
    from_grpc,
)
from ...proto.keys import Key
from ...proto.limits import CHUNK_BYTES, MAX_BATCH_KEYS
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, DeleteStatus, Tier
from ..counters import Counters
from ..results import Entry, Found, SaveOutcome
from . import messages
from .backoff import Backoff
from .channel import Security
from .connection import unanswered
from .deadline import Deadline
from .link import Holding, Link
from .not_in_place import NothingInPlace
from .packing import check_header, pack
from .session import DEFAULT_CONNECT_TIMEOUT_MS, SessionKeeper, check_answering, hello_of
from .trace_context import CallSpans, trace_metadata
from .transport import (
    Claimed,
    Granted,
    Range,
    ReserveItem,
    SaveTerms,
    Saving,
    Share,
    Sink,
)

T = TypeVar("T")

#: Makes a staged save: its opening, the payloads, until when. Raises PrefixdError, OSError.
Stage: TypeAlias = Callable[
    [pb.SaveStagedRequest, Sequence[FlatBytes], Deadline], list[pb.SaveResult]
]


class RemoteTransport(NothingInPlace):
    """`transport.Transport` over one connection that is opened again when it breaks.

    A call that the daemon refuses because it does not know the session gets a new session and
    is repeated once; it had no effect before. No other failure is repeated.
    """

    def __init__(
        self,
        address: str | None = None,
        name: str | None = None,
        *,
        label: str | None = None,
        counters: Counters,
        connect_timeout_ms: int = DEFAULT_CONNECT_TIMEOUT_MS,
        backoff: Backoff | None = None,
        security: Security | None = None,
    ) -> None:
        """`address` None: the default one. `name` None: that of the program. `label`: see
        `Client`. `security`: see `channel.open_channel`. Raises ConfigError for what is no address,
        InvalidSize for a name or a label that can't be one."""
        self._counters = counters
        #: Makes a span of each rpc; None: nothing is traced.
        self.spans: CallSpans | None = None
        self._address = default_address() if address is None else normalize_address(address)
        self._keeper = SessionKeeper(
            self._address,
            hello_of(name, label),
            counters=counters,
            connect_timeout_ms=connect_timeout_ms,
            backoff=backoff,
            when_opened=self._opened,
            security=security,
        )

    def _opened(self, link: Link) -> None:
        """Before a session is used. In the keeper's thread; `_keeper` may not be there yet."""

    @property
    def max_batch_keys(self) -> int:
        link = self._keeper.current
        return (link.welcome.max_batch_keys if link else 0) or MAX_BATCH_KEYS

    def _batches(self, things: Sequence[T]) -> Iterator[Sequence[T]]:
        """As many at once as one call takes."""
        size = self.max_batch_keys
        return (things[start : start + size] for start in range(0, len(things), size))

    @property
    def connected(self) -> bool:
        return self._keeper.connected

    @property
    def under_pressure(self) -> bool:
        link = self._keeper.current
        return link is not None and link.under_pressure

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

    def share(self, tier: Tier, deadline: Deadline) -> Share | None:
        for limits in self._keeper.link(deadline).welcome.tiers:
            if limits.tier == int(tier) and limits.max_reserved_bytes and limits.slab_bytes:
                return Share(limits.max_reserved_bytes, limits.slab_bytes)
        return None

    # ---- read side

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        found: list[Found] = []
        for batch in self._batches(keys):
            found += self._lookup(batch, wait_ms, deadline)
        return found

    def _lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        request = pb.LookupRequest(keys=keys, wait_ms=wait_ms)
        _, response = self._call(
            "Lookup", deadline, lambda link, s: link.calls.Lookup(request, timeout=s)
        )
        with messages.understanding():
            return [
                messages.found_of(key, result)
                for key, result in zip(keys, response.results, strict=True)
            ]

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        request = pb.ClaimRequest(
            keys=keys, mode=pb.ClaimMode.ValueType(mode), wait_ms=wait_ms, lease_ms=lease_ms
        )

        def ask(link: Link, timeout_s: float) -> pb.ClaimResponse:
            request.session.CopyFrom(link.ref)
            return link.calls.Claim(request, timeout=timeout_s)

        link, response = self._call("Claim", deadline, ask)
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

    def claim_known(
        self, entries: Sequence[Entry], lease_ms: int, deadline: Deadline
    ) -> Holding | None:
        """Pin entries that an index told of. None: some of them are no longer the same; then
        nothing is pinned."""
        request = pb.ClaimRequest(
            keys=[entry.key for entry in entries],
            mode=pb.CLAIM_MODE_ANY,
            lease_ms=lease_ms,
            brief=True,
        )

        def ask(link: Link, timeout_s: float) -> pb.ClaimResponse:
            request.session.CopyFrom(link.ref)
            return link.calls.Claim(request, timeout=timeout_s)

        link, response = self._call("Claim", deadline, ask)
        if not response.claim_id:
            return None
        holding = link.claims.hold(link, response.claim_id)
        holding.entries = entries
        if list(response.generations) == [entry.generation for entry in entries]:
            return holding
        self.give_back([holding])
        return None

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        link = self._holder(claim)
        request = pb.ReadRequest(
            session=link.ref, claim_id=claim.number, ranges=map(messages.range_of, ranges)
        )
        timeout_s = deadline.left_s()
        self._call_held(
            "Read", link, lambda: link.connection.read(request, len(ranges), sink, timeout_s)
        )
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        link = self._keeper.current
        held = [claim for claim in claims if claim.link is link]
        if not held or link is None:
            return [False] * len(claims)
        outcomes: dict[int, int] = {}
        for numbers in self._batches([claim.number for claim in held]):
            request = pb.ReleaseRequest(session=link.ref, claim_ids=numbers)
            timeout_s = deadline.left_s()
            response = self._call_held(
                "Release", link, partial(link.calls.Release, request, timeout=timeout_s)
            )
            with messages.understanding():
                outcomes.update(zip(numbers, response.results, strict=True))
        return [
            claim.link is link
            and outcomes[claim.number] == pb.RELEASE_STATUS_RELEASED
            and claim.why_lost is None
            for claim in claims
        ]

    def give_back(self, claims: Sequence[Holding]) -> None:
        """Release claims of the current session without waiting for the answer."""
        link = self._keeper.current
        if link is not None:
            for numbers in self._batches([c.number for c in claims if c.link is link]):
                link.send(pb.SessionRequest(give_back=pb.GiveBack(claim_ids=numbers)))

    def forget(self, claim: Holding) -> None:
        give_back = pb.GiveBack(claim_ids=[claim.number])
        claim.link.send(pb.SessionRequest(give_back=give_back))

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        found: list[bool] = []
        for batch in self._batches(keys):
            request = pb.LookupRequest(keys=batch, brief=True)
            _, response = self._call("Lookup", deadline, partial(_lookup, request))
            found += messages.present_of(batch, response)
        return found

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> int:
        run = 0
        for batch in self._batches(keys):
            request = pb.LookupRequest(keys=batch, stop_at_first_absent=True, brief=True)
            _, response = self._call("Lookup", deadline, partial(_lookup, request))
            present = [presence == pb.PRESENCE_PRESENT for presence in response.presences]
            run += present.index(False) if False in present else len(present)
            if len(present) < len(batch) or not all(present):
                break
        return run

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        request = pb.DeleteRequest(keys=keys)

        def ask(link: Link, timeout_s: float) -> pb.DeleteResponse:
            request.session.CopyFrom(link.ref)
            return link.connection.stub.Delete(
                request, timeout=timeout_s, metadata=trace_metadata()
            )

        _, response = self._call("Delete", deadline, ask)
        with messages.understanding():
            return [DeleteStatus(status) for _, status in zip(keys, response.results, strict=True)]

    @property
    def shares(self) -> bool:
        link = self._keeper.current
        return link is not None and link.welcome.shares

    def pull(self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, deadline: Deadline) -> int:
        request = pb.PullRequest(keys=keys, mode=pb.ClaimMode.ValueType(mode), wait_ms=wait_ms)

        def ask(link: Link, timeout_s: float) -> pb.PullResponse:
            request.session.CopyFrom(link.ref)
            return link.connection.stub.Pull(request, timeout=timeout_s, metadata=trace_metadata())

        _, response = self._call("Pull", deadline, ask)
        return response.pulled

    def touch(self, keys: Sequence[Key]) -> None:
        link = self._keeper.current
        if link is not None:
            for told in self._batches(keys):
                link.send(pb.SessionRequest(touch=pb.Touch(keys=told)))

    def suspect(self, keys: Sequence[Key]) -> None:
        link = self._keeper.current
        if link is not None:
            link.send(pb.SessionRequest(suspect=pb.Suspect(keys=keys)))

    # ---- write side

    def reserve(
        self, items: Sequence[ReserveItem], terms: SaveTerms, deadline: Deadline
    ) -> list[Granted]:
        header = messages.header_of(items, terms)

        def ask(link: Link, timeout_s: float) -> pb.ReserveResponse:
            header.session.CopyFrom(link.ref)
            request = pb.ReserveRequest(header=header)
            return link.calls.Reserve(request, timeout=timeout_s)

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
        timeout_s = deadline.left_s()
        response = self._call_held(
            "Cancel", link, lambda: link.calls.Cancel(request, timeout=timeout_s)
        )
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
        tokens = [holding.number for holding, _ in reservations]
        packed = pack(
            pb.WriteRequest(session=link.ref).SerializeToString(),
            [pb.WritePart(token=token) for token in tokens],
            payloads,
            chunk_bytes=link.welcome.chunk_bytes or CHUNK_BYTES,
            max_message_bytes=link.max_message_bytes,
        )
        timeout_s = deadline.left_s()
        response = self._call_held("Write", link, lambda: link.connection.write(packed, timeout_s))
        with messages.understanding():
            results = dict(zip(response.tokens, response.results, strict=True))
            return [
                messages.outcome_of(key, results[holding.number]) for holding, key in reservations
            ]

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        header = messages.header_of([saving.item for saving in items], terms)
        labels = [pb.WritePart(item=index) for index in range(len(items))]
        payloads = [saving.payload for saving in items]

        def send(link: Link, timeout_s: float) -> pb.SaveResponse | pb.SaveWholeResponse:
            header.session.CopyFrom(link.ref)
            opening = pb.SaveRequest(header=header).SerializeToString()
            check_header(header, link.max_message_bytes)
            packed = pack(
                opening,
                labels,
                payloads,
                chunk_bytes=link.welcome.chunk_bytes or CHUNK_BYTES,
                max_message_bytes=link.max_message_bytes,
            )
            return link.connection.save(packed, timeout_s)

        _, response = self._call("Save", deadline, send)
        return messages.outcomes_of([saving.item.key for saving in items], response.results)

    def save_staged(
        self,
        stage: Stage,
        ref: pb.SessionRef,
        items: Sequence[Saving],
        terms: SaveTerms,
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        """`save`, with the payloads in the staging memory of session `ref`.

        Raises UnknownStaging, before anything happened, if that session has ended.
        """
        header = messages.header_of([saving.item for saving in items], terms)
        payloads = [saving.payload for saving in items]

        def send(link: Link, _timeout_s: float) -> list[pb.SaveResult]:
            if link.ref != ref:
                raise UnknownStaging("the session that it was handed to has ended")
            header.session.CopyFrom(ref)
            check_header(header, link.max_message_bytes)
            return stage(pb.SaveStagedRequest(header=header), payloads, deadline)

        _, results = self._call("SaveStaged", deadline, send)
        return messages.outcomes_of([saving.item.key for saving in items], results)

    def write_staged(
        self,
        stage: Stage,
        ref: pb.SessionRef,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        """`write`, in the same way."""
        link = self._writer(reservations, deadline)
        if link.ref != ref:
            raise UnknownStaging("the session that it was handed to has ended")
        tokens = [holding.number for holding, _ in reservations]
        opening = pb.SaveStagedRequest(reserved=pb.StagedReservations(session=ref, tokens=tokens))
        results = self._call_held("SaveStaged", link, lambda: stage(opening, payloads, deadline))
        return messages.outcomes_of([key for _, key in reservations], results)

    def _writer(self, reservations: Sequence[tuple[Holding, Key]], deadline: Deadline) -> Link:
        """The session in use, which is the one that the reservations are of."""
        link = self._keeper.link(deadline)
        if any(holding.link is not link for holding, _ in reservations):
            raise UnknownReservation("it was made in a session that has ended")
        return link

    # ---- calling

    def _call(
        self, name: str, deadline: Deadline, ask: Callable[[Link, float], T]
    ) -> tuple[Link, T]:
        """`ask` in the current session; once more in a new one if the daemon lost that."""
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

    def _call_held(self, name: str, link: Link, ask: Callable[[], T]) -> T:
        """One rpc in this very session. Raises PrefixdError."""
        check_answering(link)
        self._counters.rpc(name)
        silent = False
        try:
            return ask() if self.spans is None else self.spans.call(name, ask)
        except grpc.RpcError as problem:
            error, silent = from_grpc(problem), unanswered(problem)
        except PrefixdError as problem:  # from the local socket
            error, silent = problem, isinstance(problem, DeadlineExceeded)
        except ValueError as problem:
            # The channel was closed between being looked up and being used.
            error = DaemonUnavailable(f"the connection closed: {problem}")
        if isinstance(error, UnknownSession | StaleIncarnation):
            self._keeper.renew(link, str(error))
        elif silent:
            link.call_timed_out()
        raise error

    def _holder(self, claim: Holding) -> Link:
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)
        return claim.link


def _lookup(request: pb.LookupRequest, link: Link, timeout_s: float) -> pb.LookupResponse:
    return link.calls.Lookup(request, timeout=timeout_s)
