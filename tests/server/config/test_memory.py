"""The sum of all bounds: every option that takes memory is in it."""

from __future__ import annotations

from prefixd.server.config import budgets
from prefixd.server.config.budgets import describe_memory, memory_parts, resolve
from prefixd.server.config.loading import load_config
from prefixd.server.sharing.engine_link import MAX_KNOWN
from tests.support.running import MACHINE

MIB = 2**20


def parts(*flags: str) -> dict[str, int]:
    budgets = ("--ram=64MiB", "--shm=0", "--disk=0")
    return memory_parts(resolve(load_config([*budgets, *flags], {}), MACHINE))


def test_each_option_adds_what_it_allows() -> None:
    before = parts()
    assert before["ram.budget"] == 64 * MIB
    assert before["entries"] == 1024 * 600
    for flag, name, more_bytes in (
        ("--server.max_reads=300MiB", "server.max_reads", 44 * MIB),
        ("--server.max_saves=2GiB", "server.max_saves", 1024 * MIB),
        ("--server.staging_total=2GiB", "server.staging_total", 1024 * MIB),
        ("--server.max_connections=2048", "server.max_connections", 64 * MIB),
        ("--server.max_rpcs=1024", "server.max_rpcs", 32 * MIB),
        ("--sessions.max_sessions=8192", "sessions.max_sessions", 64 * MIB),
        ("--watch.history=32MiB", "watch.history", 16 * MIB),
        ("--ram.max_budget=128MiB", "ram.budget", 64 * MIB),
    ):
        after = parts(flag)
        assert after[name] - before[name] == more_bytes, flag
    assert parts("--tcp=127.0.0.1:0")["server.max_local"] == 512 * MIB
    assert "watch.history" not in parts("--watch.max_watchers=0")


def test_an_engine_is_remembered_and_a_bucket_twice_more() -> None:
    assert "shared.engine" not in parts()
    engine = "--shared.engine=redis://10.0.0.5"
    alone = parts(engine)
    assert alone["shared.engine"] == 50 * MIB
    both = parts(engine, "--shared.capacity=s3://bucket/prefix")
    assert both["shared.engine"] == 150 * MIB
    assert both["shared.memory"] == 2 * alone["shared.memory"]


def test_as_many_keys_are_known_as_the_sum_says() -> None:
    assert budgets._KNOWN_KEYS == MAX_KNOWN


def test_the_sum_is_described_with_its_largest_parts() -> None:
    plan = resolve(load_config(["--ram=64GiB", "--shm=0", "--disk=0"], {}), MACHINE)
    line = describe_memory(plan)
    assert line.startswith("memory: at most 67.71GiB")
    assert "of which ram.budget 64GiB, " in line
