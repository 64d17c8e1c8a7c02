"""Records what clients look up, while an operator asks for it (`Admin.Record`).

The daemon does not see look-ups: most are made in its memory, without a call. So it asks its
clients, in their sessions, to send them. What waits for the operator is bounded, in fair shares
(`core.shares`), and nothing waits for an operator: what is too much is dropped and counted. The
clients make the ids, under a secret that nobody stores; the keys of two namespaces give different
ids, as they are different keys here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from secrets import token_bytes
from time import monotonic
from typing import Final, NamedTuple

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidSize, LimitReached, MalformedMessage, NotPermitted
from ..core.shares import Holder, Shares
from ..runtime.gate import stopping
from .access import Access, namespace_of
from .calls import Caller, audit, taken_within

#: What waits for the operator, in bytes on the wire: a million ids. Messages of many short look-ups
#: take some six times as many bytes of memory.
_MAX_WAITING_BYTES: Final = 8 * 2**20
#: What a message counts for at least.
_MESSAGE_BYTES: Final = 512
#: Bytes in one message to the operator, after which it ends.
_ENOUGH_BYTES: Final = 2**20
#: The operator is sent what came, this often; and a message without look-ups after the longer time.
_SEND_EVERY_S: Final = 0.1
_BEAT_S: Final = 1.0

#: Makes the event for the client of each session.
EventOf = Callable[[Access | None], pb.SessionEvent]


class _Waiting(NamedTuple):
    """What one message of a client brought, and what it counts for."""

    holder: Holder
    size_bytes: int
    label: str
    message: pb.LookedUp


class Recording:
    """See prefixd.proto for what `Record` promises. The event loop's."""

    def __init__(
        self, tell_all: Callable[[EventOf], Awaitable[None]], open_sessions: Callable[[], int]
    ) -> None:
        """`tell_all` sends each open session the event that is made for it."""
        self._tell_all = tell_all
        self._open_sessions = open_sessions
        #: How long the operator may leave a message untaken.
        self.stall_timeout_s = 30.0
        #: Empty while nobody records.
        self._secret = b""
        self._sample_permille = 0
        #: Sessions whose clients record.
        self._answered: set[int] = set()
        self._waiting: deque[_Waiting] = deque()
        self._shares = Shares("bytes of recorded look-ups", _MAX_WAITING_BYTES)
        self._dropped = self._unnamed = 0
        #: The token of the operator, and whether it is no longer valid.
        self._access: Access | None = None
        self._revoked = False
        self._closed = asyncio.Event()
        self._telling: asyncio.Future[None] | None = None

    @property
    def active(self) -> bool:
        """Whether an operator records."""
        return bool(self._secret)

    def asked_of(self, access: Access | None) -> pb.Record | None:
        """What the client of a session is asked for now; None: nothing. `access`: what the session
        may reach."""
        secret, namespace = self._secret, namespace_of(access)
        if not secret:
            return None
        if namespace is not None:
            name = namespace.name.encode()
            secret = blake2b(name, key=secret, digest_size=limits.RECORD_SECRET_BYTES).digest()
        return pb.Record(secret=secret, sample_permille=self._sample_permille)

    def take(self, holder: Holder, label: str, message: pb.LookedUp) -> None:
        """Take what the client of a session sends. Raises MalformedMessage."""
        if len(message.lookups) > limits.MAX_RECORDED_LOOKUPS:
            raise MalformedMessage("more look-ups than one message has")
        ids = 0
        for lookup in message.lookups:
            blocks = len(lookup.ids)
            ids += blocks
            if not 0 < blocks >= lookup.hit_blocks or lookup.prompt_tokens > limits.MAX_REPORTED:
                raise MalformedMessage("the numbers of a recorded look-up don't fit each other")
        if ids > limits.MAX_RECORDED_IDS:
            raise MalformedMessage("more ids than one message has")
        if max(message.dropped, message.unnamed) > limits.MAX_REPORTED:
            raise MalformedMessage("more look-ups than a client can make")
        if not self.active:
            return
        self._answered.add(holder.session)
        self._dropped += message.dropped
        self._unnamed += message.unnamed
        if not message.lookups:
            return
        # With all that it has: fields that this version doesn't know take memory, too.
        size_bytes = message.ByteSize() + len(message.lookups) * len(label.encode())
        waiting = _Waiting(holder, max(_MESSAGE_BYTES, size_bytes), label, message)
        if self._shares.may_take(holder, waiting.size_bytes):
            self._shares.add(holder, waiting.size_bytes)
            self._waiting.append(waiting)
        else:
            self._dropped += len(message.lookups)

    def left(self, session: int) -> None:
        """A session has ended."""
        self._answered.discard(session)

    def end_revoked(self, known: frozenset[Access]) -> None:
        """End a recording whose operator's token is no longer among these."""
        if self._access is not None and self._access not in known:
            self._revoked = True

    def close(self) -> None:
        """End the recording: the daemon stops. Idempotent."""
        self._closed.set()

    async def record(
        self, request: pb.RecordRequest, caller: Caller
    ) -> AsyncGenerator[pb.RecordResponse, None]:
        if not 0 < request.sample_permille <= 1000:
            raise InvalidSize(f"a sample has 1 to 1,000 permille, not {request.sample_permille}")
        if self.active:
            raise LimitReached("look-ups are recorded already, and only one call at a time may")
        self._secret = token_bytes(limits.RECORD_SECRET_BYTES)
        self._sample_permille = request.sample_permille
        self._access, self._revoked = caller.access, False
        audit(caller, "record", sample_permille=request.sample_permille)
        try:
            caller.lasts()
            self._tell()
            sent_s = monotonic()
            yield self._response()
            while not self._closed.is_set():
                if self._revoked:
                    raise NotPermitted("the token of this recording is not known any more")
                if self._waiting or monotonic() >= sent_s + _BEAT_S:
                    sent_s = monotonic()
                    with taken_within(self.stall_timeout_s, "what is recorded"):
                        yield self._response()
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_SEND_EVERY_S):
                            await self._closed.wait()
            while self._waiting:
                with taken_within(self.stall_timeout_s, "what is recorded"):
                    yield self._response()
            raise stopping()
        finally:
            self._secret = b""
            self._answered.clear()
            while self._waiting:
                self._take_out()
            self._dropped = self._unnamed = 0
            self._tell()
            audit(caller, "record_ended")

    def _tell(self) -> None:
        """Tell all clients what they are asked for. Several calls at once all tell the latest."""
        self._telling = asyncio.ensure_future(self._tell_all(self._event))

    def _event(self, access: Access | None) -> pb.SessionEvent:
        return pb.SessionEvent(record=self.asked_of(access) or pb.Record())

    def _response(self) -> pb.RecordResponse:
        response = pb.RecordResponse(
            dropped=self._dropped,
            unnamed=self._unnamed,
            sessions=self._open_sessions(),
            recording=len(self._answered),
        )
        self._dropped = self._unnamed = size_bytes = 0
        while self._waiting and size_bytes < _ENOUGH_BYTES:
            waiting = self._take_out()
            for lookup in waiting.message.lookups:
                lookup.label = waiting.label
            size_bytes += waiting.size_bytes
            response.lookups.extend(waiting.message.lookups)
        return response

    def _take_out(self) -> _Waiting:
        waiting = self._waiting.popleft()
        self._shares.give(waiting.holder, waiting.size_bytes)
        return waiting
