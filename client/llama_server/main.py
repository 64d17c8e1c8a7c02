"""`prefixd-llama-server`: in the place of llama-server's command, or before a server that runs.

prefixd-llama-server [options] -- llama-server -m model.gguf --port 8080
prefixd-llama-server --upstream http://127.0.0.1:8081 --slots DIR --listen 127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import ssl
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from ...proto.errors import CallerError, ConfigError
from ...proto.limits import (
    DEFAULT_COLD_MAX_TOKENS,
    DEFAULT_COLD_MIN_TOKENS,
    DEFAULT_MIN_TOKENS,
    DEFAULT_SAVE_TIMEOUT_MS,
)
from ...proto.vocabulary import Tier
from ..aio import AsyncClient
from ..client import Client
from ..policy import SavePolicy
from .command_line import ServerCommand, parse_command
from .folder import SlotFolder, UnsafeFolder
from .gateway import Gateway, Settings
from .upstream import FAILURES, ModelServer, Upstream

logger = logging.getLogger("prefixd.llama_server")

#: A call of the cache takes no longer; a daemon that hangs costs a request this once.
_DEADLINE_MS: Final = 2_000
_SHIFTS: Final = "with --context-shift, states are not those of their tokens"
#: The exit statuses of a mistake on the command line, and of a start that failed.
_BAD_INPUT, _PROBLEM = 2, 1
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG: Final = 1
#: How often a starting server is asked whether it is ready.
_POLL_S: Final = 0.05


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run until the server ends or a signal comes. Returns the exit status."""
    try:
        options = _parse(arguments)
    except (ValueError, OSError) as why:
        _say(str(why))
        return _BAD_INPUT
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        return asyncio.run(_run(options))
    except (OSError, UnsafeFolder, CallerError, ConfigError, ssl.SSLError) as why:
        _say(str(why))
        return _PROBLEM


def _say(problem: str) -> None:
    sys.stderr.write(f"prefixd-llama-server: {problem}\n")


# ---- options


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    address: str | None
    label: str
    settings: Settings
    log_level: str
    #: The server to start, or the one that runs.
    server: ServerCommand | None
    upstream: str
    #: The user's own folder of slot files.
    slots: Path | None
    #: Host and port, or the path of a socket and 0.
    listen: tuple[str, int]


def _parse(arguments: Sequence[str]) -> Options:
    """Raises ValueError, in words for the user; exits for --help."""
    own, dashes, command = _split(arguments)
    parser = _parser()
    found = parser.parse_args(own)
    server = parse_command(command, os.environ) if dashes else None
    if (server is None) == (found.upstream is None):
        raise ValueError("give either -- and the command of llama-server, or --upstream URL")
    if server is None and found.slots is None:
        raise ValueError("--upstream needs --slots: the folder that its --slot-save-path names")
    if server is None:
        _check_url(found.upstream)
    slots = found.slots if server is None else server.slots
    key = _key_of(server, os.environ)
    try:
        policy = SavePolicy(
            min_tokens=found.min_tokens,
            cold_min_tokens=max(found.min_tokens, DEFAULT_COLD_MIN_TOKENS),
            cold_max_tokens=max(found.min_tokens, DEFAULT_COLD_MAX_TOKENS),
        )
        fingerprint = found.fingerprint or None
        settings = Settings(
            tier=Tier[found.tier.upper()],
            policy=policy,
            idle_s=found.idle_save,
            save_timeout_ms=found.save_timeout,
            fingerprint=fingerprint,
            tenants=found.tenants,
            auth={"Authorization": f"Bearer {key}"} if key else {},
            swa_full=server is None or server.swa_full,
            unsupported=_SHIFTS if server is not None and server.shifts else None,
        )
    except ConfigError as why:
        raise ValueError(str(why)) from None
    return Options(
        address=found.address,
        label=found.label,
        settings=settings,
        log_level=found.log_level,
        server=server,
        upstream=found.upstream or "",
        slots=None if slots is None else Path(slots),
        listen=_address(found.listen),
    )


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"--upstream is an address like http://127.0.0.1:8081, not {url}")


