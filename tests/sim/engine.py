"""A simulated shared engine: a primary and its replica, and nodes that reach them, or not.

An acknowledged write is on the primary, and some time later on the replica; a failover loses what
is not there yet. Requests of a call whose deadline is over, or whose process is dead, may still be
carried out: they lie in a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from prefixd.proto.keys import Key
from prefixd.proto.payload import crc32c
from prefixd.server.sharing.delete_log import FleetDelete, Logged
from prefixd.server.sharing.engine_record import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    same_entry,
)
from prefixd.server.sharing.engine_store import (
    LogPage,
    NodeState,
    NodeStatus,
    Offer,
    Outcome,
    SharedEntry,
    SharedStore,
    Wanted,
)
from tests.sim.world import Fiber, World

T = TypeVar("T")

#: Records that one read of the log returns, so that it takes several.
_PAGE: Final = 3


@dataclass
class State:
    """What one engine process has."""

    values: dict[Key, bytes] = field(default_factory=dict)
    log: list[Logged] = field(default_factory=list)
    trimmed: bool = False


@dataclass(frozen=True)
class LoggedDelete:
    """A record that the engine has taken."""

    at_ns: int
    node: str
    record: FleetDelete


class SimEngine:
    """See the module. `most_records`: of the log."""

    def __init__(self, world: World, most_records: int) -> None:
        self.world = world
        self.state = State()
        self.logged: list[LoggedDelete] = []
        #: Nodes that can't reach it.
        self.cut_off: set[str] = set()
        #: It carries nothing out before this.
        self.frozen_until_ns = 0
        self._most_records = most_records
        self._replica = State()
        #: What the replica has not done yet, and when the primary did it.
        self._unreplicated: deque[tuple[int, Callable[[State], None]]] = deque()
        #: How far the clock of the primary is behind.
        self._behind_ms = 0

    def call(self, node: str, deadline_s: float, operation: Callable[[State], T]) -> T | None:
        """Carry out an operation for a node. None: no answer came in time."""
        world = self.world
        until_ns = int(deadline_s * 1e9)
        results: list[T] = []
        waiting: Fiber = world.current

        def arrives() -> None:
            if self.frozen_until_ns > world.now_ns:
                world.later(self.frozen_until_ns - world.now_ns + 1_000, arrives)
            elif node not in self.cut_off:
                results.append(operation(self.state))
                world.wake(waiting)

        if node not in self.cut_off:
            world.later(20_000 + world.delay_ns(), arrives)
        while not results and world.now_ns < until_ns:
            world.block(until_ns)
        back_ns = world.now_ns + 20_000 + world.delay_ns()
        world.pass_time(max(0, min(back_ns, until_ns) - world.now_ns))
        if not results or node in self.cut_off or back_ns > until_ns:
            world.pass_time(max(0, until_ns - world.now_ns))
            return None
        return results[0]

    def change(self, change: Callable[[State], None]) -> None:
        """Carry out a change, here and, later, on the replica."""
        change(self.state)
        self._unreplicated.append((self.world.now_ns, change))

    def append(self, node: str, record: bytes) -> None:
        log = self.state.log
        last_ms = int(log[-1].place.split(b"-")[0]) if log else 0
        now_ms = self.world.now_ns // 1_000_000 - self._behind_ms
        entry = Logged(b"%d-0" % max(last_ms + 1, now_ms), record)

        def add(state: State) -> None:
            state.log.append(entry)
            if len(state.log) > self._most_records:
                del state.log[0]
                state.trimmed = True

        self.change(add)
        decoded = FleetDelete.decode(record)
        assert decoded is not None
        self.logged.append(LoggedDelete(self.world.now_ns, node, decoded))

    # ---- the nemesis

    def fail_over(self, lag_ms: int, behind_ms: int) -> None:
        """The replica, which is behind by `lag_ms`, takes over. Its clock is behind, too."""
        upto_ns = self.world.now_ns - lag_ms * 1_000_000
        while self._unreplicated and self._unreplicated[0][0] <= upto_ns:
            self._unreplicated.popleft()[1](self._replica)
        self._become(self._replica)
        self._behind_ms = behind_ms

    def restart_empty(self) -> None:
        self._become(State())

    def _become(self, state: State) -> None:
        self._unreplicated.clear()
        self.state, self._replica = state, deepcopy(state)

    def has(self, id_: bytes) -> bool:
        """Whether the log has a record."""
        decoded = [FleetDelete.decode(each.record) for each in self.state.log]
        return any(each is not None and each.id == id_ for each in decoded)


class EngineCalls:
    """The calls that do not depend on what the values are."""

    def __init__(self, engine: SimEngine, node: str) -> None:
        self.engine: Final = engine
        self.node: Final = node

    def set_values(self, values: Sequence[tuple[Key, bytes]], deadline_s: float) -> list[Outcome]:
        def operation(_state: State) -> bool:
            for key, value in values:
                self.engine.change(lambda state, k=key, v=value: state.values.update({k: v}))
            return True

        done = self.engine.call(self.node, deadline_s, operation)
        return [Outcome.DONE if done else Outcome.UNAVAILABLE] * len(values)

    def values(self, keys: Sequence[Key], deadline_s: float) -> list[bytes | None]:
        """None: no answer; empty: there is none."""
        found = self.engine.call(
            self.node, deadline_s, lambda state: [state.values.get(key, b"") for key in keys]
        )
        return [None] * len(keys) if found is None else list(found)

    def touch(self, expiries_ms: Sequence[tuple[Key, int]], deadline_s: float) -> list[Key]:
        values = self.values([key for key, _ in expiries_ms], deadline_s)
        return [key for (key, _), value in zip(expiries_ms, values, strict=True) if value == b""]

    def drop(self, keys: Sequence[Key], deadline_s: float) -> list[Key]:
        def operation(_state: State) -> bool:
            for key in keys:
                self.engine.change(lambda state, k=key: state.values.pop(k, None) and None)
            return True

        return [] if self.engine.call(self.node, deadline_s, operation) else list(keys)

    def log(self, records: Sequence[bytes], deadline_s: float) -> int:
        def operation(_state: State) -> int:
            for record in records:
                self.engine.append(self.node, record)
            return len(records)

        return self.engine.call(self.node, deadline_s, operation) or 0

    def read_log(self, place: bytes, deadline_s: float) -> LogPage | None:
        def operation(state: State) -> LogPage:
            later = [each for each in state.log if _number(each.place) >= _number(place)]
            return LogPage(later[:_PAGE], state.trimmed)

        return self.engine.call(self.node, deadline_s, operation)

    def problems(self) -> list[str]:
        return []

    def health(self) -> dict[str, str]:
        return {}

    def statuses(self) -> list[NodeStatus]:
        return [NodeStatus("engine", NodeState.SERVING)]

    def close(self) -> None:
        """Do nothing: calls end by their deadlines."""


def _number(place: bytes) -> int:
    return int(place.split(b"-")[0] or 0)


class Payloads(EngineCalls, SharedStore):  # type: ignore[misc]  # it has what is abstract there
    """The engine with payloads, as one node reaches it."""

    def find(self, keys: Sequence[Key], deadline_s: float) -> list[SharedEntry | None]:
        values = self.values(keys, deadline_s)
        return [decode_header(key, value or b"") for key, value in zip(keys, values, strict=True)]

    def get(self, wanted: Sequence[Wanted], deadline_s: float) -> list[Outcome]:
        values = self.values([want.entry.key for want in wanted], deadline_s)
        outcomes = []
        for want, value in zip(wanted, values, strict=True):
            payload = (value or b"")[HEADER_BYTES:]
            if not value:
                outcomes.append(Outcome.UNAVAILABLE if value is None else Outcome.ABSENT)
            elif not same_entry(want.entry.key, value, want.entry) or (
                crc32c(payload) != want.entry.payload_crc32c
            ):
                outcomes.append(Outcome.DAMAGED)
            else:
                want.room[:] = payload
                outcomes.append(Outcome.DONE)
        self.drop_damaged(wanted, outcomes, deadline_s)
        return outcomes

    def put(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        values = [
            (offer.entry.key, encode_header(offer.entry) + b"".join(offer.pieces))
            for offer in offers
        ]
        return self.set_values(values, deadline_s)


class Bucket(Payloads):
    """A bucket, as one node reaches it. It is an engine of its own, which loses nothing."""

    def get_stamped(self, wanted: Sequence[Wanted], deadline_s: float) -> list[tuple[Outcome, int]]:
        outcomes = self.get(wanted, deadline_s)
        values = self.engine.state.values
        found = [decode_header(w.entry.key, values.get(w.entry.key, b"")) for w in wanted]
        stamps = [0 if entry is None else entry.stamp for entry in found]
        return list(zip(outcomes, stamps, strict=True))

    def touch(self, _expiries_ms: Sequence[tuple[Key, int]], _deadline_s: float) -> list[Key]:
        return []


class Locations(EngineCalls):
    """The engine with the places of entries: what `PeerStore` uses of a `RedisStore`."""

    def heads(self, keys: Sequence[Key], length: int, deadline_s: float) -> list[bytes]:
        return [(value or b"")[:length] for value in self.values(keys, deadline_s)]

    def put_values(self, offers: Sequence[Offer], deadline_s: float) -> list[Outcome]:
        values: list[tuple[Key, Any]] = [(o.entry.key, b"".join(o.pieces)) for o in offers]
        return self.set_values(values, deadline_s)
