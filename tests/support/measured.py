"""The core and its metrics, without the rest of a daemon. The test moves the clock."""

from __future__ import annotations

from itertools import count

from prometheus_client import CollectorRegistry

from prefixd.proto.entry import Content
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import ClaimMode, SaveReason, Tier
from prefixd.server.api.metrics import StateCollector
from prefixd.server.core.effects import ClaimAnswer, Opened, Reply, ReserveAnswer, WriteOrder
from prefixd.server.core.events import (
    ClaimAsked,
    Event,
    KeyToSave,
    LookupAsked,
    ReserveAsked,
    SessionOpened,
    Tick,
    WriteBegan,
    WriteSealed,
)
from prefixd.server.core.state import MetaState
from prefixd.server.core.tables import StateConfig
from prefixd.tiers.eviction import make_policy
from prefixd.tiers.ledger import Ledger

BUDGET_BYTES = 1000


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


class Daemon:
    """A `MetaState` with two tiers of 1,000 bytes, and a method for each event that tests need."""

    def __init__(self) -> None:
        ledgers = {
            Tier.RAM: Ledger(Tier.RAM, BUDGET_BYTES, make_policy("lru", BUDGET_BYTES)),
            Tier.DISK: Ledger(
                Tier.DISK, BUDGET_BYTES, make_policy("fifo", BUDGET_BYTES), max_entries=50
            ),
        }

        def footprint(payload_bytes: int, token_ids_bytes: int) -> int:
            return payload_bytes + token_ids_bytes

        footprints = dict.fromkeys(ledgers, footprint)
        self.state = MetaState(StateConfig(), ledgers, footprints, frozenset([Tier.DISK]), 1)
        self.registry = CollectorRegistry()
        self.collector = StateCollector(self.state, dict)
        self.registry.register(self.collector)
        self.now_ns = 10
        self.requests = count(1)

    def apply(self, event: Event) -> object:
        """Apply an event. Returns its answer, or None while the request waits."""
        self.now_ns += 1
        replies = [e.answer for e in self.state.apply(event) if isinstance(e, Reply)]
        return replies[-1] if replies else None

    def session(self) -> int:
        opened = self.apply(SessionOpened(next(self.requests), "test", self.now_ns))
        assert isinstance(opened, Opened)
        return opened.session

    def reserve(
        self, session: int, number: int, size: int, tier: Tier = Tier.RAM, wait_ns: int = 0
    ) -> WriteOrder | None:
        items = (KeyToSave(key(number), Content(size, 16)),)
        request = ReserveAsked(
            next(self.requests),
            session,
            tier,
            SaveReason.COLD,
            items,
            (),
            False,
            100,
            self.now_ns + wait_ns,
            self.now_ns,
        )
        answer = self.apply(request)
        if not isinstance(answer, ReserveAnswer):
            return None
        (result,) = answer.results
        return result if isinstance(result, WriteOrder) else None

    def begin(self, session: int, number: int, size: int = 100, tier: Tier = Tier.RAM) -> int:
        order = self.reserve(session, number, size, tier)
        assert order is not None
        self.apply(WriteBegan(next(self.requests), session, order.token, self.now_ns))
        return order.token

    def seal(self, token: int, expected_crc32c: int = 7) -> None:
        self.apply(WriteSealed((token,), (7,), (expected_crc32c,), self.now_ns))

    def save(self, session: int, number: int, size: int = 100) -> None:
        self.seal(self.begin(session, number, size))

    def claim(self, session: int, *numbers: int, lease_ns: int = 10**9) -> int:
        answer = self.apply(
            ClaimAsked(
                next(self.requests),
                session,
                tuple(map(key, numbers)),
                ClaimMode.RUN,
                lease_ns,
                self.now_ns,
                self.now_ns,
            )
        )
        assert isinstance(answer, ClaimAnswer)
        return answer.claim

    def lookup(self, number: int, wait_ns: int = 0) -> None:
        request = LookupAsked(
            next(self.requests), (key(number),), False, self.now_ns + wait_ns, self.now_ns
        )
        self.apply(request)

    def tick(self, after_ns: int) -> None:
        self.now_ns += after_ns
        self.apply(Tick(self.now_ns))

    def value(self, name: str, labels: dict[str, str] | None = None) -> float:
        value = self.registry.get_sample_value(f"prefixd_{name}", labels or {})
        assert value is not None, f"prefixd_{name} {labels} does not exist"
        return value
