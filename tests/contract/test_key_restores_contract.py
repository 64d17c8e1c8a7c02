"""Restores by key over every transport: the results of a search and a restore, in fewer round trips
where possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixd.client import (
    ClaimMode,
    Client,
    MissReason,
    ReserveItem,
    SaveItem,
    Tier,
)
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError, InvalidKey, InvalidSize
from prefixd.proto.keys import Key
from tests.contract import test_transport_contract as contract
from tests.contract.test_transport_contract import (
    EVICT,
    SIZES,
    TOKENS,
    fresh_keys,
    fresh_namespace,
    in_place,
    payload_of,
    save_some,
)
from tests.support.daemon import eventually, tcp_daemon

transport, flags, daemon = contract.transport, contract.flags, contract.daemon
operator, make, client = contract.operator, contract.make, contract.client
tier = contract.tier

KEY = Key(bytes(32))


def test_a_restore_of_keys_is_a_search_and_a_restore(
    daemon: PrivateDaemon, client: Client, tier: Tier
) -> None:
    keys, payloads = save_some(client, tier)
    buffers = [bytearray(size) for size in SIZES]
    before = client.counters
    result = client.restore_keys(keys, buffers)
    assert buffers == payloads
    assert (result.run, result.token_count, result.miss) == (4, 28, None)
    assert (result.payload_bytes, result.restored) == (sum(SIZES), (True,) * 4)
    changed = {
        name: amount - before[name]  # type: ignore[operator]  # numbers
        for name, amount in client.counters.items()
        if isinstance(amount, int) and amount != before[name]
    }
    # No tokens: what the keys stand for is not known, and a ratio of what is there says nothing.
    assert changed == {
        "lookups": 1,
        "hits": 1,
        "hit_entries": 4,
        "restores": 1,
        "restored_entries": 4,
        "restored_tokens": 28,
        "restored_bytes": sum(SIZES),
    }
    # Fewer buffers than keys, absent keys, and a buffer of the wrong size.
    (absent,) = fresh_keys(1)
    some = [keys[0], absent, *keys[1:]]
    for requested, sizes, mode, expected in (
        (keys, SIZES[:2], ClaimMode.RUN, [None] * 2),
        (some, (SIZES[0], 1, *SIZES[1:]), ClaimMode.RUN, [None, *[MissReason.ABSENT] * 4]),
        (some, (SIZES[0], 1, *SIZES[1:]), ClaimMode.ANY, [None, MissReason.ABSENT, *[None] * 3]),
        (keys, (SIZES[0], 2, *SIZES[2:]), ClaimMode.RUN, [None, MissReason.WRONG_SIZE, None, None]),
        ([absent], (1,), ClaimMode.RUN, [MissReason.ABSENT]),
        ([keys[0], keys[0]], (SIZES[0],) * 2, ClaimMode.ANY, [None] * 2),
        (keys, (), ClaimMode.RUN, []),
    ):
        buffers = [bytearray(size) for size in sizes]
        result = client.restore_keys(requested, buffers, mode=mode)
        assert list(result.misses) == expected
        assert result.run == [*expected, MissReason.ABSENT].index(
            next((miss for miss in expected if miss), MissReason.ABSENT)
        )
        saved = dict(zip(keys, payloads, strict=True))
        for key, buffer, miss in zip(requested, buffers, expected, strict=False):
            assert buffer == (saved[key] if miss is None else bytes(len(buffer)))
    (reservation,) = client.reserve([ReserveItem(absent, 3)], tier=tier, reason=EVICT)
    with reservation:
        result = client.restore_keys([absent], [bytearray(3)])
        assert result.miss is (MissReason.ABSENT if in_place(client) else MissReason.IN_FLIGHT)
    with daemon.admin() as admin:
        assert not list(admin.all_claims())


def test_a_restore_of_a_chain_says_how_many_tokens_it_saves(client: Client, tier: Tier) -> None:
    chain = client.chain(fresh_namespace(), TOKENS, 20)
    items = [SaveItem(chain[index], payload_of(chain[index], 5_000)) for index in (0, 1, 3)]
    assert all(outcome.ok for outcome in client.save_many(items, tier=tier, reason=EVICT))
    buffers = [[bytearray(2_000), bytearray(3_000)] for _ in range(5)]
    result = client.restore_keys(chain, buffers)
    assert (result.run, result.token_count) == (2, 40)
    assert result.misses == (None, None, *[MissReason.ABSENT] * 3)
    assert [b"".join(pieces) for pieces in buffers[:2]] == [item.payload for item in items[:2]]


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda c: c.restore_keys([KEY], [bytearray(1)] * 2), InvalidSize),
        (lambda c: c.restore_keys([KEY], [], mode=ClaimMode.FIRST), CallerError),
        (lambda c: c.restore_keys([KEY], [], mode=0), CallerError),
        (lambda c: c.restore_keys([b"short"], [bytearray(1)]), InvalidKey),
        (lambda c: c.restore_keys([KEY], [b"1"]), InvalidSize),
    ],
    ids=[
        "a buffer for no key",
        "mode FIRST",
        "an invalid mode",
        "a short key",
        "a read-only buffer",
    ],
)
def test_a_mistake_raises(
    client: Client, use: Callable[[Client], object], error: type[CallerError]
) -> None:
    with pytest.raises(error):
        use(client)


def test_over_a_framed_connection_it_is_one_round_trip(transport: str, client: Client) -> None:
    keys, payloads = save_some(client)
    before = client.counters["rpcs"]
    buffers = [bytearray(size) for size in SIZES]
    assert client.restore_keys(keys, buffers)
    assert buffers == payloads
    assert client.restore_keys(fresh_keys(1), [bytearray(1)]).run == 0
    after = client.counters["rpcs"]
    calls = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    if transport in ("unix", "data", "tls"):
        assert calls == {"Fetch": 2}
    elif transport == "grpc":
        assert calls == {"Claim": 2, "Read": 1, "Release": 1}
    else:
        assert calls == {}


def test_a_client_decides_before_bytes_move_whether_loading_pays(
    make: Callable[..., Client], daemon: PrivateDaemon, client: Client
) -> None:
    """No payload is sent to a client that computes faster than it loads."""
    keys, _ = save_some(client)
    buffers = [bytearray(size) for size in SIZES]
    fast = make(daemon, prefill_tokens_per_s=1e9)
    assert fast.restore_keys(keys, buffers), "the speed of loading is not known yet"
    result = fast.restore_keys(keys, buffers)
    assert set(result.misses) == {MissReason.SLOW}
    # With ANY, entries are independent of each other, and the rule does not apply.
    assert fast.restore_keys(keys, buffers, mode=ClaimMode.ANY)


def test_more_keys_than_one_call_takes_are_restored(client: Client) -> None:
    keys = fresh_keys(4_200)
    items = [SaveItem(key, key) for key in keys]
    assert all(outcome.ok for outcome in client.save_many(items, tier=Tier.RAM, reason=EVICT))
    buffers = [bytearray(len(key)) for key in keys]
    assert client.restore_keys(keys, buffers).run == len(keys)
    assert buffers == keys


def test_a_restore_from_a_dead_daemon_is_a_miss(
    make: Callable[..., Client], flags: tuple[str, ...]
) -> None:
    """In place too, because the search needs a session."""
    with tcp_daemon(*flags) as daemon:
        client = make(daemon)
        keys, _ = save_some(client)
        daemon.kill()
        eventually(lambda: not client.connected)
        result = client.restore_keys(keys, [bytearray(size) for size in SIZES])
        assert set(result.misses) == {MissReason.UNAVAILABLE}
        assert client.counters["misses"]["unavailable"] == 1  # type: ignore[index]  # a group