def _address(text: str) -> tuple[str, int]:
    if text.endswith(".sock"):
        return text, 0
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not int(port) < 65536:
        raise ValueError(f"--listen is HOST:PORT or the path of a socket, not {text}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _key_of(server: ServerCommand | None, environment: Mapping[str, str]) -> str | None:
    """A key for the calls that no request causes; None: none is known."""
    if server is None:
        return environment.get("LLAMA_API_KEY", "").split(",")[0].strip() or None
    if server.api_key or not server.api_key_file:
        return server.api_key
    lines = Path(server.api_key_file).read_text().splitlines()
    return next((line for line in lines if line), None)


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """What is before and after the first `--`."""
    if "--" not in arguments:
        return list(arguments), False, []
    at = list(arguments).index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prefixd-llama-server",
        usage="prefixd-llama-server [options] -- llama-server ...\n"
        "       prefixd-llama-server [options] --upstream URL --slots DIR",
        description="llama.cpp's server, with the prompts that it forgets kept in prefixd. In the "
        "first form it starts the server behind itself, and listens where that would have "
        "(--host, --port). Status at /prefixd/stats and /prefixd/metrics.",
    )
    add = parser.add_argument
    add("--address", help="of the daemon: unix:/path or host:port; default: where it is found")
    add("--tier", choices=["ram", "shm", "disk"], default="shm", help="default: shm")
    add("--label", default="llama-server", help="under which prefixctl stats adds up its counts")
    add("--min-tokens", type=int, default=DEFAULT_MIN_TOKENS, help="shorter is not kept")
    add("--idle-save", type=float, default=5.0, metavar="S", help="save a slot unused for so long")
    add(
        "--save-timeout",
        type=int,
        default=DEFAULT_SAVE_TIMEOUT_MS,
        metavar="MS",
        help="for a save, and for all of them at the end",
    )
    add("--tenants", action="store_true", help="keep the states of different API keys apart")
    add(
        "--fingerprint", metavar="TEXT", help="names the weights, if their file is not on this host"
    )
    add("--upstream", metavar="URL", help="a llama-server that runs already")
    add("--slots", metavar="DIR", help="its --slot-save-path, on tmpfs")
    add("--listen", metavar="HOST:PORT", default="127.0.0.1:8090", help="with --upstream")
    add("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser


# ---- running


class ServerProcess:
    """llama-server as a child: it gets the signals, and its exit status becomes that of the
    wrapper. It ends with this process, however that ends."""

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


async def _run(options: Options) -> int:
    with ExitStack() as stack:
        own = None
        if options.server is not None:
            own = SlotFolder.temporary()
            stack.callback(own.close)
        if options.slots is None:
            assert own is not None
            folder = own
        else:
            folder = SlotFolder(options.slots)
            stack.callback(folder.close)
        client = Client(
            options.address,
            name="llama-server",
            label=options.label,
            deadline_ms=_DEADLINE_MS,
            policy=options.settings.policy,
            save_timeout_ms=options.settings.save_timeout_ms,
        )
        async with AsyncClient(client) as cache:
            if options.server is None or own is None:
                return await _serve(options, Upstream(options.upstream), cache, folder)
            socket_path = str(own.path / "server.sock")
            upstream = Upstream(f"http://localhost{options.server.prefix}", socket_path)
            command = options.server.command(socket_path, str(own.path))
            return await _serve(options, upstream, cache, folder, command)


async def _serve(
    options: Options,
    upstream: Upstream,
    cache: AsyncClient,
    folder: SlotFolder,
    command: list[str] | None = None,
) -> int:
    gateway = Gateway(upstream, cache, folder, options.settings)
    runner = gateway.runner()
    await runner.setup()
    process: ServerProcess | None = None
    try:
        for site in _sites(options, runner):
            await site.start()
            logger.info("listening on %s", site.name)
        if options.settings.unsupported:
            logger.warning("prompts are not kept: %s", options.settings.unsupported)
        stop: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, stop.put_nowait, number)
        ended: asyncio.Task[int] | None = None
        if options.server is not None and command is not None:
            unset = options.server.unset
            process = await ServerProcess.start(command, os.environ, unset)
            ended = asyncio.ensure_future(process.wait())
            for number in _PASSED_ON:
                loop.add_signal_handler(number, process.signal, number)
        identification = asyncio.ensure_future(_identify_when_ready(gateway, upstream, options))
        return await _until_the_end(gateway, runner, stop, process, ended, identification)
    finally:
        if process is not None:
            process.signal(signal.SIGKILL)
        await runner.cleanup()
        await upstream.close()


async def _until_the_end(
    gateway: Gateway,
    runner: web.AppRunner,
    stop: asyncio.Queue[int],
    process: ServerProcess | None,
    ended: asyncio.Task[int] | None,
    identification: asyncio.Task[None],
) -> int:
    """Wait for a signal or the end of the server, save, and return the exit status."""
    signalled = asyncio.ensure_future(stop.get())
    await asyncio.wait(
        {signalled, *([ended] if ended else [])}, return_when=asyncio.FIRST_COMPLETED
    )
    identification.cancel()
    if ended is not None and ended.done():
        signalled.cancel()
        logger.info("llama-server has ended with status %d", ended.result())
        return ended.result()
    number = signalled.result()
    for site in list(runner.sites):
        await site.stop()
    saving = asyncio.ensure_future(gateway.close())
    again = asyncio.ensure_future(stop.get())
    # A second signal ends it at once, as it does llama-server.
    await asyncio.wait(
        {saving, again, *([ended] if ended else [])}, return_when=asyncio.FIRST_COMPLETED
    )
    saving.cancel()
    again.cancel()
    if process is None or ended is None:
        return 0
    process.signal(number)
    last = asyncio.ensure_future(stop.get())
    await asyncio.wait({ended, last}, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        process.signal(signal.SIGKILL)
    last.cancel()
    return await ended


async def _identify_when_ready(gateway: Gateway, upstream: Upstream, options: Options) -> None:
    server = ModelServer(upstream, "", options.settings.auth)
    while True:
        try:
            await server.call("/health")
        except FAILURES:
            await asyncio.sleep(_POLL_S)
        else:
            break
    await gateway.identify()


def _sites(options: Options, runner: web.AppRunner) -> list[web.BaseSite]:
    """Where llama-server would have listened."""
    server = options.server
    context = None
    if server is None:
        return [_site(runner, *options.listen, context)]
    if server.certificate and server.private_key:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(server.certificate, server.private_key)
    return [_site(runner, host, server.port, context) for host in server.hosts]


def _site(
    runner: web.AppRunner, host: str, port: int, context: ssl.SSLContext | None
) -> web.BaseSite:
    if host.endswith(".sock"):
        return web.UnixSite(runner, host, ssl_context=context)
    return web.TCPSite(runner, host, port, ssl_context=context, reuse_address=True)
