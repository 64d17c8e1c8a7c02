"""Keeps a session with the daemon: opens it, watches it, and opens another one when it ends.

A thread reads the session stream and reconnects; callers only ask for the current `Link`. They wait
for one during the first attempt after a start or a loss. Once that attempt has failed, or a caller
has waited in vain, the daemon counts as down: every call is a miss at once, while the thread keeps
trying. Calls also fail at once while the link is suspect, and after a session whose daemon stopped
answering.
"""

from __future__ import annotations

import enum
import logging
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    ClientClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    Draining,
    InvalidSize,
    PrefixdError,
)
from ...proto.limits import MAX_CLIENT_NAME_CHARS, MAX_IDENTITIES_PER_SESSION
from ...proto.namespaces import check_label
from ..counters import ClientCounters
from .deadline import Deadline
from .grpc_connection import GrpcConnection
from .link import Link
from .reach import reach, what_to_do
from .security import Security

#: Without a handler of its own: in a program that has not set up logging, its warnings go to
#: stderr. A daemon that is not found is otherwise noticed by nobody.
logger = logging.getLogger("prefixd.client")

#: How long `close` lets the daemon end the session in order.
_LEAVE_S: Final = 0.25
#: Waits between attempts to connect: the first, the longest, and the factor that they grow by.
INITIAL_MS: Final = 50.0
MAX_MS: Final = 2_000.0
FACTOR: Final = 2.0


class _State(enum.Enum):
    CONNECTING = enum.auto()
    """The first attempt after a start or a loss is in progress. Callers wait for it."""
    UP = enum.auto()
    DOWN = enum.auto()
    """That attempt failed. The thread makes further ones; callers don't wait."""
    CLOSED = enum.auto()


