"""Many client processes that restore at once: what all of them together move in a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final

from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ..client import Client
from ..restores import Verify
from .moving import private_memory
from .samples import Case

#: With the number of processes behind it.
CROWD_OP: Final = "restore-by-"
_STOP_WITHIN_S: Final = 10.0


def work(
    pipe: Connection, address: str, keys: Sequence[Key], block_bytes: int, verify: Verify
) -> None:
    """A process of the crowd: restores all of `keys` whenever it is told to. Says None, or what
    went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    room = private_memory(len(keys) * block_bytes)
    rooms = [room[i * block_bytes : (i + 1) * block_bytes] for i in range(len(keys))]
    for each in rooms:
        each[:] = b"\1" * block_bytes
    with contextlib.suppress(EOFError, BrokenPipeError), Client(address, verify=verify) as client:
        pipe.send(None if client.wait_connected() else "no daemon answers")
        while pipe.recv():
            hit = client.longest_run(keys, claim=False)
            whole = len(hit) == len(keys) and hit.restore_into(rooms)
            pipe.send(None if whole else f"restored {len(hit)} of {len(keys)} blocks")


class Crowd:
    """Processes, each with a client and a buffer of its own. A context manager."""

    def __init__(
        self, clients: int, address: str, keys: Sequence[Key], block_bytes: int, verify: Verify
    ) -> None:
        self._arguments = (address, list(keys), block_bytes, verify)
        self._clients = clients
        self._moved_bytes = len(keys) * block_bytes
        self._blocks = len(keys)
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Crowd:
        context = multiprocessing.get_context("spawn")
        try:
            for _ in range(self._clients):
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, *self._arguments), daemon=True)
                process.start()
                # The worker's end lives in the worker only: it closes when the worker dies.
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._hear(self._pipes)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def cases(self, peer: str) -> Iterator[Case]:
        """One process alone, and all of them."""
        for count in sorted({1, self._clients}):
            yield Case(
                peer,
                f"{CROWD_OP}{count}",
                self._blocks,
                lambda count=count: self.restore(count),  # type: ignore[misc]  # bound now
                count * self._moved_bytes,
            )

    def restore(self, count: int) -> None:
        """The first `count` processes restore, all at once."""
        for pipe in self._pipes[:count]:
            # A process that died is noticed when its answer does not come.
            with contextlib.suppress(OSError):
                pipe.send(True)
        self._hear(self._pipes[:count])

    def _hear(self, pipes: Iterable[Connection]) -> None:
        for pipe in pipes:
            try:
                problem = pipe.recv()
            except (EOFError, OSError):
                problem = "it died"
            if problem is not None:
                raise PrefixdError(f"a process of the crowd failed: {problem}")

    def _end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(False)
            pipe.close()
        for process in self._processes:
            process.join(_STOP_WITHIN_S)
            process.kill()
            process.join()
            process.close()
