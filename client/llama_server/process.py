"""llama-server as a child: it gets the signals, and its exit status becomes that of the wrapper."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
#: How often a starting server is asked whether it is ready.
POLL_S: Final = 0.05


class ServerProcess:
    """A running llama-server. It ends with this process, however that ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], unset: Sequence[str]
    ) -> ServerProcess:
        """Raises OSError. Not from a thread: the kernel ends the server with the thread."""
        kept = {name: value for name, value in environment.items() if name not in unset}
        parent = os.getpid()
        # Looked up before the fork: another thread may hold the loader's lock during it.
        prctl = ctypes.CDLL(None).prctl

        def end_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        process = await asyncio.create_subprocess_exec(
            *command,
            env=kept,
            # A Ctrl-C of the terminal is for the wrapper, which saves first.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.running:
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status; 128 + the number of the signal that ended it."""
        status = await self._process.wait()
        return status if status >= 0 else 128 - status