class Backoff:
    """How long to wait before each attempt to reach a daemon: nothing at first, then doubling up to
    a maximum.

    Each wait is random within its upper half, so that clients that lost a daemon at the same moment
    don't come back at the same moment.
    """

    def __init__(
        self,
        initial_ms: float = INITIAL_MS,
        max_ms: float = MAX_MS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` returns random numbers in [0, 1)."""
        self._initial_ms = initial_ms
        self._max_ms = max_ms
        self._draw = draw
        self._next_ms = 0.0

    def next_s(self) -> float:
        """The wait before the next attempt, in seconds."""
        wait_ms = self._next_ms
        self._next_ms = min(self._max_ms, max(self._initial_ms, wait_ms * FACTOR))
        return wait_ms * (1 + self._draw()) / 2 / 1e3

    def reset(self) -> None:
        """The daemon answered: after its next loss, begin again without a wait."""
        self._next_ms = 0.0


class LookupRecorders(Protocol):
    """Sends what is looked up while the daemon asks for it."""

    def asked(self, record: pb.Record, send: Callable[[pb.SessionRequest], bool]) -> None:
        """The daemon asks for a recording, or for none any more. `send` returns False when it takes
        no message for now."""

    def leave(self) -> None:
        """The session has ended."""


class SessionKeeper:
    """Keeps a session open whenever the daemon can be reached. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        hello: pb.Hello,
        *,
        counters: ClientCounters,
        connect_timeout_ms: int,
        backoff: Backoff | None = None,
        when_opened: Callable[[Link], None] | None = None,
        security: Security | None = None,
        recorders: LookupRecorders | None = None,
    ) -> None:
        """`addresses`: for each session the first one is used at which a daemon answers (`reach`).
        `when_opened`: called with each session before it is used, in the keeper's thread.
        `security`: see `security.open_channel`. `recorders`: see `RemoteTransport`."""
        self._recorders = recorders
        self._when_opened = when_opened
        self._security = security
        self._addresses = tuple(addresses)
        self._hello = hello
        self._counters = counters
        self._connect_timeout_ms = connect_timeout_ms
        self._backoff = backoff or Backoff()
        #: Sent at the beginning of every session, the latest last.
        self._identities: dict[bytes, pb.Identity] = {}
        self._changed = threading.Condition()
        self._state = _State.CONNECTING
        self._why_down = f"no daemon has answered yet at {' or '.join(self._addresses)}"
        #: Whether the log says that there is no daemon. Once is enough for each time.
        self._told = False
        #: The link in use (UP) or being opened; None between attempts.
        self._link: Link | None = None
        self._closing = threading.Event()
        # A daemon thread, so that a program that does not close its client can still exit.
        self._thread = threading.Thread(target=self._run, name="prefixd-session", daemon=True)
        self._thread.start()

    # ---- for callers

    def link(self, deadline: Deadline, *, opening: bool = False) -> Link:
        """The session in use. `opening`: for a call that begins something new, which a daemon that
        is stopping would refuse.

        Raises DaemonUnavailable at once while the daemon is down, DeadlineExceeded when the first
        attempt to reach it takes longer than the call may, Draining, ClientClosed.
        """
        deadline.left_s()
        with self._changed:
            try:
                while self._state is _State.CONNECTING:
                    self._changed.wait(deadline.left_s())
            except DeadlineExceeded:
                if self._state is _State.CONNECTING:
                    self._state = _State.DOWN  # the next call does not wait as well
                raise
            if self._state is _State.UP and self._link is not None:
                check_answering(self._link)
                if opening and self._link.draining:
                    raise Draining("the daemon is stopping")
                return self._link
            if self._state is _State.CLOSED:
                raise ClientClosed("this client is closed")
            raise DaemonUnavailable(self._why_down)

    def renew(self, link: Link, why: str) -> None:
        """Replace the session of `link`, which the daemon does not know any more."""
        with self._changed:
            if self._link is not link or self._state is not _State.UP:
                return
            self._state = _State.CONNECTING
        link.close(why)

    def announce(self, identity: pb.Identity) -> None:
        """Tell the daemon, now and in later sessions. Of more than it keeps, the latest."""
        with self._changed:
            self._identities.pop(identity.digest, None)
            self._identities[identity.digest] = identity
            if len(self._identities) > MAX_IDENTITIES_PER_SESSION:
                del self._identities[next(iter(self._identities))]
            link = self._link if self._state is _State.UP else None
        if link is not None:
            link.send(pb.SessionRequest(identity=identity))

    @property
    def current(self) -> Link | None:
        """The session in use, if there is one at this moment."""
        with self._changed:
            return self._link if self._state is _State.UP else None

    @property
    def connected(self) -> bool:
        """Whether there is a session at this moment, with a daemon that answers."""
        with self._changed:
            return self._answering()

    def wait(self, deadline: Deadline) -> bool:
        """Wait for a session, through any number of attempts. False: the client was closed.

        Raises DeadlineExceeded.
        """
        with self._changed:
            while not self._answering() and self._state is not _State.CLOSED:
                self._changed.wait(deadline.left_s())
            return self._state is _State.UP

    def _answering(self) -> bool:
        link = self._link
        if link is None or self._state is not _State.UP:
            return False
        return not link.suspect and not link.why_ended

    @property
    def why_down(self) -> str:
        """Why there is no session at this moment; empty: there is one."""
        with self._changed:
            return "" if self._state is _State.UP else self._why_down

    def close(self, within_s: float) -> None:
        """End the session; the daemon releases what it held. Idempotent."""
        until_s = time.monotonic() + within_s
        with self._changed:
            self._state = _State.CLOSED
            link = self._link
            self._changed.notify_all()
        self._closing.set()
        joinable = self._thread is not threading.current_thread()  # finalizers run anywhere
        if link is not None:
            link.leave("the client was closed")
            if joinable and not link.suspect:
                self._thread.join(min(_LEAVE_S, within_s))
            link.close("the client was closed")
        if joinable:
            self._thread.join(max(0.0, until_s - time.monotonic()))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            if wait_s := self._backoff.next_s():
                self._enter(_State.DOWN)
                self._closing.wait(wait_s)
            try:
                self._attempt()
            except PrefixdError as problem:
                self._failed(str(problem))
            except Exception as problem:
                # If the thread ended here, the client would never reconnect.
                logger.exception("the session failed in a way that it should not")
                self._failed(repr(problem))

    def _enter(self, state: _State, link: Link | None = None) -> bool:
        """Change the state. False: the client is closed, and stays so."""
        with self._changed:
            if self._state is _State.CLOSED:
                return False
            self._state = state
            self._link = link
            self._changed.notify_all()
            return True

    def _failed(self, why: str) -> None:
        with self._changed:
            told, self._told = self._told, True
            self._why_down = why
        if not told:
            logger.warning("%s. %s. Until then every call is a miss", why, what_to_do(why))
        self._enter(_State.DOWN)

    def _attempt(self) -> None:
        """Open a session and serve it until it ends. Raises PrefixdError if it can't be opened."""
        reached = reach(self._addresses, self._connect_timeout_ms / 1e3)
        address, target = reached.address, reached.target
        connection = GrpcConnection(reached, self._connect_timeout_ms, self._security)
        if not self._hello.client_version:
            # In this thread: its look-up imports much that a client has no other use for.
            self._hello.client_version = _own_version()
        link = Link(connection, self._hello, self._connect_timeout_ms / 1e3, self._counters)
        try:
            if not self._enter(self._state, link):
                return
            try:
                link.open()
            except DaemonUnavailable as problem:
                why = str(problem).replace(target, address)
                raise DaemonUnavailable(f"no daemon at {address}: {why}") from None
            self._counters.add("sessions")
            if self._recorders is not None and link.welcome.HasField("record"):
                self._recorders.asked(link.welcome.record, link.offer)
            if self._when_opened is not None:
                self._when_opened(link)
            version = link.welcome.daemon_version
            logger.info("session %d with prefixd %s at %s", link.ref.session_id, version, address)
            if _is_older(version, self._hello.client_version):
                logger.warning(
                    "the daemon at %s is of prefixd %s, older than this client (%s): what it does "
                    "not know is a miss; update it first",
                    address,
                    version,
                    self._hello.client_version,
                )
            if not self._enter(_State.UP, link):
                return
            with self._changed:
                identities = list(self._identities.values())
            for identity in identities:  # one that comes meanwhile is sent twice
                link.send(pb.SessionRequest(identity=identity))
            self._told = False
            self._serve(link)
            if self._recorders is not None:
                self._recorders.leave()
            self._why_down = link.why_ended
            if not self._closing.is_set():
                logger.warning("lost the daemon at %s: %s", address, link.why_ended)
            # A daemon that hangs may accept a connection and still not answer: don't wait for it.
            silent = link.silent or link.suspect
            self._enter(_State.DOWN if silent else _State.CONNECTING)
        finally:
            link.close("the attempt was given up")

    def _serve(self, link: Link) -> None:
        """Handle the events of the session until it ends."""
        for event in link.events():
            match event.WhichOneof("kind"):
                case "heartbeat_ack":
                    # Not before: against a daemon that ends every session at once, the waits have
                    # to keep growing.
                    self._backoff.reset()
                    with self._changed:
                        self._changed.notify_all()  # the link is not suspect any more
                case "claim_lost":
                    lost = event.claim_lost
                    if link.claims.lose(lost.claim_id, lost.why):
                        self._counters.add("lost_claims")
                case "reservation_lost":
                    gone = event.reservation_lost
                    if link.reservations.lose(gone.token, gone.why):
                        self._counters.add("lost_reservations")
                case "draining":
                    link.draining = True
                    logger.info("the daemon is stopping")
                case "record":
                    if self._recorders is not None:
                        self._recorders.asked(event.record, link.offer)
                case _:
                    pass  # an event of a later version


def check_answering(link: Link) -> None:
    """Raises DaemonUnavailable if a call in this session would get no answer."""
    if link.why_ended:
        raise DaemonUnavailable(link.why_ended)
    if link.suspect:
        raise DaemonUnavailable("the daemon did not answer the last call in time")


def _own_version() -> str:
    from ... import __version__

    return __version__


def _is_older(daemon: str, client: str) -> bool:
    """Is the daemon's minor version an earlier one, as far as both are known?"""
    daemon_minor, client_minor = (re.match(r"(\d+)\.(\d+)", each) for each in (daemon, client))
    if daemon_minor is None or client_minor is None:
        return False
    return tuple(map(int, daemon_minor.groups())) < tuple(map(int, client_minor.groups()))


def hello_of(name: str | None, label: str | None = None) -> pb.Hello:
    """How this client introduces itself; without a name, as its program. Raises InvalidSize,
    CallerError."""
    if name is None:
        name = Path(sys.argv[0]).name[:MAX_CLIENT_NAME_CHARS] or "client"
    if not 0 < len(name) <= MAX_CLIENT_NAME_CHARS:
        raise InvalidSize(f"a name has 1 ... {MAX_CLIENT_NAME_CHARS} characters, not {len(name)}")
    if label is not None:
        check_label(label)
    return pb.Hello(client_name=name, pid=os.getpid(), host=socket.gethostname(), label=label or "")
