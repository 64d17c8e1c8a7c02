"""The trace context of a call as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.trace_parent import TraceParent, decode_traceparent, encode_traceparent

#: The example in the standard.
EXAMPLE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_example_of_the_standard() -> None:
    parent = TraceParent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert decode_traceparent(EXAMPLE) == parent
    assert encode_traceparent(parent) == EXAMPLE


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_encoded_is_decoded(trace_id: int, span_id: int, sampled: bool) -> None:
    parent = TraceParent(trace_id, span_id, sampled)
    assert decode_traceparent(encode_traceparent(parent)) == parent


@pytest.mark.parametrize("parent", [TraceParent(0, 1, True), TraceParent(1, 0, True)])
def test_what_is_no_span_does_not_travel(parent: TraceParent) -> None:
    assert encode_traceparent(parent) == b""


@given(st.binary(max_size=80))
def test_whatever_comes_is_a_parent_or_none(data: bytes) -> None:
    parent = decode_traceparent(data)
    assert parent is None or encode_traceparent(parent)[:53] == data[:53]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        EXAMPLE[:-1],
        EXAMPLE + b"\n",
        EXAMPLE + b"-00",
        EXAMPLE.upper(),
        b"ff" + EXAMPLE[2:],
        EXAMPLE.replace(b"-", b"_"),
        b"00-" + b"0" * 32 + EXAMPLE[35:],
        EXAMPLE[:36] + b"0" * 16 + b"-01",
        "00-\u0660af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".encode(),
        b"0" * 10**6,
    ],
)
def test_what_is_malformed_is_none(data: bytes) -> None:
    assert decode_traceparent(data) is None
