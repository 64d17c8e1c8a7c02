"""Which node of a fleet should serve a prompt: the one that has most of it, unless it is too busy.

    with Router({"a": "10.0.0.5:7070", "b": "10.0.0.6:7070"}) as router:
        choice = router.best_node(block_keys(namespace, tokens, 512), {"a": 3.0, "b": 0.5})

A `Router` watches the daemons and keeps the keys of each in a compact set (`CompactKeys`: at most
16 bytes a key and node, and no false positive that a test can find). The rule of `best_node`:

1. The candidates are the nodes in `loads`. A node's run is the number of the chain's leading blocks
   that it has.
2. The idle node is the one with the least load; of equals the one with the longest run, then the
   first.
3. The warm node is the one with the longest run; of equals the one with the least load, then the
   first.
4. The warm node is chosen if its run is longer than the idle node's by at least a 50th of the
   chain, and its load is at most twice the mean of all candidates plus 16 times the load of the
   blocks that this saves (`block_load`); else the idle one. 16 times: the next prompts that begin
   alike find their blocks in one place, too.

So prompts stay with their blocks as long as that saves work, and no node gets far more than its
share. `prefixctl simulate --route cache-aware` runs this code on a trace.

What a node has is a hint, and a moment old. A choice that turns out wrong is a miss there.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Self, TypeVar

from ..proto import prefixd_pb2 as pb
from ..proto.errors import PrefixdError
from ..proto.keys import Key
from ..proto.namespaces import TenantNamespace
from ..proto.vocabulary import Tier
from .watch import Cleared, Disconnected, Evicted, Published, Synced, Watch, WatchEvent

logger = logging.getLogger("prefixd.client")
T = TypeVar("T")

#: A longer run has to save at least one part in this many of the chain ...
WORTH_PART: Final = 50
#: ... and the load of its node may be at most this many times the mean.
MOST_LOAD: Final = 2.0
#: ... plus so many times what that saves.
SAVED_TIMES: Final = 16
#: `RecentLoads`: how many requests a node remembers its load for, on average.
REMEMBERED: Final = 32
_KIND: Final = attrgetter("kind")
#: Above this, `RecentLoads` returns to small numbers.
_MOST_WEIGHT: Final = 1e100
#: Of a key, the bytes that its mark is made of.
MARK_BYTES: Final = 8
_LEAST_SLOTS: Final = 16


def mark_of(key: bytes) -> int:
    """The mark of a key: its first 8 bytes, a number in little-endian (0 counts as 1)."""
    return int.from_bytes(key[:MARK_BYTES], "little") or 1


class CompactKeys:
    """A set of keys, by their marks. One thread at a time may change it. `in` may run on others
    meanwhile, and then miss a key that is there.

    Keys are SHA-256, so two keys of a node with the same mark are as likely as a collision of 64
    random bits: of 32,768 keys and one that is not among them, 1.8e-15. Such a key would count as
    resident, or leave with the other one. For routing that is exact enough, because the node checks
    the whole key.

    The marks lie in one array, hashed by division, with linear probing. Removing moves later marks
    back, so nothing is left behind. The array has 4/3 to 2 slots for each key, which is at most 16
    bytes a key (and 128 bytes at least).
    """

    __slots__ = ("_count", "_slots")

    def __init__(self) -> None:
        #: Marks; 0: an empty slot. At least one slot is empty.
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """The memory of the array."""
        return len(self._slots) * self._slots.itemsize

    def __contains__(self, mark: object) -> bool:
        """Whether the key with this mark is in the set."""
        if not isinstance(mark, int):
            return False
        slots = self._slots
        room = len(slots)
        at = mark % room
        while held := slots[at]:
            if held == mark:
                return True
            at = at + 1 if at + 1 < room else 0
        return False

    def add(self, marks: Iterable[int]) -> None:
        """Add keys by their marks."""
        slots, count = self._slots, self._count
        room = len(slots)
        for mark in marks:
            at = mark % room
            while held := slots[at]:
                if held == mark:
                    break
                at = at + 1 if at + 1 < room else 0
            else:
                slots[at] = mark
                count += 1
                if 4 * count > 3 * room:
                    room = 2 * count
                    slots = self._moved_to(room)
        self._count = count

    def discard(self, marks: Iterable[int]) -> None:
        """Remove those of these keys that are in the set."""
        for mark in marks:
            self._discard(mark)

    def _discard(self, mark: int) -> None:
        slots = self._slots
        room = len(slots)
        at = mark % room
        while (held := slots[at]) != mark:
            if not held:
                return
            at = at + 1 if at + 1 < room else 0
        # Fill the gap with a later mark that may lie there, then the gap that this leaves.
        gap = at
        while True:
            at = at + 1 if at + 1 < room else 0
            held = slots[at]
            if not held:
                break
            if (at - held) % room >= (at - gap) % room:
                slots[gap] = held
                gap = at
        slots[gap] = 0
        self._count -= 1
        if 2 * self._count < room and room > _LEAST_SLOTS:
            self._moved_to(max(_LEAST_SLOTS, 3 * self._count // 2))

    def _moved_to(self, room: int) -> array[int]:
        """New slots, with the same marks."""
        slots = array("Q", bytes(8 * room))
        for mark in self._slots:
            if mark:
                at = mark % room
                while slots[at]:
                    at = at + 1 if at + 1 < room else 0
                slots[at] = mark
        self._slots = slots
        return slots


class Choice(NamedTuple):
    """The node for a prompt, and how many leading blocks of its chain the node has."""

    node: str
    blocks: int


class RecentLoads(dict[str, float]):
    """The loads of nodes, for a router that has no better measure: the work that each was given
    lately. With every addition all loads lose one part in 32 n.

    In a unit of its own: the numbers compare with each other, and with `of`. What was given long
    ago doesn't weigh: a router that adds up everything since its start sends prompts away from
    their blocks to make up for old differences.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        """None of the nodes has a load."""
        super().__init__(dict.fromkeys(nodes, 0.0))
        #: What a token counts now. It grows, in place of every load losing its part.
        self._weight = 1.0

    def of(self, tokens: float) -> float:
        """The load of so many tokens that are given now."""
        return tokens * self._weight

    def add(self, node: str, tokens: float) -> None:
        """A node was given a prompt, of which it has to prefill so many tokens."""
        self._weight /= 1 - 1 / (REMEMBERED * len(self))
        self[node] += self.of(tokens)
        if self._weight > _MOST_WEIGHT:
            for each in self:
                self[each] /= self._weight
            self._weight = 1.0


