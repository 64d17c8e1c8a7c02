"""The machine of `tests.model.closing` where namespaces have shares of the tiers."""

from __future__ import annotations

from typing import ClassVar

from tests.model.closing import ClosingMachine


class SharesMachine(ClosingMachine):
    """Two namespaces and some of none, with shares of each tier: more than all of what RAM has so
    far, and such that not much is left of the others."""

    shares: ClassVar[dict[str, dict[str, int]]] = {
        "ram": {"one": 16, "two": 12},
        "shm": {"one": 20},
        "disk": {"one": 12, "two": 9},
    }
    parts: ClassVar[dict[str, str]] = {"a": "one", "b": "one", "c": "two", "d": "two"}


class FewEntriesMachine(SharesMachine):
    """One namespace with a share of the tier that holds only so many entries: it is sure of one of
    two. Nearly all keys are of none, so that more of them are often there than may be pinned."""

    shares: ClassVar[dict[str, dict[str, int]]] = {"ram": {}, "shm": {"one": 20}, "disk": {}}
    parts: ClassVar[dict[str, str]] = {"a": "one"}
