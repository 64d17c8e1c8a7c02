"""The machine of `tests.model.closing`, with shares of the tiers for namespaces."""

from __future__ import annotations

from typing import ClassVar

from tests.model.closing import ClosingMachine


class SharesMachine(ClosingMachine):
    """Two namespaces with shares, and keys without a namespace. The shares of RAM exceed its
    initial size, and those of the other tiers leave little for other keys."""

    shares: ClassVar[dict[str, dict[str, int]]] = {
        "ram": {"one": 16, "two": 12},
        "shm": {"one": 20},
        "disk": {"one": 12, "two": 9},
    }
    parts: ClassVar[dict[str, str]] = {"a": "one", "b": "one", "c": "two", "d": "two"}


class FewEntriesMachine(SharesMachine):
    """One namespace has a share of the tier with two entries: one of them. Nearly all keys have no
    namespace, so the tier often holds more of them than may be pinned."""

    shares: ClassVar[dict[str, dict[str, int]]] = {"ram": {}, "shm": {"one": 20}, "disk": {}}
    parts: ClassVar[dict[str, str]] = {"a": "one"}
