"""Any buffer as flat bytes, without copying.

Payloads are `bytes`, `bytearray`, `memoryview`, numpy arrays, CPU tensors, or lists of those. They
need not be contiguous: those that are not are taken as their contiguous pieces.

Their items are numbers, characters or structures of those. Objects, pointers and functions are
refused: their bytes are addresses, which mean nothing in another process, and crash it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ..proto.errors import CallerError, InvalidSize
from ..proto.kernel import native
from ..proto.payload import FlatBytes, Pieces

if TYPE_CHECKING:
    from typing_extensions import Buffer

    #: A buffer, a tensor in CPU memory, or a sequence of those.
    Payload: TypeAlias = Buffer | Sequence[Any] | Any

#: What the buffer protocol calls numbers, characters, padding, and structures and arrays of them.
_PLAIN: Final = re.compile(r"(?:[?cbBhHiIlLqQnNefdgspuwxT{}@=<>!^0-9(), ]|Z[fdg])*")
_FIELD_NAME: Final = re.compile(r":[^:]*:")
_ADDRESSES: Final = (
    "a payload is bytes, and the items of this one are addresses of objects, which mean nothing "
    "in another process"
)
#: With more pieces, packing them first costs less.
MAX_PIECES: Final = 2**16


def flat_bytes(payload: Payload, *, writable: bool = False) -> FlatBytes:
    """The bytes of `payload`, not copied: of a list or tuple, those of its members one after
    the other; of an array that is not contiguous, its rows in C order.

    Raises `InvalidSize` for no bytes, for a row that is not contiguous, for more than `MAX_PIECES`
    pieces, or for read-only memory when `writable`; `CallerError` for what is no buffer, or one
    of objects or pointers.
    """
    if not isinstance(payload, list | tuple):
        view = _view(payload)
        if view.c_contiguous:
            return _checked(view, writable=writable)
    elif 1 < len(payload) <= MAX_PIECES:
        # A page of an engine has many pieces, most of them flat bytes already.
        ready = _ready(payload, writable=writable)
        if len(ready) == len(payload):
            return Pieces(ready)
    pieces: list[memoryview] = []
    _gather(pieces, payload, writable=writable)
    if not pieces:
        raise InvalidSize("a payload has at least one byte")
    return pieces[0] if len(pieces) == 1 else Pieces(pieces)


def all_flat(payloads: Sequence[Payload], *, writable: bool = False) -> Sequence[FlatBytes]:
    """`flat_bytes` of each, faster where all are flat bytes already, as in most batches."""
    if native and type(payloads) is list and native.flat(payloads, writable):
        return payloads.copy()
    ready = _ready(payloads, writable=writable)
    if len(ready) == len(payloads):
        return ready
    return [flat_bytes(payload, writable=writable) for payload in payloads]


def _ready(payloads: Sequence[Payload], *, writable: bool) -> list[memoryview]:
    """Those that are flat unsigned bytes already, without a call for each."""
    return [
        payload
        for payload in payloads
        if type(payload) is memoryview
        and payload.format == "B"
        and payload.ndim == 1
        and payload.c_contiguous
        and payload.nbytes
        and not (writable and payload.readonly)
    ]


def _gather(pieces: list[memoryview], payload: Payload, *, writable: bool) -> None:
    """Add the contiguous pieces of `payload`. Empty members add nothing."""
    members: Iterable[Payload]
    if isinstance(payload, list | tuple):
        members = payload
    else:
        view = _view(payload)
        if not view.nbytes:
            return
        # A memoryview gives no rows, and those of its array may be others.
        if view.c_contiguous or view.ndim < 2 or isinstance(payload, memoryview):
            if len(pieces) == MAX_PIECES:
                raise InvalidSize(f"a payload lies in at most {MAX_PIECES} pieces")
            pieces.append(_checked(view, writable=writable))
            return
        members = cast("Iterable[Any]", view.obj)
    for member in members:
        _gather(pieces, member, writable=writable)


def _checked(view: memoryview, *, writable: bool) -> memoryview:
    """`view` as flat unsigned bytes. Raises InvalidSize."""
    if not view.nbytes:
        raise InvalidSize("a payload has at least one byte")
    if not view.c_contiguous:
        raise InvalidSize("a payload lies together in C order; make it contiguous first")
    if writable and view.readonly:
        raise InvalidSize("the buffer to restore into is read-only")
    if view.format == "B" and view.ndim == 1:
        return view
    if not _is_plain(view.format):
        raise CallerError(_ADDRESSES)
    # `memoryview.cast` knows only native number formats.
    return PickleBuffer(view).raw()


def _view(payload: Payload) -> memoryview:
    try:
        return memoryview(cast("Buffer", payload))
    except (TypeError, ValueError, BufferError):
        # No buffer, or its numbers have a format that the buffer protocol does not know.
        for as_buffer in (_tensor_view, _array_view):
            try:
                return as_buffer(payload)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                continue
    raise CallerError(
        f"a payload is a contiguous buffer in CPU memory, not such a {type(payload).__name__}"
        f"{_why_not(payload)}"
    )


@lru_cache(maxsize=256)
def _is_plain(format: str) -> bool:
    """Whether items of this format have no addresses in them."""
    return _PLAIN.fullmatch(_FIELD_NAME.sub(" ", format)) is not None


def _why_not(payload: Any) -> str:
    """What the caller can do with a tensor or an array that is no payload."""
    if getattr(getattr(payload, "dtype", None), "hasobject", False):
        return f": {_ADDRESSES}"
    if unresolved := _unresolved(payload):
        return f": call {unresolved}() first"
    device = str(getattr(payload, "device", "cpu"))
    if device != "cpu":
        return f" on device {device}: copy it to the CPU first"
    return ""


def _tensor_view(tensor: Any) -> memoryview:
    """A tensor of any type as bytes, because numpy has no bfloat16 and no float8."""
    # The tensor's library must be loaded; nothing here imports it.
    library = sys.modules[type(tensor).__module__.partition(".")[0]]
    if _unresolved(tensor):
        raise TypeError("its bytes are not its numbers")
    flat = tensor.detach().reshape(-1) if not tensor.ndim else tensor.detach()
    return memoryview(flat.view(library.uint8).numpy())


def _unresolved(tensor: Any) -> str:
    """The method that makes the bytes of a lazily conjugated or negated tensor those of its
    numbers; empty for any other."""
    for state in ("conj", "neg"):
        if getattr(tensor, f"is_{state}", bool)() is True:
            return f"resolve_{state}"
    return ""


def _array_view(array: Any) -> memoryview:
    return memoryview(array.view("u1"))
