"""Loads the configuration of the daemon, or refuses it and lists every wrong option at once."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ... import __version__
from ...proto import limits
from ...proto.endpoints import (
    ADDRESS_VARIABLE,
    LOCAL_SUFFIX,
    SOCKET_NAME,
    UNIX_SCHEME,
    default_addresses,
    socket_path,
)
from ...proto.errors import ConfigError
from ...proto.trace_parent import TRACING_VARIABLE
from ...proto.trust import why_no_place
from ...proto.units import format_bytes, format_duration
from ...tiers.arena import MIN_SLAB_BYTES
from . import sources
from .budgets import Plan, describe_memory, resolve, too_small
from .machine import Machine
from .options import Config, ServerSection, SharedSection, TierSection
from .sources import Given, Option
from .values import parse_shares

PROGRAM: Final = sources.Program(
    name="prefixd",
    version=__version__,
    description="Keeps the KV state of LLM prompt prefixes and gives it back at memory speed.",
    flags={
        "--address": "server.address",
        "--tcp": "server.tcp",
        "--metrics": "server.metrics",
        "--ram": "ram.budget",
        "--shm": "shm.budget",
        "--disk": "disk.budget",
        "--log-level": "log.level",
        "--log-format": "log.format",
    },
    variables={ADDRESS_VARIABLE: "server.address", TRACING_VARIABLE: "server.tracing"},
)
_GOOD: Final = "The configuration is good."
_TITLE: Final = """The configuration of prefixd: every option with its meaning and its default.
This is what `prefixd --print-config` prints. Use it with `prefixd --config FILE`.

