"""Every way a call can fail, as one tree, and its one translation to and from gRPC.

An error says whose fault it is (`CallerError`: the caller's own mistake; everything else is
the state of the world) and whether the same call may succeed later (`retryable`). Over gRPC
it travels as a status code, its sentence, and two trailing metadata entries,
`prefixd-error` (the `name` here) and `prefixd-retry`; `from_grpc` gives back the same class.

A result inside a batch (a key that is absent, an entry that is too large) is a status in the
response, not an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final, cast

import grpc

ERROR_METADATA: Final = "prefixd-error"
RETRY_METADATA: Final = "prefixd-retry"


class PrefixdError(Exception):
    """The root. `str(error)` is a sentence for people."""

    name: ClassVar[str] = "internal"
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    #: Of the class; only an error of a later version has its own.
    retryable: bool = False


# ---- the caller's own mistake: repeating the call can't help


class CallerError(PrefixdError, ValueError):
    """The call itself is wrong."""

    name = "caller_error"
    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidKey(CallerError):
    """A key that is not 32 bytes."""

    name = "invalid_key"


class InvalidNamespace(CallerError):
    """A namespace with a field that no key can be made of."""

    name = "invalid_namespace"


class InvalidTokens(CallerError):
    """Token ids that are no ints in 0 ... 2^31 - 1."""

    name = "invalid_tokens"


class InvalidBatch(CallerError):
    """A batch without elements, with too many, or naming one twice."""

    name = "invalid_batch"


class InvalidSize(CallerError):
    """A size, offset, length or time outside its range."""

    name = "invalid_size"


class UnknownTier(CallerError):
    """A tier that does not exist or is not configured."""

    name = "unknown_tier"


class UnknownReason(CallerError):
    """A save without one of the five save reasons."""

    name = "unknown_reason"


class MalformedMessage(CallerError):
    """A message or a stream of messages that does not follow the contract."""

    name = "malformed_message"


class ClientClosed(CallerError):
    """A closed client was used. Raised locally only."""

    name = "client_closed"
    code = grpc.StatusCode.CANCELLED


class ConfigError(CallerError):
    """A configuration with at least one wrong key; the sentence lists every one."""

    name = "config_error"


# ---- the state of the world


class DirectoryInUse(PrefixdError):
    """Another daemon has the directory or the socket. Raised locally only, at a start."""

    name = "directory_in_use"
    code = grpc.StatusCode.FAILED_PRECONDITION
    retryable = True


class UnknownSession(PrefixdError):
    """The session ended or never was. Open a new one and repeat."""

    name = "unknown_session"
    code = grpc.StatusCode.FAILED_PRECONDITION
    retryable = True


class StaleIncarnation(PrefixdError):
    """A token, claim or session of another start of the daemon. Open a new session."""

    name = "stale_incarnation"
    code = grpc.StatusCode.FAILED_PRECONDITION
    retryable = True


class UnknownClaim(PrefixdError):
    """A claim that this session does not hold."""

    name = "unknown_claim"
    code = grpc.StatusCode.NOT_FOUND


class ClaimLost(PrefixdError):
    """The lease ran out or the claim was revoked: throw away what was read under it."""

    name = "claim_lost"
    code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownReservation(PrefixdError):
    """The reservation expired, was cancelled, or never was this session's. Reserve again."""

    name = "unknown_reservation"
    code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownStaging(PrefixdError):
    """This session has no staging memory, or not at that place. Save over gRPC."""

    name = "unknown_staging"
    code = grpc.StatusCode.FAILED_PRECONDITION


class UnreadableMemory(PrefixdError):
    """The daemon can't read the memory that this client lends. Save through staging memory."""

    name = "unreadable_memory"
    code = grpc.StatusCode.FAILED_PRECONDITION


class CurveDisabled(PrefixdError):
    """The daemon keeps no live hit curve."""

    name = "curve_disabled"
    code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownEntry(PrefixdError):
    """No such key is published."""

    name = "unknown_entry"
    code = grpc.StatusCode.NOT_FOUND


class EntryCorrupt(PrefixdError):
    """The stored bytes do not match their checksum; the entry was dropped."""

    name = "entry_corrupt"
    code = grpc.StatusCode.DATA_LOSS