class NodeKeys:
    """The keys of one node, from the events of a watch in their order.

    While the daemon lists everything anew, the earlier keys stay.
    """

    def __init__(self) -> None:
        self.keys = CompactKeys()
        self._coming: CompactKeys | None = None
        #: Are these exactly the daemon's keys, as of the last event?
        self.exact = False

    def published(self, marks: Iterable[int]) -> None:
        """Keys can be found from now on."""
        (self.keys if self._coming is None else self._coming).add(marks)

    def evicted(self, marks: Iterable[int]) -> None:
        """Keys can't be found any more."""
        (self.keys if self._coming is None else self._coming).discard(marks)

    def cleared(self) -> None:
        """Everything is listed anew from here on."""
        self._coming = CompactKeys()
        self.exact = False

    def synced(self) -> None:
        """The list is complete."""
        if self._coming is not None:
            self.keys, self._coming = self._coming, None
        self.exact = True

    def disconnected(self) -> None:
        """What the daemon has is not known any more."""
        self.exact = False

    @property
    def size_bytes(self) -> int:
        """The memory of the sets."""
        coming = 0 if self._coming is None else self._coming.size_bytes
        return self.keys.size_bytes + coming


class RoutingTable:
    """What each node of a fleet has, from the events of their watches, and the choice of a node.
    Does no I/O. One thread at a time may change a node; any may call `best_node` meanwhile."""

    def __init__(self, namespace: str | None = None) -> None:
        """`namespace`: the one that the clients' tokens are bound to, if any, as for
        `ResidentKeys`. Raises ValueError for what is no namespace."""
        self._namespace = None if namespace is None else TenantNamespace(namespace)
        self.nodes: dict[str, NodeKeys] = {}

    def apply(self, node: str, event: WatchEvent) -> None:
        """Take the next event of a node's watch."""
        keys = self.nodes.get(node)
        if keys is None:
            keys = self.nodes[node] = NodeKeys()
        match event:
            case Published():
                keys.published((mark_of(event.key),))
            case Evicted():
                keys.evicted((mark_of(event.key),))
            case Cleared():
                keys.cleared()
            case Synced():
                keys.synced()
            case Disconnected():
                keys.disconnected()

    def best_node(
        self, chain: Sequence[Key], loads: Mapping[str, float], *, block_load: float = 0.0
    ) -> Choice | None:
        """The node for a prompt, by the rule above. None: there is no candidate.

        `chain`: the keys of its blocks, root first. `loads`: the candidates, each with its load in
        any unit, 0 when idle; leave out those that are down. `block_load`: what a block that has to
        be prefilled adds to a load, in the same unit; 0: not known. A node that is not followed has
        nothing.
        """
        nodes = self.nodes
        sets = {name: nodes[name].keys for name in loads if name in nodes}
        return choose(_Marks(chain, self._namespace), sets, loads, block_load)


