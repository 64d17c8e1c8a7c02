"""LMDB in a process of its own, which is killed, stopped, or sends nonsense."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
from test_rows import row_of, rows_in

from prefixd.tiers import lmdb_rows, lmdb_wire, rows
from prefixd.tiers.lmdb_rows import LmdbRows
from prefixd.tiers.store import StoreError
from tests.support.daemon import eventually
from tests.support.warm import WARM

Opened = Callable[[], LmdbRows]


def test_both_sides_mean_the_same_rows() -> None:
    """The process has its own copies of constants, because it must not import much."""
    assert lmdb_wire.ROW_BYTES == rows.ROW_BYTES
    script = "import prefixd.tiers.lmdb_child, sys; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"False\n"


# ---- the process ends


def kill(table: LmdbRows) -> None:
    assert table.pid is not None
    os.kill(table.pid, signal.SIGKILL)


def test_a_killed_process_costs_one_call(opened_rows: Opened) -> None:
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    kill(table)
    with pytest.raises(StoreError, match="ended with -9"):
        table.apply([], [(2, row_of(2))])
    table.apply([], [(3, row_of(3))])
    found = rows_in(table)
    assert found == rows_in(opened_rows())
    assert {slab: row for slab, row in found.items() if slab != 2} == {1: row_of(1), 3: row_of(3)}


#: A process that kills itself once, at one step of its work. A file records that it did.
ENDING = """
import os, signal, sys
from pathlib import Path
import prefixd.tiers.lmdb_child as child
left, flag = [int(sys.argv[1])], Path(sys.argv[2])
def counted(real):
    def call(*arguments, **options):
        left[0] -= 1
        if not left[0] and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("pread", "pwrite", "fstat"):
    setattr(os, name, counted(getattr(os, name)))
Path.rename, Path.unlink = counted(Path.rename), counted(Path.unlink)
for name in ("reset", "write", "sync", "_state", "_read_back"):
    setattr(child.CellFile, name, counted(getattr(child.CellFile, name)))
for name in ("_write", "_write_spare", "_take_spare", "_find", "_copy", "apply"):
    setattr(child.Table, name, counted(getattr(child.Table, name)))
child._MIN_SLICE_SLABS = 1
del sys.argv[1:3]
child.main()
"""


@pytest.mark.parametrize("step", [*range(1, 40, 2), 100, *range(280, 440, 9)])
def test_killed_at_any_step_it_has_what_was_acknowledged(
    opened_rows: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    (tmp_path / "tier").mkdir()
    flag = tmp_path / "flag"
    command = (*WARM, "-c", ENDING, str(step), str(flag))
    monkeypatch.setattr(LmdbRows, "command", command)
    table = opened_rows()
    acknowledged: dict[int, bytes] = {}
    unknown: set[int] = set()
    for number in range(1, 60):
        slab = number % 25
        try:
            table.apply([(number + 3, None)], [(slab, row_of(number))])
        except StoreError:
            unknown |= {slab, number + 3}
        else:
            unknown -= {slab, number + 3}
            acknowledged.pop(number + 3, None)
            acknowledged[slab] = row_of(number)
    acknowledged.pop(0, None)
    assert flag.exists()
    assert len(unknown) <= 2
    for found in (rows_in(table), rows_in(opened_rows())):
        assert found.keys() - unknown == acknowledged.keys() - unknown
        assert all(found[slab] == acknowledged[slab] for slab in acknowledged.keys() - unknown)


KILLED = """
import sys
from pathlib import Path
from prefixd.tiers.lmdb_rows import LmdbRows
table = LmdbRows(Path(sys.argv[1]), 2_000, sync=False)
table.probe()
print(table.pid, flush=True)
while True:
    table.probe()
