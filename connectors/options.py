"""What an adapter is told by its engine's configuration, and the client that this makes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from ..client.client import Client
from ..proto.errors import ConfigError
from ..proto.vocabulary import Tier

DEFAULT_DEADLINE_MS: Final = 5_000
#: Engines bound what they hand over themselves; beyond this a store is dropped.
DEFAULT_MAX_PENDING_SAVES: Final = 1_024
_OURS: Final = frozenset({"address", "tier", "deadline_ms", "max_pending_saves"})


class Attached(NamedTuple):
    """A client, which the adapter owns, and the tier that it saves to."""

    client: Client
    tier: Tier


def attach(
    engine: str, options: Mapping[str, Any], also: Collection[str] | None = None
) -> Attached:
    """`address` (where the daemon is; else it is found), `tier` (`ram`, the default, `shm`,
    `disk`), `deadline_ms` and `max_pending_saves`. `engine`: what operators see. `also`: the other
    options of this adapter; None: the engine keeps its own among them.

    Raises ConfigError, which names everything that is wrong.
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


def plain_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """An engine's fields as a namespace takes them: what is no plain value by its text."""
    plain = bool | int | float | str | None
    return {
        str(name): value if isinstance(value, plain) else str(value)
        for name, value in fields.items()
    }
