"""What an engine imports: the client, its results, its errors, and the words they use.

Each name is imported on first use: prefixctl lives below this package, and most of its commands
need no gRPC.
"""

import os

# gRPC's handlers for forks abort some of the children that a process with a client forks, before
# they can run another program, and sometimes that process itself. The Python part of gRPC does
# without them unless this is set to 1; its core, which reads it when gRPC is first imported, does
# not. Nothing is lost: a fork can't use the client anyway.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Type checkers take it for true. `typing` itself would be most of the import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..proto import errors as errors
    from ..proto.keys import Adapter as Adapter
    from ..proto.keys import Extra as Extra
    from ..proto.keys import ForeignNamespace as ForeignNamespace
    from ..proto.keys import Key as Key
    from ..proto.keys import Namespace as Namespace
    from ..proto.keys import block_keys as block_keys
    from ..proto.keys import context_hash as context_hash
    from ..proto.keys import extend_chain as extend_chain
    from ..proto.keys import prefix_key as prefix_key
    from ..proto.vocabulary import ClaimMode as ClaimMode
    from ..proto.vocabulary import DeleteStatus as DeleteStatus
    from ..proto.vocabulary import MissReason as MissReason
    from ..proto.vocabulary import SaveReason as SaveReason
    from ..proto.vocabulary import SaveStatus as SaveStatus
    from ..proto.vocabulary import Tier as Tier
    from .aio import AsyncClient as AsyncClient
    from .client import Client as Client
    from .hits import Hit as Hit
    from .identity import Dimension as Dimension
    from .identity import Part as Part
    from .identity import StateIdentity as StateIdentity
    from .policy import SavePolicy as SavePolicy
    from .results import Entry as Entry
    from .results import RestoreResult as RestoreResult
    from .results import SaveOutcome as SaveOutcome
    from .saves import Reservation as Reservation
    from .saves import ReserveItem as ReserveItem
    from .saves import SaveItem as SaveItem
    from .watch import AsyncWatch as AsyncWatch
    from .watch import Cleared as Cleared
    from .watch import Disconnected as Disconnected
    from .watch import Evicted as Evicted
    from .watch import Published as Published
    from .watch import ResidentKeys as ResidentKeys
    from .watch import Synced as Synced
    from .watch import Watch as Watch

#: The module that each name comes from.
_HOMES = {
    name: module
    for module, names in {
        "..proto": "errors",
        "..proto.keys": "Adapter Extra ForeignNamespace Key Namespace block_keys "
        "context_hash extend_chain prefix_key",
        "..proto.vocabulary": "ClaimMode DeleteStatus MissReason SaveReason SaveStatus Tier",
        ".aio": "AsyncClient",
        ".client": "Client",
        ".hits": "Hit",
        ".identity": "Dimension Part StateIdentity",
        ".policy": "SavePolicy",
        ".results": "Entry RestoreResult SaveOutcome",
        ".saves": "Reservation ReserveItem SaveItem",
        ".watch": "AsyncWatch Cleared Disconnected Evicted Published ResidentKeys Synced Watch",
    }.items()
    for name in names.split()
}

__all__ = [  # literal, for type checkers
    "Adapter",
    "AsyncClient",
    "AsyncWatch",
    "ClaimMode",
    "Cleared",
    "Client",
    "DeleteStatus",
    "Dimension",
    "Disconnected",
    "Entry",
    "Evicted",
    "Extra",
    "ForeignNamespace",
    "Hit",
    "Key",
    "MissReason",
    "Namespace",
    "Part",
    "Published",
    "Reservation",
    "ReserveItem",
    "ResidentKeys",
    "RestoreResult",
    "SaveItem",
    "SaveOutcome",
    "SavePolicy",
    "SaveReason",
    "SaveStatus",
    "StateIdentity",
    "Synced",
    "Tier",
    "Watch",
    "block_keys",
    "context_hash",
    "errors",
    "extend_chain",
    "prefix_key",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
