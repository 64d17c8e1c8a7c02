"""The keys that a search asks for: of the prefixes of a prompt, or of its blocks.

Prefix entries hold the whole state of `tokens[:n]`, for any n, so a search asks for every length,
longest first. Block chains hold one block per entry; a search goes forward and stops at the first
missing block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from ..proto.errors import InvalidTokens
from ..proto.keys import Key, Namespace, chain_pieces, prefix_keys
from ..proto.limits import DEFAULT_BOUNDARY_ALIGN_TOKENS, MAX_BATCH_KEYS
from .arguments import whole
from .ranks import check_shard

if TYPE_CHECKING:
    from ..proto.keys import Extras
    from ..proto.tokens import Tokens


def count_tokens(tokens: Tokens) -> int:
    """Raises InvalidTokens for what has no length."""
    try:
        return len(tokens)  # type: ignore[arg-type]  # a buffer without one is caught
    except TypeError:
        raise InvalidTokens(f"tokens are a sequence, not a {type(tokens).__name__}") from None


# ---- prefixes

#: So many of the longest lengths are looked at one by one, at about 0.6 us each.
MAX_WALK_LENGTHS: Final = 8 * MAX_BATCH_KEYS
#: Shorter ones only at these multiples, at which the save policy cuts.
COARSE_TOKENS: Final = DEFAULT_BOUNDARY_ALIGN_TOKENS


class PrefixWalk(NamedTuple):
    """Keys to look for, longest prefix first, and the tokens that each stands for."""

    keys: list[Key]
    token_counts: list[int]


def boundaries(token_count: int, stride_tokens: int = 1) -> list[int]:
    """The multiples of the stride in 1 ... token_count, and the count itself, ascending. Of more
    than `MAX_WALK_LENGTHS` the shorter ones only where they are multiples of `COARSE_TOKENS`."""
    stride_tokens = whole("stride_tokens", stride_tokens, 1)
    lengths = range(stride_tokens, token_count + 1, stride_tokens)
    fine = lengths[-MAX_WALK_LENGTHS:]
    coarse = list(range(COARSE_TOKENS, fine[0], COARSE_TOKENS)) if fine else []
    end = [token_count] if token_count % stride_tokens else []
    return [*coarse, *fine, *end]


def prefix_walk(
    namespace: Namespace, tokens: Tokens, stride_tokens: int = 1, *, extras: Extras = ()
) -> PrefixWalk:
    """The prefixes of `tokens`, all keys in one hash pass.

    Raises InvalidNamespace as `BlockChain` does.
    """
    check_shard(namespace)
    lengths = boundaries(count_tokens(tokens), stride_tokens)
    keys = prefix_keys(namespace, tokens, lengths, extras)
    return PrefixWalk(keys[::-1], lengths[::-1])


# ---- blocks


class BlockChain(Sequence[Key]):
    """The keys of a prompt cut into blocks, root first, each hashed when it is first needed.

    A search that misses early hashes little. `tokens` are referenced, not copied: don't change
    them before every key was hashed. Not thread-safe until then.
    """

    def __init__(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int,
        *,
        include_partial: bool = False,
        extras: Extras = (),
    ) -> None:
        """`include_partial`: a trailing incomplete block is part of the chain, to be saved; a
        search does not look for it. `extras`: digests, at positions of `tokens`, of what the tokens
        do not say (images, prompt embeddings, an adapter that the request chose at 0). Raises
        InvalidSize, InvalidTokens, InvalidExtras, and InvalidNamespace for a namespace without a
        shard in one of several ranks."""
        check_shard(namespace)
        block_tokens = whole("block_tokens", block_tokens)
        token_count = count_tokens(tokens)
        self._keys: list[Key] = []
        self._rest: Iterator[list[Key]] = chain_pieces(
            namespace.root,
            0,
            tokens,
            block_tokens,
            include_partial=include_partial,
            extras=extras,
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
        selected = range(len(self))[index]
        if isinstance(selected, int):
            self._hash_up_to(selected)
            return self._keys[selected]
        if selected:
            self._hash_up_to(max(selected[0], selected[-1]))
        if selected.step == 1:
            return self._keys[selected.start : selected.stop]
        return [self._keys[position] for position in selected]

    def __repr__(self) -> str:
        partial = f" and {self.partial_tokens} tokens" if self.partial_tokens else ""
        return f"<BlockChain: {self.whole_blocks} blocks of {self.block_tokens} tokens{partial}>"

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[list[Key]]:
        """All keys, as they are hashed."""
        keys, index = self._keys, 0
        while index < len(self):
            if index == len(keys):
                keys += next(self._rest)
            part = keys[index:]
            index += len(part)
            yield part

    @property
    def complete_keys(self) -> Sequence[Key]:
        """The complete blocks, hashed as lazily as the chain itself."""
        return _Blocks(self, range(self.whole_blocks))

    @property
    def keys(self) -> list[Key]:
        """Every key; hashes those that were not yet."""
        return self[:]

    @property
    def token_counts(self) -> list[int]:
        """Tokens of each block."""
        counts = [self.block_tokens] * self.whole_blocks
        return [*counts, self.partial_tokens] if self.partial_tokens else counts

    def _hash_up_to(self, last: int) -> None:
        while len(self._keys) <= last:
            self._keys += next(self._rest)


class _Blocks(Sequence[Key]):
    """Some blocks of a chain, hashed when they are first needed; slices of it are lazy too."""

    def __init__(self, chain: BlockChain, blocks: range) -> None:
        self._chain = chain
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | Sequence[Key]:
        selected = self._blocks[index]
        return (
            self._chain[selected] if isinstance(selected, int) else _Blocks(self._chain, selected)
        )

    def __iter__(self) -> Iterator[Key]:
        if self._blocks.start or self._blocks.step != 1:
            return (self._chain[block] for block in self._blocks)
        return islice(self._chain, len(self._blocks))