def choose(
    chain: Sequence[T],
    sets: Mapping[str, Container[T]],
    loads: Mapping[str, float],
    block_load: float = 0.0,
) -> Choice | None:
    """The rule, of any kind of blocks. `sets`: those of each node; without one it has nothing."""
    if not loads:
        return None
    runs = _Runs(chain, sets, loads)
    least = min(loads.values())
    while True:
        idle = max((node for node, load in loads.items() if load == least), key=runs.of)
        if not runs.verify(idle):
            continue
        warm = min(runs.found, key=lambda node: (-runs.of(node), loads[node]), default=idle)
        if runs.verify(warm):
            break
    saved = runs.of(warm) - runs.of(idle)
    mean = sum(loads.values()) / len(loads)
    most = MOST_LOAD * mean + SAVED_TIMES * saved * block_load
    worth_it = WORTH_PART * saved >= len(chain) and loads[warm] <= most
    node = warm if worth_it else idle
    return Choice(node, runs.of(node))


class _Marks(Sequence[int]):
    """The marks of a chain's keys, each made when it is first needed."""

    def __init__(self, chain: Sequence[Key], namespace: TenantNamespace | None) -> None:
        self._chain = chain
        self._namespace = namespace
        self._made: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._chain)

    def __getitem__(self, number: int) -> int:  # type: ignore[override]  # nobody takes a slice
        mark = self._made.get(number)
        if mark is None:
            key = self._chain[number]
            if self._namespace is not None:
                (key,) = self._namespace.stored([key])
            mark = self._made[number] = mark_of(key)
        return mark


class _Runs(Generic[T]):
    """How many leading blocks of a chain each candidate has.

    Found by a binary search, because a node seldom has a block without those before it. Where it
    does, the result is too large, never too small; `verify` counts.
    """

    def __init__(
        self, chain: Sequence[T], sets: Mapping[str, Container[T]], candidates: Iterable[str]
    ) -> None:
        self._chain = chain
        self._sets = sets
        self._verified: set[str] = set()
        #: The candidates that have the first block, in their order, with their runs.
        self.found: dict[str, int] = {}
        if chain:
            first = chain[0]
            for node in candidates:
                blocks = sets.get(node, ())
                if first in blocks:
                    self.found[node] = self._searched(blocks)

    def of(self, node: str) -> int:
        return self.found.get(node, 0)

    def verify(self, node: str) -> bool:
        """Whether the run of a node was right. If not, it is now."""
        run = self.of(node)
        if run < 3 or node in self._verified:
            return True  # two blocks were looked at one by one
        self._verified.add(node)
        chain, blocks = self._chain, self._sets[node]
        right = next((n for n in range(1, run) if chain[n] not in blocks), run)
        self.found[node] = right
        return right == run

    def _searched(self, blocks: Container[T]) -> int:
        """The run of a node that has the first block. Most have few more, so its length is doubled
        until a block is missing."""
        chain = self._chain
        there, missing, step = 0, len(chain), 1
        while there + step < missing:
            if chain[there + step] in blocks:
                there += step
                step *= 2
            else:
                missing = there + step
        while missing - there > 1:
            middle = (there + missing) // 2
            if chain[middle] in blocks:
                there = middle
            else:
                missing = middle
        return missing


@dataclass(frozen=True, slots=True)
class FollowedNode:
    """What a router knows of a node."""

    #: The number of its keys, and the memory that they take.
    keys: int
    size_bytes: int
    #: Are these exactly the daemon's keys, as of its last event?
    exact: bool
    #: Why the daemon can't be watched at this moment; empty: it can.
    problem: str