SIZE: 8GiB, 512MiB, 4096 (bytes). DURATION: 60s, 500ms, 1h30m."""


def print_config() -> str:
    """A TOML file with every option, its description and its default."""
    return sources.template(Config, _TITLE)


def default_paths(env: Mapping[str, str], uid: int) -> dict[str, str]:
    """The socket and the directories that are used unless configured. Creates nothing.

    For a unit with RuntimeDirectory= and StateDirectory=, systemd sets them in the environment.
    """
    if env.get("STATE_DIRECTORY"):
        state = env["STATE_DIRECTORY"]
    elif uid == 0:
        state = "/var/lib/prefixd"
    elif env.get("XDG_STATE_HOME", "").startswith("/"):
        state = f"{env['XDG_STATE_HOME']}/prefixd"
    else:
        state = "~/.local/state/prefixd"
    if env.get("RUNTIME_DIRECTORY"):
        address = f"{UNIX_SCHEME}{env['RUNTIME_DIRECTORY']}/{SOCKET_NAME}"
    else:
        unnamed = {name: value for name, value in env.items() if name != ADDRESS_VARIABLE}
        addresses = default_addresses(unnamed, uid)
        # If there is none, the complaint is about the last of the user's own.
        address = next((each for each in addresses if _usable(each)), addresses[-2])
    return {
        "server.address": address,
        "shm.directory": f"/dev/shm/prefixd-{uid}",
        "disk.directory": state,
    }


def _usable(address: str) -> bool:
    """Whether a daemon of this user can listen at a default address."""
    path = socket_path(address)
    assert path is not None
    directory = path.parent
    # Its parent is not made: a user without a login has no /run/user/<uid>.
    found = directory.is_dir() or directory.parent.is_dir()
    return found and not why_no_place(directory) and not _not_writable(directory)


#: Says what a start with this configuration would stumble over, and what the tiers get, if that is
#: known. Each sentence begins with the name of an option and a colon.
Examine: TypeAlias = Callable[[Config, Plan | None], Iterable[str]]


def load_config(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Config:
    """The configuration from flags, then `env` (default: the process's own), then the file. Raises
    as `load_plan` does."""
    config, _ = _load(argv, env, None)
    return config


def load_plan(
    argv: Sequence[str], env: Mapping[str, str] | None = None, examine: Examine | None = None
) -> Plan:
    """The configuration, as `load_config`, and what each tier gets on this machine.

    `examine`: look also at what the configuration names: files, directories, packages, addresses.
    For a start and for `--check-config`, which is the start without the start.
    `--help`, `--version`, `--print-config` and a good `--check-config` print and raise
    SystemExit(0). Raises ConfigError, which lists everything that is wrong.
    """
    _, plan = _load(argv, env, examine or unusable)
    assert plan is not None
    return plan


def _load(
    argv: Sequence[str], env: Mapping[str, str] | None, examine: Examine | None
) -> tuple[Config, Plan | None]:
    """The plan comes with `examine`."""
    env = os.environ if env is None else env
    found = sources.read(Config, PROGRAM, argv, env)
    if found.print_config:
        print(print_config(), end="")
        raise SystemExit(0)
    places = default_paths(env, os.getuid())
    given = {
        path: entry
        for path, entry in found.given.items()
        if not (path in places and entry.value == "auto")
    }
    config, wrong = _validate(given, places)
    problems = [*found.problems, *wrong.values()]
    for paths, why in _conflicts(config):
        if wrong.keys().isdisjoint(paths):
            problems.append(f"{' and '.join(paths)}: {why}")
    plan = None
    if found.check_config or examine is not None:
        disk = config.disk
        machine = Machine.probe(
            config.shm.directory,
            disk.directory if disk.budget_bytes else None,
            disk_mount=disk.mount,
        )
        try:
            plan = resolve(config, machine)
            problems += too_small(plan)
        except ConfigError as problem:
            problems.append(str(problem))
        problems += _new_ones(problems, wrong, (examine or unusable)(config, plan))
    if problems:
        sources.refuse(problems)
    if found.check_config:
        assert plan is not None
        warnings = [f"warning: {warning}" for warning in plan.warnings]
        good = "The configuration is possible, but likely not meant:" if warnings else _GOOD
        print(good, *warnings, *plan.describe(), describe_memory(plan), sep="\n")
        raise SystemExit(0)
    return config, plan


def _new_ones(
    problems: Sequence[str], wrong: Mapping[str, str], found: Iterable[str]
) -> Iterator[str]:
    """Those of `found` whose option has no problem yet: the rest follows from the first."""
    named = {*wrong}
    for problem in problems:
        named.update(problem.partition(":")[0].split(" and "))
    for problem in found:
        option = problem.partition(":")[0]
        if option not in named:
            named.add(option)
            yield problem


# ---- what can be wrong


def unusable(config: Config, plan: Plan | None) -> Iterator[str]:
    """Directories that the daemon could not write to, files that it could not read, and what is in
    the place of a socket. Creates nothing."""
    for name, option in sources.options(Config).items():
        file = option.value_in(config) if option.kind.metavar == "FILE" else ""
        if file and not (Path(file).is_file() and os.access(file, os.R_OK)):
            yield f"{name}: {file} is no file that the user {os.geteuid()} can read"
    directories: list[tuple[str, Path]] = []
    for name, address in (
        ("server.address", config.server.address),
        ("server.admin_address", config.server.operators()),
    ):
        path = socket_path(address)
        assert path is not None
        if path.exists() and not path.is_socket():
            yield f"{name}: {path} is there and is no socket; it is not replaced"
        if name == "server.address" or config.server.admin_address != "auto":
            directories.append((name, path.parent))
    for tier, tier_plan in plan.tiers.items() if plan else ():
        if tier_plan.directory is not None and not tier_plan.problem:
            directories.append((f"{tier.label}.directory", tier_plan.directory))
    for name, directory in directories:
        if why := _not_writable(directory):
            yield f"{name}: {why}"
        elif name == "server.address" and (why := _passed_over(config.server.address, directory)):
            yield f"{name}: {why}, so that no client looks for a daemon there"


def _passed_over(address: str, directory: Path) -> str:
    """Why clients that look for a daemon by themselves pass over this one; empty: they don't."""
    return why_no_place(directory) if address in default_addresses() else ""


def _not_writable(directory: Path) -> str:
    """Why the directory can't be written to, or created if it does not exist; empty if it can."""
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is no directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} can't be written to by the user {os.geteuid()}"
    owner = place.stat().st_uid
    if place == directory and owner not in (0, os.geteuid()):
        return f"{place} belongs to the user {owner}; it is not used"
    return ""


