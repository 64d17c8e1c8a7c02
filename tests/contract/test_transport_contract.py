"""The contract of every transport: the same suite in place, over both sockets and over gRPC,
plain and under TLS, each on a real daemon.

If two transports behave differently, one of them has a bug. What only one transport does, to be
faster, is tested with that transport.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from prefixd.client import (
    ClaimMode,
    Client,
    Hit,
    MissReason,
    Namespace,
    Reservation,
    ReserveItem,
    SaveItem,
    SavePolicy,
    SaveReason,
    SaveStatus,
    Tier,
)
from prefixd.client.counters import ClientCounters
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.local import staging
from prefixd.client.local.local_transport import LocalTransport
from prefixd.client.results import ReserveStatus
from prefixd.client.wire import security
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.proto.errors import CallerError, ClientClosed, InvalidBatch, InvalidKey, InvalidSize
from prefixd.proto.keys import Key, prefix_key
from prefixd.proto.vocabulary import Presence
from tests.support.certificates import Authority
from tests.support.daemon import eventually, tcp_address, tcp_daemon
from tests.support.fakes import PATIENCE_S

POLICY = SavePolicy(boundary_align_tokens=20)
TOKENS = list(range(1_000, 1_105))
SIZES = (4_096, 1, 100_000, 300_001)
#: Shorter than the interval of the heartbeats that would renew it.
LEASE_MS = 100

EVICT = SaveReason.EVICT


@pytest.fixture(scope="module", params=["local", "lending", "unix", "grpc", "data", "tls"])
def transport(request: pytest.FixtureRequest) -> str:
    """The transport that is being tested."""
    return str(request.param)


@pytest.fixture(scope="module")
def flags(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """The flags of the transport's daemons."""
    if transport != "tls":
        yield ()
        return
    authority = Authority(tmp_path_factory.mktemp("tls") / "ours")
    certificate, key = authority.sign("daemon")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(security.CA, str(authority.certificate))
        yield f"--server.tls_cert={certificate}", f"--server.tls_key={key}"


@pytest.fixture(scope="module")
def daemon(flags: tuple[str, ...]) -> Iterator[PrivateDaemon]:
    with tcp_daemon("--sessions.heartbeat=60s", *flags, ram="64MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def operator(daemon: PrivateDaemon) -> Iterator[AdminConnection]:
    """A connection to the module's daemon, for the check of each client that is made."""
    with daemon.admin() as admin:
        yield admin


@pytest.fixture
def make(
    transport: str,
    daemon: PrivateDaemon,
    operator: AdminConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Client]]:
    """Makes clients over the transport."""
    made: list[Client] = []
    ours = daemon
    if transport == "lending":  # for payloads of every size
        monkeypatch.setattr(staging, "LEND_BYTES", 1)

    def make(daemon: PrivateDaemon, **options: Any) -> Client:
        address = tcp_address(daemon) if transport in ("data", "tls") else daemon.address
        if transport == "grpc":
            counters = ClientCounters()
            over_grpc = RemoteTransport(
                address, options.pop("name", None), counters=counters, wire="grpc"
            )
            options |= {"transport": over_grpc, "counters": counters}
        client = Client(address, local=transport in ("local", "lending"), policy=POLICY, **options)
        made.append(client)
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        with nullcontext(operator) if daemon is ours else daemon.admin() as admin:
            before = admin.stats().in_flight["data_connections"]
            client.probe(fresh_keys(1), wait_ms=1)
            assert admin.stats().in_flight["data_connections"] - before == (
                address is not daemon.address
            )
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(daemon: PrivateDaemon, make: Callable[..., Client]) -> Client:
    return make(daemon)


@pytest.fixture(params=Tier, ids=lambda tier: tier.label)
def tier(request: pytest.FixtureRequest) -> Tier:
    found: Tier = request.param
    return found


def fresh_keys(count: int) -> list[Key]:
    return [Key(os.urandom(32)) for _ in range(count)]


def fresh_namespace() -> Namespace:
    return Namespace(os.urandom(32), "q4_0", b"c" * 32)


