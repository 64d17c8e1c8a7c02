"""Starts of Python that cost a fork instead of the imports.

The suite starts more than a thousand processes of Python, and a new interpreter takes 0.8 s of CPU
to import the daemon, 0.3 s for the client: more than most of them take for what they do. So each
pytest process keeps a helper, which has imported both, has no thread, and never called gRPC. It
forks when a test starts a daemon, the disk tier's child, a process of multiprocessing, or
`[*WARM, ...]`. Each fork has such a helper of its own, for what it starts itself.

To whom starts it nothing differs: `subprocess` and `multiprocessing` start processes with one
function, `fork_exec`. That is replaced; pipes, waiting and signals around it stay theirs. The new
process is a child of the one that asked, as any: the helper forks twice, and meanwhile orphans
below that one are given to it (`PR_SET_CHILD_SUBREAPER`).

A new interpreter is started as ever where a fork could differ: by other commands, with options
(`-W`) or a program before it, in another environment of Python, gRPC or the loader, on a terminal,
by a process that has moved to other namespaces.
Tests of what is imported, and of how an interpreter begins and ends, use `sys.executable`.

What differs in a fork: strings have the hashes of the helper's, /proc/PID/cmdline is the helper's,
and the process is gone as soon as its exit handlers have run, without freeing object by object.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

#: `[*WARM, "-c", script]` or `[*WARM, "-m", module]`. An interpreter ignores options like this one.
WARM: Final = (sys.executable, "-X", "warm")
#: With `-m` these are forked unasked: those who start them are not tests.
MODULES: Final = ("prefixd", "prefixd.tiers.lmdb_child")
IMPORTED: Final = (
    "prefixd.server.daemon",
    "prefixd.client.ctl.main",
    "prefixd.client.aio",
    "prefixd.tiers.lmdb_file",
    "multiprocessing.spawn",
)
#: The beginnings of variables that are read before a program's first line.
READ_AT_START: Final = ("PYTHON", "LD_", "GRPC", "MALLOC_", "GLIBC_", "PROTOCOL_BUFFERS_")
ROOT: Final = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_REQUEST_BYTES: Final = 2**20
_MAX_DESCRIPTORS: Final = 253
#: Of `fork_exec`: group, groups, user, umask, and a function to call before.
_SAME_USER: Final = [None, None, None, -1, None]


@contextmanager
def warm_starts() -> Iterator[None]:
    """From here on processes are started as the module says."""
    starter = _Starter()
    starter.install()
    try:
        yield
    finally:
        starter.close()


# ---- in the process that asks


class _Starter:
    """Asks a helper, which is started when it is first needed."""

    def __init__(self, requests: socket.socket | None = None) -> None:
        self._requests = requests
        self._helper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._read_at_start = _read_at_start(os.environ)
        self._namespaces = _namespaces()
        self._prctl = ctypes.CDLL(None).prctl
        self._exec = _posixsubprocess.fork_exec

    def install(self) -> None:
        self._put(self.fork_exec)

    def close(self) -> None:
        self._put(self._exec)
        if self._helper is not None and self._requests is not None:
            self._requests.close()
            self._helper.wait()

    def _put(self, fork_exec: Any) -> None:
        _posixsubprocess.fork_exec = fork_exec
        if hasattr(subprocess, "_fork_exec"):
            subprocess._fork_exec = fork_exec

    def fork_exec(self, *given: Any) -> int:
        """In place of `_posixsubprocess.fork_exec`: the id of a new process."""
        asked = self._request_of(*given)
        pid = self._ask(*asked) if asked is not None else 0
        # What went wrong is for the real one to say.
        return pid or self._exec(*given)

    def _request_of(
        self,
        args: Sequence[str | bytes],
        _executables: object,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: str | bytes | None,
        env: Sequence[bytes] | None,
        *others: Any,
    ) -> tuple[dict[str, Any], list[int]] | None:
        """What to ask for, and the descriptors that go with it. None: this is not for a fork."""
        stdin, _, _, stdout, _, stderr, _, errors, _, new_session, group, *identity = others
        command = _warm_command([os.fsdecode(arg) for arg in args])
        variables = dict(os.environ)
        if env is not None:
            pairs = (os.fsdecode(entry).partition("=") for entry in env)
            variables = {name: value for name, _, value in pairs}
        if (
            command is None
            or group not in (None, -1)
            or not close_fds
            or identity[:5] != _SAME_USER
            or os.getpid() != self._pid
            or _read_at_start(variables) != self._read_at_start
            or _namespaces() != self._namespaces
        ):
            return None
        numbers = {0: stdin, 1: stdout, 2: stderr}
        numbers = {number: number if fd == -1 else fd for number, fd in numbers.items()}
        numbers |= {fd: fd for fd in pass_fds if fd != errors}
        if any(map(os.isatty, numbers.values())):
            return None
        request = {
            "command": command,
            "cwd": str(Path.cwd() / os.fsdecode(cwd or "")),
            "environment": variables,
            "numbers": list(numbers),
            "new_session": bool(new_session),
        }
        return request, list(numbers.values())

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        """The new process's id; 0 if there is none."""
        with self._lock:
            if self._requests is None:
                self._requests = self._start()
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
                return int(self._requests.recv(64))
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self) -> socket.socket:
        ours, theirs = _connected()
        with theirs:
            self._helper = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return ours