def _validate(
    given: Mapping[str, Given], places: Mapping[str, str]
) -> tuple[Config, dict[str, str]]:
    """The configuration without its wrong options, and a sentence for each of those."""
    known = sources.options(Config)
    wrong = {
        path: _complaint(path, entry, _unknown(path, list(known)))
        for path, entry in given.items()
        if path not in known
    }
    while True:
        tree: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
        right = {path: entry.value for path, entry in given.items() if path not in wrong}
        for path, value in {**places, **right}.items():
            section, _, key = path.partition(".")
            tree[section][key] = value
        try:
            return Config.model_validate(tree), wrong
        except ValidationError as refused:
            before = len(wrong)
            for error in refused.errors():
                path = ".".join(map(str, error["loc"][:2]))
                entry = given.get(path) or Given(places[path], "the defaults of this machine")
                wrong.setdefault(path, _complaint(path, entry, _reason(error, known[path])))
            if len(wrong) == before or wrong.keys() & places.keys() - given.keys():
                # A default is wrong, or no wrong option was found: there is no configuration to
                # examine further.
                sources.refuse(list(wrong.values()))


#: A password in a URL. The complaint may be that there is one, so it must not be shown.
_PASSWORD: Final = re.compile(r"(//[^/@:]*:)[^/@]*@")


def _complaint(path: str, entry: Given, why: str) -> str:
    value = _PASSWORD.sub(r"\1...@", repr(entry.value))
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return f"{path} = {shown} (from {entry.origin}): {why}"


def _unknown(path: str, known: Sequence[str]) -> str:
    close = get_close_matches(path, known, n=1) or [
        k for k in known if k.partition(".")[2] == path.rpartition(".")[2]
    ]
    return "there is no such option" + (f"; did you mean {close[0]}?" if close else "")


def _reason(error: ErrorDetails, option: Option) -> str:
    limits_of: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "value_error":
            return str(limits_of["error"])
        case "greater_than_equal":
            return f"should be at least {option.kind.show(limits_of['ge'])}"
        case "less_than_equal":
            return f"should be at most {option.kind.show(limits_of['le'])}"
        case _:
            return error["msg"].replace("Input should", "should")


