"""The client: look for cached state, restore it, save it. Never the reason a request fails.

Whatever goes wrong on the way to the daemon (it is gone, it hangs, it refuses, it is of another
version, a checksum is wrong, a claim was lost) is a miss, and counted. Only a caller's own mistake
raises, before anything is asked: `CallerError` and what is below it, such as a key of the wrong
length, a client that was closed, or one that a forked process took along.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..proto.errors import CallerError, ClientClosed, ConfigError, InvalidSize
from ..proto.frames import TRACING_VARIABLE
from ..proto.keys import Key, Namespace, check_key, prefix_keys
from ..proto.limits import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_DEADLINE_MS,
    DEFAULT_SAVE_TIMEOUT_MS,
    DEFAULT_SHARED_WAIT_MS,
    MAX_LEASE_MS,
    MAX_WAIT_MS,
)
from ..proto.vocabulary import ClaimMode
from .benefit import LoadSpeeds, MinBenefit
from .call_queue import CallQueue
from .counters import Counters, Snapshot
from .failures import Failures
from .hits import Hit, Reader
from .key_methods import CALL_THREADS, MAX_PENDING_CALLS, KeyCalls
from .key_restores import KeyRestorer
from .local.transport import LocalTransport
from .owner import Owner
from .policy import SavePolicy
from .restores import VERIFY_CHOICES, Verify
from .results import RestoreResult
from .save_methods import Saves
from .saves import Writer
from .search import BlockChain, Searcher, checked_keys, count_tokens, prefix_walk
from .wire.data_transport import DataTransport
from .wire.deadline import Deadline
from .wire.session import DEFAULT_CONNECT_TIMEOUT_MS
from .wire.trace_context import CallSpans
from .wire.transport import Transport

if TYPE_CHECKING:
    from ..proto.keys import Tokens
    from .buffers import Payload

DEFAULT_MAX_PENDING_SAVES: Final = 64
DEFAULT_MAX_PENDING_BYTES: Final = 2**30
#: What closing may take beyond its deadline, to see calls end that it made fail.
_GRACE_S: Final = 0.02
#: What leaving the daemon may take when a client was not closed.
_FORGOTTEN_S: Final = 0.25


class Client(Saves, KeyCalls):
    """A connection to a prefixd daemon, for any number of threads of one process.

    Making one returns at once; the first call waits for the connection, within its deadline.
    While the daemon is down every call is a miss at once, and the client goes on trying to
    reach it in the background.

    Every method takes `deadline_ms` for that one call: how long it may take, beside what it was
    told to wait for others (`wait_ms`) and the time that moving its bytes is given (64 MiB/s at
    least). A daemon that hangs costs one call its deadline; until it answers again the others are
    misses at once.

    A program that ends without closing its client drops the asynchronous saves that are pending.
    A forked process can use nothing of it: every call raises CallerError there.
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
        counters: Counters | None = None,
        tracing: bool | None = None,
    ) -> None:
        """`address`: `unix:/path` or `host:port`; None: `proto.endpoints.default_address()`.
        `name`: shown to operators, and to clients that meet one of its saves. `label`: under which
        name the daemon adds up what this client counts, a model or a tenant (1 ... 64
        letters, digits, `._:/@+-`); the daemon keeps 64, and later ones count as "other".
        `connect_timeout_ms`: after it the daemon counts as down. `lease_ms` of claims, 0: the
        daemon's own. `policy`: the gates of saves, and the stride of `longest_prefix`.
        `verify`: what has its CRC32C checked on restore: `always` everything, `disk` what comes
        from disk, `never` nothing; views and single layers are never checked.
        `prefill_tokens_per_s`: how fast the engine computes; hits that are estimated to load
        slower, or to save less than `min_benefit_ms`, are left out. `shared_wait_ms`: where the
        daemon shares entries with other nodes, how long a search waits for what it brings beyond
        what is here, but no longer than the engine would compute it; 0: not at all.
        `max_pending_saves`,
        `max_pending_bytes`: asynchronous saves beyond are dropped. `savers`: how many of those are
        under way at a time; with more than one, a chain may be published out of order. `local`:
        do in place what can be done in place, on the daemon's host; the rest, or all of it, goes
        over the data socket of a daemon that is reached over TCP and has one, else over gRPC.
        `transport`, and the `counters` that it counts in, replace both. `tracing`: OpenTelemetry
        spans of what this client does, for the program's own tracer provider; None: if
        $PREFIXD_TRACING is `otel`.

        Raises CallerError for a setting that can't be, ConfigError for tracing without its package.
        """
        for what, value in (
            ("deadline_ms", deadline_ms),
            ("connect_timeout_ms", connect_timeout_ms),
            ("save_timeout_ms", save_timeout_ms),
        ):
            if value < 1:
                raise InvalidSize(f"{what} is at least 1, not {value}")
        if not 0 <= lease_ms <= MAX_LEASE_MS:
            raise InvalidSize(f"lease_ms is in 0 ... {MAX_LEASE_MS}, not {lease_ms}")
        for what, value, least in (
            ("shared_wait_ms", shared_wait_ms, 0),
            ("max_pending_saves", max_pending_saves, 0),
            ("max_pending_bytes", max_pending_bytes, 1),
            ("savers", savers, 1),
        ):
            if value < least:
                raise InvalidSize(f"{what} is at least {least}, not {value}")
        if verify not in VERIFY_CHOICES:
            raise CallerError(f"verify is one of {', '.join(VERIFY_CHOICES)}, not {verify!r}")
        self._owner = Owner()
        self._closed = False
        self.deadline_ms = deadline_ms
        self.save_timeout_ms = save_timeout_ms
        self._counters = counters or Counters()
        self.policy = policy or SavePolicy()
        #: How fast each tier loads, as measured on restores.
        self.speeds = LoadSpeeds()
        benefit = MinBenefit(self.speeds, prefill_tokens_per_s, min_benefit_ms)
        searcher_type, reader_type, restorer_type, writer_type, spans = _parts(tracing)
        if transport is None:
            transport = remote = DataTransport(
                address,
                name,
                label=label,
                counters=self._counters,
                connect_timeout_ms=connect_timeout_ms,
            )
            remote.spans = spans
            if local:
                transport = LocalTransport(remote)
        self._transport = transport
        self._failures = failures = Failures()
        self._reader = reader_type(
            self._transport,
            self._counters,
            failures,
            self.speeds,
            self._owner,
            verify=verify,
            deadline_ms=deadline_ms,
        )
        self._searcher = searcher_type(
            self._transport,
            self._reader,
            self._counters,
            failures,
            benefit,
            lease_ms=lease_ms,
            shared_wait_ms=shared_wait_ms,
        )
        self._key_restorer = restorer_type(self._transport, self._searcher, self._reader, failures)
        self._writer = writer_type(
            self._transport,
            self._counters,
            failures,
            self._owner,
            deadline_ms=deadline_ms,
            save_timeout_ms=save_timeout_ms,
            max_pending_saves=max_pending_saves,
            max_pending_bytes=max_pending_bytes,
            savers=savers,
        )
        self._calls = CallQueue(MAX_PENDING_CALLS, threads=CALL_THREADS, name="call")

        # Not __del__: at the end of the program that runs when the threads are gone already.
        self._finalizer = weakref.finalize(
            self,
            _forgotten,
            self._owner,
            self._writer,
            self._calls,
            self._reader,
            self._transport,
        )

    # ---- looking for state

    def longest_prefix(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        claim: bool = True,
        exact_end: bool = False,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Hit | None:
        """The longest prefix entry of `tokens`, claimed; None: a miss.

        Looks at the multiples of `policy.boundary_align_tokens`, with `exact_end` also at the
        end of the tokens: all keys in one hash pass, longest first, one rpc. `claim` False only
        looks: nothing is pinned, nothing moves in an eviction order. `wait_ms`: how long to
        wait for a save in flight.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        stride_tokens = self.policy.boundary_align_tokens
        keys, counts = prefix_walk(namespace, tokens, stride_tokens, exact_end=exact_end)
        wanted_tokens = counts[0] if counts else 0
        return (
            self._searcher.search(
                keys, counts, ClaimMode.FIRST, wait_ms, deadline, wanted_tokens, pin=claim
            )
            or None
        )

    def resume(
        self,
        parent_key: Key,
        tokens: Tokens,
        wait_ms: int | None = None,
        *,
        namespace: Namespace,
        exact_end: bool = False,
        deadline_ms: int | None = None,
    ) -> Hit | None:
        """The state that a conversation left off with, claimed; None: a miss.

        `parent_key` is the prefix entry of its last save, which may still be in flight: waits
        for it at most `wait_ms` (None: `policy.session_resume_wait_ms`), and takes the longest
        prefix of `tokens` if it does not come, all in one rpc. The parent is only used if its key
        is that of a prefix of `tokens`: of one of the walk's lengths or all of them, or of as many
        as it was saved with (an entry saved without a `token_count` does not say).
        """
        wait_ms = self.policy.session_resume_wait_ms if wait_ms is None else wait_ms
        deadline = self._begin(deadline_ms, wait_ms)
        parent_key = check_key(parent_key)
        stride_tokens = self.policy.boundary_align_tokens
        ends = prefix_walk(namespace, tokens, stride_tokens, exact_end=True)
        # What these tokens say of the parent counts, whatever it was saved with.
        parent_count = dict(zip(*ends, strict=True)).get(parent_key)
        others = [
            (key, count)
            for key, count in zip(*ends, strict=True)
            if key != parent_key and (exact_end or not count % stride_tokens)
        ]
        keys = [parent_key, *(key for key, _ in others)]
        counts = [parent_count, *(count for _, count in others)]
        hit = self._searcher.search(keys, counts, ClaimMode.FIRST, wait_ms, deadline)
        if not hit or hit.keys != [parent_key] or parent_count is not None:
            return hit or None
        length = min(hit.token_counts[0], count_tokens(tokens))
        if length and prefix_keys(namespace, tokens, [length]) == hit.keys:
            return hit
        self._reader.release([hit], deadline_ms)
        return self._searcher.search(keys[1:], counts[1:], ClaimMode.FIRST, 0, deadline) or None

    def chain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        *,
        include_partial: bool = False,
    ) -> BlockChain:
        """The keys of `tokens` cut into blocks, root first. No rpc; see `BlockChain`."""
        return BlockChain(namespace, tokens, block_tokens, include_partial=include_partial)

    def longest_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        claim: bool = True,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
    ) -> Hit:
        """The blocks of a chain up to the first that is missing, claimed; empty (and false) when
        that is block 0. `hit.miss` says why the run ends; None: all blocks are there.

        One rpc for as many blocks as one call takes (4,096 unless the daemon says less). `claim`
        False only looks: on the daemon's host without any rpc, and hashing no more blocks than
        there are. Only the complete blocks of a `BlockChain` are looked for. `prompt_tokens`: what
        all `keys` stand for, for the hit ratio that the daemon shows; a `BlockChain` knows.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        counts: list[int | None] | None = None
        wanted: Sequence[Key]
        if isinstance(keys, BlockChain):
            wanted = keys.complete_keys
            counts = [keys.block_tokens] * len(wanted)
        else:
            wanted = checked_keys(keys)
        return self._searcher.search(
            wanted, counts, ClaimMode.RUN, wait_ms, deadline, prompt_tokens, pin=claim
        )

    def claim(
        self,
        keys: Sequence[Key],
        *,
        mode: ClaimMode = ClaimMode.ANY,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Hit:
        """Pin those of `keys` that `mode` wants; empty (and false) if there are none.

        A key that is named twice is there twice. One rpc for 4,096 keys. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        if not isinstance(mode, ClaimMode):
            raise CallerError(f"a mode is one of ClaimMode, not {mode!r}")
        checked = checked_keys(keys)
        return self._searcher.search(checked, None, mode, wait_ms, deadline)

    # ---- restoring it

    def restore_into(
        self,
        hit: Hit,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> RestoreResult:
        """Copy the payloads of a hit into `buffers`; see `Hit.restore_into`."""
        self._check_usable()
        return hit.restore_into(buffers, indices=indices, deadline_ms=deadline_ms)

    def release_many(self, hits: Sequence[Hit], *, deadline_ms: int | None = None) -> list[bool]:
        """Release hits in one rpc; see `Hit.release`."""
        self._check_usable()
        return self._reader.release(hits, deadline_ms)

    # ---- this client

    @property
    def counters(self) -> Snapshot:
        """What this client has counted so far, as a dict of its own; see `Counters`."""
        return self._counters.snapshot()

    @property
    def connected(self) -> bool:
        """Is there a session with the daemon at this moment?"""
        return not self._closed and self._transport.connected

    @property
    def under_pressure(self) -> bool:
        """Is memory short on the daemon's node, as it said with its last answer to a heartbeat? An
        engine can then save what it does not need at once (`SaveReason.EVICT`) and free its own
        copy. False: the daemon does not watch for it, or there is none."""
        return not self._closed and self._transport.under_pressure

    def wait_connected(self, *, deadline_ms: int | None = None) -> bool:
        """Wait until the daemon is reached, however often that has to be tried."""
        deadline = self._begin(deadline_ms)
        try:
            return self._transport.wait(deadline)
        except Exception as problem:
            self._failures.reason(problem)
            return False

    def close(self, *, deadline_ms: int | None = None) -> None:
        """Finish the pending saves and leave the daemon, which releases whatever this client still
        holds, all within `deadline_ms`; saves that are not done by then are dropped (0: all of
        them), and calls under way in other threads end as misses.

        Idempotent. In a forked process it does nothing: there is nothing to leave.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        if self._owner.is_here:
            within_ms = self.deadline_ms if deadline_ms is None else deadline_ms
            _close(self._writer, self._calls, self._reader, self._transport, within_ms / 1e3)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosed("this client is closed")
        self._owner.check()

    def _begin(self, deadline_ms: int | None, wait_ms: int = 0) -> Deadline:
        """Every call begins here: may it, and until when."""
        self._check_usable()
        if not 0 <= wait_ms <= MAX_WAIT_MS:
            raise InvalidSize(f"a wait is in 0 ... {MAX_WAIT_MS} ms, not {wait_ms}")
        within_ms = self.deadline_ms if deadline_ms is None else deadline_ms
        return Deadline(within_ms + wait_ms)


def _parts(
    tracing: bool | None,
) -> tuple[type[Searcher], type[Reader], type[KeyRestorer], type[Writer], CallSpans | None]:
    """What a client is made of, and what makes spans of its calls. Raises ConfigError."""
    if tracing is None:
        asked = os.environ.get(TRACING_VARIABLE, "none")
        if asked not in ("otel", "none", ""):
            raise ConfigError(f"{TRACING_VARIABLE} is otel or none, not {asked}")
        tracing = asked == "otel"
    if not tracing:
        return Searcher, Reader, KeyRestorer, Writer, None
    try:
        from .tracing import (
            OtelCalls,
            TracedKeyRestorer,
            TracedReader,
            TracedSearcher,
            TracedWriter,
        )
    except ImportError as problem:
        raise ConfigError(
            f"tracing needs more than is installed ({problem}): "
            "pip install 'prefixd[opentelemetry]'"
        ) from None
    return TracedSearcher, TracedReader, TracedKeyRestorer, TracedWriter, OtelCalls()


def _close(
    writer: Writer, calls: CallQueue, reader: Reader, transport: Transport, within_s: float
) -> None:
    until_s = time.monotonic() + within_s + _GRACE_S
    calls.drop_pending()
    writer.close(within_s)
    reader.close()
    transport.close(max(0.0, until_s - time.monotonic()))
    writer.join(max(0.0, until_s - time.monotonic()))
    calls.close(max(0.0, until_s - time.monotonic()))


def _forgotten(
    owner: Owner, writer: Writer, calls: CallQueue, reader: Reader, transport: Transport
) -> None:
    """A client was dropped, or the program ends, without its being closed: pending saves are
    dropped."""
    if owner.is_here:
        warnings.warn("a client was never closed", ResourceWarning, stacklevel=1)
        writer.drop_pending()
        _close(writer, calls, reader, transport, _FORGOTTEN_S)
