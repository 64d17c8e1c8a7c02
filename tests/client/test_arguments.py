"""Whatever a caller gives, what is wrong is a `CallerError`, and nothing is asked of the daemon."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prefixd.client import Client, Hit, Key, Reservation, ReserveItem, SaveItem, SavePolicy, Tier
from prefixd.proto.errors import CallerError, InvalidSize
from tests.support.fake_clients import ALL, NAMESPACE, ONE, fake_daemon, searching_client
from tests.support.fakes import PATIENCE_S, FakeDaemon

daemon = pytest.fixture(fake_daemon)
client = pytest.fixture(searching_client)

WRONG: dict[str, object] = {
    "None": None,
    "a number": 7,
    "a fraction": 1.5,
    "text": "abc",
    "a key": bytes(32),
    "an object": object(),
    "a list of numbers": [1],
    "a dict": {},
    "a pair": (1, 2),
}

#: Of each method that takes something, what it may be given.
CALLS: dict[str, dict[str, Any]] = {
    "longest_prefix": {"namespace": NAMESPACE, "tokens": [1, 2]},
    "resume": {"parent_key": ONE, "tokens": [1], "namespace": NAMESPACE, "wait_ms": 0},
    "chain": {"namespace": NAMESPACE, "tokens": [1] * 600},
    "longest_run": {"keys": ALL},
    "claim": {"keys": ALL},
    "claim_async": {"keys": ALL},
    "probe": {"keys": ALL},
    "exists": {"keys": ALL},
    "exists_one": {"key": ONE},
    "leading_run": {"keys": ALL},
    "restore_keys": {"keys": ALL[:1], "buffers": [bytearray(3)]},
    "touch": {"keys": ALL},
    "delete": {"keys": ALL[2:]},
    "save": {"key": ONE, "payload": b"abc", "tier": Tier.RAM},
    "save_async": {"key": ONE, "payload": b"abc", "tier": Tier.RAM},
    "save_many": {"items": [SaveItem(ONE, b"abc")], "tier": Tier.RAM},
    "save_many_async": {"items": [SaveItem(ONE, b"abc")], "tier": Tier.RAM},
    "save_made_async": {
        "keys": [ONE],
        "bunches": lambda: [[SaveItem(ONE, b"abc")]],
        "payload_bytes": 3,
        "tier": Tier.RAM,
    },
    "reserve": {"items": [ReserveItem(ONE, 3)], "tier": Tier.RAM},
    "write": {"writes": []},
    "cancel": {"reservations": []},
    "release_many": {"hits": []},
    "would_drop": {"payload_bytes": 3},
    "announce": {},
    "flush": {},
    "wait_connected": {},
    "close": {},
}


def called(method: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Make the call, and wait for its future. A mistake may be one."""
    try:
        result = method(**arguments)
        if hasattr(result, "add_done_callback"):
            result = result.result(PATIENCE_S)
    except CallerError:
        return
    if isinstance(result, Hit):
        result.release()
    for each in result if isinstance(result, list) else ():
        if isinstance(each, Reservation):
            each.cancel()


def test_every_method_is_tried() -> None:
    methods = {
        name
        for name, _ in inspect.getmembers(Client, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods == CALLS.keys()


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"close"}))
def test_a_wrong_type_is_a_mistake_or_does_no_harm(client: Client, name: str) -> None:
    method, given = getattr(client, name), CALLS[name]
    for kind, wrong in WRONG.items():
        for parameter in inspect.signature(method).parameters:
            called(method, {**given, parameter: wrong})
        unexpected = client.counters["misses"], client.counters["failures"]
        counted = [counts["unexpected"] for counts in unexpected]  # type: ignore[index]
        assert counted == [0, 0], kind


