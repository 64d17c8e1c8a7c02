"""Two real daemons and one engine: blocks that are saved on one are read on the other, and failures
of the engine are misses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from typer.testing import CliRunner

from prefixd.client import Client, Hit, Key, MissReason, Namespace, SaveItem, Tier, prefix_key
from prefixd.client.ctl.main import app

from ...support.daemon import eventually
from ...support.fake_redis import FakeRedis
from ...support.outside import DaemonProcess, daemon_process
from ...support.redis_servers import free_ports
from ...support.running import payload

PATIENCE_S = 60.0
TOKENS = list(range(16 * 12))
BLOCK_TOKENS = 16
BLOCK_BYTES = 20_000
NAMESPACE = Namespace(b"m" * 32, "q8", bytes(32))


@contextmanager
def fleet(*flags: str) -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """An engine, two daemons that share through it, and a client of each."""
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients = [], []
        for _ in range(2):
            daemon = stack.enter_context(
                daemon_process(f"--shared.engine={engine.url}", "--shared.life=1h", *flags)
            )
            daemon.start()
            daemons.append(daemon)
            client = Client(daemon.address, shared_wait_ms=30_000, deadline_ms=60_000)
            clients.append(stack.enter_context(client))
        yield engine, daemons, clients


@pytest.fixture
def everything() -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    with fleet("--shared.write=all") as made:
        yield made


@pytest.fixture
def peers() -> Iterator[tuple[FakeRedis, list[DaemonProcess], list[Client]]]:
    """Two daemons that read from each other; the engine has no payloads."""
    with ExitStack() as stack:
        engine = FakeRedis()
        stack.callback(engine.close)
        daemons, clients = [], []
        for port in free_ports(2):
            address = f"127.0.0.1:{port}"
            daemon = stack.enter_context(
                daemon_process(
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
        yield engine, daemons, clients


def keys_of(client: Client) -> list[Key]:
    return client.chain(NAMESPACE, TOKENS, BLOCK_TOKENS).keys


def name_of(key: Key) -> bytes:
    """The name of a key in the engine."""
    return b"px1:1:{%b}" % key.hex().encode()


def save(client: Client, numbers: range) -> None:
    keys = keys_of(client)
    items = [SaveItem(keys[n], payload(n, BLOCK_BYTES), BLOCK_TOKENS) for n in numbers]
    outcomes = client.save_many(items, tier=Tier.RAM)
    assert all(outcomes), outcomes


def run_of(client: Client) -> int:
    """How many blocks of the prompt a search finds. Checks the bytes of each."""
    hit = client.longest_run(client.chain(NAMESPACE, TOKENS, BLOCK_TOKENS))
    return restored(client, hit) if hit else 0


def restored(client: Client, hit: Hit) -> int:
    rooms = [bytearray(BLOCK_BYTES) for _ in hit.keys]
    result = client.restore_into(hit, rooms)
    assert all(bytes(room) == payload(n, BLOCK_BYTES) for n, room in enumerate(rooms))
    hit.release()
    return sum(result.restored)


def test_what_one_node_saved_another_restores(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    assert run_of(there) == 0
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert run_of(there) == 12
    asked = len(engine.commands)
    assert run_of(there) == 12, "it is here now"
    assert [c for c in engine.commands[asked:] if c[0] in (b"GET", b"GETRANGE")] == []


def said(daemon: DaemonProcess, *arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        app, [*arguments, "--address", daemon.address]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_operators_see_what_came_from_where_and_how_the_engine_is(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (here, there) = everything
    node = f"127.0.0.1:{engine.port}"
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert run_of(there) == 12
    key = keys_of(here)[3].hex()
    eventually(lambda: "offered to other nodes" in said(daemons[0], "why", key))
    why = said(daemons[1], "why", key)
    assert "brought from another node" in why
    assert node in why
    stats = said(daemons[1], "stats").splitlines()
    assert any("12 entries" in line for line in stats)
    assert any(node in line and "serving" in line for line in stats), stats
    engine.close()
    assert run_of(there) == 12
    eventually(lambda: "unreachable" in said(daemons[1], "stats"))
    with daemons[1].admin() as admin:
        found = admin.stats().shared
        assert (found["nodes"], found["nodes_serving"]) == (1, 0)
    assert not there.longest_run(there.chain(NAMESPACE, [7] * 64, BLOCK_TOKENS))
    with daemons[1].admin() as admin:
        assert admin.stats().shared["unanswered"] > 0


def test_a_look_without_a_claim_brings_it_as_well(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    hit = there.longest_run(there.chain(NAMESPACE, TOKENS, BLOCK_TOKENS), claim=False)
    assert len(hit.keys) == restored(there, hit) == 12


def test_a_run_that_is_here_in_part_is_made_longer(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    save(there, range(5))
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert run_of(there) == 12


def test_a_hole_ends_the_run(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    name = name_of(keys_of(here)[7])
    del engine.values[name]
    assert run_of(there) == 7


def test_the_longest_prefix_of_another_node_is_preferred(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    tokens = list(range(4096))
    for client, length in ((there, 2048), (here, 4096)):
        key = prefix_key(NAMESPACE, tokens[:length])
        assert client.save(key, payload(length, 50_000), tier=Tier.RAM, token_count=length)
    eventually(lambda: len(engine.values) == 2)
    with there.longest_prefix(NAMESPACE, tokens) as hit:  # type: ignore[union-attr]
        assert list(hit.token_counts) == [4096]
        room = bytearray(50_000)
        assert there.restore_into(hit, [room])
        assert room == payload(4096, 50_000)


def test_what_was_read_twice_is_offered_by_default() -> None:
    with fleet() as (engine, _, (here, there)):
        save(here, range(12))
        assert run_of(there) == 0
        assert not engine.values, "nobody has used it yet"
        assert run_of(here) == 12
        eventually(lambda: len(engine.values) == 12)
        assert run_of(there) == 12
        lives = [until for _, (_, until) in engine.values.items()]
        assert len(set(lives)) == 12
        by_key = [engine.values[name_of(key)][1] for key in keys_of(here)]
        assert by_key == sorted(by_key, reverse=True), "the root lives longest"


def test_an_engine_that_lost_everything_is_filled_again_by_use(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, _there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    engine.values.clear()
    eventually(lambda: run_of(here) == 12 and len(engine.values) == 12)


def test_what_the_engine_evicted_is_offered_again_when_it_is_saved_again(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (here, there) = everything
    save(here, range(12))
    with daemons[0].admin() as admin:
        eventually(lambda: admin.stats().shared["offered_entries"] == 12)
    here.delete(keys_of(here)[7:])
    del engine.values[name_of(keys_of(here)[7])]
    assert run_of(here) == 7
    save(here, range(7, 8))
    eventually(lambda: len(engine.values) == 12)
    assert run_of(there) == 12


def test_a_flipped_bit_in_the_engine_is_a_miss(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    name = name_of(keys_of(here)[4])
    value, until = engine.values[name]
    spoilt = bytearray(value)
    spoilt[1000] ^= 4
    engine.values[name] = (bytes(spoilt), until)
    assert run_of(there) == 4
    assert name not in engine.values, "it is dropped"


def test_an_engine_that_hangs_costs_what_the_client_waits_and_nothing_local(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (here, there) = everything
    save(here, range(3))
    eventually(lambda: len(engine.values) == 3)
    engine.answers.clear()
    with Client(daemons[1].address, shared_wait_ms=50) as hurried:
        hit = hurried.longest_run(hurried.chain(NAMESPACE, TOKENS, BLOCK_TOKENS))
        assert not hit
        assert hit.miss is MissReason.ABSENT
        save(hurried, range(3, 12))
        assert run_of(hurried) == 0, "the first blocks did not come"
        save(hurried, range(3))
        assert run_of(hurried) == 12
    engine.answers.set()
    eventually(lambda: len(engine.values) == 12)
    assert run_of(here) == 12
    assert run_of(there) == 12


def test_an_engine_that_is_gone_is_said_and_misses(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (here, there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    engine.close()
    assert run_of(there) == 0
    save(there, range(12))
    assert run_of(there) == 12
    eventually(lambda: bool(daemons[1].logged("shared_engine")))
    assert daemons[1].stop() == 0


def test_many_readers_at_once_bring_it_once(
    everything: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = everything
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    asked = len(engine.commands)
    chain = there.chain(NAMESPACE, TOKENS, BLOCK_TOKENS).keys
    pending = [there.claim_async(chain) for _ in range(8)]
    for each in pending:
        each.result(PATIENCE_S).release()
    assert run_of(there) == 12
    got = [command for command in engine.commands[asked:] if command[0] == b"GET"]
    assert len(got) == 12


def test_fleets_share_nothing_with_each_other() -> None:
    engine = FakeRedis()
    with ExitStack() as stack:
        stack.callback(engine.close)
        flags = (f"--shared.engine={engine.url}", "--shared.write=all")
        clients = []
        for name in ("a", "b"):
            daemon = stack.enter_context(daemon_process(*flags, f"--shared.fleet={name}"))
            daemon.start()
            clients.append(stack.enter_context(Client(daemon.address)))
        save(clients[0], range(12))
        eventually(lambda: len(engine.values) == 12)
        assert run_of(clients[1]) == 0


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
def test_bad_settings_end_the_start_with_a_sentence(flag: str, words: str) -> None:
    flags = ("--shared.engine=redis://127.0.0.1:1", "--disk.budget=0")
    with daemon_process() as daemon:
        ended = daemon.attempt(*flags, flag)
    assert ended.status != 0
    assert words in ended.err
    assert "secret" not in ended.err


def test_nodes_read_from_each_other(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = peers
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    assert max(len(value) for value, _ in engine.values.values()) < 200
    before = dict(engine.values)
    assert run_of(there) == 12
    eventually(lambda: all(engine.values[name][0] != before[name][0] for name in before))
    here.delete(keys_of(here))
    assert run_of(here) == 12, "and back again"


def test_what_a_node_has_evicted_is_a_miss_and_is_asked_for_once(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = peers
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    here.delete(keys_of(here)[4:5])
    assert run_of(there) == 4
    assert not any(keys_of(here)[4].hex().encode() in name for name in engine.values)


def test_a_node_that_is_gone_is_a_miss(
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, daemons, (here, there) = peers
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    daemons[0].kill()
    assert run_of(there) == 0
    save(there, range(12))
    assert run_of(there) == 12


@pytest.mark.parametrize("address", [b"no address \xff", b"unix:/run/x", b"127.0.0.1:1", b""])
def test_a_node_that_lies_about_its_address_is_a_miss(
    address: bytes,
    peers: tuple[FakeRedis, list[DaemonProcess], list[Client]],
) -> None:
    engine, _, (here, there) = peers
    save(here, range(12))
    eventually(lambda: len(engine.values) == 12)
    for name, (value, until) in list(engine.values.items()):
        engine.values[name] = (value[:64] + address, until)
    assert run_of(there) == 0
    assert run_of(here) == 12
