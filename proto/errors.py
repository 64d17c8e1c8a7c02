"""Every way a call can fail, as one tree, and its one translation to and from gRPC.

An error says whose fault it is (`CallerError`: the caller's own mistake; everything else is
the state of the world) and whether the same call may succeed later (`retryable`). Over gRPC
it travels as a status code, its sentence, and two trailing metadata entries,
`prefixd-error` (the `name` here) and `prefixd-retry`; `from_grpc` gives back the same class.

A result inside a batch (a key that is absent, an entry that is too large) is a status in the
response, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar, Final, cast

import grpc
from grpc import StatusCode as Code

ERROR_METADATA: Final = "prefixd-error"
RETRY_METADATA: Final = "prefixd-retry"


class PrefixdError(Exception):
    """The root. `str(error)` is a sentence for people."""

    #: That of the class, as `invalid_key` for InvalidKey: part of the contract.
    name: ClassVar[str] = "internal"
    code: ClassVar[Code] = Code.INTERNAL
    #: Of the class; only an error of a later version has its own.
    retryable: bool = False

    def __init_subclass__(cls, code: Code | None = None, retryable: bool | None = None) -> None:
        """`code`, `retryable`: where they are not those of the class above."""
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.code = cls.code if code is None else code
        cls.retryable = cls.retryable if retryable is None else retryable


# ---- the caller's own mistake: repeating the call can't help


class CallerError(PrefixdError, ValueError, code=Code.INVALID_ARGUMENT):
    """The call itself is wrong."""


class InvalidKey(CallerError):
    """A key that is not 32 bytes."""


class InvalidNamespace(CallerError):
    """A namespace with a field that no key can be made of."""


class InvalidTokens(CallerError):
    """Token ids that are no ints in 0 ... 2^31 - 1."""


class InvalidBatch(CallerError):
    """A batch without elements, with too many, or naming one twice."""


class InvalidSize(CallerError):
    """A size, offset, length or time outside its range."""


class UnknownTier(CallerError):
    """A tier that does not exist or is not configured."""


class UnknownReason(CallerError):
    """A save without one of the five save reasons."""


class MalformedMessage(CallerError):
    """A message or a stream of messages that does not follow the contract."""


class ClientClosed(CallerError, code=Code.CANCELLED):
    """A closed client was used. Raised locally only."""


class ConfigError(CallerError):
    """A configuration with at least one wrong key; the sentence lists every one."""


# ---- the state of the world


class DirectoryInUse(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """Another daemon has the directory or the socket. Raised locally only, at a start."""


class UnknownSession(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """The session ended or never was. Open a new one and repeat."""


class StaleIncarnation(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """A token, claim or session of another start of the daemon. Open a new session."""


class UnknownClaim(PrefixdError, code=Code.NOT_FOUND):
    """A claim that this session does not hold."""


class ClaimLost(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The lease ran out or the claim was revoked: throw away what was read under it."""


class UnknownReservation(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The reservation expired, was cancelled, or never was this session's. Reserve again."""


class UnknownStaging(PrefixdError, code=Code.FAILED_PRECONDITION):
    """This session has no staging memory, or not at that place. Save over gRPC."""


class UnreadableMemory(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The daemon can't read the memory that this client lends. Save through staging memory."""


class CurveDisabled(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The daemon keeps no live hit curve."""


class UnknownEntry(PrefixdError, code=Code.NOT_FOUND):
    """No such key is published."""


class EntryCorrupt(PrefixdError, code=Code.DATA_LOSS):
    """The stored bytes do not match their checksum; the entry was dropped."""


class RecordError(EntryCorrupt):
    """Bytes that are no record of a format that this version reads."""


class LimitReached(PrefixdError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """A table of the daemon is full (sessions, claims, reservations, waiters)."""


class DeviceFull(PrefixdError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The device under a tier has no space left, whatever the budget says."""


class StoreFailed(PrefixdError, code=Code.UNAVAILABLE, retryable=True):
    """A store could not read or write."""


class Draining(PrefixdError, code=Code.UNAVAILABLE, retryable=True):
    """The daemon is stopping."""


class NotAuthenticated(PrefixdError, code=Code.UNAUTHENTICATED):
    """The call came without a token that the daemon knows."""


class NotPermitted(PrefixdError, code=Code.PERMISSION_DENIED):
    """The role of the call's token does not allow it."""


class DaemonUnavailable(PrefixdError, code=Code.UNAVAILABLE, retryable=True):
    """No daemon answers at the address, or the connection broke."""


class DeadlineExceeded(PrefixdError, code=Code.DEADLINE_EXCEEDED, retryable=True):
    """No answer within the call's deadline."""


def _all_below(root: type[PrefixdError]) -> Iterable[type[PrefixdError]]:
    yield root
    for sub in root.__subclasses__():
        yield from _all_below(sub)


#: name -> class, for every class of the tree.
BY_NAME: Final[dict[str, type[PrefixdError]]] = {c.name: c for c in _all_below(PrefixdError)}

#: What a status without our metadata means: it was made by the transport, not by a daemon.
TRANSPORT_CODES: Final[dict[Code, type[PrefixdError]]] = {
    Code.OK: PrefixdError,
    Code.CANCELLED: DaemonUnavailable,
    Code.UNKNOWN: PrefixdError,
    Code.INVALID_ARGUMENT: CallerError,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.NOT_FOUND: UnknownEntry,
    Code.ALREADY_EXISTS: PrefixdError,
    Code.PERMISSION_DENIED: CallerError,
    Code.UNAUTHENTICATED: CallerError,
    # A message above the limit: the same one will never pass.
    Code.RESOURCE_EXHAUSTED: InvalidSize,
    Code.FAILED_PRECONDITION: PrefixdError,
    Code.ABORTED: DaemonUnavailable,
    Code.OUT_OF_RANGE: CallerError,
    Code.UNIMPLEMENTED: MalformedMessage,
    Code.INTERNAL: PrefixdError,
    Code.UNAVAILABLE: DaemonUnavailable,
    Code.DATA_LOSS: EntryCorrupt,
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
    """The error that a daemon named on its local socket, where there is no gRPC status."""
    if name in BY_NAME:
        return BY_NAME[name](sentence)
    error = PrefixdError(sentence)
    error.retryable = retryable
    return error
