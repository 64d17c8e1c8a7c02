"""Searches and claims: the rpcs that they make, and what they find."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from prefixd.client import (
    ClaimMode,
    Client,
    MissReason,
    ReserveItem,
    SaveReason,
    Tier,
)
from prefixd.client.counters import ClientCounters
from prefixd.client.wire.deadline import Deadline
from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.proto.errors import (
    DeadlineExceeded,
    InvalidKey,
    LimitReached,
)
from prefixd.proto.keys import Key, block_keys, prefix_key
from prefixd.proto.limits import MAX_BATCH_KEYS, MAX_WAIT_MS
from tests.support.fake_clients import (
    ALL,
    NAMESPACE,
    ONE,
    POLICY,
    THREE,
    TOKENS,
    TWO,
    fake_daemon,
    save_prefix,
    searched,
    searching_client,
)
from tests.support.fakes import PATIENCE_S, FakeDaemon, keys

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(searching_client)


# ---- prefix entries


def test_the_longest_prefix_is_found_and_claimed_in_one_rpc(
    daemon: FakeDaemon, client: Client
) -> None:
    for length in (20, 60, 40):
        save_prefix(daemon, length)
    with client.longest_prefix(NAMESPACE, TOKENS) as hit:
        assert hit.token_count == 60
        assert hit.read(0) == b"state of 60"
        assert len(daemon.claims) == 1
    assert searched(client)["rpcs"] == {"Claim": 1, "Read": 1, "Release": 1}
    assert searched(client)["hits"] == 1
    assert client.counters["hit_tokens"] == 60


def test_looking_only_pins_nothing(daemon: FakeDaemon, client: Client) -> None:
    save_prefix(daemon, 40)
    hit = client.longest_prefix(NAMESPACE, TOKENS, claim=False)
    assert (hit.token_count, hit.claimed) == (40, False)
    assert searched(client)["rpcs"] == {"Lookup": 1}
    assert not daemon.claims


@pytest.mark.parametrize("claim", [True, False])
def test_a_miss_is_an_empty_hit_with_its_reason(client: Client, claim: bool) -> None:
    with client.longest_prefix(NAMESPACE, TOKENS, claim=claim) as hit:
        assert not hit
        assert hit.miss is MissReason.ABSENT
        result = hit.restore_into([])
    assert not result, "nothing was restored"
    assert (result.miss, result.run) == (MissReason.ABSENT, 0)
    assert searched(client)["misses"] == {"absent": 1}


@pytest.mark.parametrize("claim", [True, False])
def test_a_prompt_without_tokens_is_a_miss_without_an_rpc(client: Client, claim: bool) -> None:
    assert not client.longest_prefix(NAMESPACE, [], claim=claim)
    assert searched(client) == {"lookups": 1, "hits": 0, "misses": {"absent": 1}, "rpcs": {}}


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("length", [1, 20, 37, 104, 105])
def test_a_state_of_any_length_is_found(
    daemon: FakeDaemon, client: Client, claim: bool, length: int
) -> None:
    save_prefix(daemon, length)
    with client.longest_prefix(NAMESPACE, TOKENS, claim=claim) as hit:
        assert hit.token_count == length
    assert not client.longest_prefix(NAMESPACE, TOKENS[: length - 1], claim=claim)


def test_with_a_stride_only_its_multiples_and_the_end_are_looked_at(
    daemon: FakeDaemon, client: Client
) -> None:
    save_prefix(daemon, 37)
    assert not client.longest_prefix(NAMESPACE, TOKENS, stride_tokens=20)
    for length in (40, 105):
        save_prefix(daemon, length)
        with client.longest_prefix(NAMESPACE, TOKENS, stride_tokens=20) as hit:
            assert hit.token_count == length


def test_the_walk_counts_tokens_itself(daemon: FakeDaemon, client: Client) -> None:
    save_prefix(daemon, 40, token_count=0)
    with client.longest_prefix(NAMESPACE, TOKENS) as hit:
        assert hit.token_count == 40


@pytest.mark.parametrize("claim", [True, False])
def test_a_save_in_flight_is_waited_for_or_named(
    daemon: FakeDaemon, client: Client, claim: bool
) -> None:
    key = prefix_key(NAMESPACE, TOKENS[:40])
    with Client(daemon.address, name="writer", local=False) as writer:
        (reservation,) = writer.reserve(
            [ReserveItem(key, 3, token_count=40)], tier=Tier.RAM, reason=SaveReason.FINISH
        )
        assert not client.longest_prefix(NAMESPACE, TOKENS, claim=claim)
        assert searched(client)["misses"] == {"in_flight": 1}
        name = "Claim" if claim else "Lookup"
        thread = threading.Thread(
            target=lambda: (
                daemon.wait_until(lambda: daemon.rpcs[name] == 2),
                reservation.write(b"abc"),
            )
        )
        thread.start()
        hit = client.longest_prefix(NAMESPACE, TOKENS, claim=claim, wait_ms=MAX_WAIT_MS)
        thread.join(PATIENCE_S)
    assert hit.token_count == 40
    hit.release()


# ---- resume


def test_resume_takes_the_parent_in_one_rpc(daemon: FakeDaemon, client: Client) -> None:
    save_prefix(daemon, 60)
    parent = save_prefix(daemon, 93)
    with client.resume(parent, TOKENS, namespace=NAMESPACE) as hit:
        assert hit.token_count == 93
    assert searched(client)["rpcs"] == {"Claim": 1, "Release": 1}


def test_resume_waits_for_the_parents_save(daemon: FakeDaemon, client: Client) -> None:
    save_prefix(daemon, 60)
    parent = prefix_key(NAMESPACE, TOKENS[:93])
    with Client(daemon.address, name="writer", local=False) as writer:
        (reservation,) = writer.reserve(
            [ReserveItem(parent, 3, token_count=93)], tier=Tier.RAM, reason=SaveReason.FINISH
        )
        thread = threading.Thread(
            target=lambda: (
                daemon.wait_until(lambda: daemon.rpcs["Claim"]),
                reservation.write(b"abc"),
            )
        )
        thread.start()
        hit = client.resume(parent, TOKENS, MAX_WAIT_MS, namespace=NAMESPACE)
        thread.join(PATIENCE_S)
    assert hit.token_count == 93
    hit.release()


def test_resume_falls_back_to_the_longest_prefix(daemon: FakeDaemon, client: Client) -> None:
    save_prefix(daemon, 60)
    parent = prefix_key(NAMESPACE, TOKENS[:93])
    with client.resume(parent, TOKENS, 0, namespace=NAMESPACE) as hit:
        assert hit.token_count == 60
    assert searched(client)["rpcs"] == {"Claim": 1, "Release": 1}
    assert not client.resume(parent, TOKENS[:50], 0, namespace=NAMESPACE)


def test_resume_refuses_a_parent_of_other_tokens(daemon: FakeDaemon, client: Client) -> None:
    stranger = prefix_key(NAMESPACE, [7] * 50)
    daemon.put(stranger, b"other", token_count=50)
    assert not client.resume(stranger, TOKENS, 0, namespace=NAMESPACE)
    save_prefix(daemon, 60)
    with client.resume(stranger, TOKENS, 0, namespace=NAMESPACE) as hit:
        assert hit.token_count == 60
    longer = save_prefix(daemon, 93)
    assert not client.resume(longer, TOKENS[:20], 0, namespace=NAMESPACE)
    assert not daemon.claims


def test_resume_may_name_a_parent_on_a_stride(daemon: FakeDaemon, client: Client) -> None:
    parent = save_prefix(daemon, 60)
    with client.resume(parent, TOKENS, 0, namespace=NAMESPACE) as hit:
        assert hit.keys == [parent]
    with pytest.raises(InvalidKey):
        client.resume(Key(b"short"), TOKENS, namespace=NAMESPACE)


@pytest.mark.parametrize("length", [60, 93, 105])
def test_resume_knows_a_parent_that_does_not_say_its_length(
    daemon: FakeDaemon, length: int
) -> None:
    options: dict[str, Any] = {"prefill_tokens_per_s": 1e9, "min_benefit_ms": 1}
    parent = prefix_key(NAMESPACE, TOKENS[:length])
    daemon.put(parent, b"state", token_count=0)
    with Client(daemon.address, local=False, policy=POLICY, **options) as client:
        found = client.resume(parent, TOKENS, 0, namespace=NAMESPACE)
        with client.claim([parent]) as hit:
            assert hit.token_counts == (0,)
        # At 1e9 tokens/s every entry of known length is slow.
        assert (bool(found), found.miss) == (False, MissReason.SLOW)
    with (
        Client(daemon.address, local=False, policy=POLICY) as client,
        client.resume(parent, TOKENS, 0, namespace=NAMESPACE) as found,
    ):
        assert (found.keys, found.token_count) == ([parent], length)
    assert not daemon.claims


# ---- block chains


def test_a_run_ends_at_the_first_block_that_is_missing(daemon: FakeDaemon, client: Client) -> None:
    chain = client.chain(NAMESPACE, TOKENS, 20)
    for index in (0, 1, 3):
        daemon.put(chain[index], b"block", token_count=1)
    with client.longest_run(chain) as hit:
        assert hit.keys == chain[:2]
        assert hit.token_counts == (20, 20)
        assert hit.miss is MissReason.ABSENT
    assert searched(client)["rpcs"] == {"Claim": 1, "Release": 1}
    with client.longest_run(chain.keys, claim=False) as hit:
        assert hit.keys == chain[:2]
        assert hit.token_counts == (1, 1)
        assert hit.miss is MissReason.ABSENT


def test_a_run_that_is_whole_misses_nothing(daemon: FakeDaemon, client: Client) -> None:
    chain = client.chain(NAMESPACE, TOKENS, 20, include_partial=True)
    for key in chain:
        daemon.put(key, b"block")
    for claim in (True, False):
        with client.longest_run(chain, claim=claim) as hit:
            assert len(hit) == chain.whole_blocks == len(chain) - 1
            assert hit.miss is None


def test_a_run_of_nothing_is_an_empty_hit(client: Client) -> None:
    assert not client.longest_run(client.chain(NAMESPACE, TOKENS, 20))
    assert not client.longest_run(client.chain(NAMESPACE, TOKENS[:5], 20))
    assert searched(client) == {
        "lookups": 2,
        "hits": 0,
        "misses": {"absent": 2},
        "rpcs": {"Claim": 1},
    }
    empty = client.longest_run([])
    assert (len(empty), empty.miss) == (0, MissReason.ABSENT)


@pytest.mark.parametrize("claim", [True, False])
def test_a_prompt_that_is_shorter_than_a_block_is_a_miss(client: Client, claim: bool) -> None:
    for run in ([], client.chain(NAMESPACE, [1], 2)):
        hit = client.longest_run(run, claim=claim, prompt_tokens=1)
        assert (len(hit), hit.miss) == (0, MissReason.ABSENT)
    counters = client.counters
    assert (counters["lookups"], counters["hits"], counters["hit_tokens"]) == (2, 0, 0)
    assert client.exists([], prompt_tokens=1) == []
    assert client.leading_run([], prompt_tokens=1) == 0
    assert client.restore_keys([], []).miss is None


@pytest.mark.parametrize("claim", [True, False])
def test_a_chain_longer_than_a_batch_is_one_hit(
    daemon: FakeDaemon, client: Client, claim: bool
) -> None:
    tokens = list(range(2 * MAX_BATCH_KEYS + 10))
    blocks = block_keys(NAMESPACE, tokens, 1)
    for number, key in enumerate(blocks):
        daemon.put(key, number.to_bytes(4, "big"))
    with client.longest_run(client.chain(NAMESPACE, tokens, 1), claim=claim) as hit:
        assert len(hit) == hit.token_count == len(tokens)
        assert hit.miss is None
        targets = [bytearray(4) for _ in tokens]
        restored = hit.restore_into(targets)
        assert restored.run == len(tokens)
        assert [int.from_bytes(each, "big") for each in targets] == tokens
        assert hit.read(len(tokens) - 1) == targets[-1]
        assert hit.release()
    assert not daemon.claims
    del daemon.entries[blocks[MAX_BATCH_KEYS + 3]]
    with client.longest_run(blocks, claim=claim) as hit:
        assert len(hit) == MAX_BATCH_KEYS + 3
        assert hit.miss is MissReason.ABSENT


def test_a_long_run_that_can_be_asked_for_in_part_is_a_part(
    daemon: FakeDaemon, client: Client
) -> None:
    """What was found before the daemon refused counts, with the reason why there is not more."""
    every = [Key(key) for key in keys(MAX_BATCH_KEYS + 1)]
    for key in every:
        daemon.put(key, b"b")

    def refuse_the_next(answer: Any) -> Any:
        daemon.fail("Claim", LimitReached("enough"))
        return answer

    daemon.mangle("Claim", refuse_the_next)
    with client.longest_run(every) as hit:
        assert len(hit) == MAX_BATCH_KEYS
        assert hit.miss is MissReason.REFUSED
    assert not daemon.claims


# ---- claims and probes


def test_claims_pin_what_their_mode_wants(daemon: FakeDaemon, client: Client) -> None:
    for key in (ONE, THREE):
        daemon.put(key, b"bytes", token_count=5)
    for mode, found in (
        (ClaimMode.ANY, [ONE, THREE]),
        (ClaimMode.RUN, [ONE]),
        (ClaimMode.FIRST, [ONE]),
    ):
        with client.claim(ALL, mode=mode) as hit:
            assert hit.keys == found
            assert hit.token_count == 5 * len(found)


def test_probes_tell_and_pin_nothing(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, b"bytes")
    first, second = client.probe([ONE, TWO])
    assert first.present
    assert first.entry is not None
    assert not second.present
    assert client.exists([ONE, TWO]) == [True, False]
    assert searched(client) == {"lookups": 1, "hits": 1, "misses": {}, "rpcs": {"Lookup": 2}}
    assert not daemon.claims


def test_what_is_not_to_be_counted_is_not(daemon: FakeDaemon, client: Client) -> None:
    daemon.put(ONE, b"bytes")
    assert client.exists([ONE, TWO], counted=False) == [True, False]
    assert client.exists_one(ONE, counted=False)
    assert client.leading_run([ONE, TWO], counted=False) == 1
    with client.claim([ONE], counted=False), client.longest_run([TWO], counted=False):
        pass
    client.restore_keys([ONE, TWO], [bytearray(5), bytearray(5)], counted=False)
    with client.claim_async([TWO], counted=False).result() as hit:
        assert not hit
    assert searched(client)["lookups"] == 0
    client.exists([ONE, TWO], prompt_tokens=33)
    client.leading_run([TWO, ONE], prompt_tokens=10)
    client.exists_one(TWO, prompt_tokens=5)
    counted = client.counters
    assert (counted["lookups"], counted["hits"], counted["lookup_tokens"]) == (3, 1, 48)
    assert counted["missed_tokens"]["absent"] == 17 + 10 + 5


# ---- restores by key that search first; tests/contract has the others


class Noting(RemoteTransport):
    """Records its calls, and can't restore by key in one trip."""

    shared = False
    fails: Exception | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.asked: list[str] = []
        self.waits_ms: list[int] = []
        super().__init__(*args, **kwargs)

    @property
    def shares(self) -> bool:
        return self.shared

    def fetch_found(self, *_: Any) -> bool:
        self.asked.append("fetch_found")
        if self.fails is not None:
            raise self.fails
        return False

    def pull(self, keys: Sequence[Key], _mode: ClaimMode, wait_ms: int, _deadline: Deadline) -> int:
        self.asked.append(f"pull {len(keys)}")
        self.waits_ms.append(wait_ms)
        return 0