def _conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that are valid by themselves and wrong together: their names, and why."""
    yield from _tcp_conflicts(config.server, config.shared)
    yield from _tier_conflicts(config)
    if config.shared.capacity and not config.shared.engine.startswith("redis"):
        yield (
            ("shared.capacity", "shared.engine"),
            "a bucket of capacity is for what a Valkey or Redis, or its nodes, no longer have: "
            "the engine has to be one",
        )
    server, pressure, sessions = config.server, config.pressure, config.sessions
    if server.operators() in (server.address, f"{server.address}{LOCAL_SUFFIX}"):
        yield (
            ("server.admin_address", "server.address"),
            f"workers are served at {server.operators()}; operators need a socket of their own",
        )
    if server.staging_bytes > server.staging_total_bytes:
        yield (
            ("server.staging", "server.staging_total"),
            f"{format_bytes(server.staging_bytes)} for one client are more than the "
            f"{format_bytes(server.staging_total_bytes)} for all",
        )
    if pressure.low_watermark >= pressure.high_watermark:
        yield (
            ("pressure.low_watermark", "pressure.high_watermark"),
            f"pressure begins at {pressure.high_watermark:g} of the memory and has to end below "
            f"that, not at {pressure.low_watermark:g}",
        )
    lost_after_ns = limits.SESSION_LOST_AFTER_INTERVALS * sessions.heartbeat_ns
    if sessions.claim_lease_ns < lost_after_ns:
        yield (
            ("sessions.claim_lease", "sessions.heartbeat"),
            f"a lease of {format_duration(sessions.claim_lease_ns)} would run out between the "
            f"heartbeats of a living client; at least {format_duration(lost_after_ns)}",
        )


def _tcp_conflicts(
    server: ServerSection, shared: SharedSection
) -> Iterator[tuple[tuple[str, ...], str]]:
    data = server.data if server.data != "auto" else ""
    secured = server.tls_cert and (server.tokens or server.tls_client_ca)
    lack = "clients are not authenticated" if server.tls_cert else "nothing is encrypted"
    for option, address in (("server.tcp", server.tcp), ("server.data", data)):
        if address and not secured and not server.allow_remote and not _is_loopback(address):
            yield (
                (option, "server.allow_remote"),
                f"{address} can be reached from other machines, and {lack}; listen on 127.0.0.1, "
                "set tls_cert, tls_key and tokens, or say allow_remote = true",
            )
    if bool(server.tls_cert) != bool(server.tls_key):
        yield ("server.tls_cert", "server.tls_key"), "one of them is set, and TLS needs both"
    for name in ("tls_client_ca", "tokens"):
        if getattr(server, name) and not server.tls_cert:
            yield (f"server.{name}", "server.tls_cert"), "they need TLS; nothing else protects them"
    if server.tls_cert and not server.tcp:
        yield ("server.tls_cert", "server.tcp"), "TLS is for TCP, which is switched off"
    if shared.payloads == "nodes" and bool(server.tls_cert) != bool(shared.peer_ca):
        yield (
            ("shared.peer_ca", "server.tls_cert"),
            "one of them is set: nodes that read from each other all serve TLS, or none does",
        )
    if shared.payloads == "nodes" and shared.address and (why := _not_for_others(shared)):
        yield ("shared.address",), why
    if shared.peer_token_file and not shared.peer_ca:
        yield (
            ("shared.peer_token_file", "shared.peer_ca"),
            "it needs TLS; nothing else protects it",
        )
    if data and not server.tcp:
        yield (
            ("server.data", "server.tcp"),
            f"clients learn of {data} over TCP only, and there is none: say where with tcp",
        )
    listening = (("tcp", server.tcp), ("data", data), ("metrics", server.metrics))
    for (one, at), (other, there) in combinations(listening, 2):
        if at and at == there and not at.endswith(":0"):
            yield (f"server.{one}", f"server.{other}"), f"both are {at}"


def _not_for_others(shared: SharedSection) -> str:
    """Why other nodes can't reach this one at the address that they are told; empty: they can."""
    host, _, port = shared.address.rpartition(":")
    with suppress(ValueError):
        if ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_unspecified:
            return f"{shared.address} is where to listen, not where others reach this node"
    if port == "0":
        return f"{shared.address} has no port that other nodes could be told"
    urls = map(urlsplit, shared.engine.split(","))
    engines = [url.netloc.rpartition("@")[2] for url in urls]
    # Nodes that share an engine on loopback are all on this machine: a trial.
    if _is_loopback(shared.address) and not all(map(_is_loopback, engines)):
        return f"other nodes would look for this one at {shared.address}, which is themselves"
    return ""


def _tier_conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    tiers: dict[str, TierSection] = {name: getattr(config, name) for name in ("ram", "shm", "disk")}
    for name, tier in tiers.items():
        budget_bytes = tier.budget_bytes
        shares_bytes = sum(parse_shares(tier.shares).values())
        if shares_bytes and not config.server.tokens:
            yield (
                (f"{name}.shares", "server.tokens"),
                "shares are for namespaces of tokens, and there are no tokens",
            )
        if not isinstance(budget_bytes, int):
            continue
        if name == "disk" and 0 < budget_bytes < MIN_SLAB_BYTES:
            yield ("disk.budget",), f"{format_bytes(budget_bytes)} do not hold one page"
        if name != "disk" and 0 < budget_bytes < tier.slab_bytes:
            yield (
                (f"{name}.budget", f"{name}.slab"),
                f"a budget of {format_bytes(budget_bytes)} does not hold one slab of "
                f"{format_bytes(tier.slab_bytes)}",
            )
        if shares_bytes > budget_bytes:
            yield (
                (f"{name}.shares", f"{name}.budget"),
                f"the shares add up to {format_bytes(shares_bytes)}, and the tier has "
                f"{format_bytes(budget_bytes)}",
            )
    if not any(tier.budget_bytes for tier in tiers.values()):
        yield ("ram.budget", "shm.budget", "disk.budget"), "all are 0: there would be no tier"
    if os.path.realpath(config.shm.directory) == os.path.realpath(config.disk.directory):
        yield ("shm.directory", "disk.directory"), f"both are {config.shm.directory}"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