class RecordError(EntryCorrupt):
    """Bytes that are no record of a format that this version reads."""

    name = "record_error"


class LimitReached(PrefixdError):
    """A table of the daemon is full (sessions, claims, reservations, waiters)."""

    name = "limit_reached"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class DeviceFull(PrefixdError):
    """The device under a tier has no space left, whatever the budget says."""

    name = "device_full"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class StoreFailed(PrefixdError):
    """A store could not read or write."""

    name = "store_failed"
    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class Draining(PrefixdError):
    """The daemon is stopping."""

    name = "draining"
    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class NotAuthenticated(PrefixdError):
    """The call came without a token that the daemon knows."""

    name = "not_authenticated"
    code = grpc.StatusCode.UNAUTHENTICATED


class NotPermitted(PrefixdError):
    """The role of the call's token does not allow it."""

    name = "not_permitted"
    code = grpc.StatusCode.PERMISSION_DENIED


class DaemonUnavailable(PrefixdError):
    """Nobody answers at the address, or the connection broke."""

    name = "daemon_unavailable"
    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class DeadlineExceeded(PrefixdError):
    """No answer within the call's deadline."""

    name = "deadline_exceeded"
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    retryable = True


def _all_below(root: type[PrefixdError]) -> Iterable[type[PrefixdError]]:
    yield root
    for sub in root.__subclasses__():
        yield from _all_below(sub)


#: name -> class, for every class of the tree.
BY_NAME: Final[dict[str, type[PrefixdError]]] = {c.name: c for c in _all_below(PrefixdError)}

#: What a status without our metadata means: it was made by the transport, not by a daemon.
TRANSPORT_CODES: Final[dict[grpc.StatusCode, type[PrefixdError]]] = {
    grpc.StatusCode.OK: PrefixdError,
    grpc.StatusCode.CANCELLED: DaemonUnavailable,
    grpc.StatusCode.UNKNOWN: PrefixdError,
    grpc.StatusCode.INVALID_ARGUMENT: CallerError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: UnknownEntry,
    grpc.StatusCode.ALREADY_EXISTS: PrefixdError,
    grpc.StatusCode.PERMISSION_DENIED: CallerError,
    grpc.StatusCode.UNAUTHENTICATED: CallerError,
    # A message above the limit: the same one will never pass.
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidSize,
    grpc.StatusCode.FAILED_PRECONDITION: PrefixdError,
    grpc.StatusCode.ABORTED: DaemonUnavailable,
    grpc.StatusCode.OUT_OF_RANGE: CallerError,
    grpc.StatusCode.UNIMPLEMENTED: MalformedMessage,
    grpc.StatusCode.INTERNAL: PrefixdError,
    grpc.StatusCode.UNAVAILABLE: DaemonUnavailable,
    grpc.StatusCode.DATA_LOSS: EntryCorrupt,
}


def metadata_of(error: PrefixdError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that carries `error` beside its code and sentence."""
    return (
        (ERROR_METADATA, error.name),
        (RETRY_METADATA, "1" if error.retryable else "0"),
    )


def from_grpc(error: grpc.RpcError) -> PrefixdError:
    """The error that the daemon raised, or the transport's failure in our words.

    `error` is what a failed call raises: it is a `grpc.Call` too (sync) or an `AioRpcError`.
    An error of a later version, whose name is unknown here, gets the class of its code and
    keeps what it says about repeating the call.
    """
    code = error.code()
    details = error.details() or code.name
    # Named tuples from the synchronous stack, pairs from the asyncio one.
    metadata = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    name, retry = metadata.get(ERROR_METADATA), metadata.get(RETRY_METADATA)
    if isinstance(name, str) and name in BY_NAME:
        return BY_NAME[name](details)
    translated = TRANSPORT_CODES[code](details)
    if retry is not None:
        translated.retryable = retry == "1"
    return translated


def from_name(name: str, sentence: str, *, retryable: bool) -> PrefixdError:
    """The same for an error that came without a gRPC status, on the local socket."""
    if name in BY_NAME:
        return BY_NAME[name](sentence)
    error = PrefixdError(sentence)
    error.retryable = retryable
    return error
