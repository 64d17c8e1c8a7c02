"""How much memory a configuration may take: the bounds of all options, added up."""

from __future__ import annotations

from typing import Final

from ...proto.units import format_bytes
from ...proto.vocabulary import Tier
from .budgets import Plan
from .options import Shared

#: What a daemon takes that serves nobody: the interpreter, its libraries, buffers of gRPC.
_BASE_BYTES: Final = 256 * 2**20
#: An entry in the tables, and its row in the index.
_ENTRY_BYTES: Final = 600
#: A connection with what it may have sent ahead, a call, and a session.
_CONNECTION_BYTES: Final = 64 * 2**10
_CALL_BYTES: Final = 64 * 2**10
_SESSION_BYTES: Final = 16 * 2**10
#: A key that a claim or an unfinished save holds, with what the tables note of it.
_HELD_KEY_BYTES: Final = 100
#: The keys that an engine is known to have (`sharing.link.MAX_KNOWN`).
_KNOWN_KEYS: Final = 262_144
_KNOWN_KEY_BYTES: Final = 200


def memory_parts(plan: Plan) -> dict[str, int]:
    """What each option adds, in bytes, by the option's name. The table in deploy/README.md shows
    the same."""
    config = plan.config
    server, sessions, watch = config.server, config.sessions, config.watch
    # gRPC over TCP accepts half as many again (`runtime.descriptors.with_arrivals`).
    connections = int(server.max_connections * (3.5 if server.tcp else 1))
    entries = sum(
        min(tier.max_entries or tier.max_budget_bytes, tier.max_budget_bytes // tier.slab_bytes)
        for tier in plan.tiers.values()
    )
    parts = {
        "ram.budget": plan.all_tiers[Tier.RAM].max_budget_bytes,
        "shm.budget": plan.all_tiers[Tier.SHM].max_budget_bytes,
        "server.staging_total": server.staging_total_bytes,
        "server.max_reads": server.max_read_bytes,
        "server.max_saves": server.max_save_bytes,
        "server.max_local": server.max_local_bytes * (2 if server.tcp else 1),
        "server.max_connections": connections * _CONNECTION_BYTES,
        "server.max_rpcs": server.max_rpcs * _CALL_BYTES,
        "server.journal": server.journal_bytes * 5 // 4,
        "sessions.max_sessions": sessions.max_sessions * _SESSION_BYTES,
        "sessions.max_held_keys": sessions.max_held_keys * _HELD_KEY_BYTES,
        "watch.history": watch.history_bytes if watch.max_watchers else 0,
        "shared.memory": config.shared.memory_bytes * _copies(config.shared),
        "shared.engine": _known_keys(config.shared) * _KNOWN_KEY_BYTES,
        "entries": entries * _ENTRY_BYTES,
        "the daemon itself": _BASE_BYTES,
    }
    return {name: size_bytes for name, size_bytes in parts.items() if size_bytes}


def _copies(shared: Shared) -> int:
    """Of entries on their way. A request to a bucket has one of its own, which may outlive the
    call."""
    if not shared.engine:
        return 0
    return 2 if shared.capacity or shared.engine.startswith("s3:") else 1


def _known_keys(shared: Shared) -> int:
    """A bucket behind the engine has a list of its own, and one of what it has in part."""
    if not shared.engine:
        return 0
    return _KNOWN_KEYS * (3 if shared.capacity else 1)


def describe(plan: Plan) -> str:
    """One line: the sum, and its largest parts."""
    parts = memory_parts(plan)
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    named = ", ".join(f"{name} {format_bytes(parts[name])}" for name in largest)
    return f"memory: at most {format_bytes(sum(parts.values()))}, of which {named}"