def _connected() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST_BYTES)
    return ends


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}


def _namespaces() -> list[int]:
    return [Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("mnt", "net", "pid", "user")]


def _warm_command(argv: list[str]) -> list[str] | None:
    """The command from `-c` or `-m` on, if it may be forked."""
    if tuple(argv[:3]) == WARM:
        return argv[3:]
    of_multiprocessing = argv[1:2] == ["-c"] and argv[3:] == ["--multiprocessing-fork"]
    of_a_module = argv[1:2] == ["-m"] and argv[2] in MODULES
    if argv[0] == sys.executable and (of_multiprocessing or of_a_module):
        return argv[1:]
    return None


# ---- in the helper, and in its forks


def main() -> None:
    """Serve the process that started this one; in a fork, run what it asked for."""
    # The first to be registered is the last to be called.
    atexit.register(_leave)
    # Ctrl-C is not for helpers.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    path = sys.path[1:]
    for module in IMPORTED:
        import_module(module)
    gc.freeze()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a process with threads must not fork"
    command = _serve(socket.socket(fileno=int(sys.argv[1])), path)
    signal.signal(signal.SIGINT, interrupt)
    gc.enable()
    _run(*command)


def _serve(requests: socket.socket, path: list[str]) -> list[str]:
    """Returns in each fork, with its command; else ends with who asks."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        ready, told = socket.socketpair()
        between = os.fork()
        if between:
            told.close()
            _close(fds)
            os.waitpid(between, 0)
            with ready:
                pid = ready.recv(64)
            # Now that it has its parent, and this hung up, it begins.
            requests.send(pid or b"0")
            continue
        if os.fork():
            os._exit(0)
        ready.close()
        requests.close()
        own, requests = _connected()
        if os.fork():
            requests.close()
            return _become(json.loads(message), fds, path, told, own)
        # The fork's own helper.
        told.close()
        own.close()
        _close(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _become(
    request: dict[str, Any],
    fds: list[int],
    path: list[str],
    told: socket.socket,
    own: socket.socket,
) -> list[str]:
    """Turn a fork into the process that was asked for; returns its command."""
    command: list[str] = request["command"]
    try:
        if request["new_session"]:
            os.setsid()
        os.chdir(request["cwd"])
        # Away from where they are to be.
        above = max(request["numbers"]) + 1
        told_fd, own_fd, *fds = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
            for fd in (told.detach(), own.detach(), *fds)
        ]
        os.closerange(3, above)
        for fd, number in zip(fds, request["numbers"], strict=True):
            os.dup2(fd, number)
        _close(fds)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = ["" if command[0] == "-c" else request["cwd"], *path]
        _Starter(socket.socket(fileno=own_fd)).install()
        with socket.socket(fileno=told_fd) as told:
            told.send(b"%d" % os.getpid())
            told.recv(1)
    except OSError:
        os._exit(1)
    return command


def _run(kind: str, what: str, *arguments: str) -> None:
    """As an interpreter does, which then ends with its status."""
    global _status
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        atexit.unregister(_leave)
        raise
    except BaseException:
        _status = 1
        raise


#: Of the process, for `_leave`.
_status = 0


def _leave() -> NoReturn:
    """Threads were waited for, all else was called: nothing is left but to free memory."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_status & 0xFF)


if __name__ == "__main__":
    main()
