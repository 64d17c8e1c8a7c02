"""The measurements, against real daemons: they do what they say, and notice what is wrong."""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from prefixd.client.bench import transfers
from prefixd.client.bench.run import (
    CHAIN_BLOCKS,
    EVICTED,
    HASHING,
    MOVERS,
    OPS,
    PARTS,
    BenchPlan,
    Evictions,
    Walks,
    lookups_of,
    measure,
    measure_evictions,
    rpcs_of,
)
from prefixd.client.bench.samples import Row
from prefixd.client.bench.transfers import (
    BlockBatch,
    Buffers,
    Crowd,
    Subject,
    memcpy_case,
    new_keys,
    work,
)
from prefixd.client.client import Client
from prefixd.client.counters import ClientCounters
from prefixd.client.ctl.bench import bench
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.proto.errors import InvalidSize, PrefixdError
from prefixd.proto.vocabulary import SaveReason, Tier
from tests.support.daemon import private_daemon, problems_of

BLOCK_BYTES = 700_000
BLOCKS = 3


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(
        "--server.tcp=127.0.0.1:0", ram="16MiB", shm="16MiB", disk="16MiB"
    ) as running:
        yield running


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, verify="disk") as connected:
        yield connected


@pytest.fixture
def remote(daemon: PrivateDaemon) -> Iterator[Client]:
    counters = ClientCounters()
    transport = RemoteTransport(daemon.address, counters=counters, wire="grpc")
    with Client(transport=transport, counters=counters) as connected:
        yield connected


# ---- transfers


@pytest.mark.parametrize("tier", list(Tier))
def test_a_batch_goes_there_and_back(client: Client, tier: Tier) -> None:
    buffers = Buffers(BLOCKS, BLOCK_BYTES)
    batch = BlockBatch(Subject("me", client, tier, local=True), buffers, BLOCKS)
    cases = {case.op: case for case in batch.cases()}
    in_place = set() if tier is Tier.DISK else {"view"}
    assert set(cases) == {"save", "restore", "exists"} | in_place
    for case in cases.values():
        assert (case.peer, case.blocks) == ("me", BLOCKS)
        assert case.moved_bytes == (0 if case.op == "exists" else BLOCKS * BLOCK_BYTES)
        case.before()
        case.action()
    batch.verify()
    assert client.counters["saved_entries"] == 2 * BLOCKS
    rpcs = client.counters["rpcs"]
    assert isinstance(rpcs, dict)
    assert rpcs["Read"] == 0, "it was read in place"
    assert rpcs["Claim"] == (0 if tier is Tier.DISK else 2), "views need a claim, restores none"


def test_the_same_over_grpc(remote: Client) -> None:
    batch = BlockBatch(
        Subject("me", remote, Tier.RAM, local=False, claims=True), Buffers(2, 50_000), 2
    )
    assert [case.op for case in batch.cases()] == ["save", "restore", "exists"]
    batch.verify()
    batch.exists()
    rpcs = remote.counters["rpcs"]
    assert isinstance(rpcs, dict)
    assert (rpcs["Claim"], rpcs["Read"], rpcs["Lookup"]) == (1, 1, 1)


@pytest.mark.parametrize("by_key", [False, True])
def test_the_same_over_the_data_socket(daemon: PrivateDaemon, by_key: bool) -> None:
    """A restore takes two round trips: the search, then claim and bytes. By key it takes one."""
    counters = ClientCounters()
    transport = RemoteTransport(daemon.address, counters=counters, wire="data")
    with Client(transport=transport, counters=counters) as client:
        assert client.wait_connected()
        subject = Subject("me", client, Tier.RAM, local=False, by_key=by_key)
        batch = BlockBatch(subject, Buffers(2, 50_000), 2)
        batch.verify()
        rpcs = client.counters["rpcs"]
        assert isinstance(rpcs, dict)
        assert {name: count for name, count in rpcs.items() if count} == {
            "Save": 1,
            **({} if by_key else {"Lookup": 1}),
            "Fetch": 1,
        }


def test_every_save_is_of_new_keys(client: Client) -> None:
    batch = BlockBatch(Subject("me", client, Tier.RAM, local=True), Buffers(1, 100), 1)
    batch.save()
    with pytest.raises(PrefixdError, match="me: 1 blocks were not saved: present"):
        batch.save()
    batch.renew()
    batch.save()


def test_wrong_bytes_are_noticed(client: Client) -> None:
    buffers = Buffers(2, 100)
    batch = BlockBatch(Subject("me", client, Tier.RAM, local=True), buffers, 2)
    batch.save()
    batch.restore()
    buffers.check("me", buffers.rooms(2))
    buffers.rooms(2)[1][50] ^= 1
    with pytest.raises(PrefixdError, match="me: block 1 is not what was saved"):
        buffers.check("me", buffers.rooms(2))
    buffers.wipe(2)
    with pytest.raises(PrefixdError, match="block 0"):
        buffers.check("me", buffers.rooms(2))


