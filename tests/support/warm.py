"""Starts of Python that cost a fork instead of the imports.

The suite starts more than a thousand Python processes. A new interpreter takes 0.8 s of CPU to
import the daemon and 0.3 s to import the client, which is more than most of these processes take
for their work. So each pytest process keeps a helper process, which has imported both, has a single
thread, and has never called gRPC. The helper forks when a test starts a daemon, the disk tier's
child (from a smaller helper), a process of multiprocessing, or `[*WARM, ...]`. Each fork has a
helper of its own, for the processes that it starts.

The caller sees no difference: `subprocess` and `multiprocessing` both start processes with the
function `fork_exec`, and only this function is replaced, not the pipes, waits and signals around
it. The new process is a child of its caller: the helper forks twice, while the caller adopts
orphaned descendants (`PR_SET_CHILD_SUBREAPER`).

A new interpreter is started as usual where a fork could differ: for other commands, with options
(`-W`) or a program before it, with other environment variables of Python, gRPC or the loader, on a
terminal, or from a process that has moved to other namespaces.
Tests of imports, and of the start and end of an interpreter, use `sys.executable`.

A fork differs in three ways: it has the string hashes of the helper, it has the helper's
/proc/PID/cmdline, and it exits right after its exit handlers, without freeing its objects.
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

#: `[*WARM, "-c", script]` or `[*WARM, "-m", module]`. An interpreter ignores this option.
WARM: Final = (sys.executable, "-X", "warm")
#: With `-m`, these are forked without `WARM`, because they are started by the package itself.
MODULES: Final = ("prefixd", "prefixd.tiers.lmdb_child")
IMPORTED: Final = (
    "prefixd.server.daemon",
    "prefixd.client.ctl.main",
    "prefixd.client.aio",
    "prefixd.client.local.local_transport",
    "prefixd.tiers.lmdb_file",
    "multiprocessing.spawn",
)
#: Most processes of the suite are these, which need little and start none. A test process forks
#: them from a second helper: a fork's cost is the size of what is forked.
LIGHT: Final = ("-m", "prefixd.tiers.lmdb_child")
IMPORTED_FOR_LIGHT: Final = ("prefixd.tiers.lmdb_file",)
#: What these modules need besides, which few tests start: imported before the first of them. (Not
#: numpy, which starts threads.)
IMPORTED_FIRST: Final = {
    "prefixd.client.llama_server": "aiohttp.web",
    "tests.support.fake_llama": "aiohttp.web",
}
#: Prefixes of the variables that are read before a program's first line.
READ_AT_START: Final = ("PYTHON", "LD_", "GRPC", "MALLOC_", "GLIBC_", "PROTOCOL_BUFFERS_")
ROOT: Final = Path(__file__).parents[2]

_PR_SET_CHILD_SUBREAPER: Final = 36
_MAX_REQUEST_BYTES: Final = 2**20
_MAX_DESCRIPTORS: Final = 253
#: Arguments of `fork_exec`: group, groups, user, umask, and a function to call before.
_SAME_USER: Final = [None, None, None, -1, None]


@contextmanager
def warm_starts() -> Iterator[None]:
    """Start processes as the module describes, until the end of the context."""
    starter = _Starter()
    starter.install()
    try:
        yield
    finally:
        starter.close()


# ---- in the calling process


class _Starter:
    """Sends requests to helpers, each of which it starts when it first needs it.

    In a fork it has one, which the fork was made with.
    """

    def __init__(self, requests: socket.socket | None = None) -> None:
        #: By whether they are for light processes.
        self._requests: dict[bool, socket.socket] = {}
        if requests is not None:
            self._requests = {False: requests, True: requests}
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._read_at_start = _read_at_start(os.environ)
        self._namespaces = _namespaces()
        self._prctl = ctypes.CDLL(None).prctl
        self._exec = _posixsubprocess.fork_exec
        self._spawns = subprocess._USE_POSIX_SPAWN  # type: ignore[attr-defined]

    def install(self) -> None:
        # From Python 3.13 on, most starts would not pass `fork_exec`.
        subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]
        self._put(self.fork_exec)

    def close(self) -> None:
        self._put(self._exec)
        subprocess._USE_POSIX_SPAWN = self._spawns  # type: ignore[attr-defined]
        for requests in self._requests.values():
            requests.close()
        for helper in self._helpers:
            helper.wait()

    def _put(self, fork_exec: Any) -> None:
        _posixsubprocess.fork_exec = fork_exec
        if hasattr(subprocess, "_fork_exec"):
            subprocess._fork_exec = fork_exec

    def fork_exec(self, *given: Any) -> int:
        """In place of `_posixsubprocess.fork_exec`: the id of a new process."""
        request = self._request_of(*given)
        pid = self._ask(*request) if request is not None else 0
        # If the helper fails, the real function raises the right exception.
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
        """The request and its descriptors, or None if this needs a new interpreter."""
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
            # As exec would: an ignored signal stays ignored, a handler does not stay.
            "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        }
        return request, list(numbers.values())

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        """The id of the new process, or 0 if the helper could not start it."""
        light = tuple(request["command"][:2]) == LIGHT
        with self._lock:
            if light not in self._requests:
                self._requests[light] = self._start(IMPORTED_FOR_LIGHT if light else IMPORTED)
            requests = self._requests[light]
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(requests, [json.dumps(request).encode()], fds)
                return int(requests.recv(64))
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self, imports: Sequence[str]) -> socket.socket:
        ours, theirs = _connected()
        with theirs:
            helper = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._helpers.append(helper)
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
    """Serve the process that started this one; in a fork, run the requested command."""
    # Registered first, so that it is called last.
    atexit.register(_leave)
    # Ctrl-C must not end helpers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    path = sys.path[1:]
    for module in sys.argv[2:]:
        import_module(module)
    gc.freeze()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a process with threads must not fork"
    command = _serve(socket.socket(fileno=int(sys.argv[1])), path)
    gc.enable()
    _run(*command)


def _serve(requests: socket.socket, path: list[str]) -> list[str]:
    """Returns in each fork, with its command. The helper itself exits with its caller."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        command = tuple(request["command"][:2])
        if first := IMPORTED_FIRST.get(command[-1]):
            import_module(first)
            gc.freeze()
        started, starting = socket.socketpair()
        between = os.fork()
        if between:
            starting.close()
            _close(fds)
            os.waitpid(between, 0)
            with started:
                pid = started.recv(64)
            # The caller has adopted the fork by now, which runs once `started` is closed.
            requests.send(pid or b"0")
            continue
        if os.fork():
            os._exit(0)
        started.close()
        requests.close()
        if command == LIGHT:
            return _become(request, fds, path, starting)
        own, requests = _connected()
        if os.fork():
            requests.close()
            return _become(request, fds, path, starting, own)
        # This process becomes the fork's own helper.
        starting.close()
        own.close()
        _close(fds)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _become(
    request: dict[str, Any],
    fds: list[int],
    path: list[str],
    starting: socket.socket,
    own: socket.socket | None = None,
) -> list[str]:
    """Turn a fork into the requested process, with its own helper. Returns its command."""
    command: list[str] = request["command"]
    try:
        if request["new_session"]:
            os.setsid()
        os.chdir(request["cwd"])
        # Moves the descriptors out of the way of their final numbers, and leaves no copy behind.
        fds = [starting.detach(), *([own.detach()] if own else []), *fds]
        above = max(*request["numbers"], *fds) + 1
        fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
        starting_fd = fds.pop(0)
        own_fd = fds.pop(0) if own else None
        os.closerange(3, above)
        for fd, number in zip(fds, request["numbers"], strict=True):
            os.dup2(fd, number)
        _close(fds)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:] = ["" if command[0] == "-c" else request["cwd"], *path]
        if not request["ignores_interrupt"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if own_fd is not None:
            _Starter(socket.socket(fileno=own_fd)).install()
        with socket.socket(fileno=starting_fd) as starting:
            starting.send(b"%d" % os.getpid())
            starting.recv(1)  # returns once the helper closes its end
    except OSError:
        os._exit(1)
    return command


def _run(kind: str, program: str, *arguments: str) -> None:
    """Run a module or a script as an interpreter does, and keep its exit status."""
    global _status
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        atexit.unregister(_leave)
        raise
    except BaseException:
        _status = 1
        raise


#: The exit status of this process, for `_leave`.
_status = 0


def _leave() -> NoReturn:
    """Exit without freeing memory: threads have ended, and the other exit handlers have run."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(_status & 0xFF)


if __name__ == "__main__":
    main()