@pytest.fixture
def transport(daemon: FakeDaemon) -> Noting:
    return Noting(daemon.address, "me", counters=ClientCounters())


@pytest.fixture
def restoring(transport: Noting) -> Iterator[Client]:
    with Client(transport=transport, counters=transport.counters) as client:
        yield client


def test_what_other_nodes_have_is_brought_before_bytes_move(
    daemon: FakeDaemon, transport: Noting, restoring: Client
) -> None:
    daemon.put(ONE, b"one")
    transport.shared = True
    buffers = [bytearray(3) for _ in ALL]
    result = restoring.restore_keys([ONE, TWO, THREE], buffers)
    assert result.misses == (None, MissReason.ABSENT, MissReason.ABSENT)
    assert transport.asked == ["pull 2"]
    # `ClaimMode.ANY` fetches nothing from other nodes, so that one trip is enough.
    assert restoring.restore_keys([ONE], buffers[:1], mode=ClaimMode.ANY)
    assert transport.asked == ["pull 2", "fetch_found"]
    assert not daemon.claims


def test_other_nodes_have_no_longer_than_computing_takes(
    daemon: FakeDaemon, transport: Noting
) -> None:
    daemon.put(ONE, b"one", token_count=100)
    transport.shared = True
    with Client(
        transport=transport, counters=transport.counters, policy=POLICY,
        prefill_tokens_per_s=2000, shared_wait_ms=500,
    ) as client:  # fmt: skip
        for tokens in (300, 3000, 1):
            client.longest_run(ALL, claim=False, prompt_tokens=tokens)
        assert transport.waits_ms == [100, 500], "the last one takes no millisecond to compute"
        client.longest_run(ALL, claim=False)
        assert transport.waits_ms.pop() == 500, "nobody knows what they stand for"
        client.claim([TWO, ONE], mode=ClaimMode.FIRST).release()
        assert transport.waits_ms.pop() == 500, "nor is it known of one that is longer"
        save_prefix(daemon, 40)
        found = client.longest_prefix(NAMESPACE, TOKENS, claim=False)
        left = len(TOKENS) - found.token_count
        assert transport.waits_ms.pop() == left // 2 > 0, "what it has counts"


def test_what_fails_before_it_is_known_what_is_there_is_a_miss_of_all(
    transport: Noting, restoring: Client
) -> None:
    transport.fails = DeadlineExceeded("too late")
    result = restoring.restore_keys([ONE, TWO], [bytearray(3), bytearray(3)])
    assert result.misses == (MissReason.DEADLINE,) * 2
    assert transport.asked == ["fetch_found"]
    counted = restoring.counters
    assert (counted["lookups"], counted["misses"]["deadline"]) == (1, 1)
    assert not any(counted["failures"].values()), "it is counted once"
