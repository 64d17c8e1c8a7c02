"""What is measured of one daemon, part by part, as rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ...proto.errors import InvalidSize, PrefixdError, UnknownTier
from ...proto.vocabulary import Tier
from ..client import Client
from ..counters import Counters
from ..local.local_transport import LocalTransport
from ..restores import Verify
from ..wire.data_transport import DataTransport
from ..wire.grpc_transport import GrpcTransport
from .crowd import Crowd
from .evicting import ALONE, OPS, PINNED, Evictions
from .moving import BATCHES_HELD, Batch, Buffers, Subject, memcpy_case
from .samples import Row, interleave
from .walking import ENTRIES, HASHING, Walks, questions_of, rpcs_of

if TYPE_CHECKING:
    from ..ctl.connection import AdminConnection

#: Who moves blocks, by the word for it.
MOVERS: Final = ("ram", "shm", "disk", "data", "grpc")
#: Those that are no tier: ways of a client on another host, to the RAM tier.
REMOTE: Final = ("data", "grpc")
PARTS: Final = (*MOVERS, "walk", "many", "evict")
#: Times as many samples of an eviction: it is over in milliseconds, and daemons are compared.
_EVICTION_SAMPLES: Final = 4
_SECURED_WITHIN_S: Final = 600.0
_LOOK_EVERY_S: Final = 0.05
#: However large the batch is, a measurement waits for it.
_SAVE_WITHIN_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Raises InvalidSize for what is out of range."""

    parts: tuple[str, ...] = PARTS
    batches: tuple[int, ...] = (1, 8, 48)
    block_bytes: int = 5 * 2**20
    repeats: int = 8
    verify: Verify = "always"
    #: Processes that restore at once.
    clients: int = 8
    #: Entries that evictions must not walk over.
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

    def of_blocks(self, block_bytes: int) -> Plan:
        """The largest batch again, of blocks of another size."""
        return replace(
            self, parts=self.movers, batches=(max(self.batches),), block_bytes=block_bytes
        )

    def entries_bytes(self, slab_bytes: int) -> int:
        """What a tier needs for all that is measured in it, entries taking whole slabs."""
        # Beside its payload an entry has a record's head and tail, or nothing.
        block_bytes = _whole(self.block_bytes + 4096, slab_bytes)
        searched_bytes = ENTRIES * slab_bytes if "walk" in self.parts else 0
        return BATCHES_HELD * max(self.batches) * block_bytes + searched_bytes


