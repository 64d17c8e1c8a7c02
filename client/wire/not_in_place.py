"""What a transport says that reaches nothing of the daemon's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode
from ..results import Entry
from .deadline import Deadline
from .link import Holding
from .transport import Claimed, Copied, Looked, Range, Sink


class NothingInPlace:
    """The part of `transport.Transport` that works in place, for one that can't."""

    def fetch(self, _ranges: Sequence[Range], _sink: Sink, _deadline: Deadline) -> bool:
        return False

    def fetch_found(
        self,
        _keys: Sequence[Key],
        _mode: ClaimMode,
        _room_bytes: Sequence[int],
        _begin: Callable[[Claimed], Sink],
        _deadline: Deadline,
    ) -> bool:
        return False

    def peek(self, _keys: Sequence[Key]) -> list[bool] | None:
        return None

    def peek_one(self, _key: Key) -> bool | None:
        return None

    def find(self, _keys: Iterable[Key], _mode: ClaimMode, _deadline: Deadline) -> Looked | None:
        return None

    def copy(
        self,
        entries: Sequence[Entry],
        _targets: Sequence[FlatBytes],
        _check: Sequence[bool],
        _in_place: object | None = None,
    ) -> list[Copied]:
        return [Copied.GONE] * len(entries)

    def views(self, _claim: Holding, _entries: Sequence[Entry]) -> list[list[memoryview]] | None:
        return None

    def refused(self) -> dict[str, str]:
        return {"everything": "this connection is gRPC only"}
