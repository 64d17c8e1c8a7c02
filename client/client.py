"""The client: looks for cached state, restores it, saves it. Never the reason a request fails.

Whatever goes wrong on the way to the daemon (it is gone, it hangs, it refuses, its version
differs, a checksum is wrong, a claim was lost) is a miss, and counted. Only mistakes of the caller
raise, before any call: `CallerError` and its subclasses, such as for a key of the wrong length, a
closed client, or one that a fork inherited.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from ..proto.errors import CallerError, ConfigError
from ..proto.keys import Key
from ..proto.limits import (
    DEFAULT_CONNECT_TIMEOUT_MS,
    DEFAULT_DEADLINE_MS,
    DEFAULT_SAVE_TIMEOUT_MS,
    DEFAULT_SHARED_WAIT_MS,
    MAX_LEASE_MS,
)
from ..proto.trace_parent import TRACING_VARIABLE
from ..proto.vocabulary import SaveReason, Tier
from .arguments import instance, whole
from .context import CallContext
from .counters import ClientCounters, Snapshot
from .hits import Reader
from .identity import StateIdentity
from .lookups import CALL_THREADS, MAX_PENDING_CALLS, Lookups
from .policy import LoadSpeeds, MinBenefit, SavePolicy
from .recording import FolderRecorder, Recorders, RecordOptions
from .restores import VERIFY_CHOICES, Verify
from .results import SaveOutcome
from .saves import Reservation, ReserveItem, SaveItem, Writer
from .search import Searcher
from .thread_pool import CallQueue
from .wire.trace_context import CallSpans
from .wire.transport import SaveTerms, Transport

if TYPE_CHECKING:
    from ..proto.tokens import Tokens
    from .buffers import Payload

logger = logging.getLogger("prefixd.client")

DEFAULT_MAX_PENDING_SAVES: Final = 64
DEFAULT_MAX_PENDING_BYTES: Final = 2**30
#: How long closing may wait beyond its deadline for the calls that it made fail.
_GRACE_S: Final = 0.02
#: How long leaving the daemon may take for a client that was never closed.
_FORGOTTEN_S: Final = 0.25


class Client(Lookups):
    """A connection to a prefixd daemon, for any number of threads of one process.

    Making one returns at once; the first call waits for the connection, within its deadline.
    While the daemon is down every call is a miss at once, and the client keeps trying to
    reach it in the background.

    Every method that may wait takes `deadline_ms` for that one call: how long it may take, on top
    of the time it may wait for others (`wait_ms`) and the time allowed for moving its bytes
    (64 MiB/s at least). Without it, a call takes the client's `deadline_ms`; `save` and `save_many`
    take `save_timeout_ms`, which is longer, because a save is worth waiting for, and is all that
    they take, however large they are. A daemon that hangs costs one call its deadline; until it
    answers again other calls are misses at once.

    A program that ends without closing its client drops the asynchronous saves that are pending.
    A forked process can't use the client: every call raises CallerError there.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str | None = None,
        label: str | None = None,
        deadline_ms: int = DEFAULT_DEADLINE_MS,
        connect_timeout_ms: int = DEFAULT_CONNECT_TIMEOUT_MS,
        save_timeout_ms: int = DEFAULT_SAVE_TIMEOUT_MS,
        lease_ms: int = 0,
        policy: SavePolicy | None = None,
        verify: Verify = "always",
        prefill_tokens_per_s: float | None = None,
        min_benefit_ms: float = 0.0,
        shared_wait_ms: int = DEFAULT_SHARED_WAIT_MS,
        max_pending_saves: int = DEFAULT_MAX_PENDING_SAVES,
        max_pending_bytes: int = DEFAULT_MAX_PENDING_BYTES,
        savers: int = 1,
        local: bool = True,
        transport: Transport | None = None,
        counters: ClientCounters | None = None,
        tracing: bool | None = None,
        record: RecordOptions | None = None,
    ) -> None:
        """`address`: `unix:/path` or `host:port`; None: `proto.endpoints.default_address()`.
        `name`: shown to operators, and to clients that find one of its saves in flight. `label`: a
        model or a tenant (1 ... 64 letters, digits, `._:/@+-`), by which the daemon adds up what
        its clients count; the daemon keeps 64, and later ones count as "other".
        `connect_timeout_ms`: after it the daemon counts as down. `lease_ms` of claims, 0: the
        daemon's own. `policy`: when to save, and how much of a prompt.
        `verify`: which payloads have their CRC32C checked on restore: `always` all, `disk` those
        from disk, `never` none; views and single layers are never checked.
        `prefill_tokens_per_s`: how fast the engine computes; hits that are estimated to load
        slower, or to save less than `min_benefit_ms`, are left out. `shared_wait_ms`: where the
        daemon shares entries with other nodes, how long a search waits for those that are not
        here, but no longer than the engine would take to compute them; 0: not at all.
        `max_pending_saves`, `max_pending_bytes`: asynchronous saves beyond are dropped. `savers`:
        how many of those run at a time; with more than one, a chain may be published out of order.
        `local`: on the daemon's host, do in place what can be done in place; everything else goes
        over the data socket of a daemon that is reached over TCP and has one, else over gRPC.
        `transport`, with the `counters` that it uses, replaces both. `tracing`: OpenTelemetry
        spans of what this client does, for the program's own tracer provider; None: if
        $PREFIXD_TRACING is `otel`. `record`: write what is looked up into a trace; None: if
        $PREFIXD_RECORD names a folder.

        Raises CallerError for a setting out of range, ConfigError for tracing without its package.
        """
        for what, value, least in (
            ("deadline_ms", deadline_ms, 1),
            ("connect_timeout_ms", connect_timeout_ms, 1),
            ("save_timeout_ms", save_timeout_ms, 1),
            ("shared_wait_ms", shared_wait_ms, 0),
            ("max_pending_saves", max_pending_saves, 0),
            ("max_pending_bytes", max_pending_bytes, 1),
            ("savers", savers, 1),
        ):
            whole(what, value, least)
        whole("lease_ms", lease_ms, 0, MAX_LEASE_MS)
        if policy is not None:
            instance("policy", policy, SavePolicy)
        if verify not in VERIFY_CHOICES:
            raise CallerError(f"verify is one of {', '.join(VERIFY_CHOICES)}, not {verify!r}")
        self._closed = False
        self._address = address or "the default addresses"
        self.deadline_ms = deadline_ms
        self.save_timeout_ms = save_timeout_ms
        self.policy = policy or SavePolicy()
        #: How fast each tier loads, as measured on restores.
        self.speeds = LoadSpeeds()
        benefit = MinBenefit(self.speeds, prefill_tokens_per_s, min_benefit_ms)
        searcher_type, reader_type, writer_type, spans = _parts(tracing)
        record = record or RecordOptions.from_environment()
        recorders = Recorders(None if record is None else FolderRecorder(record, label or ""))
        self._recorders = recorders
        counters = counters or ClientCounters()
        if transport is None:
            # Imported here with gRPC and protobuf, three quarters of the time of all imports, for
            # programs that import the client and never make one.
            from .local.local_transport import LocalTransport
            from .wire.remote_transport import RemoteTransport

            kind = LocalTransport if local else RemoteTransport
            transport = remote = kind(
                address,
                name,
                label=label,
                counters=counters,
                connect_timeout_ms=connect_timeout_ms,
                recorders=recorders,
            )
            remote.spans = spans
        self._transport = transport
        self._context = context = CallContext(transport, counters, deadline_ms)
        self._calls = CallQueue(MAX_PENDING_CALLS, threads=CALL_THREADS, name="call")
        disk_calls = CallQueue(MAX_PENDING_CALLS, threads=CALL_THREADS, name="disk-call")
        self._reader = reader_type(context, self._calls, disk_calls, self.speeds, verify)
        self._searcher = searcher_type(
            context, self._reader, benefit, lease_ms=lease_ms, shared_wait_ms=shared_wait_ms
        )
        self._writer = writer_type(
            context,
            save_timeout_ms=save_timeout_ms,
            max_pending_saves=max_pending_saves,
            max_pending_bytes=max_pending_bytes,
            savers=savers,
        )
        # Not __del__: when that runs at the end of the program, the threads are gone already.
        self._finalizer = weakref.finalize(
            self, _forgotten, context, self._writer.queue, self._calls, self._reader
        )
        # Before the other one, and after that one was made: the last is the first to be called.
        self._recorders_finalizer = weakref.finalize(self, recorders.close)

    # ---- saving state

    def save(
        self,
        key: Key,
        payload: Payload,
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        token_count: int | None = None,
        layer_count: int = 0,
        token_ids: Tokens | bytes | None = None,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> SaveOutcome:
        """Save one payload, and wait until it is published; see `save_many` and `SaveItem`.

        `key`: of a block, one of a `chain`; of the whole state of `tokens`,
        `prefix_key(namespace, tokens)`, which `longest_prefix` finds for every prompt that begins
        with these tokens, whatever their number.
        """
        item = SaveItem(key, payload, token_count, layer_count, token_ids)
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save([item], terms, deadline_ms)[0]

    def save_async(
        self,
        key: Key,
        payload: Payload,
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        token_count: int | None = None,
        layer_count: int = 0,
        token_ids: Tokens | bytes | None = None,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Future[SaveOutcome]:
        """Queue the save of one payload; see `save_many_async` and `SaveItem`."""
        item = SaveItem(key, payload, token_count, layer_count, token_ids)
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save_async([item], terms, deadline_ms, itemgetter(0))

    def save_many(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[SaveOutcome]:
        """Save payloads to one tier, in one rpc, and wait until they are published, at most
        `save_timeout_ms` (or `deadline_ms`); of a chain: root first. Returns how each ended.

        `reason`: shown to operators. `ancestors`: the blocks before the first item, root first;
        the save counts as a use of them. `wait_ms`: how long to wait for other clients that are
        saving the same keys.

        It takes several calls for more items than one call takes, for more than a session may have
        reserved in a tier at once, and for a key that is named twice.
        Raises InvalidKey, InvalidSize, UnknownTier, UnknownReason; what the daemon refuses, such
        as a tier that it does not have, is an outcome.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save(items, terms, deadline_ms)

    def save_many_async(
        self,
        items: Sequence[SaveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Future[list[SaveOutcome]]:
        """Queue a `save_many` for another thread. Never blocks; the future holds how each item
        ended.

        Calls run in order (several `savers` begin them in order). Beyond `max_pending_saves` calls,
        or `max_pending_bytes` of payload, they are dropped and counted; `would_drop` tells before
        the payload is made. Payloads are referenced, not copied: don't change them before the
        future is done.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms)
        return self._writer.save_async(items, terms, deadline_ms, list)

    def save_made_async(
        self,
        keys: Sequence[Key],
        bunches: Callable[[], Iterable[Sequence[SaveItem]]],
        *,
        payload_bytes: int,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
    ) -> Future[list[SaveOutcome]]:
        """`save_many_async` of items that are made when their turn has come, because their payloads
        are still in the memory of a device.

        The other thread calls `bunches`, and saves each bunch before it asks for the next, with the
        items before it as ancestors; payloads may lie in memory that the next bunch uses again.
        Together they are the items of `keys`, in this order, with `payload_bytes` in all. If making
        one fails, it and the rest are `FAILED`.
        """
        terms = self._terms(tier, reason, ancestors, 0)
        return self._writer.save_made(keys, bunches, terms, payload_bytes)

    def would_drop(self, payload_bytes: int = 0) -> bool:
        """Would an asynchronous save of `payload_bytes` be dropped at this moment? A save larger
        than `max_pending_bytes` is taken when no other is pending."""
        self._check_usable()
        return not self._writer.queue.takes(whole("payload_bytes", payload_bytes))

    @property
    def pending_saves(self) -> int:
        """Asynchronous saves that are queued or running."""
        return self._writer.queue.pending[0]

    @property
    def pending_save_bytes(self) -> int:
        """Their payload, which the caller may not change yet."""
        return self._writer.queue.pending[1]

    def reserve(
        self,
        items: Sequence[ReserveItem],
        *,
        tier: Tier,
        reason: SaveReason = SaveReason.COLD,
        ancestors: Sequence[Key] = (),
        wait_ms: int = 0,
        ttl_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> list[Reservation]:
        """Reserve the exclusive right to save keys, and their room, before computing them.

        Of several clients that miss the same key one is granted it and computes; the others
        learn which client that is, or with `wait_ms` wait until the key is PRESENT. `ttl_ms`: how
        long a reservation lasts, 0: as long as the daemon says. One rpc. Raises as `save_many`.
        """
        terms = self._terms(tier, reason, ancestors, wait_ms, ttl_ms)
        return self._writer.reserve(items, terms, deadline_ms)

    def write(
        self, writes: Sequence[tuple[Reservation, Payload]], *, deadline_ms: int | None = None
    ) -> list[SaveOutcome]:
        """Save the payloads of granted reservations, in one rpc; see `Reservation.write`."""
        self._check_usable()
        return self._writer.write(writes, deadline_ms)

    def cancel(
        self, reservations: Sequence[Reservation], *, deadline_ms: int | None = None
    ) -> list[bool]:
        """Give reservations back, in one rpc; see `Reservation.cancel`."""
        self._check_usable()
        return self._writer.cancel(reservations, deadline_ms)

    def flush(self, *, deadline_ms: int | None = None) -> bool:
        """Wait for the pending asynchronous saves. False: they took longer.

        In the done-callback of a save it makes the queued saves itself."""
        self._check_usable()
        return self._writer.queue.flush(self._within_ms(deadline_ms) / 1e3)

    # ---- this client

    @property
    def counters(self) -> Snapshot:
        """What this client has counted so far; the dict is the caller's own."""
        return self._context.counters.snapshot()

    @property
    def connected(self) -> bool:
        """Is there a session with the daemon at this moment?"""
        return not self._closed and self._transport.connected

    @property
    def under_pressure(self) -> bool:
        """Is memory short on the daemon's node, as of its last answer to a heartbeat? An engine can
        then save what it does not need at once (`SaveReason.EVICT`) and free its own copy. Always
        False when the daemon does not watch memory, or can't be reached."""
        return not self._closed and self._transport.under_pressure

    def announce(self, identity: StateIdentity) -> None:
        """Say what the keys of a namespace depend on: in the log, one line (a warning if nothing is
        shared) and a table at level DEBUG, and to the daemon, whose operators see it with
        `prefixctl identity`. For connectors, when they attach or go on in another namespace. Waits
        for nothing. The daemon keeps the latest few of a client."""
        self._check_usable()
        instance("identity", identity, StateIdentity)
        level = logging.INFO if identity.unshared is None else logging.WARNING
        logger.log(level, "keys of %s", identity)
        logger.debug("keys of %s:\n%s", identity.engine, "\n".join(identity.lines()))
        self._transport.announce(identity.digest, *identity.announcement())

    def wait_connected(self, *, deadline_ms: int | None = None) -> bool:
        """Wait until the daemon is reached, and keep trying. False: not by the deadline."""
        deadline = self._begin(deadline_ms)
        try:
            return self._transport.wait(deadline)
        except Exception as problem:
            self._context.failures.reason(problem)
            return False

    def close(self, *, deadline_ms: int | None = None) -> None:
        """Finish the pending saves and leave the daemon, which releases what this client still
        holds, all within `deadline_ms`; saves that are not done by then are dropped (0: all of
        them), and calls running in other threads end as misses.

        Idempotent. Does nothing in a forked process, which has no connection.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        if self._context.owner.is_here:
            within_ms = self._within_ms(deadline_ms)
            self._recorders.close(leaving=True)
            _close(self._context, self._writer.queue, self._calls, self._reader, within_ms / 1e3)
            self._recorders_finalizer()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self.connected else "not connected"
        return f"<Client of {self._address}: {state}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _terms(
        self,
        tier: Tier,
        reason: SaveReason,
        ancestors: Sequence[Key],
        wait_ms: int,
        ttl_ms: int = 0,
    ) -> SaveTerms:
        self._check_usable()
        return SaveTerms(tier, reason, ancestors, wait_ms, ttl_ms)


def _parts(
    tracing: bool | None,
) -> tuple[type[Searcher], type[Reader], type[Writer], CallSpans | None]:
    """The parts of a client, with or without spans, and the spans of calls. Raises ConfigError."""
    if tracing is None:
        exporter = os.environ.get(TRACING_VARIABLE, "none")
        if exporter not in ("otel", "none", ""):
            raise ConfigError(f"{TRACING_VARIABLE} is otel or none, not {exporter}")
        tracing = exporter == "otel"
    if not tracing:
        return Searcher, Reader, Writer, None
    try:
        from .tracing import OtelCalls, TracedReader, TracedSearcher, TracedWriter
    except ImportError as problem:
        raise ConfigError(
            f"tracing needs more than is installed ({problem}): pip install opentelemetry-api"
        ) from None
    return TracedSearcher, TracedReader, TracedWriter, OtelCalls()


def _close(
    context: CallContext, saves: CallQueue, calls: CallQueue, reader: Reader, within_s: float
) -> None:
    until_s = time.monotonic() + within_s + _GRACE_S
    for queue in (calls, reader.disk_calls):
        queue.drop_pending()
    saves.flush(within_s)
    saves.drop_pending()
    reader.copier.close()
    reader.streams.close()
    context.transport.close(max(0.0, until_s - time.monotonic()))
    for queue in (saves, calls, reader.disk_calls):
        queue.close(max(0.0, until_s - time.monotonic()))


def _forgotten(context: CallContext, saves: CallQueue, calls: CallQueue, reader: Reader) -> None:
    """A client was dropped, or the program ends, and the client was never closed."""
    if context.owner.is_here:
        warnings.warn("a client was never closed", ResourceWarning, stacklevel=1)
        saves.drop_pending()
        _close(context, saves, calls, reader, _FORGOTTEN_S)
