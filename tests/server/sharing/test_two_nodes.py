"""Two real daemons and one engine. Blocks saved on one daemon are read on the other, and failures
of the engine are misses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from typer.testing import CliRunner

from prefixd.client import (
    Client,
    DeleteStatus,
    Hit,
    Key,
    MissReason,
    Namespace,
    SaveItem,
    Tier,
    prefix_key,
)
from prefixd.client.ctl.main import app

from ...support.daemon import eventually
from ...support.fake_redis import FakeRedis
from ...support.outside import RAM_ALONE, DaemonProcess, daemon_process
from ...support.ports import free_ports
from ...support.running import payload

PATIENCE_S = 60.0
TOKENS = list(range(16 * 12))
BLOCK_TOKENS = 16
BLOCK_BYTES = 20_000
NAMESPACE = Namespace(b"m" * 32, "q8", bytes(32))


def wait_for_engine(daemons: list[DaemonProcess], nodes: int = 1) -> None:
    """Until each node has reached the engine, which it does after it listens. `nodes`: of the
    engine, and the bucket behind it."""
    for daemon in daemons:
        with daemon.admin() as admin:
            eventually(lambda admin=admin: admin.stats().shared["nodes_serving"] == nodes)


@contextmanager
def fleet(*flags: str) -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """An engine, two daemons that share through it, and a client of each."""
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients = [], []
        for _ in range(2):
            daemon = stack.enter_context(
                daemon_process(
                    *RAM_ALONE, f"--shared.engine={engine.url}", "--shared.life=1h", *flags
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=30_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        wait_for_engine(daemons)
        yield engine, daemons, clients


@pytest.fixture
def sharing_all() -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    with fleet("--shared.write=all") as made:
        yield made


@pytest.fixture
def peers() -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """Two daemons that read payloads from each other. The engine has none."""
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients = [], []
        for port in free_ports(2):
            address = f"127.0.0.1:{port}"
            daemon = stack.enter_context(
                daemon_process(
                    *RAM_ALONE,
                    f"--shared.engine={engine.url}",
                    "--shared.write=all",
                    "--shared.payloads=nodes",
                    f"--shared.address={address}",
                    f"--server.tcp={address}",
                )
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=30_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        wait_for_engine(daemons)
        yield engine, daemons, clients


def keys_of(client: Client) -> list[Key]:
    return client.chain(NAMESPACE, TOKENS, BLOCK_TOKENS).keys


def name_of(key: Key) -> bytes:
    """The name of a key in the engine."""
    return b"px1:1:{%b}" % key.hex().encode()


def save(client: Client, numbers: Iterable[int]) -> None:
    keys = keys_of(client)
    items = [SaveItem(keys[n], payload(n, BLOCK_BYTES), BLOCK_TOKENS) for n in numbers]
    outcomes = client.save_many(items, tier=Tier.RAM)
    assert all(outcomes), outcomes


def evict_all(daemon: DaemonProcess) -> None:
    """Evict all entries of a node. The engine is not told."""
    with daemon.admin() as admin:
        admin.evict(2**30, [Tier.RAM])


def lose(daemon: DaemonProcess, client: Client, number: int) -> None:
    """Have a node lose one of 12 blocks, as it is evicted: the engine still lists it."""
    evict_all(daemon)
    save(client, [each for each in range(12) if each != number])


def restored_blocks(client: Client) -> int:
    """Restore all blocks of the prompt that a search finds, and check their bytes. Returns their
    number."""
    hit = client.longest_run(client.chain(NAMESPACE, TOKENS, BLOCK_TOKENS))
    return restored(hit) if hit else 0


def restored(hit: Hit) -> int:
    buffers = [bytearray(BLOCK_BYTES) for _ in hit.keys]
    result = hit.restore_into(buffers)
    assert all(bytes(buffer) == payload(n, BLOCK_BYTES) for n, buffer in enumerate(buffers))
    hit.release()
    return sum(result.restored)


def test_one_node_restores_what_another_saved(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    assert restored_blocks(second) == 0
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(second) == 12
    commands_before = len(engine.commands)
    assert restored_blocks(second) == 12, "the local copy was not found"
    assert [c for c in engine.commands[commands_before:] if c[0] in (b"GET", b"GETRANGE")] == []


def prefixctl(daemon: DaemonProcess, *arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        app, [*arguments, "--address", daemon.address]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_operators_see_where_entries_are_from_and_the_engine_state(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = sharing_all
    node = f"127.0.0.1:{engine.port}"
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(second) == 12
    key = keys_of(first)[3].hex()
    eventually(lambda: "offered to other nodes" in prefixctl(daemons[0], "why", key))
    why = prefixctl(daemons[1], "why", key)
    assert "brought from another node" in why
    assert node in why
    stats = prefixctl(daemons[1], "stats").splitlines()
    assert any("12 entries" in line for line in stats)
    assert any(node in line and "serving" in line for line in stats), stats
    engine.close()
    assert restored_blocks(second) == 12
    eventually(lambda: "unreachable" in prefixctl(daemons[1], "stats"))
    with daemons[1].admin() as admin:
        found = admin.stats().shared
        assert (found["nodes"], found["nodes_serving"]) == (1, 0)
    assert not second.longest_run(second.chain(NAMESPACE, [7] * 64, BLOCK_TOKENS))
    with daemons[1].admin() as admin:
        assert admin.stats().shared["unanswered"] > 0


@pytest.mark.parametrize("payloads", ["sharing_all", "peers"])
def test_no_node_fetches_what_one_has_deleted(
    payloads: str, request: pytest.FixtureRequest
) -> None:
    engine, _, (first, second) = request.getfixturevalue(payloads)
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    keys = keys_of(first)
    assert first.delete(keys[:-1]) == [DeleteStatus.DELETED] * 11
    assert restored_blocks(first) == 0, "the copies of other nodes are not fetched back"
    assert restored_blocks(second) == 0
    assert len(engine.values) == 1
    assert second.delete(keys[-1:]) == [DeleteStatus.ABSENT]
    assert not engine.values, "a delete reaches the engine from any node"


@pytest.mark.parametrize("payloads", ["sharing_all", "peers"])
def test_a_delete_reaches_the_copies_of_other_nodes(
    payloads: str, request: pytest.FixtureRequest
) -> None:
    engine, _, clients = request.getfixturevalue(payloads)
    first, second = clients
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(second) == 12
    # A busy machine may take longer than an answer waits.
    assert set(second.delete(keys_of(first))) <= {DeleteStatus.DELETED, DeleteStatus.ERASING}
    eventually(lambda: restored_blocks(first) == 0)
    save(first, range(12))
    eventually(lambda: restored_blocks(second) == 12)


def test_a_search_without_a_claim_also_fetches(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    hit = second.longest_run(second.chain(NAMESPACE, TOKENS, BLOCK_TOKENS), claim=False)
    assert len(hit.keys) == restored(hit) == 12


def test_a_partial_local_run_is_extended(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    save(second, range(5))
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(second) == 12


def test_a_hole_ends_the_run(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    name = name_of(keys_of(first)[7])
    del engine.values[name]
    assert restored_blocks(second) == 7


def test_the_longest_prefix_of_another_node_is_preferred(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    tokens = list(range(4096))
    for client, length in ((second, 2048), (first, 4096)):
        key = prefix_key(NAMESPACE, tokens[:length])
        assert client.save(key, payload(length, 50_000), tier=Tier.RAM, token_count=length)
    eventually(lambda: len(engine.values) == 2)
    with second.longest_prefix(NAMESPACE, tokens) as hit:
        assert list(hit.token_counts) == [4096]
        room = bytearray(50_000)
        assert hit.restore_into([room])
        assert room == payload(4096, 50_000)


def test_entries_read_twice_are_offered_by_default() -> None:
    with fleet() as (engine, _, (first, second)):
        save(first, range(12))
        assert restored_blocks(second) == 0
        assert not engine.values, "an unread entry was offered"
        assert restored_blocks(first) == 12
        eventually(lambda: len(engine.values) == 12)
        assert restored_blocks(second) == 12
        lives = [until for _, (_, until) in engine.values.items()]
        assert len(set(lives)) == 12
        by_key = [engine.values[name_of(key)][1] for key in keys_of(first)]
        assert by_key == sorted(by_key, reverse=True), "the root does not expire last"


def test_an_engine_that_lost_everything_is_filled_again_by_use(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, _second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    engine.values.clear()
    eventually(lambda: restored_blocks(first) == 12 and len(engine.values) == 12)


def test_evicted_entries_are_offered_again_when_saved_again(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = sharing_all
    save(first, range(12))
    with daemons[0].admin() as admin:
        eventually(lambda: admin.stats().shared["offered_entries"] == 12)
    evict_all(daemons[0])
    del engine.values[name_of(keys_of(first)[7])]
    assert restored_blocks(first) == 7
    save(first, range(7, 8))
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(second) == 12


def test_a_flipped_bit_in_the_engine_is_a_miss(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    name = name_of(keys_of(first)[4])
    value, until = engine.values[name]
    damaged = bytearray(value)
    damaged[1000] ^= 4
    engine.values[name] = (bytes(damaged), until)
    assert restored_blocks(second) == 4
    assert name not in engine.values, "the damaged value was not dropped"


def test_a_hanging_engine_delays_only_shared_reads(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = sharing_all
    save(first, range(3))
    eventually(lambda: len(engine.values) == 3)
    engine.answers.clear()
    with Client(daemons[1].address, shared_wait_ms=50) as hurried:
        hit = hurried.longest_run(hurried.chain(NAMESPACE, TOKENS, BLOCK_TOKENS))
        assert not hit
        assert hit.miss is MissReason.ABSENT
        save(hurried, range(3, 12))
        assert restored_blocks(hurried) == 0, "the first blocks were fetched"
        save(hurried, range(3))
        assert restored_blocks(hurried) == 12
    engine.answers.set()
    eventually(lambda: len(engine.values) == 12)
    assert restored_blocks(first) == 12
    assert restored_blocks(second) == 12


def test_a_dead_engine_is_reported_and_misses(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    engine.close()
    assert restored_blocks(second) == 0
    save(second, range(12))
    assert restored_blocks(second) == 12
    eventually(lambda: bool(daemons[1].logged("shared_engine")))
    assert daemons[1].stop() == 0


def test_concurrent_readers_fetch_each_block_once(
    sharing_all: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = sharing_all
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    commands_before = len(engine.commands)
    chain = second.chain(NAMESPACE, TOKENS, BLOCK_TOKENS).keys
    pending = [second.claim_async(chain) for _ in range(8)]
    for each in pending:
        each.result(PATIENCE_S).release()
    assert restored_blocks(second) == 12
    got = [command for command in engine.commands[commands_before:] if command[0] == b"GET"]
    assert len(got) == 12


def test_fleets_share_nothing_with_each_other() -> None:
    engine = FakeRedis()
    with ExitStack() as stack:
        stack.callback(engine.close)
        flags = (f"--shared.engine={engine.url}", "--shared.write=all")
        daemons, clients = [], []
        for name in ("a", "b"):
            daemon = stack.enter_context(
                daemon_process(*RAM_ALONE, *flags, f"--shared.fleet={name}")
            )
            daemon.start()
            daemons.append(daemon)
            clients.append(stack.enter_context(Client(daemon.address)))
        wait_for_engine(daemons)
        save(clients[0], range(12))
        eventually(lambda: len(engine.values) == 12)
        assert restored_blocks(clients[1]) == 0


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--shared.engine=http://x:1", "redis://"),
        ("--shared.engine=redis://user:secret@x:1", "password_file"),
        ("--shared.fleet=a b", "shared.fleet"),
        ("--shared.password_file=/nowhere/at/all", "shared.password_file"),
        ("--shared.tier=disk", "no budget"),
    ],
)
def test_bad_settings_are_refused_at_the_start(flag: str, words: str) -> None:
    flags = ("--shared.engine=redis://127.0.0.1:1", "--disk.budget=0")
    with daemon_process() as daemon:
        ended = daemon.attempt(*flags, flag)
    assert ended.status != 0
    assert words in ended.err
    assert "secret" not in ended.err


def test_nodes_read_from_each_other(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = peers
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert max(len(value) for value, _ in engine.values.values()) < 200
    before = dict(engine.values)
    assert restored_blocks(second) == 12
    eventually(lambda: all(engine.values[name][0] != before[name][0] for name in before))
    evict_all(daemons[0])
    assert restored_blocks(first) == 12, "the first node did not fetch its blocks back"


def test_an_entry_evicted_by_its_node_is_a_miss_and_is_forgotten(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = peers
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    lose(daemons[0], first, 4)
    assert restored_blocks(second) == 4
    assert not any(keys_of(first)[4].hex().encode() in name for name in engine.values)


def test_a_dead_node_is_a_miss(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (first, second) = peers
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    daemons[0].kill()
    assert restored_blocks(second) == 0
    save(second, range(12))
    assert restored_blocks(second) == 12


@pytest.mark.parametrize("address", [b"no address \xff", b"unix:/run/x", b"127.0.0.1:1", b""])
def test_a_node_that_lies_about_its_address_is_a_miss(
    address: bytes,
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (first, second) = peers
    save(first, range(12))
    eventually(lambda: len(engine.values) == 12)
    for name, (value, until) in list(engine.values.items()):
        engine.values[name] = (value[:64] + address, until)
    assert restored_blocks(second) == 0
    assert restored_blocks(first) == 12
