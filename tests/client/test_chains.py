"""Which keys a search asks for, and in which order."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.chains import (
    COARSE_TOKENS,
    MAX_WALK_LENGTHS,
    BlockChain,
    boundaries,
    count_tokens,
    prefix_walk,
)
from prefixd.proto.errors import InvalidSize, InvalidTokens
from prefixd.proto.keys import Namespace, block_keys, prefix_key

NAMESPACE = Namespace(b"f" * 32, "q4_0", b"c" * 32)


def test_boundaries_are_the_multiples_of_the_stride_and_the_end() -> None:
    assert boundaries(10, 3) == [3, 6, 9, 10]
    assert boundaries(9, 3) == [3, 6, 9]
    assert boundaries(2, 3) == [2]
    assert boundaries(0, 3) == []


@given(st.integers(0, 70_000), st.sampled_from([1, 2, 7, 2048]))
def test_of_many_boundaries_the_longest_and_the_coarse_ones_are_looked_at(
    token_count: int, stride: int
) -> None:
    lengths = boundaries(token_count, stride)
    fine = [n for n in range(1, token_count + 1) if n % stride == 0]
    coarse = [n for n in range(1, token_count + 1) if n % COARSE_TOKENS == 0]
    wanted = {*fine[-MAX_WALK_LENGTHS:], *([token_count] if token_count else [])}
    if len(fine) > MAX_WALK_LENGTHS:
        wanted |= {n for n in coarse if n < fine[-MAX_WALK_LENGTHS]}
    assert lengths == sorted(wanted)


def test_a_stride_is_positive() -> None:
    with pytest.raises(InvalidSize, match="stride"):
        boundaries(10, 0)


@pytest.mark.parametrize("make", [list, tuple, lambda tokens: array("i", tokens)])
def test_a_prefix_walk_asks_for_the_longest_first(make: object) -> None:
    tokens = list(range(100, 170))
    walk = prefix_walk(NAMESPACE, make(tokens), 20)  # type: ignore[operator]
    assert walk.token_counts == [70, 60, 40, 20]
    assert walk.keys == [prefix_key(NAMESPACE, tokens[:n]) for n in walk.token_counts]


def test_a_short_prompt_asks_for_its_end() -> None:
    assert prefix_walk(NAMESPACE, [1, 2, 3], 20) == ([prefix_key(NAMESPACE, [1, 2, 3])], [3])
    assert prefix_walk(NAMESPACE, []) == ([], [])


def test_tokens_have_a_length() -> None:
    assert count_tokens([1, 2]) == 2
    with pytest.raises(InvalidTokens, match="not a generator"):
        count_tokens(number for number in range(3))  # type: ignore[arg-type]


class CountingTokens(list[int]):
    """Records which slices are taken: hashing a block takes one."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.slices: list[slice] = []

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index != slice(None, 0):  # the check that it is a sequence
            self.slices.append(index)
        return super().__getitem__(index)


def test_a_chain_hashes_only_what_is_asked_for() -> None:
    tokens = CountingTokens(list(range(100)))
    chain = BlockChain(NAMESPACE, tokens, 10)
    assert len(chain) == 10
    assert tokens.slices == []
    assert chain[1] == block_keys(NAMESPACE, list(range(100)), 10)[1]
    # One block, and then one or, by the kernel, two.
    assert tokens.slices in ([slice(0, 10), slice(10, 20)], [slice(0, 10), slice(10, 30)])
    assert chain[0] == block_keys(NAMESPACE, list(range(100)), 10)[0]
    assert len(tokens.slices) == 2
    assert next(iter(chain)) == chain[0]
    assert len(tokens.slices) == 2


@given(st.integers(0, 50), st.integers(1, 12), st.booleans(), st.slices(8), st.slices(8))
def test_a_chain_is_the_list_of_its_keys(
    token_count: int, block: int, partial: bool, first: slice, second: slice
) -> None:
    tokens = list(range(token_count))
    expected = block_keys(NAMESPACE, tokens, block, include_partial=partial)
    chain = BlockChain(NAMESPACE, tokens, block, include_partial=partial)
    assert chain[first] == expected[first]
    assert chain[second] == expected[second]
    assert len(chain) == len(expected)
    assert chain.keys == list(chain) == expected
    assert len(chain.token_counts) == len(chain)
    assert sum(chain.token_counts) == (token_count if partial else token_count // block * block)
    assert chain.whole_blocks == token_count // block


def test_a_chain_refuses_what_lists_refuse() -> None:
    chain = BlockChain(NAMESPACE, range(10), 5)
    assert chain[-1] == chain[1]
    with pytest.raises(IndexError):
        chain[2]


def test_a_block_has_tokens() -> None:
    with pytest.raises(InvalidSize, match="block"):
        BlockChain(NAMESPACE, [1, 2, 3], 0)
