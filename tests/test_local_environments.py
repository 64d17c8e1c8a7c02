"""LMDB environments that several readers of one process share."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from prefixd.client.local.environments import Environment


def write(directory: Path, table: bytes | None = None, **rows: bytes) -> None:
    """As the daemon does, which is another process: ours may not have it open meanwhile."""
    directory.mkdir(exist_ok=True)
    with lmdb.open(str(directory), max_dbs=2) as environment:
        db = None if table is None else environment.open_db(table)
        with environment.begin(db=db, write=True) as txn:
            for key, value in rows.items():
                txn.put(key.encode(), value)


@contextmanager
def descriptor(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def opened(directory: Path, table: bytes | None = None) -> Environment:
    with descriptor(directory) as fd:
        return Environment(fd, table)


def get(environment: Environment, key: bytes) -> object:
    with environment.lmdb.begin(db=environment.table) as txn:
        return txn.get(key)


def is_closed(environment: Environment) -> bool:
    try:
        environment.lmdb.stat()
    except lmdb.Error:
        return True
    return False


def test_it_is_read_only(tmp_path: Path) -> None:
    write(tmp_path / "index", key=b"value")
    environment = opened(tmp_path / "index")
    assert get(environment, b"key") == b"value"
    with pytest.raises(lmdb.ReadonlyError):
        environment.lmdb.begin(write=True)
    environment.close()


def test_one_table_of_it(tmp_path: Path) -> None:
    write(tmp_path / "disk", b"chunks", key=b"value")
    first, second = opened(tmp_path / "disk", b"chunks"), opened(tmp_path / "disk", b"chunks")
    assert get(first, b"key") == get(second, b"key") == b"value"
    first.close()
    assert get(second, b"key") == b"value"
    second.close()


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_last_to_leave_closes_it(tmp_path: Path, order: tuple[int, ...]) -> None:
    write(tmp_path / "index", key=b"value")
    environments = [opened(tmp_path / "index") for _ in range(3)]
    for number in order[:-1]:
        environments[number].close()
        environments[number].close()
        assert get(environments[order[-1]], b"key") == b"value"
    environments[order[-1]].close()
    assert all(is_closed(environment) for environment in environments)
    again = opened(tmp_path / "index")
    assert get(again, b"key") == b"value"
    again.close()


def test_a_file_that_was_replaced_is_another_environment(tmp_path: Path) -> None:
    """The daemon makes a damaged index anew, while clients of this process have the old one."""
    write(tmp_path / "index", key=b"old")
    old = opened(tmp_path / "index")
    for name in ("data.mdb", "lock.mdb"):
        (tmp_path / "index" / name).unlink()
    write(tmp_path / "index", key=b"new")
    new = opened(tmp_path / "index")
    assert get(old, b"key") == b"old"
    assert get(new, b"key") == b"new"
    old.close()
    assert get(new, b"key") == b"new"
    new.close()


def test_what_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    write(tmp_path / "disk", key=b"value")
    with pytest.raises(lmdb.NotFoundError):
        opened(tmp_path / "disk", b"chunks")
    write(tmp_path / "disk", b"chunks", key=b"value")
    environment = opened(tmp_path / "disk", b"chunks")
    assert get(environment, b"key") == b"value"
    environment.close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"data\.mdb"):
        opened(tmp_path / "empty")


def test_a_fork_closes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy of the environment is LMDB's own business, and the parent's stays."""
    write(tmp_path / "index", key=b"value")
    environment = opened(tmp_path / "index")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        environment.close()
    assert get(environment, b"key") == b"value"
    environment.close()
    assert is_closed(environment)


def test_threads_that_come_and_go(tmp_path: Path) -> None:
    write(tmp_path / "disk", b"chunks", key=b"value")
    found: list[object] = []

    def come_and_go() -> None:
        for _ in range(100):
            environment = opened(tmp_path / "disk", b"chunks")
            found.append(get(environment, b"key"))
            environment.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"value"] * 800
