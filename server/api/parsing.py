"""Requests out of their bytes, on every transport. What would take far more than its bytes is
refused before it is made: an empty part of a save is two bytes, and takes dozens in memory, so that
millions of them would hold the loop for longer than a second.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ...proto.errors import MalformedMessage

M = TypeVar("M", bound=Message)

#: A longer message is looked through first. A batch of keys is shorter, and what is longer mostly
#: has a few large fields: payloads.
LOOKED_THROUGH_BYTES: Final = 256 * 2**10
#: A save of as many entries as may be, with all that there is to say of them, has half as many.
MOST_FIELDS: Final = 2**16
#: Values of a column that count as one field: so many take the memory of one.
_PACKED: Final = 8
_MAX_VARINT_BITS: Final = 64


def parse(kind: type[M], data: bytes) -> M:
    """The message in `data`. Raises MalformedMessage for none, or one of too many fields."""
    try:
        if len(data) > LOOKED_THROUGH_BYTES and fields_of(kind, data) > MOST_FIELDS:
            raise MalformedMessage(f"{len(data)} bytes with more than {MOST_FIELDS} fields")
        return kind.FromString(data)
    except (DecodeError, IndexError) as problem:
        raise MalformedMessage(
            f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}: {problem}"
        ) from None


def fields_of(kind: type[Message], data: bytes) -> int:
    """How many fields there are, those of messages within it too; of more than MOST_FIELDS one
    more than that. Raises DecodeError or IndexError for some of what is no such message."""
    return MOST_FIELDS - max(-1, _left(kind.DESCRIPTOR, data, 0, len(data), MOST_FIELDS))


def _left(kind: Any, data: bytes, at: int, end: int, left: int) -> int:
    """`left` without the fields of a message in data[at:end]; negative: there are more."""
    messages, columns = _known(kind)
    while at < end and left >= 0:
        left -= 1
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length_bytes, at = _varint(data, at)
                number, start = tag >> 3, at
                at += length_bytes
                if number in columns:
                    left -= length_bytes // _PACKED
                elif length_bytes and (inner := messages.get(number)) is not None:
                    left = _left(inner, data, start, at, left)
            case 5:
                at += 4
            case wire_type:
                raise DecodeError(f"wire type {wire_type}")
    if at > end and left >= 0:
        raise DecodeError("a field is longer than what it is in")
    return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at data[at], and what follows it."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, _MAX_VARINT_BITS, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number of more than 64 bits")


@cache
def _known(kind: Any) -> tuple[dict[int, Any], frozenset[int]]:
    """The fields that are messages, and those that are columns where they have a length."""
    messages = {f.number: f.message_type for f in kind.fields if f.message_type is not None}
    columns = frozenset(
        f.number
        for f in kind.fields
        if f.message_type is None and f.cpp_type != FieldDescriptor.CPPTYPE_STRING
    )
    return messages, columns