class Router:
    """A `RoutingTable` that watches the daemons of its nodes, on a thread for each. A context
    manager. Thread-safe.

    While a daemon can't be reached, its node keeps what it had; leave it out of `loads` if it is
    down. The router watches again as soon as the daemon answers, and the daemon lists everything
    anew if it no longer knows what happened meanwhile.
    """

    def __init__(
        self,
        nodes: Mapping[str, str] | None = None,
        *,
        namespace: str | None = None,
        tiers: Sequence[Tier] = (),
        watch: Callable[..., Watch] = Watch,
    ) -> None:
        """`nodes`: see `follow`. `namespace`: see `RoutingTable`. `tiers`: empty for all. `watch`
        makes a watch of an address and `tiers`. Raises ValueError, and what `follow` raises."""
        self._table = RoutingTable(namespace)
        self._tiers = tuple(tiers)
        self._make_watch = watch
        self._followers: dict[str, _Follower] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.follow(nodes or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def follow(self, nodes: Mapping[str, str]) -> None:
        """Watch these nodes, and no others: the address of each daemon by the name of its node, as
        for `Watch`. Raises ConfigError, and DaemonUnavailable where a daemon can't be watched;
        nothing has changed then."""
        with self._changed:
            kept = {
                name: follower
                for name, follower in self._followers.items()
                if nodes.get(name) == follower.address
            }
            new = {
                name: _Follower(self, address, self._make_watch(address, tiers=self._tiers))
                for name, address in nodes.items()
                if name not in kept
            }
            left = [each for name, each in self._followers.items() if name not in kept]
            self._followers = kept | new
            self._table.nodes = {name: each.keys for name, each in self._followers.items()}
            if self._closed:
                left += new.values()
            else:
                for follower in new.values():
                    follower.start()
        for follower in left:
            follower.watch.close()

    def best_node(
        self, chain: Sequence[Key], loads: Mapping[str, float], *, block_load: float = 0.0
    ) -> Choice | None:
        """See `RoutingTable.best_node`."""
        return self._table.best_node(chain, loads, block_load=block_load)

    def nodes(self) -> dict[str, FollowedNode]:
        """What is known of each node."""
        with self._changed:
            followers = dict(self._followers)
        return {
            name: FollowedNode(
                len(each.keys.keys), each.keys.size_bytes, each.keys.exact, each.problem
            )
            for name, each in followers.items()
        }

    def wait(self, timeout_s: float) -> bool:
        """Wait until every key of every node is known. False: that took too long."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not all(each.keys.exact for each in self._followers.values()):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._closed:
                    return False
                self._changed.wait(left_s)
            return True

    def changed(self) -> None:
        """A node's keys are known, or are not any more."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        with self._changed:
            self._closed = True
            followers = list(self._followers.values())
            self._changed.notify_all()
        for follower in followers:
            follower.watch.close()
        for follower in followers:
            if follower.is_alive() and follower is not threading.current_thread():
                follower.join()


class _Follower(threading.Thread):
    """Follows one daemon."""

    def __init__(self, router: Router, address: str, watch: Watch) -> None:
        super().__init__(name="prefixd-router", daemon=True)
        self._router = router
        self.address: Final = address
        self.watch: Final = watch
        self.keys: Final = NodeKeys()
        self.problem = ""

    def run(self) -> None:
        try:
            for message in self.watch.messages():
                was_exact = self.keys.exact
                if isinstance(message, Disconnected):
                    self.problem = message.why
                    self.keys.disconnected()
                else:
                    self.problem = ""
                    apply(self.keys, message)
                if self.keys.exact is not was_exact:
                    self._router.changed()
        except PrefixdError as problem:
            self.problem = str(problem)
            self.keys.disconnected()
            logger.warning("the daemon at %s can't be watched: %s", self.watch.address, problem)


def apply(keys: NodeKeys, message: pb.WatchResponse) -> None:
    """Take the events of a message. Much faster than with a `WatchEvent` for each."""
    mark = int.from_bytes
    for kind, events in groupby(message.events, _KIND):
        # `mark_of`, without a call for each.
        marks = [mark(event.key[:MARK_BYTES], "little") or 1 for event in events]
        if kind == pb.WATCH_KIND_PUBLISHED:
            keys.published(marks)
        elif kind == pb.WATCH_KIND_EVICTED:
            keys.evicted(marks)
        elif kind == pb.WATCH_KIND_CLEARED:
            keys.cleared()
        elif kind == pb.WATCH_KIND_SYNCED:
            keys.synced()
        # A kind that only a later version knows has no effect on the keys.
