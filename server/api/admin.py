"""The `Admin` service: what operators see and order. Reads the live tables on the loop, in
slices: nothing here keeps a client waiting, however much there is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Final

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import CurveDisabled, InvalidSize, UnknownEntry
from ...proto.index import unpack_row
from ...proto.keys import Key
from ...proto.namespaces import Namespace
from ...proto.vocabulary import Tier
from ...tiers.ledger import Admission, Ledger
from ..core import state
from ..core.checking import MAX_PROBLEMS
from ..core.counters import Histogram
from ..core.entries import EntryTable
from ..core.events import Tick
from ..runtime.latencies import Latencies
from ..runtime.loop import Core
from ..runtime.recounting import recount
from ..runtime.recovery import collect_garbage
from ..runtime.scrubbing import Scrub
from ..runtime.slices import Slices
from ..runtime.verification import Reading, Swept, Verifications
from . import messages
from .calls import Caller
from .lists import detailed
from .metrics import SCRUB_COUNTERS, TIER_COUNTERS, TIER_GAUGES, counters_dict, lag_dict
from .operations import Operations, audit
from .sessions import ServiceConfig
from .usage import UsageBook, bounded

#: How often the client of a Verify hears how far it is.
_PROGRESS_EVERY_S = 0.2
#: Victims that a preview names: they are found at one moment.
_MOST_VICTIMS: Final = 1_000
_DEFAULT_QUARTERS = (1, 2, 4, 8, 16)
#: See setup.py.
COMPILED = not (state.__file__ or "").endswith(".py")


class AdminService(Operations):
    """See prefixd.proto for what each rpc promises."""

    def __init__(
        self,
        core: Core,
        config: ServiceConfig,
        in_flight: Callable[[], Mapping[str, int]],
        scrubs: Mapping[Tier, Scrub],
        usage: UsageBook,
        latencies: Latencies | None = None,
    ) -> None:
        """`in_flight`: what calls take of the daemon's memory, by name. `scrubs`: how the tiers
        are doing that are read back in the background. `usage`: what clients count."""
        super().__init__(core, usage)
        self.latencies: Final = latencies
        self._scrubs = scrubs
        self._config = config
        self._in_flight = in_flight
        self._started_ns = core.clock.now_ns()
        #: what was shared with other nodes, where anything is; set by the daemon
        self.shared: Callable[[], Mapping[str, int]] = dict
        self.shared_nodes: Callable[[], Sequence[pb.SharedNode]] = list

    # ---- what there is

    async def stats(self, request: pb.StatsRequest, _caller: Caller) -> pb.StatsResponse:
        core, slices = self._core, Slices()
        usage = {}
        for label, sums in self._usage.items():
            usage[label] = sums.message()
            await slices.pause()
        t = core.state.tables
        unhealthy = core.unhealthy()
        return pb.StatsResponse(
            daemon_version=self._config.daemon_version,
            compiled=COMPILED,
            incarnation=self._config.incarnation,
            uptime_ms=(core.clock.now_ns() - self._started_ns) // 1_000_000,
            pid=os.getpid(),
            tiers=[self._tier_stats(ledger) for ledger in t.ledgers.values()],
            sessions=len(t.sessions),
            claims=len(t.claims),
            reservations=len(t.reservations),
            waiters=len(t.waiting),
            counters=counters_dict(core.state) | lag_dict(core.lag),
            in_flight=self._in_flight(),
            shared=self.shared(),
            shared_nodes=self.shared_nodes(),
            notices=core.notices(),
            usage=usage,
            stages=self._stages(),
            oldest_claim_ms=t.oldest_claim_ns(core.clock.now_ns()) // 1_000_000,
            health="; ".join(f"{name}: {why}" for name, why in unhealthy.items()) or "serving",
        )

    def _stages(self) -> Iterator[pb.StageTimes]:
        orders = self._core.orders
        stages: dict[str, Histogram] = {}
        if self.latencies is not None:
            stages |= {"claim": self.latencies.claim, "save": self.latencies.save}
        stages |= {f"commit {tier.label}": taken for tier, taken in orders.latencies().items()}
        stages |= {f"sync {tier.label}": taken for tier, taken in orders.syncs().items()}
        stages |= {"restore": self._usage.restores(), "loop": self._core.lag.pulses}
        for name, taken in stages.items():
            times = map(bounded, taken.counts)
            yield pb.StageTimes(stage=name, bounds_ns=taken.bounds, times=times)

    def _tier_stats(self, ledger: Ledger) -> pb.TierStats:
        counters = self._core.state.tables.tier_counters[ledger.tier]
        store = self._core.stores[ledger.tier]
        numbers = {name: getattr(counters, name) for name in TIER_COUNTERS}
        numbers |= {name: getattr(ledger, name) for name in TIER_GAUGES}
        del numbers["reservations"]  # the tables have them, over all tiers
        return pb.TierStats(
            tier=ledger.tier.value,  # type: ignore[arg-type]
            policy=ledger.policy.name,
            # What the tier keeps beside the arena is secured with it.
            secured_bytes=ledger.budget_bytes - (store.size_bytes - store.secured_bytes),
            payload_bytes=counters.payload_bytes,
            state=self._core.devices.state(ledger.tier).value,
            oldest_io_ms=self._core.devices.oldest_ns(ledger.tier) // 1_000_000,
            scrub=self._scrub_stats(ledger.tier),
            kept_bytes=self.resizing.kept_bytes(ledger.tier),
            namespaces=[
                pb.NamespaceStats(
                    namespace=part.namespace,
                    share_bytes=part.share_bytes,
                    used_bytes=part.used_bytes,
                    fixed_bytes=part.fixed_bytes,
                    entries=part.used_entries,
                )
                for part in (ledger.shares.standings if ledger.shares is not None else ())
            ],
            **numbers,
        )

    def _scrub_stats(self, tier: Tier) -> pb.ScrubStats | None:
        scrub = self._scrubs.get(tier)
        if scrub is None:
            return None
        return pb.ScrubStats(
            last_pass_unix_ns=scrub.last_pass_unix_ns,
            progress_permille=int(1_000 * scrub.progress),
            **{name: getattr(scrub, name) for name in SCRUB_COUNTERS},
        )

    async def inspect(self, request: pb.InspectRequest, _caller: Caller) -> pb.InspectResponse:
        (key,) = messages.keys_of("key", [request.key])
        entry = self._core.state.tables.entries.get(key)
        if entry is None:
            raise UnknownEntry(f"no entry {key.hex()}; it was evicted, or never published")
        detail = messages.entry_detail(entry)
        if not request.verify:
            return pb.InspectResponse(entry=detail)
        verdict = await self._core.verifications.verify(entry)
        if verdict is None:
            return pb.InspectResponse(entry=detail, problem="it left while it was read")
        verified = verdict.reading is not Reading.FAILED
        return pb.InspectResponse(entry=detail, verified=verified, problem=verdict.why)

    # ---- room

    async def preview(self, request: pb.PreviewRequest, _caller: Caller) -> pb.PreviewResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        if not 0 < request.payload_bytes <= limits.MAX_PAYLOAD_BYTES:
            raise InvalidSize(f"payload_bytes is {request.payload_bytes}; ask for at least 1")
        ledger = t.ledgers[tier]
        key = _key_of(request.namespace)
        count = request.entries or 1
        needed_bytes = count * self._core.stores[tier].stored_bytes(request.payload_bytes, 0)
        if needed_bytes >= 2**63:
            raise InvalidSize(f"{needed_bytes} bytes are more than any tier has")
        admission = ledger.admission(needed_bytes, count, key)
        victims = []
        if admission is Admission.AFTER_EVICTION:
            # The first of them, where they are many.
            leaving = ledger.foretell(
                needed_bytes // count, count, lambda key: t.entries[key].stored_bytes, key
            )
            victims = [t.entries[key] for key in islice(leaving, _MOST_VICTIMS)]
        response = pb.PreviewResponse(
            admissible=admission in (Admission.FITS, Admission.AFTER_EVICTION),
            retryable=admission in (Admission.NO_ROOM, Admission.OVER_SHARE),
            message=_ADMISSION_SENTENCES[admission].format(option=f"{tier.label}.shares"),
            free_bytes=max(0, ledger.free_bytes),
            unpinned_bytes=ledger.unpinned_bytes,
            pinned_bytes=ledger.pinned_bytes,
            reserved_bytes=ledger.reserved_bytes,
            needed_bytes=needed_bytes,
            evicted_bytes=sum(entry.stored_bytes for entry in victims),
        )
        await detailed(response.victims, victims, Slices())
        return response

    async def curve(self, request: pb.CurveRequest, _caller: Caller) -> pb.CurveResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        if tier not in t.curves:
            raise CurveDisabled("this daemon samples no curve; set server.curve_keys")
        own_bytes = t.ledgers[tier].budget_bytes
        if len(request.budget_bytes) > limits.MAX_BATCH_KEYS:
            raise InvalidSize(f"at most {limits.MAX_BATCH_KEYS} budgets go into one call")
        budgets = tuple(request.budget_bytes) or tuple(
            own_bytes * quarters // 4 for quarters in _DEFAULT_QUARTERS
        )
        curve = t.curves[tier].estimate()
        return pb.CurveResponse(
            points=[
                pb.CurvePoint(budget_bytes=budget, hit_tokens=round(curve.at(budget)))
                for budget in budgets
            ],
            budget_bytes=own_bytes,
            hit_tokens=t.tier_counters[tier].hit_tokens,
            total_tokens=round(curve.total),
            sampled_keys=curve.keys,
            sampled_tokens=round(curve.total * curve.rate),
        )

    # ---- order

    async def gc(self, request: pb.GcRequest, caller: Caller) -> pb.GcResponse:
        core = self._core
        counters = core.state.tables.counters
        claims, reservations = counters.claims_lost, counters.reservations_lost
        core.post(Tick(core.clock.now_ns(), flush=True))
        records, rows = await collect_garbage(core)
        audit(caller, "gc", records=records, index_rows=rows)
        return pb.GcResponse(
            expired_claims=counters.claims_lost - claims,
            expired_reservations=counters.reservations_lost - reservations,
            orphan_records=records,
            orphan_index_rows=rows,
        )

    async def check(self, request: pb.CheckRequest, _caller: Caller) -> pb.CheckResponse:
        core = self._core
        response = pb.CheckResponse()
        found = _Problems(response)
        problems, count = await recount(core.state)
        found.add(problems, count)
        await self._check_index(found)
        response.entries = len(core.state.tables.entries)
        return response

    async def _check_index(self, found: _Problems) -> None:
        """The index has to say what the state says; what it has no room for, it may lack."""
        index, entries = self._core.index, self._core.state.tables.entries
        if index.revoked:
            return
        slices = Slices()
        start = 0
        while True:
            rows, start = index.rows(start)
            for row in rows:
                listed = unpack_row(row)
                entry = entries.find(listed.key)
                if entry is None:
                    found.add([f"the index lists {listed.key.hex()}, which is not there"])
                elif (entry.generation, entry.location) != (listed.generation, listed.location):
                    found.add([f"the index has something else for {listed.key.hex()}"])
            if not start:
                break
            await slices.pause()
            if index is not self._core.index:
                return  # it was replaced, and is closed
        if len(index) + index.stats().unlisted < len(entries):
            found.add([f"the index lacks {len(entries) - len(index)} entries"])

    async def verify(
        self, request: pb.VerifyRequest, caller: Caller
    ) -> AsyncGenerator[pb.VerifyResponse, None]:
        core = self._core
        tiers = messages.tiers_of(request.tiers, core.stores) or tuple(core.stores)
        counters = core.state.tables.tier_counters
        report = _Verified({tier: counters[tier].payload_bytes for tier in tiers})
        # A task of its own: the client hears of us also while a device takes its time.
        reading = asyncio.create_task(report.through(core.verifications, core.state.tables.entries))
        try:
            while not reading.done():
                await asyncio.wait({reading}, timeout=_PROGRESS_EVERY_S)
                if not reading.done():
                    yield report.message()
            reading.result()
            yield report.message(done=True)
        finally:
            reading.cancel()
            totals = report.totals
            audit(
                caller,
                "verify",
                tiers=[tier.label for tier in tiers],
                entries=totals.entries,
                dropped_entries=totals.damaged_entries,
            )


def _key_of(namespace: str) -> Key:
    """Any key of a namespace; of none, if there is no name. Raises InvalidSize."""
    key = Key(bytes(limits.KEY_BYTES))
    if not namespace:
        return key
    try:
        return Namespace(namespace).stored([key])[0]
    except ValueError as problem:
        raise InvalidSize(str(problem)) from None


class _Verified:
    """What a Verify has found so far."""

    def __init__(self, tier_bytes: Mapping[Tier, int]) -> None:
        """`tier_bytes`: what each tier holds, by which its part of the progress is weighed."""
        self._weights: Final = {tier: max(1, size) for tier, size in tier_bytes.items()}
        self._behind = 0
        self._told = 0
        self.totals: Final = pb.VerifyResponse()

    async def through(self, verifications: Verifications, entries: EntryTable) -> None:
        total = sum(self._weights.values())
        for tier, weight in self._weights.items():
            async with aclosing(verifications.sweep(entries, tier)) as steps:
                async for swept in steps:
                    self._add(swept)
                    behind = self._behind + swept.share * weight
                    self.totals.progress_permille = int(1_000 * behind / total)
            self._behind += weight

    def _add(self, swept: Swept) -> None:
        totals = self.totals
        totals.payload_bytes += swept.read_bytes
        for entry, verdict in swept.judged:
            name = f"entry {entry.key.hex()}"
            if verdict.reading is Reading.FAILED:
                totals.unreadable_entries += 1
                self._say(f"{name} could not be read: {verdict.why}")
                continue
            totals.entries += 1
            if verdict.reading is Reading.DAMAGED:
                totals.damaged_entries += 1
                self._say(f"{name}: {verdict.why}")

    def _say(self, problem: str) -> None:
        if self._told < MAX_PROBLEMS:
            self._told += 1
            self.totals.problems.append(problem)

    def message(self, *, done: bool = False) -> pb.VerifyResponse:
        message = pb.VerifyResponse()
        message.CopyFrom(self.totals)
        message.done = done
        del self.totals.problems[:]
        return message


class _Problems:
    """The problems of a response, which has to fit into a message."""

    def __init__(self, response: pb.CheckResponse) -> None:
        self.response = response

    def add(self, problems: Sequence[str], count: int = 0) -> None:
        """`count`: how many there are in all, if these are only the first."""
        response = self.response
        response.problem_count += count or len(problems)
        response.problems.extend(problems[: MAX_PROBLEMS - len(response.problems)])


_ADMISSION_SENTENCES = {
    Admission.FITS: "it fits without evicting anything",
    Admission.AFTER_EVICTION: "it fits after evicting the victims",
    Admission.NO_ROOM: "everything that could go is pinned or reserved; retrying may help",
    Admission.TOO_LARGE: "it is larger than the tier; retrying can't help",
    Admission.OVER_SHARE: (
        "with what is pinned and reserved it would take what {option} gives to other namespaces; "
        "retrying may help"
    ),
    Admission.ABOVE_SHARES: (
        "it is larger than what {option} leaves to the namespace; retrying can't help"
    ),
}