def _whole(size_bytes: int, slab_bytes: int) -> int:
    return -(-size_bytes // slab_bytes) * slab_bytes


Note = Callable[[str], None]


def measure(address: str, admin: AdminConnection, plan: Plan, note: Note) -> Iterator[Row]:
    """Rows of everything in the plan but evictions, as they are measured.

    `note` is told what is done at the moment. What is saved stays, until it is evicted. Raises
    PrefixdError when the daemon refuses, or gives back other bytes than it was given.
    """
    present = {Tier(tier.tier) for tier in admin.stats().tiers}
    for mover in plan.movers:
        if mover not in REMOTE and Tier[mover.upper()] not in present:
            raise UnknownTier(f"this daemon has no {mover} tier; name the parts to measure")
    note("waiting until the daemon's memory is secured")
    wait_until_secured(admin)
    with _clients(address, plan, note) as (local, over_data, remote):
        if plan.movers:
            yield from _moves(_subjects(plan, local, over_data, remote), plan, note)
        if "walk" in plan.parts:
            note("walks and chains")
            yield from _walks(local, admin, plan)
        if "many" in plan.parts:
            note(f"{plan.clients} processes at once")
            yield from _many(local, address, plan)


def measure_evictions(
    daemons: Sequence[tuple[Client, AdminConnection]], plan: Plan, note: Note
) -> list[Row]:
    """Of as many daemons as there are `evicting.OPS`, which get entries for it."""
    note(f"evictions, beside {plan.pinned:,} pinned entries and beside none")
    sides = [
        Evictions(*daemon, op, beside=0 if op == ALONE else plan.pinned, pinned=op == PINNED)
        for daemon, op in zip(daemons, OPS, strict=True)
    ]
    rows = interleave([side.case() for side in sides], plan.repeats * _EVICTION_SAMPLES)
    for side in sides:
        side.release()
    return [replace(row, more={"beside": 0 if row.op == ALONE else plan.pinned}) for row in rows]


def wait_until_secured(admin: AdminConnection) -> None:
    """Until every tier has the memory of its whole budget. Raises PrefixdError after minutes."""
    deadline_s = time.monotonic() + _SECURED_WITHIN_S
    while any(tier.secured_bytes < tier.budget_bytes for tier in admin.stats().tiers):
        if time.monotonic() > deadline_s:
            raise PrefixdError("the daemon did not get the memory that its budgets promise")
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def _clients(address: str, plan: Plan, note: Note) -> Iterator[tuple[Client, Client, Client]]:
    """The client as everybody has it, and the same as on another host: with the daemon's data
    socket, and kept on gRPC."""
    counters = Counters()
    in_place = LocalTransport(GrpcTransport(address, "bench", counters=counters))
    with ExitStack() as stack:
        local = stack.enter_context(_client(in_place, counters, plan.verify))
        counters = Counters()
        over_grpc = GrpcTransport(address, "bench-grpc", counters=counters)
        remote = stack.enter_context(_client(over_grpc, counters, plan.verify))
        counters = Counters()
        with_data = OverData(address, "bench-data", counters=counters)
        over_data = stack.enter_context(_client(with_data, counters, plan.verify))
        if not all(client.wait_connected() for client in (local, remote, over_data)):
            raise PrefixdError(f"the daemon at {address} takes no session")
        if "data" in plan.parts and not with_data.has_data:
            raise PrefixdError("this daemon has no data socket; name the parts to measure")
        for feature, why in in_place.refused().items():
            note(f"not in place, {feature}: {why}")
        yield local, over_data, remote


class OverData(DataTransport):
    """Over this host's loopback, as if it were another host's network."""

    data_host = "127.0.0.1"

    @property
    def has_data(self) -> bool:
        link = self.current
        return link is not None and link.data is not None


def _client(
    transport: LocalTransport | GrpcTransport, counters: Counters, verify: Verify
) -> Client:
    return Client(
        transport=transport,
        counters=counters,
        verify=verify,
        save_timeout_ms=_SAVE_WITHIN_MS,
    )


def _subjects(plan: Plan, local: Client, over_data: Client, remote: Client) -> Iterator[Subject]:
    for mover in plan.movers:
        if mover == "grpc":
            yield Subject("prefixd-grpc", remote, Tier.RAM, local=False, claims=True)
        elif mover == "data":
            yield Subject("prefixd-data", over_data, Tier.RAM, local=False, by_key=True)
        else:
            yield Subject(f"prefixd-{mover}", local, Tier[mover.upper()], local=True)


def _moves(subjects: Iterator[Subject], plan: Plan, note: Note) -> Iterator[Row]:
    subjects_ = list(subjects)
    most = max(plan.batches)
    buffers = Buffers(most, plan.block_bytes)
    for subject in subjects_:
        note(f"warming up {subject.peer}")
        Batch(subject, buffers, most).warm_up()
    for blocks in plan.batches:
        note(f"batches of {blocks}")
        batches = [Batch(subject, buffers, blocks) for subject in subjects_]
        cases = [memcpy_case(buffers, blocks)]
        cases += [case for batch in batches for case in batch.cases()]
        yield from interleave(cases, plan.repeats)
        for batch in batches:
            batch.verify()


def _walks(client: Client, admin: AdminConnection, plan: Plan) -> Iterator[Row]:
    """Each search with the rpcs that it took, as the client and as the daemon counted them."""
    cases = list(Walks(client, "prefixd-ram", Tier.RAM).cases())
    before = rpcs_of(client), questions_of(admin.stats())
    rows = interleave(cases, plan.repeats)
    rpcs = rpcs_of(client) - before[0]
    questions = questions_of(admin.stats()) - before[1]
    for row in rows:
        more = {} if row.peer == HASHING else {"rpcs": rpcs, "daemon_lookups": questions}
        yield replace(row, more=more)


def _many(client: Client, address: str, plan: Plan) -> Sequence[Row]:
    blocks = max(plan.batches)
    subject = Subject("prefixd-ram", client, Tier.RAM, local=True)
    batch = Batch(subject, Buffers(blocks, plan.block_bytes), blocks)
    batch.save()
    with Crowd(plan.clients, address, batch.keys, plan.block_bytes, plan.verify) as crowd:
        return interleave(crowd.cases(subject.peer), plan.repeats)
