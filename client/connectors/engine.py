"""What the adapters of all engines share: the check that the installed engine is the one that the
connector was written for, and the client that the engine's options make."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature, signature
from typing import Any, Final, NamedTuple

from ...proto.errors import ConfigError
from ...proto.vocabulary import Tier
from .. import Client
from ..identity import Dimension, Part, unrevealed
from ..weights import weights_of

DEFAULT_DEADLINE_MS: Final = 5_000
#: Beyond this a save is dropped. Engines limit what they hand over themselves.
DEFAULT_MAX_PENDING_SAVES: Final = 1_024
_OURS: Final = frozenset({"address", "tier", "deadline_ms", "max_pending_saves", "fingerprint"})


class UnsupportedEngine(ImportError):
    """The engine is not installed, or its interface is not the one that the connector knows."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that a connector was written for. The checks raise UnsupportedEngine."""

    name: str
    package: str
    #: The version whose interface the connector follows, or the first and last ("1.2 to 1.5").
    tested: str

    @property
    def version(self) -> str:
        """The installed version; "unknown" if the package has none."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is one that the connector was made for, or unknown. Of a
        range also later releases of its last version (1.5.2 of "1.2 to 1.5")."""
        if self.version == "unknown":
            return True
        first, _, last = self.tested.partition(" to ")
        here, least, most = map(_numbers, (self.version, first, last or first))
        return least <= here and here[: len(most)] <= most

    def require(self, module: str, names: Iterable[str]) -> Any:
        """Import a module of the engine and check that it has these names, which may be dotted."""
        try:
            found = import_module(module)
        except ImportError as problem:
            raise UnsupportedEngine(
                f"prefixd's connector needs {self.name} (made for {self.tested}): {problem}"
            ) from problem
        missing = [name for name in names if not _has(found, name)]
        if missing:
            raise self.unsupported(f"it has no {', '.join(missing)}")
        return found

    def check_interface(self, ours: type) -> None:
        """Check that our class has every method that the engine requires, and that each can be
        called as its base class declares it."""
        missing: frozenset[str] = getattr(ours, "__abstractmethods__", frozenset())
        if missing:
            raise self.unsupported(f"it asks for {', '.join(sorted(missing))}")
        for name, method in vars(ours).items():
            declared = getattr(ours.__base__, name, None)
            # The engine's factories do not call constructors as the base class declares its own.
            if name.startswith("_") or not callable(method) or not callable(declared):
                continue
            expected = signature(declared)
            if not _takes(signature(method), expected):
                raise self.unsupported(f"it calls {name}{_untyped(expected)}")

    def check_call(self, function: Callable[..., Any], *names: str) -> None:
        """Check that a function of the engine takes these positional arguments."""
        expected = signature(function)
        try:
            expected.bind(*names)
        except TypeError:
            what = f"it has {function.__qualname__}{_untyped(expected)}"
            raise self.unsupported(what) from None

    def unsupported(self, what: str) -> UnsupportedEngine:
        """The error that says what differs."""
        return UnsupportedEngine(
            f"prefixd's connector does not know {self.name} {self.version}: {what}; it was made "
            f"for {self.tested}"
        )


def _numbers(version: str) -> list[int]:
    """The release of a version: [0, 5, 16] of "0.5.16.post1+cu129"."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return [] if release is None else list(map(int, release[0].split(".")))


def _has(owner: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _takes(ours: Signature, expected: Signature) -> bool:
    """Whether `ours` takes every call that `expected` allows: with all arguments or only the
    required ones, by position or by name."""
    parameters = [
        each
        for each in expected.parameters.values()
        if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    required = [each for each in parameters if each.default is Parameter.empty]
    try:
        for passed in (parameters, required):
            for either_way in (Parameter.POSITIONAL_OR_KEYWORD, None):
                by_name = (Parameter.KEYWORD_ONLY, either_way)
                ours.bind(
                    *(each.name for each in passed if each.kind not in by_name),
                    **{each.name: each.name for each in passed if each.kind in by_name},
                )
    except TypeError:
        return False
    return True


def _untyped(of: Signature) -> str:
    """The parameters of a signature, without their types."""
    plain = [each.replace(annotation=Parameter.empty) for each in of.parameters.values()]
    return str(Signature(plain))


# ---- options


class Attached(NamedTuple):
    """A client, which the adapter owns, and the tier that it saves to."""

    client: Client
    tier: Tier


def attach(
    engine: str, options: Mapping[str, Any], also: Collection[str] | None = None
) -> Attached:
    """Make the client that an engine's options describe.

    The options are `address` (default: the client looks for the daemon), `tier` (`ram`, the
    default, `shm`, `disk`), `deadline_ms`, `max_pending_saves` and `fingerprint`, which the
    connector reads (`fingerprint_of`). `engine`: the client's name for operators. `also`: names of
    the adapter's other options; None: any, because the engine mixes in its own. Raises ConfigError,
    which names everything that is wrong.
    """
    wrong: list[str] = []
    tiers = {each.name.lower(): each for each in Tier}
    tier = options.get("tier", "ram")
    if not isinstance(tier, str) or tier.lower() not in tiers:
        wrong.append(f"tier is one of {', '.join(tiers)}, not {tier!r}")
    numbers: dict[str, int] = {}
    for name, default, least in (
        ("deadline_ms", DEFAULT_DEADLINE_MS, 1),
        ("max_pending_saves", DEFAULT_MAX_PENDING_SAVES, 0),
    ):
        value = options.get(name, default)
        if type(value) is not int or value < least:
            wrong.append(f"{name} is a whole number of at least {least}, not {value!r}")
        numbers[name] = value
    address = options.get("address")
    if address is not None and not isinstance(address, str):
        wrong.append(f"address is unix:/path or host:port, not {address!r}")
    salt = options.get("salt")
    if not isinstance(salt, str | bytes | None):
        wrong.append(f"salt is text, not {salt!r:.80}")
    if also is not None:
        known = sorted(_OURS.union(also))
        wrong += [
            f"there is no option {name!r}; there are {', '.join(known)}"
            for name in options
            if name not in known
        ]
    if wrong:
        raise ConfigError(f"prefixd's options for {engine}: {'; '.join(wrong)}")
    client = Client(
        address,
        name=engine,
        deadline_ms=numbers["deadline_ms"],
        max_pending_saves=numbers["max_pending_saves"],
    )
    return Attached(client, tiers[tier.lower()])


# ---- identities

#: What a user can do whose engine does not tell its connector which weights it runs.
GIVE_FINGERPRINT: Final = (
    "give the option fingerprint: text that names the weights and whatever else of the model this "
    "engine does not tell"
)


def fingerprint_of(engine: str, options: Mapping[str, Any]) -> str | None:
    """The option `fingerprint`, if it was given. Raises ConfigError for anything but text."""
    given = options.get("fingerprint")
    if given is not None and (not isinstance(given, str) or not given):
        raise ConfigError(f"prefixd's options for {engine}: fingerprint is text, not {given!r:.80}")
    return given


def weights_dimension(
    fingerprint: str | None, model: str | None = None, revision: str | None = None
) -> Dimension:
    """The weights: as the user named them, else the files of `model` on this host, else unknown, so
    that nothing is shared beyond this process."""
    if fingerprint is not None:
        return Dimension("weights", fingerprint, "the option fingerprint", Part.FINGERPRINT)
    found = None
    if model:
        with suppress(OSError):
            found = weights_of(model, revision=revision)
    if found is None:
        return unrevealed("weights", GIVE_FINGERPRINT)
    return Dimension("weights", found.digest, found.source, Part.FINGERPRINT)