"""


def test_it_ends_with_the_daemon(opened_rows: Opened, tmp_path: Path) -> None:
    daemon = subprocess.Popen(
        [*WARM, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    watched = os.pidfd_open(int(daemon.stdout.readline()))
    try:
        daemon.kill()
        # The next process waits for the end of this one by itself.
        opened_rows().apply([], [(1, row_of(1))])
        assert select.select([watched], [], [], 0)[0], "it is still there"
    finally:
        os.close(watched)
        daemon.wait()
        daemon.stdout.close()


def test_it_does_not_end_with_what_ends_the_daemon(opened_rows: Opened) -> None:
    """A signal to the process group, or from systemd, comes before the last writes."""
    table = opened_rows()
    table.probe()
    pid = table.pid
    assert pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    table.apply([], [(1, row_of(1))])
    assert table.pid == pid
    assert os.getsid(pid) == pid != os.getsid(0)


# ---- a process that hangs, or says what makes no sense


def test_a_stopped_process_holds_up_nobody_who_closes(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_rows, "CLOSE_S", 0.2)
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    assert table.pid is not None
    watched = os.pidfd_open(table.pid)
    os.kill(table.pid, signal.SIGSTOP)
    failures: list[StoreError] = []

    def call() -> None:
        try:
            table.probe()
        except StoreError as problem:
            failures.append(problem)

    caller = threading.Thread(target=call)
    caller.start()
    table.close()
    caller.join()
    assert len(failures) == 1
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)
    assert rows_in(opened_rows()) == {1: row_of(1)}


def test_a_call_that_takes_too_long_fails_and_its_process_is_replaced(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    monkeypatch.setattr(lmdb_rows, "CALL_S", 0.1)
    assert table.pid is not None
    os.kill(table.pid, signal.SIGSTOP)
    with pytest.raises(StoreError, match="did not answer in time"):
        table.probe()
    monkeypatch.undo()
    assert rows_in(table) == {1: row_of(1)}


def test_while_the_device_holds_a_killed_process_calls_fail_at_once(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    held = table.pid
    assert held is not None
    os.kill(held, signal.SIGSTOP)
    watched = os.pidfd_open(held)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_rows, "CALL_S", 0.1)
        patch.setattr(lmdb_rows, "_KILLED_S", 0.01)
        patch.setattr(subprocess.Popen, "kill", subprocess.Popen.poll)
        with pytest.raises(StoreError, match="did not answer in time"):
            table.probe()
        for _ in range(3):
            with pytest.raises(StoreError, match="still holds it"):
                table.probe()
            assert table.pid is None
    os.kill(held, signal.SIGKILL)
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)
    assert rows_in(table) == {1: row_of(1)}


def test_a_process_that_the_device_holds_at_the_close_leaves_no_zombie(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened_rows()
    table.apply([], [(1, row_of(1))])
    process = table._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(lmdb_rows, "_KILLED_S", 0.01)
        patch.setattr(subprocess.Popen, "kill", subprocess.Popen.poll)
        table.close()
    assert process.returncode is None
    os.kill(process.pid, signal.SIGKILL)
    # Nothing here waits for it or looks for its end.
    eventually(lambda: process.returncode == -signal.SIGKILL)


LIAR = """
import socket, sys
daemon = socket.socket(fileno=int(sys.argv[2]))
daemon.sendall(bytes.fromhex(sys.argv[1]))
daemon.recv(1)
"""


@pytest.mark.parametrize(
    "said",
    ["ffffffff", "01000000c0", "0100000090", "0a000000" + "c1" * 10, "00000000"],
)
def test_nonsense_is_an_error(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    opened_rows().apply([], [(1, row_of(1))])
    with monkeypatch.context() as patch:
        patch.setattr(LmdbRows, "command", (*WARM, "-c", LIAR, said))
        table = opened_rows()
        for _ in range(2):
            with pytest.raises(StoreError, match="records"):
                table.probe()
    assert rows_in(table) == {1: row_of(1)}


@pytest.mark.parametrize(
    "said",
    [
        *(["ok", found, []] for found in (5, [0, b"abc"], [0, b""], [0, b"x" * 148])),
        ["ok"],
        ["ok", None],
        ["ok", None, 5],
        ["ok", None, [], []],
    ],
)
def test_rows_that_make_no_sense_are_an_error(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch, said: list[object]
) -> None:
    packed = [msgpack.packb(message) for message in (["ok", None, []], said)]
    sent = b"".join(len(message).to_bytes(4, "little") + message for message in packed)
    monkeypatch.setattr(LmdbRows, "command", (*WARM, "-c", LIAR, sent.hex()))
    with pytest.raises(StoreError, match="records"):
        rows_in(opened_rows())


def test_what_killed_processes_left_is_removed(opened_rows: Opened, tmp_path: Path) -> None:
    opened_rows().apply([], [(1, row_of(1))])
    opened_rows().close()
    # One that is closed while it makes its spare file leaves a lock, too, so files are not counted.
    left = [tmp_path / "records-0.mdb", tmp_path / "records-1.mdb-lock"]
    for path in left:
        path.touch()
    assert rows_in(opened_rows()) == {1: row_of(1)}
    assert not any(path.exists() for path in left)
    assert len(list(tmp_path.glob("records-*.mdb"))) == 2


def test_a_process_that_does_not_start_is_an_error(
    opened_rows: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LmdbRows, "command", (*WARM, "-c", "raise SystemExit(3)"))
        table = opened_rows()
        with pytest.raises(StoreError, match="ended with 3"):
            table.probe()
    table.probe()