@pytest.fixture
def hit(daemon: FakeDaemon, client: Client) -> Iterator[Hit]:
    daemon.put(ONE, b"abc", layer_count=3)
    with client.claim([ONE]) as hit:
        yield hit


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("restore_into", {"buffers": [bytearray(3)]}),
        ("restore_async", {"buffers": [bytearray(3)]}),
        ("read", {"index": 0}),
        ("views", {"index": 0}),
        ("layer", {"index": 0, "layer": 0}),
        ("token_ids", {"index": 0}),
    ],
)
def test_so_it_is_of_a_hit(hit: Hit, name: str, given: dict[str, Any], wrong: str) -> None:
    method = getattr(hit, name)
    for parameter in inspect.signature(method).parameters:
        called(method, {**given, parameter: WRONG[wrong]})


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            lambda c: c.save_many([(ONE, b"abc")], tier=Tier.RAM),
            r"items\[0\] is a SaveItem, not a ",
        ),
        (
            lambda c: c.save(ONE, b"abc", tier="ram"),
            "a tier is one of Tier, such as Tier.RAM, not 'ram'",
        ),
        (lambda c: c.longest_prefix("llama", [1]), "a namespace is a Namespace, not a str"),
        (lambda c: c.claim(ONE), "keys are a list of keys"),
        (lambda c: c.claim(7), "keys are a list of keys, not 7"),
        (lambda c: c.claim([ONE], wait_ms=1.5), "wait_ms is a whole number, not 1.5"),
        (lambda c: c.claim([ONE], deadline_ms="5s"), "deadline_ms is a whole number, not '5s'"),
        (lambda c: c.release_many([ONE]), r"hits\[0\] is a Hit, not a bytes"),
        (lambda c: c.cancel([ONE]), r"reservations\[0\] is a Reservation, not a bytes"),
        (lambda c: c.write([ONE]), r"writes\[0\] is a tuple, not a bytes"),
        (lambda c: c.announce("me"), "identity is a StateIdentity, not 'me'"),
    ],
)
def test_the_message_says_what_it_takes(
    client: Client, use: Callable[[Any], object], sentence: str
) -> None:
    with pytest.raises(CallerError, match=sentence):
        use(client)


def test_whole_numbers_of_other_libraries_are_taken(client: Client) -> None:
    assert not client.claim([ONE], wait_ms=np.int64(0), deadline_ms=np.int32(500))  # type: ignore[arg-type]
    assert client.save(ONE, b"abc", tier=Tier.RAM, token_count=np.int64(7)).ok  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting",
    [{"deadline_ms": "5"}, {"savers": 0}, {"lease_ms": -1}, {"policy": {}}, {"savers": 1.5}],
)
def test_so_it_is_of_settings(setting: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        Client("unix:/nowhere", **setting)


# ---- what things say of themselves


def test_a_repr_shows_no_bytes_and_no_secret(daemon: FakeDaemon, hit: Hit) -> None:
    import dataclasses

    with Client(daemon.address, local=False, policy=SavePolicy()) as client:
        assert client.wait_connected()
        assert repr(client) == f"<Client of {daemon.address}: connected>"
    assert repr(client) == f"<Client of {daemon.address}: closed>"
    key = ONE.hex()[:16]
    assert repr(hit.entries[0]) == f"<Entry {key} in ram: 3 bytes, 0 tokens, cold>"
    assert repr(hit.restore_into([bytearray(3)])) == (
        "<RestoreResult: 1 of 1 buffers, run of 1, 0 tokens>"
    )
    assert repr(SaveItem(ONE, bytes(10**6))) == f"<SaveItem {key}: a bytes, None tokens>"
    tenant = dataclasses.replace(NAMESPACE, salt="secret", shard="tp 0/2")
    assert "secret" not in repr(tenant)
    assert "'tp 0/2'" in repr(tenant)
    assert str(Tier.RAM) == f"{Tier.RAM}" == Tier.RAM.label == "ram"


def test_a_mistake_is_a_value_error() -> None:
    assert issubclass(InvalidSize, ValueError)
    assert Key(bytes(32)) == bytes(32)
