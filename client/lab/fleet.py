"""A fleet in simulation: one trace over several nodes, and what they gain by sharing blocks.

Every node has an LRU of its own over blocks, as `replay` has with `TouchOrder.ROOT_MRU`; beside
them there may be one shared LRU for all (a shared tier), and nodes may read from each other. Every
block weighs 1; block i of a request (from 0) stands for min(block_tokens, input_length -
i * block_tokens) tokens, and for none behind the prompt's end. Requests are served one at a time:

1. A route picks the node of request r (from 0):
   - `round-robin`: node r mod n;
   - `hash`: the CRC32 of the first two block numbers (8 bytes each, little-endian, numbered by
     first appearance in the trace) mod n;
   - `least-loaded`: the node that has prefilled the fewest tokens so far, the first of equals;
   - `prefix-aware`: the node that would then have prefilled the fewest tokens, this request
     included, of which it saves the longest run that the node's own LRU holds.
2. The blocks are walked root first. A block in the node's LRU counts as local, one in the shared
   LRU as shared, with peer reads one in another node's LRU as peer (the first node that has it
   gives it); the first in none of them ends the walk. All tokens behind the walk are prefilled.
3. The shared LRU is touched for the blocks that it gave, leaf first; likewise the LRUs of other
   nodes, since a read claims what it reads.
4. All blocks of the request enter or touch the node's LRU, leaf first.
5. Blocks enter the shared LRU, leaf first. `all`: those behind the walk; one that is there already
   is touched. `second-use`: every block that an earlier request of the fleet had, unless the
   shared LRU holds it.

Nothing takes time here, so a block is there for the very next request, and load is the tokens
prefilled since the start. Each block that is read from elsewhere, or that enters the shared LRU,
moves over the network once.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from time import perf_counter
from typing import Any, Final

from ... import __version__
from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.lru import LRU
from .trace import TraceColumns

#: More than this is a slip: the time of some routes grows with requests times nodes.
MAX_NODES: Final = 4096
#: Leading blocks that `hash` looks at. One is not enough: it is often common to all requests.
_HASHED_BLOCKS: Final = 2


class Route(StrEnum):
    """How a balancer picks the node of a request."""

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    LEAST_LOADED = "least-loaded"
    PREFIX_AWARE = "prefix-aware"


class Write(StrEnum):
    """Which blocks enter the shared LRU."""

    ALL = "all"
    SECOND_USE = "second-use"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to simulate. `shared_blocks` 0: no shared tier.

    Raises ValueError for fewer nodes than one or more than `MAX_NODES`, and for a negative number
    of blocks.
    """

    nodes: int
    capacity_blocks: int
    route: Route = Route.ROUND_ROBIN
    shared_blocks: int = 0
    write: Write = Write.ALL
    peer_reads: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a fleet has 1 to {MAX_NODES:,} nodes, got {self.nodes}")
        for what, blocks in (
            ("capacity of a node", self.capacity_blocks),
            ("number of shared blocks", self.shared_blocks),
        ):
            if blocks < 0:
                raise ValueError(f"the {what} must not be negative, got {blocks}")

    def alternatives(self) -> list[Fleet]:
        """This fleet's nodes under every route, each without sharing, with peer reads, with the
        shared tier if this fleet has one, and with both if it has both."""
        ways = [(0, False), (0, True)]
        if self.shared_blocks:
            ways.append((self.shared_blocks, False))
            if self.peer_reads:
                ways.append((self.shared_blocks, True))
        return [
            replace(self, route=route, shared_blocks=shared_blocks, peer_reads=peer_reads)
            for route in Route
            for shared_blocks, peer_reads in ways
        ]


