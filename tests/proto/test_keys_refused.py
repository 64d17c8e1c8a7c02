"""Refused input of keys, and keys from other programs' hashes (proto/keys.py)."""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.errors import (
    CallerError,
    InvalidKey,
    InvalidNamespace,
    InvalidSize,
    InvalidTokens,
)
from prefixd.proto.keys import (
    Adapter,
    ForeignNamespace,
    Key,
    Namespace,
    block_key,
    block_keys,
    chain_pieces,
    check_key,
    context_hash,
    extend_chain,
    key_from_hex,
    prefix_key,
    prefix_keys,
)
from prefixd.proto.tokens import token_bytes

WEIGHTS, CONTEXT = b"\x11" * 32, b"\x22" * 32
LORA_A, LORA_B = b"\x33" * 32, b"\x44" * 32


def namespace(**fields: Any) -> Namespace:
    return Namespace(
        **{"fingerprint": WEIGHTS, "quantisation": "f16", "context_params": CONTEXT, **fields}
    )


NS = namespace()


# ---- what is refused

NOT_TOKENS: dict[str, Any] = {
    "negative": [-1],
    "too large": [2**31],
    "far too large": [2**40],
    "float": [1.0],
    "bytes": b"abcd",
    "bytearray": bytearray(8),
    "memoryview of bytes": memoryview(b"abcd"),
    "text": "abc",
    "set": {1, 2},
    "dict": {0: 1},
    "deque": deque([1, 2]),
    "number": 5,
    "nothing": None,
    "nested": [[1]],
    "numpy matrix": np.zeros((2, 2), np.int32),
    "numpy scalar": np.array(3),
    "numpy floats": np.array([1.5]),
    "numpy 4-byte floats": np.array([1.0], np.float32),
    "numpy bools": np.array([True]),
    "numpy negative": np.array([-1], np.int32),
    "numpy negative 64": np.array([-1]),
    "numpy too large": np.array([2**31], np.uint32),
    "numpy far too large": np.array([2**40]),
    "array too large": array("I", [2**32 - 1]),
}


@pytest.mark.parametrize("what", NOT_TOKENS)
def test_what_is_no_token(what: str) -> None:
    tokens = NOT_TOKENS[what]
    calls: list[Callable[[], object]] = [
        lambda: prefix_key(NS, tokens),
        lambda: prefix_keys(NS, tokens, [1]),
        lambda: block_keys(NS, tokens, 1),
        lambda: block_keys(NS, tokens, 64, include_partial=True),
        lambda: block_key(NS.root, 0, tokens),
    ]
    for call in calls:
        with pytest.raises(InvalidTokens, match=r"tokens? "):
            call()


@pytest.mark.parametrize("position", [0, 1, 62, 63])
def test_one_wrong_token_among_many_is_seen(position: int) -> None:
    tokens = np.arange(64, dtype=np.int32)
    tokens[position] = -2
    with pytest.raises(InvalidTokens):
        token_bytes(tokens)


@pytest.mark.parametrize("lengths", [[2, 1], [1, 1], [-1], [4], [0, 5]])
def test_boundaries_that_are_none(lengths: list[int]) -> None:
    with pytest.raises(InvalidSize):
        prefix_keys(NS, [1, 2, 3], lengths)


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_blocks_without_tokens(block_tokens: int) -> None:
    with pytest.raises(InvalidSize):
        chain_pieces(NS.root, 0, [1], block_tokens)


@pytest.mark.parametrize("index", [-1, 2**32])
def test_a_block_index_that_is_none(index: int) -> None:
    with pytest.raises(InvalidSize):
        block_key(NS.root, index, [1])
    with pytest.raises(InvalidSize):
        extend_chain(NS.root, index, [1], 1)


def test_a_chain_after_something_that_is_no_key() -> None:
    with pytest.raises(InvalidKey):
        chain_pieces(Key(b"short"), 0, [1], 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"fingerprint": b"short"},
        {"fingerprint": "x" * 32},
        {"context_params": b"\0" * 33},
        {"quantisation": "nine bytes"},
        {"quantisation": 4},
        {"salt": 7},
        {"shard": None},
    ],
)
def test_a_namespace_that_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidNamespace, match=next(iter(fields))):
        namespace(**fields)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 2.0**31, -(2.0**31)])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(InvalidNamespace, match="scale"):
        Adapter(LORA_A, scale)


