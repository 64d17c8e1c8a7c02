"""Addresses: how they are written, and where a daemon listens by default.

An address is `unix:/path/of/socket` or `host:port`; a bare absolute path is a Unix socket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .errors import ConfigError

ADDRESS_VARIABLE: Final = "PREFIXD_ADDRESS"
#: The address that serves operators, if it is configured separately.
ADMIN_ADDRESS_VARIABLE: Final = "PREFIXD_ADMIN_ADDRESS"
SOCKET_NAME: Final = "prefixd.sock"
#: Where the daemon of a machine listens, in a directory that root gave it.
SYSTEM_DIRECTORY: Final = "/run/prefixd"
UNIX_SCHEME: Final = "unix:"
#: A daemon has two more sockets beside its own, whose names end with these: the local socket
#: (proto/frames.py), and the one for operators.
LOCAL_SUFFIX: Final = ".local"
ADMIN_SUFFIX: Final = ".admin"
#: A socket is bound under its name with this behind it, and renamed when it is ready.
BINDING_SUFFIX: Final = "~"
#: The size of sun_path on Linux, without the final zero.
MAX_SOCKET_PATH_BYTES: Final = 107
#: How long the path of a daemon's own socket may be, so that those of the others fit, too.
MAX_ADDRESS_PATH_BYTES: Final = (
    MAX_SOCKET_PATH_BYTES - max(len(LOCAL_SUFFIX), len(ADMIN_SUFFIX)) - len(BINDING_SUFFIX)
)


def default_addresses(
    environ: Mapping[str, str] | None = None, uid: int | None = None
) -> tuple[str, ...]:
    """Where daemon, clients and prefixctl meet without any configuration, in this order.

    `$PREFIXD_ADDRESS` alone, if it is set. Else `prefixd.sock` in the first of these directories:

    | directory | why |
    |---|---|
    | `/run/prefixd`, for root | root's daemon is the machine's, and outlives a login |
    | `$XDG_RUNTIME_DIR/prefixd` | the user's own daemon |
    | `/run/user/<uid>/prefixd` | the same for su, cron and containers, which lack the variable |
    | `/tmp/prefixd-<uid>` | the user's own daemon, where there is no such directory |
    | `/run/prefixd`, for others | the machine's daemon, as the systemd unit starts it |

    A daemon takes the first one that it can use, a client the first one at which a daemon answers
    that it may rely on (`trust`). Creates nothing and looks at nothing. Raises ConfigError if the
    variable is not an address.
    """
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    if given := environ.get(ADDRESS_VARIABLE):
        return (normalize_address(given),)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = [f"{runtime}/prefixd"] if runtime.startswith("/") else []
    own += [f"/run/user/{uid}/prefixd", f"/tmp/prefixd-{uid}"]
    directories = [SYSTEM_DIRECTORY, *own] if uid == 0 else [*own, SYSTEM_DIRECTORY]
    paths = (Path(directory) / SOCKET_NAME for directory in dict.fromkeys(directories))
    fitting = (path for path in paths if len(os.fsencode(path)) <= MAX_ADDRESS_PATH_BYTES)
    return tuple(f"{UNIX_SCHEME}{path}" for path in fitting)


def normalize_address(address: str, *, listening: bool = False) -> str:
    """An address as `unix:/absolute/path` or `host:port`. Also takes a bare path and `unix:///path`.

    `listening` allows port 0, which lets the kernel choose a port. Raises ConfigError if `address`
    is not an address, its port is out of range, or its path is longer than the kernel takes.
    """
    if not isinstance(address, str):
        raise ConfigError(f"an address is text: unix:/path or host:port, not {address!r}")
    text = address.strip()
    if scheme := re.match(r"([a-z0-9+]+)://(?!/)", text, re.IGNORECASE):
        bare = text[scheme.end() :].rstrip("/")
        raise ConfigError(f"{address!r} is no address: write {bare}, without {scheme.group()}")
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
        like = f", as unix:{Path(text).absolute()}" if "/" in text or text.endswith(".sock") else ""
        raise ConfigError(f"{address!r} is no address: write unix:/path or host:port{like}")
    if re.fullmatch(r"[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*", host):
        raise ConfigError(
            f"{address!r} is no address: an IPv6 address stands in brackets, as in [{host}]:{port}"
        )
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
