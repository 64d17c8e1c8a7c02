"""Any buffer as flat bytes, without copying.

Payloads come and go as `bytes`, `bytearray`, `memoryview`, numpy arrays and CPU tensors; what
matters here is only that they are contiguous and, to restore into, writable.
"""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeAlias

from ..proto.errors import CallerError, InvalidSize

if TYPE_CHECKING:
    from typing_extensions import Buffer

    #: A buffer, or an object whose `numpy()` is one (a tensor in CPU memory).
    Payload: TypeAlias = Buffer | Any


def byte_view(payload: Payload, *, writable: bool = False) -> memoryview:
    """The bytes of `payload` where they lie, as a flat view of unsigned bytes.

    Raises `InvalidSize` when there are none, when they do not lie together in C order, or when
    `writable` and they are not; `CallerError` for what is no buffer at all.
    """
    view = _view(payload)
    if not view.nbytes:
        raise InvalidSize("a payload has at least one byte")
    if not view.c_contiguous:
        raise InvalidSize("a payload lies together in C order; make it contiguous first")
    if writable and view.readonly:
        raise InvalidSize("the buffer to restore into is read-only")
    if view.format == "B" and view.ndim == 1:
        return view
    # Not a cast: that knows native number formats only.
    return PickleBuffer(view).raw()


def _view(payload: Payload) -> memoryview:
    try:
        return memoryview(payload)
    except (TypeError, ValueError, BufferError):
        # No buffer, or one of numbers that buffers have no letter for.
        for as_buffer in (_tensor_view, _array_view):
            try:
                return as_buffer(payload)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                continue
    kind = type(payload).__name__
    raise CallerError(f"a payload is a contiguous buffer in CPU memory, not such a {kind}")


def _tensor_view(tensor: Any) -> memoryview:
    """Of a tensor, whatever it holds: numpy has no bfloat16 and no float8, so as bytes."""
    # The tensor's own library, which is not imported here.
    library = sys.modules[type(tensor).__module__.partition(".")[0]]
    flat = tensor.detach().reshape(-1) if not tensor.ndim else tensor.detach()
    return memoryview(flat.view(library.uint8).numpy())


def _array_view(array: Any) -> memoryview:
    return memoryview(array.view("u1"))