def test_what_is_gone_is_noticed(client: Client, daemon: PrivateDaemon) -> None:
    batch = BlockBatch(Subject("me", client, Tier.SHM, local=True), Buffers(2, 100), 2)
    batch.save()
    with daemon.admin() as admin:
        admin.evict(2**40, [Tier.SHM])
    for operation in (batch.restore, batch.view, batch.exists):
        with pytest.raises(PrefixdError, match="only 0 of 2 blocks are there"):
            operation()


def test_buffers_begin_where_an_engines_do() -> None:
    """Tensors begin at multiples of 64 bytes. Memory from malloc does not, which halves the
    speed of memcpy."""
    buffers = Buffers(2, 64)
    for view in (*buffers.sources(2), *buffers.rooms(2)):
        assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % 64 == 0


def test_no_two_blocks_are_the_same() -> None:
    blocks = [bytes(block) for block in Buffers(4, 64).sources(4)]
    assert len(set(blocks)) == 4


def test_memcpy_copies() -> None:
    buffers = Buffers(3, 64)
    case = memcpy_case(buffers, 2)
    case.action()
    buffers.check("memcpy", buffers.rooms(2))
    assert (case.op, case.moved_bytes) == ("restore", 128)
    assert bytes(buffers.rooms(3)[2]) == b"\1" * 64


# ---- searches


def test_searches_find_what_is_there_and_ask_nobody(client: Client, daemon: PrivateDaemon) -> None:
    cases = list(Walks(client, "me", Tier.RAM).cases())
    assert {case.peer for case in cases} == {HASHING, "me"}
    assert {case.op: case.blocks for case in cases if case.peer == "me"} == {
        "walk-hit": 15,
        "walk-miss": 15,
        "chain-512": CHAIN_BLOCKS,
        "chain-miss-512": 1,
        "chain-16": CHAIN_BLOCKS,
        "chain-miss-16": 1,
    }
    with daemon.admin() as admin:
        before = rpcs_of(client), lookups_of(admin.stats())
        for case in cases:
            case.action()
        assert (rpcs_of(client), lookups_of(admin.stats())) == before
        assert client.exists(new_keys(1)) == [False]


def test_the_daemon_counts_what_it_is_asked(remote: Client, daemon: PrivateDaemon) -> None:
    with daemon.admin() as admin:
        before = rpcs_of(remote), lookups_of(admin.stats())
        remote.probe(new_keys(3))
        remote.claim(new_keys(3))
        assert rpcs_of(remote) == before[0] + 2
        assert lookups_of(admin.stats()) == before[1] + 2


def test_a_search_that_finds_something_else_is_noticed(
    client: Client, daemon: PrivateDaemon
) -> None:
    cases = list(Walks(client, "me", Tier.RAM).cases())
    with daemon.admin() as admin:
        admin.evict(2**40, [Tier.RAM])
    hit = next(case for case in cases if case.op == "walk-hit")
    with pytest.raises(PrefixdError, match="me: a walk found 0 where 16384 are there"):
        hit.action()


# ---- evictions


def test_evictions_pass_by_what_is_pinned() -> None:
    """The tier is just large enough."""
    pinned, plan = 200, BenchPlan(pinned=200, repeats=1)
    notes: list[str] = []
    flags = ("--shm.budget=0", "--disk.budget=0")
    with ExitStack() as stack:
        daemons = []
        for _ in OPS:
            running = stack.enter_context(
                private_daemon(*flags, ram=f"{4 * (pinned + 2 * EVICTED)}KiB")
            )
            admin = stack.enter_context(running.admin())
            daemons.append((stack.enter_context(Client(running.address)), admin))
        rows = measure_evictions(daemons, plan, notes.append)
        assert [(row.op, row.blocks, row.more) for row in rows] == [
            ("evict", EVICTED, {"beside": 0}),
            ("evict-unpinned", EVICTED, {"beside": pinned}),
            ("evict-pinned", EVICTED, {"beside": pinned}),
        ]
        assert [admin.stats().tiers[0].entries for _, admin in daemons] == [0, pinned, pinned]
        assert all(admin.stats().tiers[0].pinned_entries == 0 for _, admin in daemons)
        client, admin = daemons[0]
        empty = Evictions(client, admin, "evict", 0, pinned=False)
        with pytest.raises(PrefixdError, match="evict: 0 of 1000 entries were evicted"):
            empty.evict()
    assert notes


# ---- many processes


