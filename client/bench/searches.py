"""Searches for the longest prefix and the longest chain, beside the hashing that both need."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...proto.errors import PrefixdError
from ...proto.keys import Key, Namespace, block_keys, iter_block_keys, prefix_keys
from ...proto.vocabulary import Tier
from ..chains import boundaries
from ..client import Client
from ..saves import SaveItem
from .samples import Case
from .transfers import save_all

if TYPE_CHECKING:
    from ...proto import prefixd_pb2 as pb

WALK_TOKENS: Final = 30_000
CHAIN_BLOCKS: Final = 256
#: Tokens of a block in traces, and in engines.
CHAIN_BLOCK_TOKENS: Final = (512, 16)
HASHING: Final = "hashing"
#: How many entries are saved. Each takes a slab.
ENTRIES: Final = 1 + CHAIN_BLOCKS * len(CHAIN_BLOCK_TOKENS)
_VOCABULARY: Final = 128_000


class Walks:
    """Prompts with a few entries in one tier, and searches that hit and miss."""

    def __init__(self, client: Client, peer: str, tier: Tier, seed: int = 0) -> None:
        self._client = client
        self._peer = peer
        self._tier = tier
        self._random = random.Random(seed)
        # Each run has its own namespace, which is empty at first.
        self._namespace = Namespace(
            bytes(32), "", bytes(32), salt=random.SystemRandom().randbytes(8)
        )

    def cases(self) -> Iterator[Case]:
        """Saves the entries to find, then yields the cases, hashing first."""
        yield from self._walks()
        for block_tokens in CHAIN_BLOCK_TOKENS:
            yield from self._chains(block_tokens)

    def _walks(self) -> Iterator[Case]:
        known, unknown = self._tokens(WALK_TOKENS), self._tokens(WALK_TOKENS)
        stride_tokens = self._client.policy.boundary_align_tokens
        lengths = boundaries(WALK_TOKENS, stride_tokens)
        middle = lengths[len(lengths) // 2]
        self._save(prefix_keys(self._namespace, known, [middle]))

        blocks = len(lengths)
        hash_all = partial(prefix_keys, self._namespace, known, lengths)
        hit = partial(self._walk, known, stride_tokens, middle)
        miss = partial(self._walk, unknown, stride_tokens, 0)
        yield Case(HASHING, "walk", blocks, hash_all, light=True)
        yield Case(self._peer, "walk-hit", blocks, hit, light=True)
        yield Case(self._peer, "walk-miss", blocks, miss, light=True)

    def _walk(self, tokens: array[int], stride_tokens: int, expected: int) -> None:
        hit = self._client.longest_prefix(
            self._namespace, tokens, stride_tokens=stride_tokens, claim=False
        )
        self._expect(expected, hit.token_count)

    def _chains(self, block_tokens: int) -> Iterator[Case]:
        tokens = CHAIN_BLOCKS * block_tokens
        known, unknown = self._tokens(tokens), self._tokens(tokens)
        self._save(block_keys(self._namespace, known, block_tokens))

        def hash_first() -> Key:
            return next(iter_block_keys(self._namespace, unknown, block_tokens))

        whole, first = f"chain-{block_tokens}", f"chain-miss-{block_tokens}"
        hash_all = partial(block_keys, self._namespace, known, block_tokens)
        hit = partial(self._chain, known, block_tokens, CHAIN_BLOCKS)
        miss = partial(self._chain, unknown, block_tokens, 0)
        yield Case(HASHING, whole, CHAIN_BLOCKS, hash_all, light=True)
        yield Case(self._peer, whole, CHAIN_BLOCKS, hit, light=True)
        yield Case(HASHING, first, 1, hash_first, light=True)
        yield Case(self._peer, first, 1, miss, light=True)

    def _chain(self, tokens: array[int], block_tokens: int, expected: int) -> None:
        chain = self._client.chain(self._namespace, tokens, block_tokens)
        self._expect(expected, len(self._client.longest_run(chain, claim=False)))

    def _expect(self, expected: int, found: int) -> None:
        if found != expected:
            raise PrefixdError(f"{self._peer}: a walk found {found} where {expected} are there")

    def _tokens(self, count: int) -> array[int]:
        return array("I", (self._random.randrange(_VOCABULARY) for _ in range(count)))

    def _save(self, keys: list[Key]) -> None:
        save_all(self._client, [SaveItem(key, b"state") for key in keys], self._tier, self._peer)


def searches() -> list[tuple[str, str, str]]:
    """(title, operation, operation of the hashing beside it) of each search."""
    found = [
        (f"longest prefix of {WALK_TOKENS:,} tokens, {kind}", f"walk-{kind}", "walk")
        for kind in ("hit", "miss")
    ]
    for block_tokens in CHAIN_BLOCK_TOKENS:
        whole, miss = f"chain-{block_tokens}", f"chain-miss-{block_tokens}"
        blocks = f"blocks of {block_tokens} tokens"
        found.append((f"chain of {CHAIN_BLOCKS} {blocks}, all there", whole, whole))
        found.append((f"chain of {CHAIN_BLOCKS} {blocks}, miss on the first", miss, miss))
    return found


def rpcs_of(client: Client) -> int:
    """How many rpcs a client has made so far."""
    return sum(client.counters["rpcs"].values())


def lookups_of(stats: pb.StatsResponse) -> int:
    """How many look-ups and claims a daemon has answered so far, for all clients."""
    counters: Any = stats.counters
    return int(counters["prefixd_lookups_total"]) + int(counters["prefixd_claims_total"])
