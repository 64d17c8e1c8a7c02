"""Seeded example traces for the workloads that people have.

A prompt is composed of named pieces of content ("the system prompt", "document 17", "what this
user typed in turn 3") with a length in tokens; `BlockIds` cuts it into blocks and gives every
block an id that stands for its content and everything before it. Two prompts therefore share
ids exactly as far as they share content, whatever the block size, and a partial last block is
shared by no longer prompt, as in a real cache.

Every session draws from its own generator, seeded by the profile, the seed and the session's
number: the same arguments give the same bytes, and a longer trace has the same sessions as a
shorter one and some more. Sessions are whole, only the last one may be cut short.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from math import inf
from random import Random

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .profiles import PROFILES, Profile, Turn
from .trace import Request

Piece = tuple[Hashable, int, int]


class BlockIds:
    """Gives blocks their ids: small integers, in order of first appearance.

    Memory grows with the number of different blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[Piece, ...]], int] = {}

    def of(self, prompt: Sequence[tuple[Hashable, int]]) -> tuple[int, ...]:
        """The block ids of a prompt given as `(content, tokens)` in order."""
        ids: list[int] = []
        parent, room = -1, self.block_tokens
        pieces: list[Piece] = []
        for content, tokens in prompt:
            start = 0
            while start < tokens:
                take = min(room, tokens - start)
                pieces.append((content, start, take))
                start += take
                room -= take
                if not room:
                    parent = self._id(parent, pieces)
                    ids.append(parent)
                    pieces, room = [], self.block_tokens
        if pieces:
            ids.append(self._id(parent, pieces))
        return tuple(ids)

    def _id(self, parent: int, pieces: list[Piece]) -> int:
        return self._ids.setdefault((parent, tuple(pieces)), len(self._ids))


def generate(
    profile: Profile | str,
    *,
    requests: int,
    seed: int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    sessions_per_s: float | None = None,
) -> Iterator[Request]:
    """Exactly `requests` requests of a profile (or the name of one), in order of arrival.

    `sessions_per_s` replaces the profile's own rate; prompts stay the same. Streamed: memory
    grows with the sessions in flight and the different blocks. Raises ValueError for an
    unknown profile, a negative number of requests, an empty block, a rate that is none.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ValueError(f"there is no profile {profile!r}; the profiles are {known}")
        profile = PROFILES[profile]
    if sessions_per_s is not None:
        if not 0 < sessions_per_s < inf:
            raise ValueError(f"sessions per second must be above 0, got {sessions_per_s}")
        arrivals = replace(profile.arrivals, sessions_per_s=sessions_per_s)
        profile = replace(profile, arrivals=arrivals)
    if requests < 0:
        raise ValueError(f"the number of requests must not be negative, got {requests}")
    if block_tokens < 1:
        raise ValueError(f"a block must have at least one token, got {block_tokens}")
    return _generate(profile, requests, seed, BlockIds(block_tokens))


def _generate(profile: Profile, requests: int, seed: int, blocks: BlockIds) -> Iterator[Request]:
    arrivals = Random(f"{profile.name}/{seed}/arrivals")
    next_arrival_s = 0.0
    planned = 0
    # In flight: when the next request arrives, session number (no two alike, so that turns are
    # never compared), the request, and the ones after it.
    flight: list[tuple[float, int, Turn, Iterator[Turn]]] = []
    for session_number in count():
        if planned == requests:
            break
        yield from _until(next_arrival_s, flight, blocks)
        random = Random(f"{profile.name}/{seed}/{session_number}")
        turns = min(profile.turns(random), requests - planned)
        planned += turns
        coming = profile.session(session_number, turns, random)
        heapq.heappush(flight, (next_arrival_s, session_number, next(coming), coming))
        next_arrival_s += profile.arrivals.gap_s(arrivals)
    yield from _until(inf, flight, blocks)


def _until(
    end_s: float, flight: list[tuple[float, int, Turn, Iterator[Turn]]], blocks: BlockIds
) -> Iterator[Request]:
    """Send what arrives before `end_s`, and put each session's next request in its place."""
    while flight and flight[0][0] < end_s:
        arrival_s, session_number, turn, coming = flight[0]
        input_length = sum(tokens for _, tokens in turn.prompt)
        ids = blocks.of(turn.prompt)
        yield Request(int(arrival_s * 1000), input_length, turn.output_tokens, ids)
        if (following := next(coming, None)) is None:
            heapq.heappop(flight)
        else:
            due_s = arrival_s + following.delay_s
            heapq.heapreplace(flight, (due_s, session_number, following, coming))
