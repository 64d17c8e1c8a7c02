"""Every error of a call, as one tree of classes, and its translation to and from gRPC.

An error says whose fault it is (`CallerError`: the caller's own mistake; all others: the state of
the world) and whether the same call may succeed later (`retryable`). gRPC carries it as a status
code, a sentence, and two trailing metadata entries, `prefixd-error` (its `name`) and
`prefixd-retry`. `from_grpc` turns that into the same class again.

A result inside a batch (a key that is absent, an entry that is too large) is a status in the
response and no error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, Final, cast

if TYPE_CHECKING:  # imported where it is used: it takes longer than the client's own modules
    import grpc

ERROR_METADATA: Final = "prefixd-error"
RETRY_METADATA: Final = "prefixd-retry"


class Code(Enum):
    """gRPC's status codes, by their names there."""

    OK = auto()
    CANCELLED = auto()
    UNKNOWN = auto()
    INVALID_ARGUMENT = auto()
    DEADLINE_EXCEEDED = auto()
    NOT_FOUND = auto()
    ALREADY_EXISTS = auto()
    PERMISSION_DENIED = auto()
    UNAUTHENTICATED = auto()
    RESOURCE_EXHAUSTED = auto()
    FAILED_PRECONDITION = auto()
    ABORTED = auto()
    OUT_OF_RANGE = auto()
    UNIMPLEMENTED = auto()
    INTERNAL = auto()
    UNAVAILABLE = auto()
    DATA_LOSS = auto()


class PrefixdError(Exception):
    """The root. `str(error)` is a sentence for people."""

    #: The name of the class, such as `invalid_key` for InvalidKey. Part of the contract.
    name: ClassVar[str] = "internal"
    code: ClassVar[Code] = Code.INTERNAL
    #: The same for all errors of a class, except for errors of a later version.
    retryable: bool = False

    def __init_subclass__(cls, code: Code | None = None, retryable: bool | None = None) -> None:
        """`code` and `retryable`: None for those of the parent class."""
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
    """Token ids that are not ints in 0 ... 2^31 - 1."""


class InvalidExtras(CallerError):
    """Extras that are no digests at positions of tokens."""


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
    """A closed client was used. Never sent over the wire."""


class ConfigError(CallerError):
    """A configuration with at least one wrong key; the sentence lists every one."""


# ---- the state of the world


class DirectoryInUse(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """Another daemon has the directory or the socket. Raised at a start, never sent to a client."""


class UnknownSession(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """The session ended or never was. Open a new one and repeat."""


class StaleIncarnation(PrefixdError, code=Code.FAILED_PRECONDITION, retryable=True):
    """A token, claim or session of another start of the daemon. Open a new session."""


class UnknownClaim(PrefixdError, code=Code.NOT_FOUND):
    """A claim that this session does not hold."""


class ClaimLost(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The lease ran out or the claim was revoked: discard what was read under it."""


class UnknownReservation(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The reservation expired, was cancelled, or never was this session's. Reserve again."""


class UnknownStaging(PrefixdError, code=Code.FAILED_PRECONDITION):
    """This session has no staging memory, or none at this offset. Save over gRPC."""


class UnreadableMemory(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The daemon can't read the memory that this client lends. Save through staging memory."""


class CurveDisabled(PrefixdError, code=Code.FAILED_PRECONDITION):
    """The daemon keeps no live hit curve."""


class UnknownEntry(PrefixdError, code=Code.NOT_FOUND):
    """The key is not published."""


class EntryCorrupt(PrefixdError, code=Code.DATA_LOSS):
    """The stored bytes do not match their checksum; the entry was dropped."""


class RecordError(EntryCorrupt):
    """Bytes that are not a record in a format that this version reads."""


class LimitReached(PrefixdError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """A table of the daemon is full (sessions, claims, reservations, waiters)."""


class DeviceFull(PrefixdError, code=Code.RESOURCE_EXHAUSTED, retryable=True):
    """The device of a tier has no space left, although the budget has."""


class StoreFailed(PrefixdError, code=Code.UNAVAILABLE, retryable=True):
    """A store could not read or write."""


class Draining(PrefixdError, code=Code.UNAVAILABLE, retryable=True):
    """The daemon is stopping."""


class NotAuthenticated(PrefixdError, code=Code.UNAUTHENTICATED):
    """The call has no token that the daemon knows."""


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

#: The meaning of a status without our metadata: it comes from the transport, not from a daemon.
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
    # A message above the limit, which will never be accepted.
    Code.RESOURCE_EXHAUSTED: InvalidSize,
    Code.FAILED_PRECONDITION: PrefixdError,
    Code.ABORTED: DaemonUnavailable,
    Code.OUT_OF_RANGE: CallerError,
    Code.UNIMPLEMENTED: MalformedMessage,
    Code.INTERNAL: PrefixdError,
    Code.UNAVAILABLE: DaemonUnavailable,
    Code.DATA_LOSS: EntryCorrupt,
}


def grpc_code(error: PrefixdError | type[PrefixdError]) -> grpc.StatusCode:
    """The status that carries `error`, or any of its class."""
    from grpc import StatusCode

    return StatusCode[error.code.name]


def metadata_of(error: PrefixdError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of `error`, which travels with its code and sentence."""
    return (
        (ERROR_METADATA, error.name),
        (RETRY_METADATA, "1" if error.retryable else "0"),
    )


#: Parts of gRPC's words for a connection that fails, and what people are told instead.
_CONNECTION_WORDS: Final = {
    "before receiving SETTINGS": "it does not answer",
    "Connection refused": "no process listens there",
    "DNS resolution failed": "its name is not known",
    "No route to host": "there is no route to its host",
    "Network is unreachable": "its network can't be reached",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not one that this client trusts",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "handshake failed": "the TLS handshake failed",
    "Connection reset by peer": "it closed the connection",
    "Socket closed": "it closed the connection",
}


def from_grpc(error: grpc.RpcError) -> PrefixdError:
    """The error that the daemon raised, or the class for a failure of the transport.

    `error` is what a failed call raises: a `grpc.Call` (sync) or an `AioRpcError`. An error of a
    later version, whose name is unknown here, gets the class of its code and keeps its `retryable`.
    """
    code = error.code()
    details = error.details() or code.name
    # The synchronous stack has named tuples, the asyncio one has pairs.
    metadata = dict(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))
    name, retry = metadata.get(ERROR_METADATA), metadata.get(RETRY_METADATA)
    if isinstance(name, str) and name in BY_NAME:
        return BY_NAME[name](details)
    known = (words for part, words in _CONNECTION_WORDS.items() if part in details)
    translated = TRANSPORT_CODES[Code[code.name]](next(known, details))
    if retry is not None:
        translated.retryable = retry == "1"
    return translated


def from_name(name: str, sentence: str, *, retryable: bool) -> PrefixdError:
    """The error in a `Failure` of the local or the data socket, which have no gRPC status."""
    if name in BY_NAME:
        return BY_NAME[name](sentence)
    error = PrefixdError(sentence)
    error.retryable = retryable
    return error