def payload_of(key: Key, size_bytes: int) -> bytes:
    return (key * (size_bytes // len(key) + 1))[:size_bytes]


def save_some(client: Client, tier: Tier = Tier.RAM) -> tuple[list[Key], list[bytes]]:
    """Entries of several sizes, the first with layers and token ids."""
    keys = fresh_keys(len(SIZES))
    payloads = [payload_of(key, size) for key, size in zip(keys, SIZES, strict=True)]
    items = [SaveItem(key, data, 7) for key, data in zip(keys, payloads, strict=True)]
    items[0] = SaveItem(keys[0], payloads[0], 7, layer_count=4, token_ids=range(7))
    outcomes = client.save_many(items, tier=tier, reason=EVICT)
    assert [outcome for outcome in outcomes if outcome.status is not SaveStatus.SAVED] == []
    assert [outcome.key for outcome in outcomes] == keys
    return keys, payloads


def restore(hit: Hit) -> tuple[Any, list[bytes]]:
    buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
    return hit.restore_into(buffers), [bytes(buffer) for buffer in buffers]


def misses(client: Client) -> dict[str, int]:
    counted = client.counters["misses"]
    assert isinstance(counted, dict)
    return {reason: number for reason, number in counted.items() if number}


# ---- finding


def test_each_mode_claims_its_keys(client: Client, tier: Tier) -> None:
    keys, _ = save_some(client, tier)
    absent = fresh_keys(2)
    requested = [keys[0], keys[1], absent[0], keys[2], absent[1], keys[3]]
    for mode, found in (
        (ClaimMode.ANY, keys),
        (ClaimMode.RUN, keys[:2]),
        (ClaimMode.FIRST, keys[:1]),
    ):
        with client.claim(requested, mode=mode) as hit:
            assert hit.keys == found
            assert hit.claimed
            assert hit.miss is (None if mode is ClaimMode.FIRST else MissReason.ABSENT)
            assert {entry.tier for entry in hit.entries} == {tier}
    assert not client.claim(absent)
    assert client.claim(absent).miss is MissReason.ABSENT


def test_probes_describe_entries_and_absent_keys(client: Client, tier: Tier) -> None:
    keys, payloads = save_some(client, tier)
    (absent,) = fresh_keys(1)
    first, missing = client.probe([keys[0], absent])
    assert first.entry is not None
    assert (first.entry.key, first.entry.tier) == (keys[0], tier)
    assert first.entry.payload_bytes == len(payloads[0])
    assert (first.entry.token_count, first.entry.layer_count) == (7, 4)
    assert first.entry.token_ids_bytes == 28
    assert first.entry.reason is EVICT
    assert missing.presence is Presence.ABSENT
    assert client.exists([absent, *keys, keys[0]]) == [False] + [True] * 5
    assert client.probe([]) == client.exists([]) == []


@pytest.mark.parametrize("claim", [True, False])
def test_the_longest_prefix_is_found(client: Client, tier: Tier, claim: bool) -> None:
    namespace = fresh_namespace()
    assert not client.longest_prefix(namespace, TOKENS, claim=claim)
    for length in (20, 60, 105):
        key = prefix_key(namespace, TOKENS[:length])
        assert client.save(key, b"state", tier=tier, reason=EVICT).ok
    for tokens, length in ((TOKENS, 105), (TOKENS[:100], 60), (TOKENS[:60], 60)):
        with client.longest_prefix(namespace, tokens, claim=claim) as hit:
            assert (hit.token_count, hit.claimed) == (length, claim)
            assert hit.read(0) == b"state"
    assert not client.longest_prefix(namespace, TOKENS[:19], claim=claim)


@pytest.mark.parametrize("claim", [True, False])
def test_a_chain_is_found_up_to_its_first_gap(client: Client, tier: Tier, claim: bool) -> None:
    chain = client.chain(fresh_namespace(), TOKENS, 20)
    items = [SaveItem(chain[index], payload_of(chain[index], 5_000)) for index in (0, 1, 2, 4)]
    assert all(outcome.ok for outcome in client.save_many(items, tier=tier, reason=EVICT))
    with client.longest_run(chain, claim=claim) as hit:
        assert (hit.keys, hit.token_count, hit.miss) == (chain[:3], 60, MissReason.ABSENT)
        result, restored = restore(hit)
        assert (result.run, result.token_count, result.miss) == (3, 60, None)
        assert restored == [item.payload for item in items[:3]]
    with client.longest_run(chain[:3], claim=claim) as hit:
        assert hit.miss is None


def test_a_conversation_is_resumed(client: Client, tier: Tier) -> None:
    namespace = fresh_namespace()
    parent = prefix_key(namespace, TOKENS[:93])
    assert not client.resume(parent, TOKENS, 0, namespace=namespace)
    assert client.save(parent, b"state", tier=tier, reason=EVICT, token_count=93).ok
    hit = client.resume(parent, TOKENS, 0, namespace=namespace)
    assert (hit.keys, hit.token_count) == ([parent], 93)
    assert hit.release()
    assert not client.resume(parent, TOKENS[:50], 0, namespace=namespace)


# ---- reading


@pytest.mark.parametrize("verify", ["always", "disk", "never"])
def test_saved_payloads_come_back(
    daemon: PrivateDaemon, make: Callable[..., Client], tier: Tier, verify: str
) -> None:
    client = make(daemon, verify=verify)
    keys, payloads = save_some(client, tier)
    with client.claim(keys) as hit:
        result, restored = restore(hit)
        assert restored == payloads
        assert (result.run, result.token_count, result.miss) == (4, 28, None)
        assert result.payload_bytes == sum(SIZES)
        buffers = [bytearray(size) for size in SIZES[:2]]
        assert hit.restore_into(buffers).run == 2
        assert [hit.read(index) for index in range(4)] == payloads
        assert [hit.layer(0, layer) for layer in range(4)] == [
            payloads[0][start : start + 1024] for start in range(0, 4096, 1024)
        ]
        assert hit.token_ids(0) == b"".join(n.to_bytes(4, "little") for n in range(7))
        assert hit.token_ids(1) == b""
        assert hit.release()
    found = client.longest_run(keys, claim=False)
    assert not found.claimed
    assert restore(found)[1] == payloads
    assert misses(client) == {}


def test_views_show_what_was_saved_or_are_refused(client: Client, tier: Tier) -> None:
    keys, payloads = save_some(client, tier)
    with client.claim(keys) as hit:
        for index, payload in enumerate(payloads):
            views = hit.views(index)
            assert views is None or b"".join(views) == payload
            assert views is None or all(view.readonly for view in views)
        assert hit.buffers is None or b"".join(hit.buffers) == b"".join(payloads)


def test_nothing_is_read_after_a_release(client: Client) -> None:
    keys, _ = save_some(client)
    hit, other = client.claim(keys), client.claim(keys)
    assert client.release_many([hit, other]) == [True, True]
    assert hit.release()
    assert not hit.lost
    for use in (lambda: hit.read(0), lambda: hit.views(0), lambda: restore(hit)):
        with pytest.raises(CallerError, match="released"):
            use()


def test_an_entry_that_was_replaced_is_read_right_or_not_at_all(
    daemon: PrivateDaemon, client: Client, tier: Tier
) -> None:
    """Found without a claim, evicted, and saved again with other bytes."""
    (key,) = fresh_keys(1)
    assert client.save(key, b"first", tier=tier, reason=EVICT).ok
    found = client.longest_run([key], claim=False)
    with daemon.admin() as admin:
        admin.evict(2**40, [tier])
    assert client.exists([key]) == [False]
    assert client.save(key, b"other", tier=tier, reason=EVICT).ok
    result, restored = restore(found)
    assert not result.restored[0] or restored == [b"first"]
    with client.claim([key]) as hit:
        assert hit.read(0) == b"other"


# ---- saving


@pytest.mark.parametrize("reason", SaveReason, ids=lambda reason: reason.label)
def test_every_reason_saves(client: Client, tier: Tier, reason: SaveReason) -> None:
    (key,) = fresh_keys(1)
    first = client.save_async(key, b"bytes", tier=tier, reason=reason).result(PATIENCE_S)
    assert client.flush()
    second = client.save(key, b"bytes", tier=tier, reason=reason)
    (third,) = client.save_many_async([SaveItem(key, b"bytes")], tier=tier).result(PATIENCE_S)
    assert {first.key, second.key, third.key} == {key}
    expected = [SaveStatus.SAVED, SaveStatus.PRESENT, SaveStatus.PRESENT]
    assert [first.status, second.status, third.status] == expected


def test_a_reservation_is_written_or_given_back(client: Client, tier: Tier) -> None:
    one, two, three = fresh_keys(3)
    assert client.save(three, b"there", tier=tier, reason=EVICT).ok
    items = [ReserveItem(key, 5) for key in (one, two, three)]
    first, second, present = client.reserve(items, tier=tier, reason=EVICT)
    assert [each.status for each in (first, second, present)] == [
        ReserveStatus.GRANTED,
        ReserveStatus.GRANTED,
        ReserveStatus.PRESENT,
    ]
    (again,) = client.reserve(items[:1], tier=tier, reason=EVICT)
    assert again.status is ReserveStatus.IN_FLIGHT
    assert client.claim([one], wait_ms=1).miss is MissReason.IN_FLIGHT
    with pytest.raises(InvalidSize):
        first.write(b"longer than that")
    assert [outcome.status for outcome in client.write([(first, b"bytes")])] == [SaveStatus.SAVED]
    assert client.cancel([first, second, present]) == [False, True, False]
    assert client.exists([one, two]) == [True, False]


def test_a_payload_that_no_tier_takes_is_an_outcome(client: Client) -> None:
    (key,) = fresh_keys(1)
    payload = bytes(9 * 2**20)  # the tier has 8 MiB
    outcome = client.save(key, payload, tier=Tier.SHM, reason=EVICT)
    assert outcome.status is SaveStatus.TOO_LARGE
    assert not outcome.retryable


def test_more_keys_than_a_call_takes(client: Client) -> None:
    keys = fresh_keys(5_000)
    items = [SaveItem(key, key) for key in keys]
    outcomes = client.save_many(items, tier=Tier.RAM, reason=EVICT)
    assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}
    assert client.exists(keys) == [True] * len(keys)
    assert all(found.present for found in client.probe(keys))
    for claim in (True, False):
        with client.longest_run(keys, claim=claim) as hit:
            assert (len(hit), hit.miss) == (len(keys), None)
            result, restored = restore(hit)
            assert result.run == len(keys)
            assert restored == keys
            assert hit.release()


# ---- mistakes

MISTAKES: dict[str, tuple[Callable[[Client, Hit], object], type[CallerError]]] = {
    "a short key": (lambda c, _: c.claim([b"short"]), InvalidKey),  # type: ignore[list-item]
    "a probe of a short key": (lambda c, _: c.probe([b"short"]), InvalidKey),  # type: ignore[list-item]
    "a wait too long": (lambda c, h: c.claim(h.keys, wait_ms=10**6), InvalidSize),
    "an invalid mode": (lambda c, h: c.claim(h.keys, mode=1), CallerError),  # type: ignore[arg-type]
    "an entry before the first": (lambda _, h: h.read(-1), InvalidSize),
    "an entry after the last": (lambda _, h: h.read(4), InvalidSize),
    "a view of no entry": (lambda _, h: h.views(4), InvalidSize),
    "token ids of no entry": (lambda _, h: h.token_ids(-1), InvalidSize),
    "a layer after the last": (lambda _, h: h.layer(0, 4), InvalidSize),
    "a restore of no entry": (
        lambda _, h: h.restore_into([bytearray(1)], indices=[4]),
        InvalidSize,
    ),
    "an entry without a buffer": (lambda _, h: h.restore_into([], indices=[0]), InvalidSize),
    "a release of no entry": (lambda _, h: h.release_some([4]), InvalidSize),
    "a buffer too many": (lambda _, h: h.restore_into([bytearray(1)] * 5), InvalidSize),
    "a read-only buffer": (lambda _, h: h.restore_into([bytes(4_096)]), InvalidSize),
    "an empty payload": (
        lambda c, h: c.save(h.keys[0], b"", tier=Tier.RAM, reason=EVICT),
        InvalidSize,
    ),
    "a view without a claim": (
        lambda c, h: c.longest_run(h.keys, claim=False).views(0),
        CallerError,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_and_costs_nothing(client: Client, mistake: str) -> None:
    use, error = MISTAKES[mistake]
    with client.claim(save_some(client)[0]) as hit:
        with pytest.raises(error):
            use(client, hit)
        assert hit.claimed
        assert restore(hit)[0].run == 4


def test_a_reservation_is_written_once(client: Client) -> None:
    (key,) = fresh_keys(1)
    (reservation,) = client.reserve([ReserveItem(key, 3)], tier=Tier.RAM, reason=EVICT)
    with pytest.raises(InvalidBatch):
        client.write([(reservation, b"abc")] * 2)
    assert reservation.write(b"abc").ok
    with pytest.raises(CallerError):
        reservation.write(b"abc")


# ---- claims that are lost, daemons that are gone, clients that are closed


def in_place(client: Client) -> bool:
    """Does this client read from the daemon's own memory and files?"""
    return isinstance(client._transport, LocalTransport)


def test_a_claim_that_is_lost_is_a_miss_of_everything(
    daemon: PrivateDaemon, make: Callable[..., Client], tier: Tier
) -> None:
    """Except in place, while the index rows prove that the claimed bytes have not changed."""
    keys, payloads = save_some(client := make(daemon, lease_ms=LEASE_MS), tier)
    hit = client.claim(keys)
    eventually(lambda: hit.lost)
    assert not hit.claimed
    assert hit.buffers is None
    result, restored = restore(hit)
    if in_place(client):
        assert result
        assert restored == payloads
        with daemon.admin() as admin:
            admin.evict(2**40, [tier])
        result, _ = restore(hit)
    assert (result.run, result.miss) == (0, MissReason.LOST)
    assert hit.read(0) is hit.layer(0, 0) is None
    assert not hit.release()
    assert not hit.release()
    assert hit.lost
    assert client.counters["lost_claims"] == 1


def test_a_claim_that_was_lost_stays_lost(
    daemon: PrivateDaemon, make: Callable[..., Client], tier: Tier
) -> None:
    """Even if nothing happened to its entries."""
    keys, _ = save_some(client := make(daemon, lease_ms=LEASE_MS), tier)
    hit = client.claim(keys)
    eventually(lambda: hit.lost)
    assert not hit.release()
    assert hit.lost
    assert not hit.claimed


def test_what_is_left_of_a_probed_hit_is_restored(
    daemon: PrivateDaemon, make: Callable[..., Client], tier: Tier
) -> None:
    client, other = make(daemon), make(daemon)
    keys, payloads = save_some(client, tier)
    for gone in (len(keys) - 1, 0):
        hit = client.longest_run(keys, claim=False)
        other.delete([keys[gone]])
        result, restored = restore(hit)
        assert result.restored == tuple(number != gone for number in range(len(keys)))
        assert [miss for miss in result.misses if miss] == [MissReason.ABSENT]
        assert restored[:gone] + restored[gone + 1 :] == payloads[:gone] + payloads[gone + 1 :]
        keys, payloads = save_some(client, tier)


def test_the_release_of_a_lost_claim_reports_the_loss(
    daemon: PrivateDaemon, make: Callable[..., Client]
) -> None:
    """Whether or not the client has already received the event of the loss."""
    client = make(daemon, lease_ms=LEASE_MS)
    (key,) = fresh_keys(1)
    assert client.save(key, b"bytes", tier=Tier.RAM, reason=EVICT).ok
    hit = client.claim([key])
    with daemon.admin() as admin:
        eventually(lambda: not list(admin.all_claims()))
        admin.evict(2**40, [Tier.RAM])
    assert not hit.release()


def test_a_batch_larger_than_a_sessions_share_is_saved_whole(
    make: Callable[..., Client], flags: tuple[str, ...]
) -> None:
    """Into an empty tier: the first reservations have ended before the last ones are made."""
    with tcp_daemon(*flags, "--disk.max_in_flight=1MiB", "--sessions.max_pinned_share=1") as daemon:
        client = make(daemon)
        for tier in Tier:
            keys = fresh_keys(60)
            items = [SaveItem(key, payload_of(key, 100_000), 7) for key in keys]
            outcomes = client.save_many(items, tier=tier, reason=EVICT, deadline_ms=60_000)
            assert {outcome.status for outcome in outcomes} == {SaveStatus.SAVED}, tier
            with client.claim(keys) as hit:
                assert restore(hit)[1] == [item.payload for item in items], tier


def test_claims_and_reservations_of_a_call_that_timed_out_are_given_back(
    daemon: PrivateDaemon, client: Client
) -> None:
    keys, _ = save_some(client)
    (free,) = fresh_keys(1)
    with daemon.admin() as admin:

        def granted() -> tuple[int, int]:
            counters = admin.stats().counters
            return counters["prefixd_claims_total"], counters["prefixd_reservations_total"]

        claims, reservations = granted()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert client.claim(keys, deadline_ms=100).miss is MissReason.DEADLINE
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: granted()[0] > claims and not list(admin.all_claims()))
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        reservations = granted()[1]
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            (late,) = client.reserve(
                [ReserveItem(free, 3)], tier=Tier.RAM, reason=EVICT, deadline_ms=100
            )
            assert late.status is ReserveStatus.FAILED
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: granted()[1] > reservations and not list(admin.all_reservations()))
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        with client.claim(keys) as hit:
            assert len(hit) == len(keys)


def test_a_daemon_that_died_is_a_miss(make: Callable[..., Client], flags: tuple[str, ...]) -> None:
    with tcp_daemon(*flags) as daemon:
        client = make(daemon)
        keys, payloads = save_some(client)
        held, found = client.claim(keys), client.longest_run(keys, claim=False)
        (reservation,) = client.reserve(
            [ReserveItem(fresh_keys(1)[0], 3)], tier=Tier.RAM, reason=EVICT
        )
        daemon.kill()
        eventually(lambda: held.lost and not client.connected)
        # In place, the arena of a dead daemon is still mapped, and its rows are still valid.
        result, restored = restore(held)
        assert restored == payloads if in_place(client) else result.miss is MissReason.LOST
        assert not held.release()
        result, restored = restore(found)  # every entry that is still read in place is right
        assert all(
            data == payload
            for data, payload, good in zip(restored, payloads, result.restored, strict=True)
            if good
        )
        assert not client.claim(fresh_keys(1))
        assert not client.resume(keys[0], TOKENS, namespace=fresh_namespace())
        assert not reservation.write(b"abc").ok
        assert not reservation.cancel()
        saving = client.save_async(keys[0], b"abc", tier=Tier.RAM)
        assert saving.result(PATIENCE_S).status is SaveStatus.UNAVAILABLE
        daemon.start()
        assert client.wait_connected(deadline_ms=round(PATIENCE_S * 1e3))
        assert client.save(keys[0], b"abc", tier=Tier.RAM, reason=EVICT).ok
        with client.claim(keys[:1]) as hit:
            assert hit.read(0) == b"abc"
        assert not held.release(), "a repeated release has the same result"


#: A call of each public method, for a closed client. Methods that need no daemon are left out.
USES: dict[str, Callable[[Client, Hit, Reservation], object]] = {
    "longest_prefix": lambda c, _h, _r: c.longest_prefix(fresh_namespace(), TOKENS),
    "resume": lambda c, h, _r: c.resume(h.keys[0], TOKENS, namespace=fresh_namespace()),
    "longest_run": lambda c, h, _r: c.longest_run(h.keys),
    "claim": lambda c, h, _r: c.claim(h.keys),
    "probe": lambda c, h, _r: c.probe(h.keys),
    "exists": lambda c, h, _r: c.exists(h.keys),
    "exists_one": lambda c, h, _r: c.exists_one(h.keys[0], in_place_only=True),
    "leading_run": lambda c, h, _r: c.leading_run(h.keys),
    "touch": lambda c, h, _r: c.touch(h.keys),
    "delete": lambda c, h, _r: c.delete(h.keys),
    "claim_async": lambda c, h, _r: c.claim_async(h.keys),
    "restore_keys": lambda c, h, _r: c.restore_keys(h.keys, [bytearray(SIZES[0])]),
    "release_many": lambda c, h, _r: c.release_many([h]),
    "save": lambda c, h, _r: c.save(h.keys[0], b"a", tier=Tier.RAM, reason=EVICT),
    "save_async": lambda c, h, _r: c.save_async(h.keys[0], b"a", tier=Tier.RAM),
    "save_many_async": lambda c, _h, _r: c.save_many_async([], tier=Tier.RAM),
    "save_made_async": lambda c, _h, _r: c.save_made_async(
        [], list, payload_bytes=0, tier=Tier.RAM
    ),
    "would_drop": lambda c, _h, _r: c.would_drop(),
    "save_many": lambda c, _h, _r: c.save_many([], tier=Tier.RAM, reason=EVICT),
    "reserve": lambda c, _h, _r: c.reserve([], tier=Tier.RAM, reason=EVICT),
    "write": lambda c, _h, r: c.write([(r, b"abc")]),
    "cancel": lambda c, _h, r: c.cancel([r]),
    "flush": lambda c, _h, _r: c.flush(),
    "wait_connected": lambda c, _h, _r: c.wait_connected(),
}


def test_every_public_method_is_in_this_suite() -> None:
    methods = {
        name
        for name, _ in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_")
    }
    # These make no call.
    assert methods - set(USES) == {"announce", "chain", "close"}


def test_a_closed_client_raises_and_has_given_everything_back(
    daemon: PrivateDaemon, make: Callable[..., Client]
) -> None:
    client, other = make(daemon), make(daemon)
    keys, _ = save_some(client)
    hit = client.claim(keys)
    (new,) = fresh_keys(1)
    (reservation,) = client.reserve([ReserveItem(new, 3)], tier=Tier.RAM, reason=EVICT)
    client.close()
    client.close()
    assert not client.connected
    for use in USES.values():
        with pytest.raises(ClientClosed):
            use(client, hit, reservation)
    assert restore(hit)[0].miss is MissReason.LOST
    assert not hit.release()

    def reserved() -> bool:
        (again,) = other.reserve([ReserveItem(new, 3)], tier=Tier.RAM, reason=EVICT)
        with again:
            return again.granted

    eventually(reserved)
