"""Messages of prefixd.proto as JSON for programs, and their enumerations as words.

The JSON has the field names of the contract, which carry their units. Bytes are hexadecimal,
enumerations are the words that people write (`ram`, `cold`), and unset messages are null.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.message import Message


def as_dict(message: Message) -> dict[str, Any]:
    """A message with all its fields, defaults included."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:  # descriptors have two classes, by backend
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {name: _scalar(item, inner) for name, item in sorted(value.items())}
    if field.is_repeated:
        return [_scalar(item, field) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _scalar(value, field)


def _scalar(value: Any, field: Any) -> Any:
    if isinstance(value, Message):
        return as_dict(value)
    if field.enum_type is not None:
        return enum_label(field.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value


def enum_label(enum: Any, number: int) -> str:
    """`TIER_RAM` as `ram`. A number that this version does not know stays a number."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return str(known.name.removeprefix(prefix).lower())


def label_in(message: Message, field: str) -> str:
    """The label of an enumeration in a field of a message."""
    return enum_label(message.DESCRIPTOR.fields_by_name[field].enum_type, getattr(message, field))
