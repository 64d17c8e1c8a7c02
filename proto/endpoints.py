"""Addresses: how they are written, and where a daemon listens by default.

An address is `unix:/path/of/socket` or `host:port`; a bare absolute path is a Unix socket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .errors import ConfigError

ADDRESS_VARIABLE: Final = "PREFIXD_ADDRESS"
#: The address that serves operators, if it is configured separately.
ADMIN_ADDRESS_VARIABLE: Final = "PREFIXD_ADMIN_ADDRESS"
SOCKET_NAME: Final = "prefixd.sock"
UNIX_SCHEME: Final = "unix:"
#: A daemon has two more sockets beside its own, whose names end with these: the local socket
#: (proto/frames.py), and the one for operators.
LOCAL_SUFFIX: Final = ".local"
ADMIN_SUFFIX: Final = ".admin"
#: The size of sun_path on Linux, without the final zero.
MAX_SOCKET_PATH_BYTES: Final = 107


def default_address(environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """The address that the daemon, clients and prefixctl use without any configuration.

    `$PREFIXD_ADDRESS` if it is set; else a socket in `$XDG_RUNTIME_DIR/prefixd`; else in
    `/run/prefixd` for root and in `/tmp/prefixd-<uid>` for other users. Creates nothing. Raises
    ConfigError if the variable is not an address.
    """
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    if given := environ.get(ADDRESS_VARIABLE):
        return normalize_address(given)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        directory = Path(runtime) / "prefixd"
    elif uid == 0:
        directory = Path("/run/prefixd")
    else:
        directory = Path(f"/tmp/prefixd-{uid}")
    return f"{UNIX_SCHEME}{directory / SOCKET_NAME}"


def normalize_address(address: str, *, listening: bool = False) -> str:
    """An address as `unix:/absolute/path` or `host:port`. Also takes a bare path and `unix:///path`.

    `listening` allows port 0, which lets the kernel choose a port. Raises ConfigError if `address`
    is not an address, its port is out of range, or its path is longer than the kernel takes.
    """
    text = address.strip()
    if text.startswith(("/", "./", "../", "~/")):
        text = f"{UNIX_SCHEME}{Path(text).expanduser().absolute()}"
    if text.startswith(UNIX_SCHEME):
        path = text.removeprefix(UNIX_SCHEME)
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or len(path) < 2 or "\0" in path:
            raise ConfigError(f"{address!r} names no absolute socket path: write unix:/path")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{address!r} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket path"
            )
        return f"{UNIX_SCHEME}{path}"
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{address!r} is no address: write unix:/path or host:port")
    if not (0 if listening else 1) <= int(port) < 65_536:
        raise ConfigError(f"{address!r} has the port {port}: ports are 1 to 65535")
    return text


def admin_address(address: str) -> str | None:
    """The default address for operators of the daemon at `address`. None for a TCP address, because
    operators are served on the daemon's host only."""
    path = socket_path(address)
    return None if path is None else f"{UNIX_SCHEME}{path}{ADMIN_SUFFIX}"


def socket_path(address: str) -> Path | None:
    """The path of a Unix socket address; None for a TCP address."""
    address = normalize_address(address)
    if address.startswith(UNIX_SCHEME):
        return Path(address.removeprefix(UNIX_SCHEME))
    return None
