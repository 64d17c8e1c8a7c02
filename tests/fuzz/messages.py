"""Messages of the contract with any content that their types allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.payload import crc32c
from tests.support.running import key

KEYS: Final = [key(number) for number in range(6)]
DATA: Final = [b"a" * 100, b"b" * 5000, b"c" * 9000]
_NUMBERS: Final = [0, 1, 2, 3, 16, 100, 5000, 9000]

_keys = st.one_of(st.sampled_from(KEYS), st.sampled_from([b"", bytes(31), bytes(33)]))
_names = st.sampled_from(["", "expired", "shm", "stream", "x" * 200])
_bits_32 = st.one_of(st.sampled_from(_NUMBERS), st.integers(0, 2**32 - 1))
_bits_64 = st.one_of(st.sampled_from(_NUMBERS), st.integers(0, 2**64 - 1))
_BY_TYPE: Final[dict[int, st.SearchStrategy[Any]]] = {
    FieldDescriptor.TYPE_UINT32: _bits_32,
    FieldDescriptor.TYPE_FIXED32: st.one_of(_bits_32, st.sampled_from([crc32c(d) for d in DATA])),
    FieldDescriptor.TYPE_UINT64: _bits_64,
    FieldDescriptor.TYPE_FIXED64: _bits_64,
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: st.one_of(st.integers(0, 4), st.sampled_from([9, -1, 2**31 - 1])),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.one_of(_keys, st.sampled_from(DATA), st.binary(max_size=40)),
    FieldDescriptor.TYPE_STRING: st.one_of(
        st.sampled_from(["", "a", "tenant", "x" * 121]), st.text(max_size=8)
    ),
}
#: Fields with values that make most messages valid.
_BY_NAME: Final[dict[str, st.SearchStrategy[Any]]] = {
    "key": _keys,
    "keys": _keys,
    "wait_ms": st.sampled_from([0, 0, 1, 60_001]),
    "item": st.integers(0, 3),
    "index": st.integers(0, 3),
    "payload_bytes": st.one_of(st.sampled_from([len(data) for data in DATA]), _bits_64),
    "layer_count": st.sampled_from([0, 0, 1, 4, 7]),
    "tier": st.sampled_from([0, 1, 1, 1, 2, 3, 9]),
    "token_ids": st.sampled_from([b"", b"", bytes(4), bytes(5)]),
}
#: The bytes fields among them. Fields of other types may have the same names.
_BYTES: Final = ("key", "keys", "token_ids")


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type, depth - 1)
    by_type = _BY_TYPE[field.type]
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES
    return _BY_NAME.get(field.name, by_type) if is_bytes == (field.name in _BYTES) else by_type


@st.composite
def messages(draw: Callable[..., Any], descriptor: Descriptor, depth: int = 5) -> Message:
    """A message of this type, with most of its fields set."""
    made = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth <= 0:
                continue
            if field.message_type.GetOptions().map_entry:
                value = field.message_type.fields_by_name["value"]
                if value.type != FieldDescriptor.TYPE_MESSAGE:
                    filled = st.dictionaries(_names, _values(value, 0), max_size=2)
                    getattr(made, field.name).update(draw(filled))
                continue
        if field.containing_oneof is not None:
            # The last field that is set wins, so each is set with probability 1/2.
            if not draw(st.booleans()):
                continue
        elif draw(st.integers(0, 7)) == 0:
            continue
        values = _values(field, depth)
        if field.is_repeated:
            getattr(made, field.name).extend(draw(st.lists(values, max_size=4)))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(made, field.name).CopyFrom(draw(values))
        else:
            setattr(made, field.name, draw(values))
    return made


@st.composite
def requests(draw: Callable[..., Any], descriptor: Descriptor, ref: pb.SessionRef) -> Message:
    """A message in which sessions mostly are `ref`, so that not all requests are refused."""
    made = draw(messages(descriptor))
    put_session(made, ref, draw(st.integers(0, 5)))
    return made


def put_session(message: Message, ref: pb.SessionRef, which: int) -> None:
    """Replace the sessions in a message by `ref`: with a wrong incarnation if `which` is 1, with a
    wrong secret if it is 2. 0 leaves the sessions unchanged."""
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for one in value if field.is_repeated else [value]:
            if not isinstance(one, pb.SessionRef):
                put_session(one, ref, which)
            elif which:
                one.CopyFrom(ref)
                if which == 1:
                    one.incarnation = bytes(16)
                elif which == 2:
                    one.secret = bytes(16)


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes, often unchanged, or cut off, lengthened or with a few bytes changed."""
    changed = st.lists(
        st.tuples(st.integers(0, max(0, len(data) - 1)), st.integers(1, 255)),
        min_size=1,
        max_size=4,
    )
    return st.one_of(
        st.just(data),
        st.just(data),
        st.integers(0, len(data)).map(lambda end: data[:end]),
        st.binary(min_size=1, max_size=20).map(lambda more: data + more),
        changed.map(lambda flips: _flipped(data, flips)),
    )


def _flipped(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    made = bytearray(data)
    for at, bits in flips:
        if at < len(made):
            made[at] ^= bits
    return bytes(made)


def pieces(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """The bytes, cut into random pieces."""
    cuts = st.lists(st.integers(0, len(data)), max_size=4).map(sorted)
    return cuts.map(
        lambda at: [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]
    )
