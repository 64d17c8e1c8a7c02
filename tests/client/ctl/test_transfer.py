"""A warm tier is exported to a file, and imported into another daemon."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefixd.client import Client, SaveItem, SaveReason, Tier
from prefixd.client.ctl.entry_stream import HEADER_BYTES, MAGIC, StreamReader
from prefixd.client.ctl.failures import ExitCode
from prefixd.client.ctl.main import app
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.keys import Key
from tests.support.daemon import private_daemon, problems_of
from tests.support.warm import WARM

ENTRIES = 40


def key(number: int) -> Key:
    return Key(sha256(bytes([number])).digest())


def payload(number: int) -> bytes:
    return bytes((number + place) % 256 for place in range(3000 + 100 * number))


def run(daemon: PrivateDaemon, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--address", daemon.address])
    assert result.exit_code == code, result.output
    return result.output


def fill(daemon: PrivateDaemon, numbers: range) -> None:
    """Saves entries one after the other, so that later ones are used later."""
    with Client(daemon.address) as client:
        for number in numbers:
            item = SaveItem(
                key(number),
                payload(number),
                16,
                token_ids=bytes(4 * number) if number % 2 else None,
            )
            reason = SaveReason.EVICT if number % 3 else SaveReason.COLD
            client.save_many([item], tier=Tier.DISK, reason=reason)


def by_use(daemon: PrivateDaemon, tier: Tier = Tier.DISK) -> list[bytes]:
    with daemon.admin() as admin:
        return [entry.key for entry in admin.next_victims(tier, 1000)]


@pytest.fixture(scope="module")
def warm() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        fill(daemon, range(ENTRIES))
        yield daemon


def test_what_was_exported_is_there_in_its_order(warm: PrivateDaemon, tmp_path: Path) -> None:
    file = tmp_path / "entries"
    assert f"{ENTRIES} entries" in run(warm, "export", str(file))
    assert by_use(warm) == [key(n) for n in range(ENTRIES)], "the order is what it was"
    # Slabs of another size, so that copying the arena would not do.
    with private_daemon("--disk.slab=8KiB") as cold:
        said = json.loads(run(cold, "import", str(file), "--json"))
        assert (said["entries"], said["others"]) == (ENTRIES, {})
        assert by_use(cold) == [key(n) for n in range(ENTRIES)]
        with Client(cold.address) as client:
            for number in range(ENTRIES):
                with client.claim([key(number)]) as hit:
                    assert hit.read(0) == payload(number)
                    ids = hit.token_ids(0)
                    assert ids == (bytes(4 * number) if number % 2 else b"")
                    assert hit.entries[0].token_count == 16
                    assert hit.entries[0].reason == (
                        SaveReason.EVICT if number % 3 else SaveReason.COLD
                    )
        again = json.loads(run(cold, "import", str(file), "--json"))
        assert (again["entries"], again["others"]) == (0, {"there already": ENTRIES})
        with cold.admin() as admin:
            assert problems_of(admin) == []


def test_an_import_evicts_what_saves_would(warm: PrivateDaemon, tmp_path: Path) -> None:
    file = tmp_path / "entries"
    run(warm, "export", str(file))
    with private_daemon(ram="128KiB") as small:
        run(small, "import", str(file), "--tier", "ram")
        kept = by_use(small, Tier.RAM)
        assert 0 < len(kept) < ENTRIES
        assert kept == [key(n) for n in range(ENTRIES)][-len(kept) :], "the last used ones"


def test_a_broken_stream_is_refused_where_it_is_broken(warm: PrivateDaemon, tmp_path: Path) -> None:
    file = tmp_path / "entries"
    run(warm, "export", str(file))
    stream = bytearray(file.read_bytes())
    with file.open("rb") as source:
        first = next(iter(StreamReader(source)))
    third = len(MAGIC)
    for number in range(2):
        third += HEADER_BYTES + len(payload(number)) + (4 * number if number % 2 else 0)
    stream[third + HEADER_BYTES + 5] ^= 1
    file.write_bytes(stream)
    with private_daemon() as cold:
        said = run(cold, "import", str(file), code=ExitCode.PROBLEM)
        assert "2 entries" in said
        assert f"record 3, at byte {third:,}: its payload does not match its checksum" in said
        with Client(cold.address) as client:
            assert client.exists([first.key, key(1), key(2), key(3)]) == [True, True, False, False]


def test_an_export_goes_on_where_it_was_cut_off(warm: PrivateDaemon, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(warm, "export", str(whole))
    for length in (0, 5, len(MAGIC), len(MAGIC) + 40, whole.stat().st_size // 2):
        cut.write_bytes(whole.read_bytes()[:length])
        run(warm, "export", str(cut), "--resume")
        assert cut.read_bytes() == whole.read_bytes()
    said = json.loads(run(warm, "export", str(whole), "--resume", "--json"))
    assert (said["entries"], said["others"]) == (0, {"there already": ENTRIES})
    assert cut.read_bytes() == whole.read_bytes()


def test_what_is_no_export_is_left_alone(warm: PrivateDaemon, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("something of mine")
    for flags in ((), ("--resume",)):
        run(warm, "export", str(file), *flags, code=ExitCode.BAD_INPUT)
        assert file.read_text() == "something of mine"
    said = run(warm, "import", str(file), code=ExitCode.PROBLEM)
    assert "this is no stream of entries" in said
    run(warm, "import", str(tmp_path / "absent"), code=ExitCode.BAD_INPUT)
    run(warm, "export", "-", "--resume", code=ExitCode.BAD_INPUT)
    run(warm, "export", "-", "--json", code=ExitCode.BAD_INPUT)


def test_through_a_pipe(warm: PrivateDaemon) -> None:
    with private_daemon() as cold:
        main = "from prefixd.client.ctl.main import main; main()"
        command = [*WARM, "-c", main]
        export = subprocess.run(
            [*command, "export", "-", "--address", warm.address],
            capture_output=True,
            check=True,
        )
        assert f"{ENTRIES} entries" in export.stderr.decode()
        done = subprocess.run(
            [*command, "import", "-", "--address", cold.address],
            input=export.stdout,
            capture_output=True,
            check=True,
        )
        assert f"{ENTRIES} entries" in done.stdout.decode()
        assert by_use(cold) == [key(n) for n in range(ENTRIES)]


def test_nobody_answers(tmp_path: Path) -> None:
    file = tmp_path / "entries"
    file.write_bytes(MAGIC)
    arguments = ["import", str(file), "--address", f"unix:{tmp_path}/none", "--timeout", "100ms"]
    assert CliRunner().invoke(app, arguments).exit_code == ExitCode.UNREACHABLE


def test_what_the_index_has_no_room_for_is_exported_too(tmp_path: Path) -> None:
    """Keys with the same beginning share a bucket of the index, which has room for some of them."""
    file = tmp_path / "entries"
    alike = [Key(number.to_bytes(32, "big")) for number in range(ENTRIES)]
    with private_daemon() as daemon:
        with Client(daemon.address) as client:
            for key in alike:
                client.save_many([SaveItem(key, key * 9, 5)], tier=Tier.DISK)
            assert not all(client.exists(alike))
        run(daemon, "export", str(file))
    with file.open("rb") as source:
        assert {entry.key: entry.payload for entry in StreamReader(source)} == {
            key: key * 9 for key in alike
        }


def test_an_export_is_for_its_user_alone_and_only_that_is_read_back(
    warm: PrivateDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "entries"
    before = os.umask(0)
    try:
        run(warm, "export", str(file))
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o620)
    said = run(warm, "import", str(file), code=ExitCode.BAD_INPUT)
    assert "others than its owner can write to it" in said
    assert f"prefixctl import - < {file}" in said
    assert "others than" in run(warm, "export", str(file), "--resume", code=ExitCode.BAD_INPUT)
    file.chmod(0o644)
    run(warm, "import", str(file))
