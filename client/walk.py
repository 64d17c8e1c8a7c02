"""The search for the longest cached prefix: which keys to ask for, in which order. Pure.

Prefix entries hold the whole state of `tokens[:n]` and are saved where n is a multiple of the
stride, so the walk asks for those lengths, longest first. Block chains hold a block each; the
walk goes forward and stops at the first block that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, overload

from ..proto.errors import InvalidSize, InvalidTokens
from ..proto.keys import Key, Namespace, iter_block_keys, prefix_keys
from ..proto.limits import MAX_BATCH_KEYS

if TYPE_CHECKING:
    from ..proto.keys import Tokens


class PrefixWalk(NamedTuple):
    """Keys to look for, longest prefix first, and the tokens that each stands for."""

    keys: list[Key]
    token_counts: list[int]


def count_tokens(tokens: Tokens) -> int:
    """Raises InvalidTokens for what has no length."""
    try:
        return len(tokens)  # type: ignore[arg-type]  # a buffer without one is caught
    except TypeError:
        raise InvalidTokens(f"tokens are a sequence, not a {type(tokens).__name__}") from None


def boundaries(token_count: int, stride_tokens: int, *, exact_end: bool = False) -> list[int]:
    """The multiples of the stride in 1 ... token_count, ascending, and with `exact_end` the
    count itself. At most the `MAX_BATCH_KEYS` longest."""
    if stride_tokens < 1:
        raise InvalidSize(f"a stride has at least one token, not {stride_tokens}")
    lengths = range(stride_tokens, token_count + 1, stride_tokens)
    ends = [token_count] if exact_end and token_count % stride_tokens else []
    first = max(0, len(lengths) + len(ends) - MAX_BATCH_KEYS)
    return [*lengths[first:], *ends]


def prefix_walk(
    namespace: Namespace, tokens: Tokens, stride_tokens: int, *, exact_end: bool = False
) -> PrefixWalk:
    """The walk over `tokens`, all keys in one hash pass. Empty if no stride is complete.

    `exact_end` also asks for the state of all of `tokens`, wherever they end.
    """
    lengths = boundaries(count_tokens(tokens), stride_tokens, exact_end=exact_end)
    keys = prefix_keys(namespace, tokens, lengths)
    return PrefixWalk(keys[::-1], lengths[::-1])


class BlockChain(Sequence[Key]):
    """The keys of a prompt cut into blocks, root first, each hashed when it is asked for.

    A walk that misses early hashes little. `tokens` are referenced, not copied: don't change
    them before every key was asked for. Not thread-safe until then.
    """

    def __init__(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int,
        *,
        include_partial: bool = False,
    ) -> None:
        """`include_partial`: a trailing incomplete block is part of the chain, to be saved; a
        walk does not look for it. Raises InvalidSize, InvalidTokens."""
        token_count = count_tokens(tokens)
        self._keys: list[Key] = []
        self._rest: Iterator[Key] = iter_block_keys(
            namespace, tokens, block_tokens, include_partial=include_partial
        )
        #: Tokens of a whole block.
        self.block_tokens = block_tokens
        #: Blocks that are complete.
        self.whole_blocks, partial_tokens = divmod(token_count, block_tokens)
        #: Tokens of the trailing incomplete block; 0 if it is not part of the chain.
        self.partial_tokens = partial_tokens if include_partial else 0

    def __len__(self) -> int:
        return self.whole_blocks + bool(self.partial_tokens)

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        wanted = range(len(self))[index]
        if isinstance(wanted, int):
            self._hash_up_to(wanted)
            return self._keys[wanted]
        if wanted:
            self._hash_up_to(max(wanted[0], wanted[-1]))
        return [self._keys[position] for position in wanted]

    def __iter__(self) -> Iterator[Key]:
        keys = self._keys
        for index in range(len(self)):
            if index == len(keys):
                keys.append(next(self._rest))
            yield keys[index]

    def whole(self, most: int) -> Sequence[Key]:
        """The complete blocks, at most so many, as lazily as the chain itself."""
        return _Head(self, min(self.whole_blocks, most))

    @property
    def keys(self) -> list[Key]:
        """Every key, hashed now if they were not."""
        return self[:]

    @property
    def token_counts(self) -> list[int]:
        """Tokens of each block."""
        counts = [self.block_tokens] * self.whole_blocks
        return [*counts, self.partial_tokens] if self.partial_tokens else counts

    def _hash_up_to(self, last: int) -> None:
        while len(self._keys) <= last:
            self._keys.append(next(self._rest))


class _Head(Sequence[Key]):
    """The first keys of a chain, hashed when they are asked for."""

    def __init__(self, chain: BlockChain, count: int) -> None:
        self._chain = chain
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        wanted = range(self._count)[index]
        if isinstance(wanted, int):
            return self._chain[wanted]
        return [self._chain[position] for position in wanted]

    def __iter__(self) -> Iterator[Key]:
        return islice(self._chain, self._count)