def test_an_adapter_without_a_hash() -> None:
    with pytest.raises(InvalidNamespace, match="sha256"):
        Adapter(b"short")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), [1], {}, 1j])
def test_a_context_value_that_is_none(value: Any) -> None:
    with pytest.raises(InvalidNamespace, match="'x'"):
        context_hash({"x": value})


# ---- keys as such


@given(st.binary(min_size=32, max_size=32))
def test_hexadecimal_comes_back(key: bytes) -> None:
    assert key_from_hex(check_key(key).hex()) == key
    assert key_from_hex(key.hex().upper()) == key
    assert check_key(memoryview(key)) == key
    assert check_key(bytearray(key)) == key


@pytest.mark.parametrize("bad", [b"", b"x" * 31, b"x" * 33, "x" * 32, 5, None])
def test_what_is_no_key(bad: Any) -> None:
    with pytest.raises(InvalidKey, match="32 bytes"):
        check_key(bad)


@pytest.mark.parametrize(
    "text", ["", "00" * 31, "00" * 33, "zz" * 32, "00 " * 21 + "0", "00 " * 32, "é" * 64]
)
def test_what_is_no_hexadecimal_key(text: str) -> None:
    with pytest.raises(InvalidKey, match="hexadecimal"):
        key_from_hex(text)


def test_every_refusal_is_the_callers_mistake() -> None:
    for refusal in (InvalidKey, InvalidNamespace, InvalidSize, InvalidTokens):
        assert issubclass(refusal, CallerError)
        assert not refusal.retryable


# ---- other programs' hashes


def foreign_key(engine: bytes, context: bytes, kind: bytes, raw: bytes) -> bytes:
    """The formula of `proto/keys.py`, with hashlib alone."""
    label = b"prefixd/foreign/v1\0" + len(engine).to_bytes(4, "little")
    root = hashlib.sha256(label + engine + context).digest()
    return hashlib.sha256(root + kind + raw).digest()


def test_foreign_keys_are_made_as_it_is_written() -> None:
    fields = {"model": "m", "page": 64}
    namespace = ForeignNamespace("sglang", fields)
    context = context_hash(fields)
    assert namespace.key(b"abc") == foreign_key(b"sglang", context, b"y", b"abc")
    assert namespace.key(-17) == foreign_key(b"sglang", context, b"i", b"-17")
    assert namespace.keys(["616263", "616263".upper(), b"abc"]) == [namespace.key(b"abc")] * 3
    assert namespace.keys([b"abc", b"abd"]) == [namespace.key(b"abc"), namespace.key("616264")]
    assert namespace.keys([]) == []


def test_two_that_differ_in_anything_share_no_key() -> None:
    ids: list[bytes | int] = [b"1", b"\1", 1, b"i1", b"y1", 256, b"\0"]
    namespaces = [
        ForeignNamespace("a", {}),
        ForeignNamespace("ab", {}),
        ForeignNamespace("a", {"b": None}),
        ForeignNamespace("a", {"b": 1}),
        ForeignNamespace("a", {"b": "1"}),
        ForeignNamespace("a", {"b": True}),
    ]
    made = [key for namespace in namespaces for key in namespace.keys(ids)]
    assert len(set(made)) == len(namespaces) * len(ids)
    assert ForeignNamespace("a", {"x": 1, "y": 2}) == ForeignNamespace("a", {"y": 2, "x": 1})
    assert len(set(namespaces)) == len(namespaces)


@pytest.mark.parametrize("wrong", [b"", "", "abc", "xy", "ab cd", None, 1.0, True, [1]])
def test_what_is_no_foreign_hash_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidKey):
        ForeignNamespace("a", {}).key(wrong)
    with pytest.raises(InvalidKey):
        ForeignNamespace("a", {}).keys([b"right", wrong])


def test_a_foreign_namespace_names_its_engine() -> None:
    with pytest.raises(InvalidNamespace):
        ForeignNamespace("", {})
    with pytest.raises(InvalidNamespace):
        ForeignNamespace("a", {"b": float("nan")})