@dataclass(slots=True)
class Amount:
    """Blocks, and the prompt tokens that they stand for."""

    blocks: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Count one block, which stands for `tokens`."""
        self.blocks += 1
        self.tokens += tokens


@dataclass(slots=True)
class Node:
    """One node: its LRU, and what it was given to do."""

    lru: LRU[int]
    requests: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.prompt_tokens - self.prefilled_tokens,
            "prefilled_tokens": self.prefilled_tokens,
        }


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What one simulation found. `seconds` is the simulation alone, without reading the trace."""

    fleet: Fleet
    total_prompt_tokens: int
    #: hits in the node's own LRU, in the shared one, in the LRUs of other nodes
    local: Amount
    shared: Amount
    peer: Amount
    #: what entered the shared LRU and was not there
    written: Amount
    final_shared_blocks: int
    nodes: tuple[Node, ...]
    seconds: float

    @property
    def total_hit_tokens(self) -> int:
        return self.local.tokens + self.shared.tokens + self.peer.tokens

    @property
    def overall_hit_rate(self) -> float:
        """Hit tokens of all requests over their prompt tokens, 0 to 1."""
        return self.total_hit_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def to_json(
        self, *, bytes_per_token: int | None = None, duration_s: float = 0.0
    ) -> dict[str, Any]:
        """This simulation as plain values.

        `bytes_per_token` adds the bytes of what moves; a `duration_s` above 0 the mean bytes a
        second over that time. What is not known is None.
        """
        moves: dict[str, dict[str, float | None]] = {}
        for name, amount in (
            ("shared_reads", self.shared),
            ("shared_writes", self.written),
            ("peer_reads", self.peer),
            ("total", _sum(self.shared, self.written, self.peer)),
        ):
            bytes_ = None if bytes_per_token is None else amount.tokens * bytes_per_token
            rate = None if bytes_ is None or duration_s <= 0 else bytes_ / duration_s
            moves[name] = {**asdict(amount), "bytes": bytes_, "bytes_per_second": rate}
        return {
            **asdict(self.fleet),
            "total_hit_tokens": self.total_hit_tokens,
            "local_hit_tokens": self.local.tokens,
            "shared_hit_tokens": self.shared.tokens,
            "peer_hit_tokens": self.peer.tokens,
            "total_prompt_tokens": self.total_prompt_tokens,
            "prefilled_tokens": self.total_prompt_tokens - self.total_hit_tokens,
            "overall_hit_rate": self.overall_hit_rate,
            "local_hit_blocks": self.local.blocks,
            "shared_hit_blocks": self.shared.blocks,
            "peer_hit_blocks": self.peer.blocks,
            "moved": moves,
            "final_shared_blocks": self.final_shared_blocks,
            "shared_evictions": self.written.blocks - self.final_shared_blocks,
            "per_node": [node.to_json() for node in self.nodes],
            "seconds": self.seconds,
        }


def _sum(*amounts: Amount) -> Amount:
    return Amount(sum(each.blocks for each in amounts), sum(each.tokens for each in amounts))


