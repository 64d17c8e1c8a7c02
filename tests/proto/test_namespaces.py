"""The keys of namespaces: never shared, and each tells its namespace."""

from __future__ import annotations

from hashlib import sha256

import pytest

from prefixd.proto.keys import Key
from prefixd.proto.limits import KEY_BYTES
from prefixd.proto.namespaces import TAG_BYTES, TenantNamespace, check_label, tag_of

KEYS = [Key(sha256(b"%d" % number).digest()) for number in range(1000)]


def test_namespaces_do_not_meet() -> None:
    spaces = [TenantNamespace(name) for name in ("a", "b", "team-a", "team-b", "a" * 32)]
    stored = [space.stored(KEYS) for space in spaces]
    everything = [*KEYS, *(key for keys in stored for key in keys)]
    assert len(set(everything)) == len(everything)
    assert {len(key) for key in everything} == {KEY_BYTES}
    for space, keys in zip(spaces, stored, strict=True):
        assert all(space.has(key) for key in keys)
        assert all(key[-TAG_BYTES:] == tag_of(space.name) for key in keys)
        assert not any(space.has(key) for key in KEYS)
        assert not any(space.has(key) for other in stored if other is not keys for key in other)


def test_what_is_stored_can_not_be_named_from_outside() -> None:
    """Not even by the daemon's own key for it."""
    a, b = TenantNamespace("a"), TenantNamespace("b")
    (stored,) = a.stored(KEYS[:1])
    assert a.stored([stored]) != (stored,)
    assert b.stored([stored]) != (stored,)


def test_the_same_on_every_node_and_after_every_start() -> None:
    """The format may not change, because entries outlive the daemon that saved them."""
    key = Key(bytes(range(32)))
    tag = sha256(b"prefixd tenant\0team-a").digest()[:8]
    hashed = sha256(b"prefixd tenant key\0team-a\0" + key).digest()[:24]
    assert TenantNamespace("team-a").stored([key]) == (hashed + tag,)
    assert TenantNamespace("team-a") == TenantNamespace("team-a") != TenantNamespace("team-b")
    assert len({TenantNamespace("team-a"), TenantNamespace("team-a")}) == 1


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a b", "ä", "a" * 33, "a\n", "a=1"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="a namespace has"):
        TenantNamespace(name)


def test_a_name_is_a_label() -> None:
    assert check_label(f"{'a' * 32}/x") == f"{'a' * 32}/x"
