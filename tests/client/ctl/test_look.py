"""The commands that look into a daemon, and `evict`, `gc`, on a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixd.client.client import Client
from prefixd.client.ctl import look
from prefixd.client.ctl.connection import AdminConnection
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.look import find_key
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.lab.replayer import BlockPayloads, keys_of_ids, replay_namespace
from prefixd.client.saves import ReserveItem, SaveItem
from prefixd.proto import kernel
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import InvalidKey, UnknownEntry
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, SaveStatus, Tier
from tests.support.ctl import run, run_json
from tests.support.daemon import private_daemon

PAYLOADS = BlockPayloads(4096)
PER_TIER = 30


@pytest.fixture(scope="module")
def running() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.fixture
def daemon(running: PrivateDaemon) -> Iterator[PrivateDaemon]:
    """A daemon that is empty at first. Its state must be consistent at the end."""
    with running.admin() as admin:
        yield running
        assert admin.check().problems == []
        admin.evict(2**40, [])
        assert [tier.entries for tier in admin.stats().tiers] == [0, 0, 0]


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, name="tester") as connected:
        yield connected


@pytest.fixture
def keys(client: Client) -> dict[Tier, list[Key]]:
    """The keys of thirty entries in every tier, in the order of their saves."""
    saved = {}
    for tier in Tier:
        ids = range(1000 * tier, 1000 * tier + PER_TIER)
        saved[tier] = keys_of_ids(replay_namespace(4096, 512).root, ids)
        # One at a time, because a save of several blocks uses them leaf first.
        for block_id, key in zip(ids, saved[tier], strict=True):
            (outcome,) = client.save_many(
                [SaveItem(key, PAYLOADS.payload(block_id), 512)], tier=tier, reason=SaveReason.EVICT
            )
            assert outcome.status is SaveStatus.SAVED
    return saved


def test_stats(daemon: PrivateDaemon, keys: dict[Tier, list[Key]]) -> None:
    data = run_json(daemon, "stats")
    assert [tier["tier"] for tier in data["tiers"]] == ["ram", "shm", "disk"]
    assert [tier["entries"] for tier in data["tiers"]] == [PER_TIER] * 3
    assert data["pid"] == daemon.pid
    assert data["health"] == "serving"
    text = run(daemon, "stats", "--counters").stdout
    assert "prefixd_claims_total" in text
    assert all(tier.label in text for tier in keys)


def test_ls_lists_the_next_victim_first(daemon: PrivateDaemon, keys: dict[Tier, list[Key]]) -> None:
    data = run_json(daemon, "ls", "--tier", "ram", "--tier", "disk", "--limit", "0")
    assert [page["tier"] for page in data["tiers"]] == ["ram", "disk"]
    for page in data["tiers"]:
        listed = [bytes.fromhex(entry["key"]) for entry in page["entries"]]
        assert listed == keys[Tier[page["tier"].upper()]]
    text = run(daemon, "ls", "--limit", "1").stdout
    assert keys[Tier.SHM][0].hex()[:16] in text
    assert keys[Tier.SHM][1].hex()[:16] not in text


def test_ls_lists_all_where_they_are_too_many_for_an_answer(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    (listed,) = run_json(daemon, "ls", "--tier", "shm", "--limit", "10001")["tiers"]
    assert [bytes.fromhex(entry["key"]) for entry in listed["entries"]] == keys[Tier.SHM]


def test_long_lists_are_shown_as_several_tables(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "TABLE_ROWS", 20)
    text = run(daemon, "ls", "--tier", "ram", "--limit", str(2**64)).stdout
    assert "ram: 1 to 20 of 30 entries" in text
    assert "ram: 21 to 30 of 30 entries" in text
    places = [text.index(key.hex()[:16]) for key in keys[Tier.RAM]]
    assert places == sorted(places)
    assert "ram: 20 of 30 entries" in run(daemon, "ls", "--tier", "ram").stdout


def test_an_empty_tier_is_listed_as_such(daemon: PrivateDaemon) -> None:
    assert "disk: no entries" in run(daemon, "ls").stdout


def test_inspect_takes_a_whole_key_or_its_beginning(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    key = keys[Tier.DISK][3].hex()
    for text in (key, key.upper(), key[:12]):
        data = run_json(daemon, "inspect", text, "--verify")
        assert data["entry"]["key"] == key
        assert data["entry"]["info"]["token_count"] == 512
        assert data["verified"]
        assert data["problem"] == ""
    assert "every byte matches" in run(daemon, "inspect", key[:12], "--verify").stdout


def test_inspect_refuses_what_names_no_single_entry(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    present = {key.hex() for tier in keys.values() for key in tier}
    absent = next(text for text in map("{:04x}".format, range(2**16))
                  if not any(key.startswith(text) for key in present))  # fmt: skip
    missing = run(daemon, "inspect", absent)
    assert missing.exit_code == ExitCode.PROBLEM
    assert absent in missing.stderr
    for text in ("abc", "xyzw", "00" * 33):
        refused = run(daemon, "inspect", text)
        assert refused.exit_code == ExitCode.BAD_INPUT
        assert "hexadecimal" in refused.stderr
    assert run(daemon, "inspect", "00" * 32).exit_code == ExitCode.PROBLEM


def test_a_beginning_that_several_keys_share_is_ambiguous(
    daemon: PrivateDaemon, client: Client
) -> None:
    shared = b"\xab" * 16
    for number in range(3):
        key = Key(shared + bytes([number]) * 16)
        client.save_many(
            [SaveItem(key, b"x", 1)], tier=Tier(number + 1), reason=SaveReason.SHUTDOWN
        )
    with daemon.admin() as admin:
        with pytest.raises(InvalidKey, match="3 keys begin with abababab"):
            find_key(admin, "ab" * 4)
        assert find_key(admin, "ab" * 16 + "02") == shared + b"\x02" * 16
        with pytest.raises(UnknownEntry):
            find_key(admin, "ab" * 16 + "03")


def test_claims_and_sessions_name_their_owners(
    daemon: PrivateDaemon, client: Client, keys: dict[Tier, list[Key]]
) -> None:
    assert run(daemon, "claims").stdout.strip() == "no claims"
    with client.longest_run(keys[Tier.RAM][:4]) as hit:
        assert len(hit) == 4
        (claim,) = run_json(daemon, "claims")["claims"]
        assert "tester" in claim["owner"]
        assert claim["keys"] == [key.hex() for key in keys[Tier.RAM][:4]]
        assert claim["payload_bytes"] == 4 * 4096
        assert claim["lease_left_ms"] > 0
        (session,) = run_json(daemon, "sessions")["sessions"]
        assert session["claims"] == 1
        assert session["saves"] == 3 * PER_TIER
        assert session["saved_bytes"] == 3 * PER_TIER * 4096
        assert session["per_second"]["saves"] > 0
        (session,) = run_json(daemon, "sessions", "--every", "1ms")["sessions"]
        assert session["per_second"]["saves"] == 0, "none between the two looks"
        assert "tester" in run(daemon, "claims").stdout
        assert "tester" in run(daemon, "sessions").stdout
        pinned = run_json(daemon, "ls", "--tier", "ram", "--limit", "0")["tiers"][0]["entries"]
        assert {e["key"] for e in pinned[-4:]} == set(claim["keys"]), "pinned entries come last"
    assert run_json(daemon, "claims") == {"claims": []}


def test_reservations_name_their_owners(daemon: PrivateDaemon, client: Client) -> None:
    assert run(daemon, "reservations").stdout.strip() == "no reservations"
    key = Key(b"\x05" * 32)
    (reservation,) = client.reserve(
        [ReserveItem(key, 10_000, 512)], tier=Tier.SHM, reason=SaveReason.COLD
    )
    with reservation:
        (held,) = run_json(daemon, "reservations")["reservations"]
        assert held["key"] == key.hex()
        assert held["tier"] == "shm"
        assert held["payload_bytes"] == 10_000
        assert "tester" in held["owner"]
        assert held["ttl_left_ms"] > 0
        assert "tester" in run(daemon, "reservations").stdout
    assert run_json(daemon, "reservations") == {"reservations": []}


def test_preview_says_what_would_go_and_changes_nothing(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    fits = run_json(daemon, "preview", "--bytes", "1MiB", "--tier", "ram")
    assert fits["admissible"]
    assert fits["victims"] == []
    evicts = run_json(daemon, "preview", "--bytes", "8MiB", "--tier", "ram")
    assert [victim["key"] for victim in evicts["victims"]] == [k.hex() for k in keys[Tier.RAM]]
    assert run_json(daemon, "stats")["tiers"][0]["entries"] == PER_TIER
    never = run(daemon, "preview", "--bytes", "9MiB", "--tier", "ram")
    assert never.exit_code == ExitCode.PROBLEM
    assert "ram: never" in never.stdout


def test_evict_frees_what_is_asked_for_and_dry_run_tells_it_exactly(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    arguments = ("evict", "--bytes", "20KiB", "--tier", "ram", "--tier", "disk")
    dry = run_json(daemon, *arguments, "--dry-run")
    assert run_json(daemon, "stats")["tiers"][0]["entries"] == PER_TIER
    wet = run_json(daemon, *arguments)
    assert dry == {**wet, "dry_run": True}
    assert [row["tier"] for row in wet["results"]] == ["ram", "disk"]
    assert all(row["freed_bytes"] >= 20 * 1024 for row in wet["results"])
    assert wet["results"][0]["entries"] == 5
    left = run_json(daemon, "ls", "--tier", "ram", "--limit", "0")["tiers"][0]["entries"]
    assert [entry["key"] for entry in left] == [key.hex() for key in keys[Tier.RAM][5:]]
    assert run_json(daemon, "stats")["tiers"][1]["entries"] == PER_TIER, "shm was not named"


def test_evict_never_takes_what_is_in_use_and_says_when_that_is_too_little(
    daemon: PrivateDaemon, client: Client, keys: dict[Tier, list[Key]]
) -> None:
    with client.claim(keys[Tier.RAM][:10]):
        for flags in (["--dry-run"], []):
            result = run(daemon, "evict", "--bytes", "8MiB", "--tier", "ram", "--json", *flags)
            assert result.exit_code == ExitCode.PROBLEM
            assert json.loads(result.stdout)["results"][0]["entries"] == PER_TIER - 10
    text = run(daemon, "evict", "--bytes", "4KiB", "--tier", "ram").stdout
    assert "evicted" in text


def test_gc_and_check_find_nothing_to_do(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    assert set(run_json(daemon, "gc").values()) == {0}
    assert "expired claims" in run(daemon, "gc").stdout
    checked = run_json(daemon, "check")
    assert checked["problems"] == []
    assert checked["entries"] == 3 * PER_TIER
    assert "everything adds up" in run(daemon, "check").stdout
    assert keys


def test_verify_reads_everything_or_the_tiers_that_are_named(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    for flags, tiers in (([], 3), (["--tier", "shm"], 1), (["--tier", "shm", "--tier", "ram"], 2)):
        found = run_json(daemon, "verify", *flags)
        assert (found["problems"], found["done"], found["progress_permille"]) == ([], True, 1_000)
        assert found["entries"] == tiers * PER_TIER
        assert found["payload_bytes"] == tiers * PER_TIER * 4096
    assert "every byte is right" in run(daemon, "verify").stdout
    assert keys


@pytest.mark.parametrize(("heard", "says"), [(0, "stopped at 0%"), (1, "stopped at 50%: 1 ent")])
def test_ctrl_c_ends_a_verification_and_shows_what_was_done(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch, heard: int, says: str
) -> None:
    closed = []

    def verify(*_args: object) -> Iterator[pb.VerifyResponse]:
        try:
            for _ in range(heard):
                yield pb.VerifyResponse(entries=1, progress_permille=500)
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(AdminConnection, "verify", verify)
    result = run(daemon, "verify")
    assert (result.exit_code, closed) == (ExitCode.INTERRUPTED, [True])
    assert says in result.stdout
    found = run_json(daemon, "verify", code=ExitCode.INTERRUPTED)
    assert (found["entries"], found["done"]) == (heard, False)


def test_verify_reports_a_flipped_bit_on_the_shm_tier(
    daemon: PrivateDaemon, keys: dict[Tier, list[Key]]
) -> None:
    """verify and inspect --verify find it, and exit with a code that scripts see."""
    data = run_json(daemon, "inspect", keys[Tier.SHM][7].hex())
    arena = max(daemon.shm_directory.glob("**/*"), key=lambda path: path.stat().st_size)
    with arena.open("r+b") as file:
        file.seek(data["entry"]["extents"][0] + 1000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    report = run_json(daemon, "verify", code=ExitCode.PROBLEM)
    assert report["damaged_entries"] == 1
    assert any(keys[Tier.SHM][7].hex() in problem for problem in report["problems"])
    assert run(daemon, "inspect", keys[Tier.SHM][7].hex()).exit_code == ExitCode.PROBLEM
    assert run_json(daemon, "verify")["problems"] == [], "it was dropped"


def test_health_for_probes(daemon: PrivateDaemon) -> None:
    result = run(daemon, "health")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "serving\n")
    assert run_json(daemon, "health")["status"] == "serving"


def test_nobody_there_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nobody"
    for command in ("health", "stats", "ls", "check", "verify", "gc", "version"):
        gone = CliRunner().invoke(app, [command, "--address", address])
        assert gone.exit_code == ExitCode.UNREACHABLE, command
        assert address in gone.stderr
        assert gone.stdout == ""


def test_version_names_the_daemon_if_there_is_one(daemon: PrivateDaemon) -> None:
    from prefixd import __version__

    data = run_json(daemon, "version")
    assert data == {
        "prefixctl_version": __version__,
        "kernel": kernel.FORM,
        "daemon_version": __version__,
        "daemon_kernel": kernel.FORM,
    }
    assert f"prefixd {__version__} at {daemon.address}" in run(daemon, "version").stdout
