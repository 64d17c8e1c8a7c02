"""The machine of `tests.model.closing`, with shares of the tiers for namespaces."""

from __future__ import annotations

from typing import ClassVar

from tests.model.closing import ClosingMachine


class SharesMachine(ClosingMachine):
    """Two namespaces with shares of each tier, and keys without a namespace. The shares are larger
    than what RAM has at first, and leave little of the other tiers."""

    shares: ClassVar[dict[str, dict[str, int]]] = {
        "ram": {"one": 16, "two": 12},
        "shm": {"one": 20},
        "disk": {"one": 12, "two": 9},
    }
    parts: ClassVar[dict[str, str]] = {"a": "one", "b": "one", "c": "two", "d": "two"}


class FewEntriesMachine(SharesMachine):
    """One namespace with a share of the tier that is limited in entries: its share is one of two.
    Nearly all keys have no namespace, so more of them are often there than may be pinned."""

    shares: ClassVar[dict[str, dict[str, int]]] = {"ram": {}, "shm": {"one": 20}, "disk": {}}
    parts: ClassVar[dict[str, str]] = {"a": "one"}
