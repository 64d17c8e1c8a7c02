"""LMCache itself: its own benchmark of L2 adapters, which verifies every byte.
`make engines-lmcache` runs this file."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

import pytest

from prefixd.client.connectors.lmcache import Keys
from tests.engines.lmcache_l2 import bench_l2, plugin
from tests.engines.page_commands import command
from tests.support.daemon import private_daemon

pytest.importorskip("lmcache")

# The engine's own warnings are not errors here.
pytestmark = pytest.mark.filterwarnings("default")
ROUNDS, KEYS = 3, 32


@pytest.mark.parametrize("tier", ["ram", "shm", "disk"])
def test_the_benchmark_of_lmcache_passes(tier: str) -> None:
    with private_daemon(ram="256MiB", shm="256MiB", disk="256MiB") as daemon:
        benched = bench_l2(plugin(daemon.address, tier), rounds=ROUNDS, keys=KEYS, data_kib=256)
        with daemon.admin() as admin:
            assert not admin.check().problems
            (told,) = (each for each in admin.stats().usage.values() if each.lookups)
    # The same ratio as its own: all were found. It does not tell how many tokens a chunk has.
    assert told.hits == told.lookups >= ROUNDS
    assert told.lookup_tokens == 0
    assert (benched.status, "verified OK" in benched.text) == (0, True), benched.text
    assert benched.successes == dict.fromkeys(("Store", "Lookup", "Load"), ROUNDS * KEYS)


def test_the_page_followed_literally() -> None:
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    given = parser.parse_args(command("lmcache.md", "lmcache", "server"))
    (spec,) = map(json.loads, given.l2_adapter)
    assert len(TokenHasher(16, given.hash_algorithm).compute_chunk_hashes([1] * 16)[0]) == 32
    with private_daemon(shm="64MiB") as daemon:
        spec["adapter_params"]["address"] = daemon.address
        benched = bench_l2(spec, rounds=1, keys=8, data_kib=256)
    assert (benched.status, "verified OK" in benched.text) == (0, True), benched.text


def test_in_the_engines_process_a_chunk_has_a_number_of_64_bits() -> None:
    """Why the page says that prefixd is attached to LMCache's server, and not in the process: two
    prompts with one such number can be made, and are one key."""
    from lmcache.v1.token_database import _normalize_hash_to_int

    assert _normalize_hash_to_int(bytes(8) + b"\1" * 24) == _normalize_hash_to_int(bytes(32))


def test_without_a_daemon_the_benchmark_fails(tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = f"unix:{tmp_path_factory.mktemp('none')}/d.sock"
    benched = bench_l2(plugin(nowhere, "ram"), rounds=1, keys=2, data_kib=4)
    assert benched.status == 1, "nothing could be verified"
    assert benched.successes == dict.fromkeys(("Store", "Lookup", "Load"), 0)


def test_every_field_of_lmcaches_keys_is_in_ours() -> None:
    """What the connector's table leaves to them."""
    from lmcache.v1.distributed.api import ObjectKey

    values = {
        "chunk_hash": b"h" * 32,
        "model_name": "m",
        "kv_rank": 1,
        "object_group_id": 0,
        "cache_salt": "s",
    }
    assert {each.name for each in fields(ObjectKey)} == set(values), "somebody has to decide"
    keys = Keys({})
    (same,) = keys.of([ObjectKey(**values)])
    for name, value in values.items():
        other = value + (b"x" if isinstance(value, bytes) else 1 if isinstance(value, int) else "x")  # type: ignore[operator]
        assert keys.of([ObjectKey(**values | {name: other})]) != [same], name
