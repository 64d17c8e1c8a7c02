"""Recording of look-ups: what the lines say, what they keep back, and what is bounded."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client, recording
from prefixd.client.chains import BlockChain
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.recording import FolderRecorder, RecordOptions
from prefixd.proto.errors import ConfigError
from prefixd.proto.keys import Key, Namespace
from prefixd.proto.vocabulary import ClaimMode, Tier
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S

NAMESPACE = Namespace(fingerprint=bytes(32), quantisation=b"", context_params=bytes(32))


def keys(*numbers: int) -> list[Key]:
    return [Key(bytes([number]) * 32) for number in numbers]


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as started:
        yield started


def lines(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def test_a_line_says_who_shares_what_and_no_key(tmp_path: Path) -> None:
    times = iter([100.0, 101.5, 101.0])
    recorder = FolderRecorder(RecordOptions(tmp_path / "new"), "team-a", lambda: next(times))
    recorder.looked(keys(1, 2, 3), 40, 2)
    chain = BlockChain(NAMESPACE, range(70), 32, include_partial=True)
    recorder.looked(chain, 0, 0)
    recorder.looked(keys(1, 2, 4), 48, 0)
    recorder.close()
    recorder.close()
    first, third, second = lines(tmp_path / "new")
    assert (first["timestamp"], third["timestamp"], second["timestamp"]) == (
        100_000, 101_000, 101_500,
    )  # fmt: skip
    assert (first["input_length"], first["hit_blocks"], first["label"]) == (40, 2, "team-a")
    assert first["hash_ids"][:2] == third["hash_ids"][:2]
    assert len({*first["hash_ids"], *second["hash_ids"], *third["hash_ids"]}) == 6
    assert (second["input_length"], second["block_size"], len(second["hash_ids"])) == (70, 32, 2)
    (path,) = (tmp_path / "new").glob("*.jsonl")
    text = path.read_text()
    for key in (*keys(1, 2, 3, 4), *chain.keys):
        assert key.hex()[:16] not in text
        assert str(int.from_bytes(key[:8], "big")) not in text
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "secret").stat().st_mode & 0o777 == 0o600


def test_clients_of_one_folder_have_the_same_ids_and_others_have_not(tmp_path: Path) -> None:
    for folder in ("a", "a", "b"):
        recorder = FolderRecorder(RecordOptions(tmp_path / folder))
        recorder.looked(keys(1), 8, 0)
        recorder.close()
    one, two = lines(tmp_path / "a")
    (other,) = lines(tmp_path / "b")
    assert one["hash_ids"] == two["hash_ids"] != other["hash_ids"]


def test_a_sample_takes_whole_trees(tmp_path: Path) -> None:
    recorder = FolderRecorder(RecordOptions(tmp_path, sample=0.5))
    for first in range(256):
        for second in (1, 200):
            recorder.looked(keys(first, second), 16, 0)
    recorder.close()
    assert recorder.recorded == len(lines(tmp_path)) == 256


def test_files_are_limited_and_the_oldest_go(tmp_path: Path) -> None:
    recorder = FolderRecorder(RecordOptions(tmp_path, max_file_bytes=500, max_files=3))
    for number in range(100):
        recorder.looked(keys(number), number, 0)
        recorder.flush()
    recorder.close()
    files = list(tmp_path.glob("*.jsonl"))
    assert len(files) == 3
    assert all(path.stat().st_size <= 500 for path in files)
    assert [line["input_length"] for line in lines(tmp_path)][-1] == 99


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.client.recording._MAX_PENDING", 3)
    monkeypatch.setattr("prefixd.client.recording._WRITE_EVERY_S", 3600)
    recorder = FolderRecorder(RecordOptions(tmp_path))
    for number in range(10):
        recorder.looked(keys(number), 1, 0)
    assert recorder.dropped == 7
    recorder.close()
    assert recorder.recorded == 3


def test_the_keys_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.client.recording._MAX_PENDING_KEYS", 5)
    monkeypatch.setattr("prefixd.client.recording._WRITE_EVERY_S", 3600)
    recorder = FolderRecorder(RecordOptions(tmp_path))
    recorder.looked(keys(1, 2, 3), 24, 0)
    recorder.looked(keys(4, 5, 6), 24, 0)
    assert recorder.dropped == 1
    recorder.flush()
    recorder.looked(keys(4, 5, 6), 24, 0)
    recorder.close()
    assert [len(line["hash_ids"]) for line in lines(tmp_path)] == [3, 3]


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_self: FolderRecorder, _line: bytes) -> None:
        raise OSError(28, "No space left on device")

    recorder = FolderRecorder(RecordOptions(tmp_path))
    monkeypatch.setattr(FolderRecorder, "_write", full)
    recorder.looked(keys(1), 1, 0)
    recorder.flush()
    recorder.looked(keys(2), 1, 0)
    recorder.close()
    assert caplog.text.count("recording look-ups ends: No space left on device") == 1


def test_a_disk_that_hangs_does_not_keep_a_client_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, answers = threading.Event(), threading.Event()

    def hang(_self: FolderRecorder, _line: bytes) -> None:
        writing.set()
        answers.wait(PATIENCE_S)

    monkeypatch.setattr(FolderRecorder, "_write", hang)
    monkeypatch.setattr(recording, "_STOP_WITHIN_S", 0.0)
    recorder = FolderRecorder(RecordOptions(tmp_path))
    recorder.looked(keys(1), 1, 0)
    assert writing.wait(PATIENCE_S)
    closing = threading.Thread(target=recorder.close)
    closing.start()
    closing.join(PATIENCE_S / 10)
    try:
        assert not closing.is_alive()
    finally:
        answers.set()
        closing.join()
        recorder._thread.join()
        recorder.close()


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RecordOptions.from_environment() is None
    monkeypatch.setenv("PREFIXD_RECORD", str(tmp_path))
    monkeypatch.setenv("PREFIXD_RECORD_SAMPLE", "0.25")
    assert RecordOptions.from_environment() == RecordOptions(str(tmp_path), 0.25)
    monkeypatch.setenv("PREFIXD_RECORD_SAMPLE", "some")
    with pytest.raises(ConfigError, match="PREFIXD_RECORD_SAMPLE is a number, not 'some'"):
        RecordOptions.from_environment()
    for bad in ({"sample": 0.0}, {"sample": 1.5}, {"max_files": 0}, {"max_file_bytes": 0}):
        with pytest.raises(ConfigError):
            RecordOptions(tmp_path, **bad)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be recorded in"):
        FolderRecorder(RecordOptions(tmp_path / "file"))


def test_nothing_is_recorded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXD_RECORD", raising=False)
    assert "PREFIXD_RECORD" not in os.environ
    assert RecordOptions.from_environment() is None


def test_every_look_up_of_blocks_is_recorded(
    daemon: PrivateDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By whichever call an engine's connector makes it; look-ups that say nothing of their prompts
    are not, and that is said."""
    with Client(daemon.address, record=RecordOptions(tmp_path)) as client:
        client.save(keys(1)[0], b"x", tier=Tier.RAM)
        mine = keys(1, 2)
        client.longest_run(mine).release()
        mine.append(keys(9)[0])
        client.leading_run(keys(1, 2))
        client.exists(keys(1, 2, 3), prompt_tokens=24)
        client.exists(keys(1))
        client.claim(keys(1, 2)).release()
        client.claim_async(keys(1, 2)).result().release()
        client.restore_keys(keys(1, 2), [bytearray(1), bytearray(1)])
        assert not caplog.records
        client.exists(keys(7, 8), counted=False)
        client.claim(keys(7, 8), mode=ClaimMode.FIRST)
        for _ in range(2):
            client.exists_one(keys(1)[0])
            client.claim_async(keys(1)).result().release()
    found = lines(tmp_path)
    assert [len(line["hash_ids"]) for line in found] == [2, 2, 3, 1, 2, 2, 2]
    assert {line["hit_blocks"] for line in found} == {1}
    assert found[2]["input_length"] == 24
    assert caplog.text.count("look-ups of single blocks") == 1
