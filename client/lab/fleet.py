"""A simulated fleet: one trace over several nodes, and what they gain by sharing blocks.

Every node has its own LRU over blocks, as `replay` has with `TouchOrder.ROOT_MRU`. There may be one
more LRU that all share (a shared tier), and nodes may read from each other. Every block weighs 1.
Block i of a request (from 0) stands for min(block_tokens, input_length - i * block_tokens) tokens,
and for none after the prompt's end. Requests are served one at a time:

1. A route picks the node of request r (from 0):
   - `round-robin`: node r mod n;
   - `hash`: the CRC32 of the first two block numbers (8 bytes each, little-endian, numbered by
     first appearance in the trace) mod n;
   - `least-loaded`: the node with the least load, the first of equals;
   - `cache-aware`: the node that a router chooses (`client.routing`, whose code this runs) that
     knows the LRUs.
   A node's load is the tokens that it prefilled lately (`routing.RecentLoads`): with each request,
   all loads lose 1 part in 32 n, before the request's own tokens are added.
2. The blocks are walked root first. A block in the node's LRU counts as local, one in the shared
   LRU as shared and, with peer reads, one in another node's LRU as peer (from the first node that
   has it). The first block in none of them ends the walk. All tokens after the walk are prefilled.
3. The shared LRU is touched for the blocks that it gave, leaf first. So are the LRUs of other
   nodes, because a read claims what it reads.
4. All blocks of the request enter or touch the node's LRU, leaf first.
5. Blocks enter the shared LRU, leaf first. `all`: those after the walk; one that is in it already
   is touched. `second-use`: every block that an earlier request of the fleet had, unless the shared
   LRU holds it.

Nothing takes time in the simulation: a block is available to the next request. A block moves over
the network once when it is read from another node or the shared tier, and once when it enters the
shared tier.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from time import perf_counter
from typing import Any, Final

from ... import __version__
from ...proto.limits import DEFAULT_BLOCK_TOKENS
from ...tiers.eviction.lru import LRU
from ..routing import RecentLoads, choose
from .trace import TraceColumns, tokens_of_blocks

#: More is a likely mistake: the time of some routes grows with requests times nodes.
MAX_NODES: Final = 4096
#: Leading blocks that `hash` uses. The first block alone is often common to all requests.
_HASHED_BLOCKS: Final = 2


class Route(StrEnum):
    """How a balancer picks the node of a request."""

    ROUND_ROBIN = "round-robin"
    HASH = "hash"
    LEAST_LOADED = "least-loaded"
    CACHE_AWARE = "cache-aware"


class WriteRule(StrEnum):
    """Which blocks enter the shared LRU."""

    ALL = "all"
    SECOND_USE = "second-use"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to simulate. Without a shared tier `shared_blocks` is 0.

    Raises ValueError for fewer nodes than one or more than `MAX_NODES`, and for a negative number
    of blocks.
    """

    nodes: int
    capacity_blocks: int
    route: Route = Route.ROUND_ROBIN
    shared_blocks: int = 0
    write: WriteRule = WriteRule.ALL
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
        """The same nodes with every route, each without sharing, with peer reads, with the shared
        tier if this fleet has one, and with both if it has both."""
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
    """A number of blocks, and the prompt tokens that they stand for."""

    blocks: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Add one block that stands for `tokens`."""
        self.blocks += 1
        self.tokens += tokens

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.blocks + other.blocks, self.tokens + other.tokens)


@dataclass(slots=True)
class SimulatedNode:
    """One node."""

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


@dataclass(slots=True)
class FleetResult:
    """The result of one simulation. `seconds` excludes reading the trace."""

    fleet: Fleet
    nodes: list[SimulatedNode]
    shared_lru: LRU[int]
    #: Hits in the node's own LRU, in the shared one, in the LRUs of other nodes.
    local: Amount = field(default_factory=Amount)
    shared: Amount = field(default_factory=Amount)
    peer: Amount = field(default_factory=Amount)
    #: Blocks that entered the shared LRU and were not in it.
    written: Amount = field(default_factory=Amount)
    seconds: float = 0.0

    @property
    def total_prompt_tokens(self) -> int:
        return sum(node.prompt_tokens for node in self.nodes)

    @property
    def final_shared_blocks(self) -> int:
        return len(self.shared_lru)

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

        `bytes_per_token` adds the bytes that move, and a `duration_s` above 0 the mean bytes a
        second over that time. Unknown values are None.
        """
        moves: dict[str, dict[str, float | None]] = {}
        for name, amount in (
            ("shared_reads", self.shared),
            ("shared_writes", self.written),
            ("peer_reads", self.peer),
            ("total", self.shared + self.written + self.peer),
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


def simulate_fleet(
    trace: TraceColumns, fleet: Fleet, *, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> FleetResult:
    """Run a trace through a fleet. Raises ValueError when a block has no tokens."""
    if block_tokens < 1:
        raise ValueError(f"a block must have at least one token, got {block_tokens}")
    nodes = [SimulatedNode(LRU(fleet.capacity_blocks)) for _ in range(fleet.nodes)]
    result = FleetResult(fleet, nodes, LRU(fleet.shared_blocks))
    simulation = _Simulation(result, _SimulatedRouter(fleet, nodes, block_tokens), block_tokens)
    started = perf_counter()
    for number, (blocks, input_length) in enumerate(trace):
        simulation.serve(number, blocks, input_length)
    result.seconds = perf_counter() - started
    return result


class _SimulatedRouter:
    """A router before the fleet. Nodes are called by their numbers."""

    def __init__(self, fleet: Fleet, nodes: Sequence[SimulatedNode], block_tokens: int) -> None:
        self._fleet = fleet
        self._block_tokens = block_tokens
        self._lrus = {str(number): node.lru for number, node in enumerate(nodes)}
        self._loads = RecentLoads(self._lrus)

    def node_of(self, number: int, blocks: Sequence[int]) -> int:
        """The node of a request: its number in the trace, its blocks root first."""
        match self._fleet.route:
            case Route.ROUND_ROBIN:
                return number % self._fleet.nodes
            case Route.HASH:
                head = blocks[:_HASHED_BLOCKS]
                return zlib.crc32(struct.pack(f"<{len(head)}Q", *head)) % self._fleet.nodes
            case Route.LEAST_LOADED:
                return int(min(self._loads, key=self._loads.__getitem__))
            case Route.CACHE_AWARE:
                block_load = self._loads.of(self._block_tokens)
                choice = choose(blocks, self._lrus, self._loads, block_load)
                assert choice is not None  # a fleet has at least one node
                return int(choice.node)

    def sent(self, node: int, prefilled_tokens: int) -> None:
        """A request went to a node, which prefills so many tokens."""
        self._loads.add(str(node), prefilled_tokens)


@dataclass(slots=True)
class _Simulation:
    result: FleetResult
    router: _SimulatedRouter
    block_tokens: int
    #: Blocks of earlier requests have numbers below this, because numbers follow first appearance.
    known_blocks: int = 0

    def serve(self, number: int, blocks: list[int], input_length: int) -> None:
        """Serve one request: its number in the trace, its blocks root first, its prompt tokens."""
        tokens = tokens_of_blocks(len(blocks), input_length, self.block_tokens)
        chosen = self.router.node_of(number, blocks)
        node = self.result.nodes[chosen]
        walked = self._walk(node, blocks, tokens)
        node.requests += 1
        node.prompt_tokens += input_length
        prefilled = input_length - sum(tokens[:walked])
        node.prefilled_tokens += prefilled
        self.router.sent(chosen, prefilled)
        node.lru.access_run(blocks[::-1])
        if self.result.fleet.shared_blocks:
            self._share(blocks, tokens, walked)
        self.known_blocks = max(self.known_blocks, max(blocks, default=-1) + 1)

    def _walk(self, node: SimulatedNode, blocks: Sequence[int], tokens: Sequence[int]) -> int:
        """Count the hits from the root on, touch the LRUs that gave them; returns how many."""
        own, shared, result = node.lru, self.result.shared_lru, self.result
        walked = 0
        givers: list[tuple[LRU[int], int]] = []
        for block, block_tokens in zip(blocks, tokens, strict=True):
            if block in own:
                result.local.add(block_tokens)
            elif block in shared:
                result.shared.add(block_tokens)
                givers.append((shared, block))
            elif self.result.fleet.peer_reads and (peer := self._holder(block)) is not None:
                result.peer.add(block_tokens)
                givers.append((peer, block))
            else:
                break
            walked += 1
        for lru, block in reversed(givers):
            lru.refresh(block)
        return walked

    def _holder(self, block: int) -> LRU[int] | None:
        """The LRU of the first node that holds the block."""
        for node in self.result.nodes:
            if block in node.lru:
                return node.lru
        return None

    def _share(self, blocks: Sequence[int], tokens: Sequence[int], walked: int) -> None:
        shared = self.result.shared_lru
        second_use = self.result.fleet.write is WriteRule.SECOND_USE
        for index in reversed(range(0 if second_use else walked, len(blocks))):
            block = blocks[index]
            if second_use and (block >= self.known_blocks or block in shared):
                continue
            if not shared.access(block):
                self.result.written.add(tokens[index])


def fleet_document(
    title: str,
    trace: dict[str, Any],
    result: FleetResult,
    *,
    compared: Sequence[FleetResult] = (),
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    bytes_per_token: int | None = None,
) -> dict[str, Any]:
    """The data that `prefixctl simulate` writes as JSON, and that its tables and its page show.

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
