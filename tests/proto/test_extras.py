"""Extras: what token ids do not say is in the keys, at its position and in no other way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.chains import BlockChain, prefix_walk
from prefixd.proto.errors import InvalidExtras
from prefixd.proto.keys import (
    Extra,
    Key,
    Namespace,
    block_key,
    block_keys,
    checked_extras,
    extend_chain,
    prefix_key,
    prefix_keys,
    with_extras,
)
from tests.proto.test_keys import golden_namespace

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "keys.json").read_text())["extras"]
NS = Namespace(b"f" * 32, "q", b"c" * 32)
TOKENS = list(range(11))
PICTURE, OTHER = (hashlib.sha256(name).digest() for name in (b"picture", b"other"))


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: f"{c['namespace']}-{c['what']}")
def test_golden_keys_with_extras(case: dict[str, Any]) -> None:
    scope = golden_namespace(case["namespace"])
    extras = [(position, bytes.fromhex(digest)) for position, digest in case["extras"]]
    tokens, block_tokens = case["tokens"], case["block_tokens"]
    keys = block_keys(scope, tokens, block_tokens, include_partial=True, extras=extras)
    assert [key.hex() for key in keys] == case["keys"]
    assert prefix_key(scope, tokens, extras).hex() == case["prefix"]


def test_without_extras_nothing_changes() -> None:
    assert block_keys(NS, TOKENS, 4, extras=[]) == block_keys(NS, TOKENS, 4)
    assert prefix_key(NS, TOKENS, []) == prefix_key(NS, TOKENS)
    assert with_extras(NS.root, []) == NS.root


extras_lists = st.lists(
    st.tuples(st.integers(0, 10), st.sampled_from([PICTURE, OTHER])), max_size=4
)


@given(extras_lists, extras_lists, st.integers(1, 5))
def test_keys_are_equal_if_and_only_if_tokens_and_extras_are(
    one: list[tuple[int, bytes]], other: list[tuple[int, bytes]], block_tokens: int
) -> None:
    """Also of the padded block and of each prefix. No keys of different kinds are equal."""
    keys = [
        block_keys(NS, TOKENS, block_tokens, include_partial=True, extras=extras)
        for extras in (one, other)
    ]
    for block, (mine, theirs) in enumerate(zip(*keys, strict=True)):
        end = (block + 1) * block_tokens
        before = [sorted(e for e in extras if e[0] < end) for extras in (one, other)]
        assert (mine == theirs) == (before[0] == before[1])
    lengths = range(len(TOKENS) + 1)
    prefixes = [prefix_keys(NS, TOKENS, lengths, extras) for extras in (one, other)]
    for length, (mine, theirs) in enumerate(zip(*prefixes, strict=True)):
        before = [sorted(e for e in extras if e[0] < length) for extras in (one, other)]
        assert (mine == theirs) == (before[0] == before[1])
        assert mine == prefix_key(NS, TOKENS[:length], [e for e in one if e[0] < length])
    assert set(keys[0]).isdisjoint(prefixes[0])
    assert len(set(keys[0])) == len(keys[0])


@given(extras_lists, st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_a_chain_can_be_extended(
    extras: list[tuple[int, bytes]], block_tokens: int, known: int, partial: bool
) -> None:
    """Positions count from the tokens that are given."""
    keys = block_keys(NS, TOKENS, block_tokens, include_partial=partial, extras=extras)
    known = min(known, len(TOKENS) // block_tokens)
    start = known * block_tokens
    parent = keys[known - 1] if known else NS.root
    later = [(position - start, digest) for position, digest in extras if position >= start]
    extended = extend_chain(
        parent, known, TOKENS[start:], block_tokens, include_partial=partial, extras=later
    )
    assert keys == keys[:known] + extended
    for index in range(known, len(TOKENS) // block_tokens):
        first = index * block_tokens
        own = [(p - first, d) for p, d in extras if first <= p < first + block_tokens]
        before = keys[index - 1] if index else NS.root
        assert block_key(before, index, TOKENS[first:][:block_tokens], own) == keys[index]


def test_a_block_with_an_extra_is_no_block_without_one() -> None:
    """Not even of the tokens that the extra would be, or after the parent that it makes."""
    (plain,) = block_keys(NS, TOKENS[:4], 4)
    (extra,) = block_keys(NS, TOKENS[:4], 4, extras=[(0, PICTURE)])
    as_tokens = [int.from_bytes(PICTURE[i : i + 4], "little") & 2**31 - 1 for i in range(0, 32, 4)]
    others = [
        plain,
        *block_keys(NS, [0, *as_tokens], 9),
        *block_keys(NS, [*TOKENS[:4], 0, *as_tokens], 13),
        prefix_key(NS, TOKENS[:4], [(0, PICTURE)]),
        Key(with_extras(plain, [Extra(0, PICTURE)])),
    ]
    assert extra not in others
    assert len(set(others)) == len(others)


def test_an_extra_of_the_incomplete_block_is_in_no_complete_one() -> None:
    late = [(9, PICTURE)]
    assert block_keys(NS, TOKENS, 4, extras=late) == block_keys(NS, TOKENS, 4)
    padded = block_keys(NS, TOKENS, 4, include_partial=True, extras=late)
    assert padded[:2] == block_keys(NS, TOKENS, 4)
    assert padded[2] != block_keys(NS, TOKENS, 4, include_partial=True)[2]


def test_an_extra_that_is_there_twice_is_another_one() -> None:
    assert prefix_key(NS, TOKENS, [(0, PICTURE)]) != prefix_key(NS, TOKENS, [(0, PICTURE)] * 2)


def test_the_chains_and_walks_of_the_client_have_them() -> None:
    extras = [Extra(5, PICTURE)]
    chain = BlockChain(NS, TOKENS, 4, include_partial=True, extras=iter(extras))
    assert chain.keys == block_keys(NS, TOKENS, 4, include_partial=True, extras=extras)
    walk = prefix_walk(NS, TOKENS, 4, extras=iter(extras))
    assert walk.keys == prefix_keys(NS, TOKENS, [4, 8, 11], extras)[::-1]


def test_a_position_may_be_any_integer() -> None:
    assert checked_extras([(np.int64(3), PICTURE), (1, OTHER)], 4) == [(1, OTHER), (3, PICTURE)]


@pytest.mark.parametrize(
    "extras",
    [
        [(11, PICTURE)],
        [(-1, PICTURE)],
        [(0, PICTURE), (2**70, PICTURE)],
        [(0, PICTURE[:31])],
        [(0, "picture")],
        [(0, bytearray(PICTURE))],
        [(0.0, PICTURE)],
        [("0", PICTURE)],
        [PICTURE],
        [(0, PICTURE, 1)],
        [0],
        5,
        [None],
    ],
)
def test_extras_that_are_no_digests_at_positions(extras: Any) -> None:
    for make in (
        lambda: block_keys(NS, TOKENS, 4, extras=extras),
        lambda: prefix_key(NS, TOKENS, extras),
        lambda: prefix_keys(NS, TOKENS, [4], extras),
        lambda: BlockChain(NS, TOKENS, 4, extras=extras),
        lambda: block_key(NS.root, 0, TOKENS, extras),
    ):
        with pytest.raises(InvalidExtras):
            make()