def simulate_fleet(
    trace: TraceColumns, fleet: Fleet, *, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> FleetResult:
    """Run a trace through a fleet. Raises ValueError when a block has no tokens."""
    if block_tokens < 1:
        raise ValueError(f"a block must have at least one token, got {block_tokens}")
    run = _Run(fleet, block_tokens)
    started = perf_counter()
    for number, (blocks, input_length) in enumerate(trace):
        run.serve(number, blocks, input_length)
    seconds = perf_counter() - started
    return FleetResult(
        fleet=fleet,
        total_prompt_tokens=trace.prompt_tokens,
        local=run.local,
        shared=run.shared,
        peer=run.peer,
        written=run.written,
        final_shared_blocks=len(run.shared_lru),
        nodes=tuple(run.nodes),
        seconds=seconds,
    )


@dataclass(slots=True)
class _Run:
    """The state of one simulation."""

    fleet: Fleet
    block_tokens: int
    nodes: list[Node] = field(init=False)
    shared_lru: LRU[int] = field(init=False)
    local: Amount = field(default_factory=Amount)
    shared: Amount = field(default_factory=Amount)
    peer: Amount = field(default_factory=Amount)
    written: Amount = field(default_factory=Amount)
    #: Blocks of earlier requests: all numbers below this, as they are given by first appearance.
    known_blocks: int = 0

    def __post_init__(self) -> None:
        self.nodes = [Node(LRU(self.fleet.capacity_blocks)) for _ in range(self.fleet.nodes)]
        self.shared_lru = LRU(self.fleet.shared_blocks)

    def serve(self, number: int, blocks: list[int], input_length: int) -> None:
        """One request: its number in the trace, its blocks root first, its prompt tokens."""
        full, rest = divmod(input_length, self.block_tokens)
        tokens = [self.block_tokens] * min(full, len(blocks))
        tokens += [rest, *(0 for _ in blocks)][: len(blocks) - len(tokens)]
        node = self.nodes[self._route(number, blocks, input_length)]
        walked = self._walk(node, blocks, tokens)
        node.requests += 1
        node.prompt_tokens += input_length
        node.prefilled_tokens += input_length - sum(tokens[:walked])
        node.lru.access_run(blocks[::-1])
        if self.fleet.shared_blocks:
            self._share(blocks, tokens, walked)
        self.known_blocks = max(self.known_blocks, max(blocks, default=-1) + 1)

    def _route(self, number: int, blocks: Sequence[int], input_length: int) -> int:
        match self.fleet.route:
            case Route.ROUND_ROBIN:
                return number % len(self.nodes)
            case Route.HASH:
                head = blocks[:_HASHED_BLOCKS]
                return zlib.crc32(struct.pack(f"<{len(head)}Q", *head)) % len(self.nodes)
            case Route.LEAST_LOADED:
                return _least(self.nodes, lambda node: node.prefilled_tokens)
            case Route.PREFIX_AWARE:

                def prefilled_then(node: Node) -> int:
                    saved_tokens = node.lru.resident_run(blocks) * self.block_tokens
                    return node.prefilled_tokens + max(0, input_length - saved_tokens)

                return _least(self.nodes, prefilled_then)

    def _walk(self, node: Node, blocks: Sequence[int], tokens: Sequence[int]) -> int:
        """Count the hits from the root on, touch what gave them, and return how many there are."""
        own, shared = node.lru, self.shared_lru
        walked = 0
        givers: list[tuple[LRU[int], int]] = []
        for block, block_tokens in zip(blocks, tokens, strict=True):
            if block in own:
                self.local.add(block_tokens)
            elif block in shared:
                self.shared.add(block_tokens)
                givers.append((shared, block))
            elif self.fleet.peer_reads and (peer := self._holder(block)) is not None:
                self.peer.add(block_tokens)
                givers.append((peer, block))
            else:
                break
            walked += 1
        for lru, block in reversed(givers):
            lru.refresh(block)
        return walked

    def _holder(self, block: int) -> LRU[int] | None:
        """The LRU of the first node that has the block."""
        for node in self.nodes:
            if block in node.lru:
                return node.lru
        return None

    def _share(self, blocks: Sequence[int], tokens: Sequence[int], walked: int) -> None:
        shared = self.shared_lru
        second_use = self.fleet.write is Write.SECOND_USE
        for index in reversed(range(0 if second_use else walked, len(blocks))):
            block = blocks[index]
            if second_use and (block >= self.known_blocks or block in shared):
                continue
            if not shared.access(block):
                self.written.add(tokens[index])


def _least(nodes: Sequence[Node], cost: Callable[[Node], int]) -> int:
    costs = [cost(node) for node in nodes]
    return costs.index(min(costs))


def fleet_document(
    title: str,
    trace: dict[str, Any],
    result: FleetResult,
    *,
    compared: Sequence[FleetResult] = (),
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    bytes_per_token: int | None = None,
) -> dict[str, Any]:
    """What `prefixctl simulate` writes as JSON, and what its tables and its page show.

    `trace` is a `TraceSummary` as JSON, with `duration_s`. `compared` are results of other fleets
    on the same trace.
    """
    sizes: dict[str, Any] = {
        "bytes_per_token": bytes_per_token,
        "duration_s": trace["duration_s"],
    }
    others = [each.to_json(**sizes) for each in compared]
    for other in others:
        del other["per_node"]
    return {
        "title": title,
        "prefixd_version": __version__,
        "block_tokens": block_tokens,
        "bytes_per_token": bytes_per_token,
        "trace": trace,
        **result.to_json(**sizes),
        "compared": others,
    }
