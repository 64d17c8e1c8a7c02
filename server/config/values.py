"""The types of options: which values are valid, why others are refused, how they are written."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ...proto.endpoints import (
    ADMIN_SUFFIX,
    BINDING_SUFFIX,
    LOCAL_SUFFIX,
    MAX_ADDRESS_PATH_BYTES,
    MAX_SOCKET_PATH_BYTES,
    normalize_address,
    socket_path,
)
from ...proto.limits import MAX_NAMESPACES
from ...proto.namespaces import NAME
from ...proto.units import format_bytes, format_duration, parse_bytes, parse_duration_ns
from ...proto.vocabulary import Tier
from ...tiers.arena import check_slab
from ...tiers.eviction import POLICIES
from .sources import Kind


def _size(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _or_auto(check: Callable[[object], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: value if value == "auto" else check(value))


def _duration(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a duration is text with a unit, like '60s' or '500ms'")
    return parse_duration_ns(value)


def _slab(value: object) -> object:
    size = _size(value)
    if isinstance(size, int):
        check_slab(size)
    return size


def _policy(value: object) -> object:
    if not isinstance(value, str) or value not in POLICIES:
        raise ValueError(f"should be one of {', '.join(POLICIES)}")
    return value


def _tracing(value: object) -> object:
    if value == "otel" and not has_module("opentelemetry.sdk.trace"):
        raise ValueError(
            "otel needs OpenTelemetry, which is not installed: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )
    return value


def has_module(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the package of the module is missing
        return False


def _directory(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("should be the name of a directory")
    return _absolute(value)


def _file(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("should be the name of a file")
    return str(_absolute(value)) if value else ""


def _absolute(name: str | Path) -> Path:
    if "\0" in str(name):
        raise ValueError("has a NUL in it, which no name of a file may have")
    return Path(name).expanduser().absolute()


def _unix_address(value: object) -> object:
    address = normalize_address(str(value))
    path = socket_path(address)
    if path is None:
        raise ValueError("should be a Unix socket; TCP is `server.tcp`")
    if len(os.fsencode(path)) > MAX_ADDRESS_PATH_BYTES:
        raise ValueError(
            f"should be a path of at most {MAX_ADDRESS_PATH_BYTES} bytes: with {LOCAL_SUFFIX} and "
            f"{ADMIN_SUFFIX} behind it, it names two more sockets"
        )
    return address


def _admin_address(value: object) -> object:
    address = normalize_address(str(value))
    path = socket_path(address)
    if path is None:
        raise ValueError("should be a Unix socket: operators are served on this host only")
    longest_bytes = MAX_SOCKET_PATH_BYTES - len(BINDING_SUFFIX)
    if len(os.fsencode(path)) > longest_bytes:
        raise ValueError(f"should be a path of at most {longest_bytes} bytes")
    return address


def _mode(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value):
        raise ValueError("should be an octal mode in quotes, like '0600' or '0660'")
    mode = int(value, 8)
    if mode & 0o600 != 0o600:
        raise ValueError("denies the daemon's own user the socket")
    return mode


def _tcp_address(value: object) -> object:
    address = normalize_address(str(value), listening=True) if value else ""
    if address.startswith("unix:"):
        raise ValueError("should be host:port; a Unix socket is `server.address`")
    return address


def _engine_urls(value: object) -> object:
    for url in str(value).split(",") if value else ():
        if not re.fullmatch(r"(rediss?|rediss?\+sentinel|s3)://[^\s,]+", url):
            raise ValueError(
                "should be redis://host:port, redis+sentinel://host:port/service, the same with "
                "rediss, or s3://bucket"
            )
        if re.match(r"rediss?(\+sentinel)?://[^/@]*:[^/@]*@", url):
            raise ValueError("should have no password in it: use `shared.password_file`")
    return value


def _bucket_url(value: object) -> object:
    if value and not re.fullmatch(r"s3://[^\s,]+", str(value)):
        raise ValueError("should be s3://bucket or s3://bucket/prefix")
    return value


def parse_shares(text: str) -> dict[str, int]:
    """The guaranteed bytes of each namespace. Raises ValueError."""
    shares: dict[str, int] = {}
    for each in text.split(",") if text.strip() else ():
        name, equals, size = (part.strip() for part in each.partition("="))
        if not equals or not NAME.fullmatch(name):
            raise ValueError(
                f"should be NAMESPACE=SIZE, with commas between; {each.strip()!r} is not"
            )
        share_bytes = parse_bytes(size)
        if not share_bytes:
            raise ValueError(f"{name!r} has an empty share; leave it out")
        if name in shares:
            raise ValueError(f"{name!r} has two shares")
        shares[name] = share_bytes
    if len(shares) > MAX_NAMESPACES:
        raise ValueError(f"has {len(shares)} namespaces, at most {MAX_NAMESPACES}")
    return shares


def _shares(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("should be text like 'team-a=4GiB, team-b=512MiB'")
    shares = parse_shares(value)
    return ", ".join(f"{name}={format_bytes(share)}" for name, share in shares.items())


def _memory_source(value: object) -> object:
    known = ("none", "system", "cgroup")
    if value not in known and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", str(value)):
        raise ValueError(f"should be {', '.join(known)} or module:function")
    return value


def _tiers(value: object) -> object:
    names = str(value).split(",") if value else []
    if len(set(names)) != len(names) or set(names) - {tier.label for tier in Tier}:
        raise ValueError("should be ram, shm and disk, or some of them, with commas between")
    return value


File = Annotated[str, BeforeValidator(_file), Kind("FILE")]
Policy = Annotated[str, BeforeValidator(_policy), Kind("|".join(POLICIES))]
Budget = Annotated[
    Annotated[int, Field(ge=0)] | Literal["auto"],
    _or_auto(_size),
    Kind("SIZE|auto", lambda value: value if value == "auto" else format_bytes(value)),
]
Size = Annotated[int, BeforeValidator(_size), Kind("SIZE", format_bytes)]
Slab = Annotated[int, BeforeValidator(_slab), Kind("SIZE", format_bytes)]
Duration = Annotated[int, BeforeValidator(_duration), Kind("DURATION", format_duration)]
Directory = Annotated[Path, BeforeValidator(_directory), Kind("DIR|auto")]
Mount = Annotated[str, BeforeValidator(_file), Kind("DIR")]
Mode = Annotated[int, BeforeValidator(_mode), Kind("MODE", "{:04o}".format)]
TcpAddress = Annotated[str, BeforeValidator(_tcp_address), Kind("HOST:PORT")]
EngineUrls = Annotated[str, BeforeValidator(_engine_urls), Kind("URL,...")]
BucketUrl = Annotated[str, BeforeValidator(_bucket_url), Kind("URL")]
DataAddress = Annotated[str, _or_auto(_tcp_address), Kind("HOST:PORT|auto")]
Shares = Annotated[str, BeforeValidator(_shares), Kind("NAMESPACE=SIZE,...")]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
UnixAddress = Annotated[str, BeforeValidator(_unix_address), Kind("unix:PATH|auto")]
AdminAddress = Annotated[str, _or_auto(_admin_address), Kind("unix:PATH|auto")]
MemorySource = Annotated[
    str, BeforeValidator(_memory_source), Kind("none|system|cgroup|MODULE:FUNCTION")
]
Tiers = Annotated[str, BeforeValidator(_tiers), Kind("TIER,...")]
Tracing = Annotated[Literal["none", "otel"], BeforeValidator(_tracing), Kind("none|otel")]