def test_a_crowd_restores(client: Client, daemon: PrivateDaemon) -> None:
    buffers = Buffers(2, 50_000)
    batch = BlockBatch(Subject("me", client, Tier.RAM, local=True), buffers, 2)
    batch.save()
    with Crowd(2, daemon.address, batch.keys, 50_000, "always") as crowd:
        one, both = crowd.cases("me")
        assert (one.op, one.moved_bytes) == ("restore-by-1", 100_000)
        assert (both.op, both.moved_bytes) == ("restore-by-2", 200_000)
        one.action()
        both.action()
        with daemon.admin() as admin:
            admin.evict(2**40, [Tier.RAM])
        with pytest.raises(PrefixdError, match="restored 0 of 2 blocks"):
            both.action()
    assert not multiprocessing.active_children()


def hurried(*arguments: Any) -> None:
    """`work`, but waiting only a moment for the daemon."""
    wait = Client.wait_connected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "wait_connected", lambda client: wait(client, deadline_ms=100))
        work(*arguments)


def test_a_crowd_without_a_daemon_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "work", hurried)
    with (
        pytest.raises(PrefixdError, match="no daemon answers"),
        Crowd(1, "unix:/nowhere/at/all", new_keys(1), 10, "disk"),
    ):
        pass
    assert not multiprocessing.active_children()


def test_one_that_dies_is_missed(client: Client, daemon: PrivateDaemon) -> None:
    keys = new_keys(1)
    client.save(keys[0], b"state", tier=Tier.RAM, reason=SaveReason.EVICT)
    with Crowd(1, daemon.address, keys, 5, "disk") as crowd:
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join()
        with pytest.raises(PrefixdError, match="it died"):
            crowd.restore(1)


# ---- plans


def test_a_plan_is_measured(daemon: PrivateDaemon) -> None:
    plan = BenchPlan(PARTS[:-1], (1, 2), 20_000, repeats=1, clients=2)
    notes: list[str] = []
    with daemon.admin() as admin:
        rows = list(measure(daemon.address, admin, plan, notes.append))
        assert problems_of(admin) == []
    assert len({(row.peer, row.op, row.blocks) for row in rows}) == len(rows)
    moved = {"prefixd-ram": 4, "prefixd-shm": 4, "prefixd-disk": 3, "memcpy": 1}
    moved |= {"prefixd-data": 3, "prefixd-grpc": 3}
    for blocks in plan.batches:
        assert {peer: len(_moves(rows, peer, blocks)) for peer in moved} == moved
    searches = [row for row in rows if "rpcs" in row.more]
    assert (
        {row.more["rpcs"] for row in searches}
        == {row.more["daemon_lookups"] for row in searches}
        == {0}
    )
    assert {row.op for row in rows if row.op.startswith("restore-by")} == {
        "restore-by-1",
        "restore-by-2",
    }
    assert all(row.p50_ms > 0 for row in rows)
    assert not [note for note in notes if "not in place" in note]


def _moves(rows: list[Row], peer: str, blocks: int) -> list[str]:
    ops = ("save", "restore", "view", "exists")
    return [row.op for row in rows if (row.peer, row.blocks) == (peer, blocks) and row.op in ops]


def test_a_daemon_without_a_data_socket_says_so() -> None:
    with private_daemon() as daemon, daemon.admin() as admin:
        rows = measure(
            daemon.address, admin, BenchPlan(("data",), (1,), 100, repeats=1), lambda _: None
        )
        with pytest.raises(PrefixdError, match="no data socket"):
            list(rows)


def test_parts_are_measured_by_themselves(daemon: PrivateDaemon) -> None:
    plan = BenchPlan(("disk",), (1,), 1000, repeats=1)
    with daemon.admin() as admin:
        rows = list(measure(daemon.address, admin, plan, lambda _: None))
    assert [(row.peer, row.op) for row in rows] == [
        ("memcpy", "restore"), ("prefixd-disk", "save"), ("prefixd-disk", "restore"),
        ("prefixd-disk", "exists"),
    ]  # fmt: skip
    assert plan.movers == ("disk",)
    assert BenchPlan().movers == MOVERS


@pytest.mark.parametrize(
    "wrong",
    [{"batches": ()}, {"batches": (0, 1)}, {"block_bytes": 0}, {"repeats": 0}, {"clients": 0},
     {"pinned": -1}],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSize):
        BenchPlan(**wrong)  # type: ignore[arg-type]  # each is of its own type


def test_a_tier_has_room_for_what_is_measured_in_it() -> None:
    plan = BenchPlan(("ram",), (1, 4), 100_000)
    assert plan.entries_bytes(65_536) == 3 * 4 * 2 * 65_536
    assert (
        BenchPlan(("ram", "walk"), (1, 4), 100_000).entries_bytes(65_536)
        == (3 * 4 * 2 + 513) * 65_536
    )


def test_what_is_measured_is_what_clients_do_unless_told_otherwise() -> None:
    default = inspect.signature(Client).parameters["verify"].default
    assert BenchPlan().verify == default
    assert inspect.signature(bench).parameters["verify"].default == default
