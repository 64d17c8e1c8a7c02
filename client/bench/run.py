"""The parts of `prefixctl bench` on a daemon, and what it takes for each."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...proto.errors import InvalidSize, PrefixdError, UnknownTier
from ...proto.keys import Key, Namespace, block_keys, chain_pieces, prefix_keys
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import Tier
from ..chains import boundaries
from ..client import Client
from ..counters import ClientCounters
from ..local.local_transport import LocalTransport
from ..restores import Verify
from ..saves import SaveItem
from ..wire.remote_transport import RemoteTransport
from .samples import Case, Row, interleave
from .transfers import (
    BATCHES_HELD,
    BlockBatch,
    Buffers,
    Crowd,
    Subject,
    memcpy_case,
    new_keys,
    save_all,
)

if TYPE_CHECKING:
    from ...proto import prefixd_pb2 as pb
    from ..ctl.connection import AdminConnection

#: The parts that move blocks.
MOVERS: Final = ("ram", "shm", "disk", "data", "grpc")
#: Those that are no tier, but the ways of a client on another host to the RAM tier.
REMOTE: Final = ("data", "grpc")
PARTS: Final = (*MOVERS, "walk", "many", "evict")
#: What is evicted beside: nothing, unclaimed entries, as many claimed entries.
ALONE, UNPINNED, PINNED = "evict", "evict-unpinned", "evict-pinned"
OPS: Final = (ALONE, UNPINNED, PINNED)
#: Entries that one measured call evicts.
EVICTED: Final = 1_000
#: What an entry takes of its tier: the smallest slab.
STORED_BYTES: Final = 4096
#: More samples of evictions, by this factor: they take milliseconds, and daemons are compared.
_EVICTION_SAMPLES: Final = 4
_SECURED_WITHIN_S: Final = 600.0
_LOOK_EVERY_S: Final = 0.05
#: Long enough for the largest batch.
_SAVE_WITHIN_MS: Final = 600_000
WALK_TOKENS: Final = 30_000
CHAIN_BLOCKS: Final = 256
#: Tokens of a block in traces, and in engines.
CHAIN_BLOCK_TOKENS: Final = (512, 16)
HASHING: Final = "hashing"
#: How many entries searches save. Each takes a slab.
SEARCHED_ENTRIES: Final = 1 + CHAIN_BLOCKS * len(CHAIN_BLOCK_TOKENS)
_VOCABULARY: Final = 128_000


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. Raises InvalidSize for what is out of range."""

    parts: tuple[str, ...] = PARTS
    batches: tuple[int, ...] = (1, 8, 48)
    block_bytes: int = 5 * 2**20
    repeats: int = 8
    verify: Verify = "always"
    #: Processes that restore at once.
    clients: int = 8
    #: Entries beside those that are evicted.
    pinned: int = 100_000

    def __post_init__(self) -> None:
        for what, value, least in (
            ("a batch", min(self.batches, default=0), 1),
            ("block_bytes", self.block_bytes, 1),
            ("repeats", self.repeats, 1),
            ("clients", self.clients, 1),
            ("pinned", self.pinned, 0),
        ):
            if value < least:
                raise InvalidSize(f"{what} is at least {least}, not {value}")

    @property
    def movers(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if part in MOVERS)

    def of_blocks(self, block_bytes: int) -> BenchPlan:
        """The same plan for the largest batch only, with blocks of another size."""
        return replace(
            self, parts=self.movers, batches=(max(self.batches),), block_bytes=block_bytes
        )

    def entries_bytes(self, slab_bytes: int) -> int:
        """The budget of a tier for all that is measured in it. Entries take whole slabs."""
        # On disk, a record has a head and a tail beside the payload.
        block_bytes = -(-(self.block_bytes + 4096) // slab_bytes) * slab_bytes
        searched_bytes = SEARCHED_ENTRIES * slab_bytes if "walk" in self.parts else 0
        return BATCHES_HELD * max(self.batches) * block_bytes + searched_bytes


#: Gets a text that says what is measured at the moment.
Note = Callable[[str], None]


def measure(address: str, admin: AdminConnection, plan: BenchPlan, note: Note) -> Iterator[Row]:
    """Yields rows of everything in the plan but evictions, as they are measured.

    The saved entries stay until they are evicted. Raises PrefixdError when the daemon refuses a
    call, or returns wrong bytes.
    """
    present = {Tier(tier.tier) for tier in admin.stats().tiers}
    for mover in plan.movers:
        if mover not in REMOTE and Tier[mover.upper()] not in present:
            raise UnknownTier(f"this daemon has no {mover} tier; name the parts to measure")
    note("waiting until the daemon's memory is secured")
    wait_until_secured(admin)
    with _clients(address, plan, note) as (local, over_data, remote):
        if plan.movers:
            yield from _moves([*_subjects(plan, local, over_data, remote)], plan, note)
        if "walk" in plan.parts:
            note("walks and chains")
            yield from _walks(local, admin, plan)
        if "many" in plan.parts:
            note(f"{plan.clients} processes at once")
            yield from _many(local, address, plan)


def measure_evictions(
    daemons: Sequence[tuple[Client, AdminConnection]], plan: BenchPlan, note: Note
) -> list[Row]:
    """Rows of evictions, from a daemon for each of `OPS`."""
    note(f"evictions, beside {plan.pinned:,} pinned entries and beside none")
    sides = [
        Evictions(*daemon, op, beside=0 if op == ALONE else plan.pinned, pinned=op == PINNED)
        for daemon, op in zip(daemons, OPS, strict=True)
    ]
    rows = interleave([side.case() for side in sides], plan.repeats * _EVICTION_SAMPLES)
    for side in sides:
        side.release()
    return [replace(row, more={"beside": 0 if row.op == ALONE else plan.pinned}) for row in rows]


class Evictions:
    """A daemon whose RAM tier holds `beside` older entries, claimed by the client or not.

    Evictions must skip claimed entries. Unclaimed ones are evicted, oldest first, and replaced, and
    show what the size of the tables alone costs.
    """

    def __init__(
        self, client: Client, admin: AdminConnection, op: str, beside: int, *, pinned: bool
    ) -> None:
        self._client = client
        self._admin = admin
        self._op = op
        keys = self._saved(beside)
        self._claims = [client.claim(some) for some in _batches(keys)] if pinned else []
        if pinned and sum(len(hit) for hit in self._claims) < beside:
            raise PrefixdError(f"{op}: the entries to pin could not be claimed")

    def release(self) -> None:
        """Give the claims back."""
        self._client.release_many(self._claims)

    def case(self) -> Case:
        return Case("prefixd-ram", self._op, EVICTED, self.evict, before=self.refill)

    def refill(self) -> None:
        """Save as many entries as the next call evicts."""
        self._saved(EVICTED)

    def evict(self) -> None:
        (result,) = self._admin.evict(EVICTED * STORED_BYTES, [Tier.RAM]).results
        if result.entries != EVICTED:
            raise PrefixdError(f"{self._op}: {result.entries} of {EVICTED} entries were evicted")

    def _saved(self, count: int) -> list[Key]:
        keys = new_keys(count)
        for some in _batches(keys):
            items = [SaveItem(key, b"state", 512) for key in some]
            save_all(self._client, items, Tier.RAM, self._op)
        return keys


def _batches(keys: Sequence[Key]) -> list[Sequence[Key]]:
    return [keys[at : at + MAX_BATCH_KEYS] for at in range(0, len(keys), MAX_BATCH_KEYS)]


class Walks:
    """Searches for the longest prefix and the longest chain, beside the hashing that both need.

    Prompts with a few entries in one tier, and searches that hit and miss.
    """

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
            return next(chain_pieces(self._namespace.root, 0, unknown, block_tokens))[0]

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


def wait_until_secured(admin: AdminConnection) -> None:
    """Wait until every tier has the memory of its whole budget. Raises PrefixdError after
    minutes."""
    deadline_s = time.monotonic() + _SECURED_WITHIN_S
    while any(tier.secured_bytes < tier.budget_bytes for tier in admin.stats().tiers):
        if time.monotonic() > deadline_s:
            raise PrefixdError("the daemon did not get the memory that its budgets promise")
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def _clients(address: str, plan: BenchPlan, note: Note) -> Iterator[tuple[Client, Client, Client]]:
    """A client on the daemon's host, and two as on another host: one with the daemon's data socket,
    one with gRPC only."""
    counters = ClientCounters()
    in_place = LocalTransport(address, "bench", counters=counters)
    with ExitStack() as stack:
        local = stack.enter_context(_client(in_place, counters, plan.verify))
        counters = ClientCounters()
        over_grpc = RemoteTransport(address, "bench-grpc", counters=counters, wire="grpc")
        remote = stack.enter_context(_client(over_grpc, counters, plan.verify))
        counters = ClientCounters()
        with_data = RemoteTransport(address, "bench-data", counters=counters, wire="data")
        over_data = stack.enter_context(_client(with_data, counters, plan.verify))
        if not all(client.wait_connected() for client in (local, remote, over_data)):
            raise PrefixdError(f"the daemon at {address} takes no session")
        if "data" in plan.parts and not with_data.framed:
            raise PrefixdError("this daemon has no data socket; name the parts to measure")
        for feature, why in in_place.refused().items():
            note(f"not in place, {feature}: {why}")
        yield local, over_data, remote


def _client(
    transport: LocalTransport | RemoteTransport, counters: ClientCounters, verify: Verify
) -> Client:
    return Client(
        transport=transport,
        counters=counters,
        verify=verify,
        save_timeout_ms=_SAVE_WITHIN_MS,
    )


def _subjects(
    plan: BenchPlan, local: Client, over_data: Client, remote: Client
) -> Iterator[Subject]:
    for mover in plan.movers:
        if mover == "grpc":
            yield Subject("prefixd-grpc", remote, Tier.RAM, local=False, claims=True)
        elif mover == "data":
            yield Subject("prefixd-data", over_data, Tier.RAM, local=False, by_key=True)
        else:
            yield Subject(f"prefixd-{mover}", local, Tier[mover.upper()], local=True)


def _moves(subjects: Sequence[Subject], plan: BenchPlan, note: Note) -> Iterator[Row]:
    most = max(plan.batches)
    buffers = Buffers(most, plan.block_bytes)
    for subject in subjects:
        note(f"warming up {subject.peer}")
        BlockBatch(subject, buffers, most).warm_up()
    for blocks in plan.batches:
        note(f"batches of {blocks}")
        batches = [BlockBatch(subject, buffers, blocks) for subject in subjects]
        cases = [memcpy_case(buffers, blocks)]
        cases += [case for batch in batches for case in batch.cases()]
        yield from interleave(cases, plan.repeats)
        for batch in batches:
            batch.verify()


def _walks(client: Client, admin: AdminConnection, plan: BenchPlan) -> Iterator[Row]:
    """Rows of searches, each with the rpcs and the daemon's look-ups of all searches together."""
    cases = list(Walks(client, "prefixd-ram", Tier.RAM).cases())
    before = rpcs_of(client), lookups_of(admin.stats())
    rows = interleave(cases, plan.repeats)
    rpcs = rpcs_of(client) - before[0]
    lookups = lookups_of(admin.stats()) - before[1]
    for row in rows:
        more = {} if row.peer == HASHING else {"rpcs": rpcs, "daemon_lookups": lookups}
        yield replace(row, more=more)


def _many(client: Client, address: str, plan: BenchPlan) -> Sequence[Row]:
    blocks = max(plan.batches)
    subject = Subject("prefixd-ram", client, Tier.RAM, local=True)
    batch = BlockBatch(subject, Buffers(blocks, plan.block_bytes), blocks)
    batch.save()
    with Crowd(plan.clients, address, batch.keys, plan.block_bytes, plan.verify) as crowd:
        return interleave(crowd.cases(subject.peer), plan.repeats)
