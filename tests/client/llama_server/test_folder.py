"""The folder of slot files: who may look into it, and what is left of a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prefixd.client.llama_server.folder import SlotFolder, UnsafeFolder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir(mode=0o700)
    return path


def test_what_an_earlier_proxy_left_is_removed_and_nothing_else(path: Path) -> None:
    for name in ("prefixd-0123.bin", "prefixd-notes.txt", "mine.bin"):
        (path / name).write_text("x")
    SlotFolder(path).close()
    assert sorted(each.name for each in path.iterdir()) == ["mine.bin", "prefixd-notes.txt"]


def test_only_one_proxy_uses_a_folder(path: Path) -> None:
    folder = SlotFolder(path)
    with pytest.raises(UnsafeFolder, match="another"):
        SlotFolder(path)
    folder.close()
    SlotFolder(path).close()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(UnsafeFolder, match="only this user"):
        SlotFolder(path)


def test_a_file_is_private_and_has_no_name_after_use(path: Path) -> None:
    folder = SlotFolder(path)
    with folder.name() as name:
        memory = folder.create(name, 100)
        assert stat.S_IMODE((path / name).stat().st_mode) == 0o600
        memory[:3] = b"abc"
        assert (path / name).read_bytes() == b"abc" + bytes(97)
        with folder.name() as longer:
            folder.create(longer, 200)
            folder.replace(longer, name)
        assert (path / name).read_bytes() == bytes(200)
    assert list(path.iterdir()) == []
    with folder.offer() as offered:
        assert offered != name
        assert stat.S_IMODE((path / offered).stat().st_mode) == 0o600
        (path / offered).write_bytes(b"state")
        taken = folder.take(offered)
        assert list(path.iterdir()) == []
    assert bytes(taken) == b"state"
    assert taken.readonly
    with folder.offer() as offered:
        assert bytes(folder.take(offered)) == b""
    folder.close()


def test_a_file_is_not_taken_through_a_link(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    folder = SlotFolder(path)
    with folder.offer() as name:
        (path / name).unlink()
        (path / name).symlink_to(secret)
        with pytest.raises(OSError, match="symbolic"):
            folder.take(name)
    assert secret.exists()
    folder.close()


def test_without_room_there_is_an_error_and_no_file(path: Path) -> None:
    folder = SlotFolder(path)
    with folder.name() as name, pytest.raises((OSError, OverflowError)):
        folder.create(name, 1 << 62)
    assert list(path.iterdir()) == []
    folder.close()


def test_a_save_that_comes_too_late_leaves_nothing(path: Path) -> None:
    folder = SlotFolder(path)
    with folder.offer() as kept:
        with folder.offer() as late:
            pass  # it was given up
        (path / late).write_bytes(b"what llama-server writes all the same")
        with folder.name() as other:
            folder.create(other, 10)
            assert sorted(each.name for each in path.iterdir()) == sorted([kept, other])


def test_temporary_folders_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    first = SlotFolder.temporary(tmp_path)
    own = first.path.parent
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE(first.path.stat().st_mode) == 0o700
    left = own / "left"
    left.mkdir()
    (left / "prefixd-1.bin").write_text("x")
    second = SlotFolder.temporary(tmp_path)
    assert not left.exists()
    assert first.path.exists()
    second.close()
    first.close()
    assert [each.name for each in own.iterdir()] == ["lock"]


def test_a_temporary_folder_is_not_made_in_one_of_another_user(tmp_path: Path) -> None:
    own = tmp_path / f"prefixd-llama-server-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o755)
    with pytest.raises(UnsafeFolder, match="0700"):
        SlotFolder.temporary(tmp_path)
