"""Every mistake that a caller can make, with the error that the daemon answers: one table.

`python -m tests.support.bad_input` prints it as Markdown. `server/api/test_service.py` makes each
mistake, compares the error's code, name and retry flag, and checks the daemon's state afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.runtime.quota import Quota
from tests.support.columns import Item, columns
from tests.support.running import (
    OpenSession,
    Running,
    answer,
    item,
    key,
    next_of,
    part,
    payload,
    stream,
)
from tests.support.watchers import too_many_watchers

Code = grpc.StatusCode
Attempt = Callable[[Running, OpenSession], Awaitable[Any]]

SHORT: Final = b"31 bytes, which is one too few."
DATA: Final = payload(1)
TOO_MANY: Final = [key(number) for number in range(limits.MAX_BATCH_KEYS + 1)]
#: The daemon's flags in these tests: one tier is switched off, and the tables are soon full.
FLAGS: Final = (
    "--shm.budget=0",
    "--server.curve_keys=0",
    "--sessions.max_sessions=2",
    "--watch.max_watchers=2",
    "--sessions.max_claims_per_session=1",
    "--sessions.max_reservations_per_session=4",
)
#: Each error's gRPC code, and whether a retry of the same call may succeed.
ERRORS: Final = {
    "claim_lost": (Code.FAILED_PRECONDITION, False),
    "curve_disabled": (Code.FAILED_PRECONDITION, False),
    "draining": (Code.UNAVAILABLE, True),
    "invalid_batch": (Code.INVALID_ARGUMENT, False),
    "invalid_key": (Code.INVALID_ARGUMENT, False),
    "invalid_size": (Code.INVALID_ARGUMENT, False),
    "limit_reached": (Code.RESOURCE_EXHAUSTED, True),
    "malformed_message": (Code.INVALID_ARGUMENT, False),
    "stale_incarnation": (Code.FAILED_PRECONDITION, True),
    "unknown_claim": (Code.NOT_FOUND, False),
    "unknown_entry": (Code.NOT_FOUND, False),
    "unknown_reason": (Code.INVALID_ARGUMENT, False),
    "unknown_session": (Code.FAILED_PRECONDITION, True),
    "unknown_staging": (Code.FAILED_PRECONDITION, False),
    "unknown_tier": (Code.INVALID_ARGUMENT, False),
}
#: The key that is published before each attempt.
PUBLISHED: Final = key(1000)


@dataclass(frozen=True)
class Mistake:
    """One mistake: `attempt` makes it, and the rpc fails with the error of this name."""

    description: str
    rpc: str
    error: str
    attempt: Attempt

    @property
    def code(self) -> grpc.StatusCode:
        return ERRORS[self.error][0]

    @property
    def retry(self) -> bool:
        return ERRORS[self.error][1]

    @property
    def id(self) -> str:
        return f"{self.rpc}: {self.description}"


@functools.cache
def mistakes() -> tuple[Mistake, ...]:
    return (
        *_batches(),
        *_headers(),
        *_sessions(),
        *_claims(),
        *_streams(),
        *_used_up_quotas(),
        *_operators(),
        *_full_tables(),
    )


# ---- requests that name keys, claims, tokens


def _lookup(keys: list[bytes], **fields: Any) -> Attempt:
    return lambda daemon, _: daemon.lookup(*keys, **fields)


def _claim(keys: list[bytes], **fields: Any) -> Attempt:
    return lambda _, session: session.claim(keys, **fields)


def _cancel(*tokens: int) -> Attempt:
    return lambda daemon, session: answer(
        daemon.cache.Cancel(pb.CancelRequest(session=session.ref, tokens=tokens))
    )


def _pull(keys: list[bytes], **fields: Any) -> Attempt:
    fields = {"mode": pb.CLAIM_MODE_RUN} | fields

    async def attempt(daemon: Running, session: OpenSession) -> None:
        await answer(daemon.cache.Pull(pb.PullRequest(session=session.ref, keys=keys, **fields)))

    return attempt


def _delete(keys: list[bytes]) -> Attempt:
    return lambda daemon, session: answer(
        daemon.cache.Delete(pb.DeleteRequest(session=session.ref, keys=keys))
    )


def _send(**kind: Any) -> Attempt:
    """Send a message on the session stream, which ends with the error."""

    async def attempt(_: Running, session: OpenSession) -> None:
        await session.send(**kind)
        while True:
            await session.event()

    return attempt


def _batches() -> Iterator[Mistake]:
    short, empty, over = "a key of 31 bytes", "an empty batch", "more than 4096 elements"
    yield Mistake(short, "Lookup", "invalid_key", _lookup([key(1), SHORT]))
    yield Mistake(empty, "Lookup", "invalid_batch", _lookup([]))
    yield Mistake(over, "Lookup", "invalid_batch", _lookup(TOO_MANY))
    yield Mistake(short, "Claim", "invalid_key", _claim([SHORT]))
    yield Mistake(empty, "Claim", "invalid_batch", _claim([]))
    yield Mistake(over, "Claim", "invalid_batch", _claim(TOO_MANY))
    yield Mistake(empty, "Release", "invalid_batch", lambda _, session: session.release())
    yield Mistake(
        over, "Release", "invalid_batch", lambda _, session: session.release(*range(4097))
    )
    yield Mistake(empty, "Cancel", "invalid_batch", _cancel())
    yield Mistake(over, "Cancel", "invalid_batch", _cancel(*range(4097)))
    yield Mistake(short, "Delete", "invalid_key", _delete([SHORT]))
    yield Mistake(empty, "Delete", "invalid_batch", _delete([]))
    yield Mistake(over, "Delete", "invalid_batch", _delete(TOO_MANY))
    yield Mistake(short, "Pull", "invalid_key", _pull([SHORT]))
    yield Mistake(empty, "Pull", "invalid_batch", _pull([]))
    yield Mistake(over, "Pull", "invalid_batch", _pull(TOO_MANY))
    any_ = _pull([key(1)], mode=pb.CLAIM_MODE_ANY)
    yield Mistake("a mode that Pull does not support", "Pull", "malformed_message", any_)
    yield Mistake(empty, "Read", "invalid_batch", _read_request())
    yield Mistake(
        over, "Read", "invalid_batch", _read_request(*(pb.ReadRange() for _ in range(4097)))
    )
    for kind, message in (("touch", pb.Touch), ("suspect", pb.Suspect)):
        for description, error, keys in (
            (short, "invalid_key", [SHORT]),
            (empty, "invalid_batch", []),
            (over, "invalid_batch", TOO_MANY),
        ):
            attempt = _send(**{kind: message(keys=keys)})
            yield Mistake(f"{description} in a {kind}", "Session", error, attempt)
    for description, claims in ((empty, range(0)), (over, range(4097))):
        attempt = _send(give_back=pb.GiveBack(claim_ids=claims))
        yield Mistake(f"{description} in a give_back", "Session", "invalid_batch", attempt)


# ---- headers of saves


def _headers() -> Iterator[Mistake]:
    for rpc in ("Reserve", "Save"):
        for description, error, items, fields in _wrong_headers():
            yield Mistake(description, rpc, error, _with_header(rpc, items, fields))
    yield Mistake(
        "a wait beyond a minute", "Lookup", "invalid_size", _lookup([key(1)], wait_ms=60_001)
    )
    yield Mistake(
        "a wait beyond a minute", "Claim", "invalid_size", _claim([key(1)], wait_ms=60_001)
    )
    yield Mistake(
        "a lease beyond the longest", "Claim", "invalid_size", _claim([key(1)], lease_ms=2**31)
    )
    yield Mistake(
        "no mode",
        "Claim",
        "malformed_message",
        _claim([key(1)], mode=pb.CLAIM_MODE_UNSPECIFIED),
    )
    yield Mistake(
        "a mode that does not exist",
        "Claim",
        "malformed_message",
        _claim([key(1)], mode=pb.ClaimMode.ValueType(7)),
    )


def _with_header(rpc: str, items: list[Item], fields: dict[str, Any]) -> Attempt:
    def attempt(daemon: Running, session: OpenSession) -> Awaitable[Any]:
        header = session.header(items, **fields)
        if rpc == "Reserve":
            return answer(daemon.cache.Reserve(pb.ReserveRequest(header=header)))
        return answer(daemon.cache.Save(stream([pb.SaveRequest(header=header)])))

    return attempt


def _wrong_headers() -> Iterator[tuple[str, str, list[Item], dict[str, Any]]]:
    """Yields the mistake, the error, the items, and the other fields of the header."""

    def of(**fields: Any) -> list[Item]:
        fields = {"key": key(1), "payload_bytes": len(DATA)} | fields
        return [Item(**fields)]

    good = of()
    yield "an empty batch", "invalid_batch", [], {}
    many = [Item(key=one, payload_bytes=1) for one in TOO_MANY]
    yield "more than 4096 elements", "invalid_batch", many, {}
    yield "the same key twice", "invalid_batch", good + good, {}
    yield "a key of 31 bytes", "invalid_key", of(key=SHORT), {}
    yield "an ancestor of 31 bytes", "invalid_key", good, {"ancestors": [SHORT]}
    yield "more than 4096 ancestors", "invalid_batch", good, {"ancestors": TOO_MANY}
    yield "a touched key of 31 bytes", "invalid_key", good, {"touched": [SHORT]}
    yield "more than 4096 touched keys", "invalid_batch", good, {"touched": TOO_MANY}
    yield "a payload of no bytes", "invalid_size", of(payload_bytes=0), {}
    huge = of(payload_bytes=limits.MAX_PAYLOAD_BYTES + 1)
    yield "a payload beyond 1 TiB", "invalid_size", huge, {}
    layers = of(layer_count=len(DATA) - 1)
    yield "layers that do not divide the payload", "invalid_size", layers, {}
    layers = of(payload_bytes=2**20, layer_count=2**16)
    yield "more layers than the limit", "invalid_size", layers, {}
    yield "no sizes", "invalid_size", good, {"payload_bytes": []}
    for column in ("payload_bytes", "token_counts", "layer_counts"):
        yield f"a column {column} that is too long", "invalid_batch", good, {column: [1, 1]}
    yield "a column of token ids that is too long", "invalid_batch", good, {"token_ids": [b"", b""]}
    yield "token ids of 3 bytes", "invalid_size", of(token_ids=b"123"), {}
    ids = bytes(limits.MAX_TOKEN_IDS_BYTES + 4)
    yield "token ids beyond 4 MiB", "invalid_size", of(token_ids=ids), {}
    yield "no tier", "unknown_tier", good, {"tier": pb.TIER_UNSPECIFIED}
    yield "a tier that does not exist", "unknown_tier", good, {"tier": 9}
    yield "a tier that is switched off", "unknown_tier", good, {"tier": Tier.SHM}
    yield "no reason", "unknown_reason", good, {"reason": pb.SAVE_REASON_UNSPECIFIED}
    yield "a reason that does not exist", "unknown_reason", good, {"reason": 6}
    yield "a wait beyond a minute", "invalid_size", good, {"wait_ms": limits.MAX_WAIT_MS + 1}
    ttl = {"ttl_ms": limits.MAX_LEASE_MS + 1}
    yield "a time to live beyond an hour", "invalid_size", good, ttl


# ---- sessions


def _calls(daemon: Running, ref: pb.SessionRef, claim: int = 1) -> dict[str, Callable[[], Any]]:
    """A valid call of every rpc that takes a session."""
    cache, keys = daemon.cache, [key(1)]
    header = pb.SaveHeader(
        session=ref, tier=Tier.RAM, reason=SaveReason.COLD, **columns([item(key(1), DATA)])
    )
    parts = [part(0, DATA)]
    reserved = pb.GrantedReservations(session=ref, tokens=[1])
    staged = pb.SaveStagedRequest(header=header)
    return {
        "Claim": lambda: cache.Claim(
            pb.ClaimRequest(session=ref, keys=keys, mode=pb.CLAIM_MODE_RUN)
        ),
        "Release": lambda: cache.Release(pb.ReleaseRequest(session=ref, claim_ids=[1])),
        "Reserve": lambda: cache.Reserve(pb.ReserveRequest(header=header)),
        "Cancel": lambda: cache.Cancel(pb.CancelRequest(session=ref, tokens=[1])),
        "Delete": lambda: cache.Delete(pb.DeleteRequest(session=ref, keys=keys)),
        "Pull": lambda: cache.Pull(pb.PullRequest(session=ref, keys=keys, mode=pb.CLAIM_MODE_RUN)),
        "Read": lambda: cache.Read(
            pb.ReadRequest(session=ref, claim_id=claim, ranges=[pb.ReadRange()])
        ),
        "Save": lambda: cache.Save(stream([pb.SaveRequest(header=header, parts=parts)])),
        "Save of reservations": lambda: cache.Save(
            stream([pb.SaveRequest(reserved=reserved, parts=parts)])
        ),
        "SaveStaged": lambda: _save_staged(daemon, staged),
    }


async def _save_staged(daemon: Running, request: pb.SaveStagedRequest) -> None:
    call = await daemon.save_staged()
    try:
        await call.write(request)
        await call.read()
    finally:
        call.cancel()


def _sessions() -> Iterator[Mistake]:
    def with_ref(rpc: str, **changed: Any) -> Attempt:
        async def attempt(daemon: Running, session: OpenSession) -> None:
            ref = pb.SessionRef()
            ref.CopyFrom(session.ref)
            for name, value in changed.items():
                setattr(ref, name, value)
            called = _calls(daemon, ref)[rpc]()
            await (called if rpc == "SaveStaged" else answer(called))

        return attempt

    calls = ("Claim", "Release", "Reserve", "Cancel", "Read", "Save")
    for rpc in (*calls, "Save of reservations", "Delete", "Pull"):
        stale, unknown = with_ref(rpc, incarnation=bytes(16)), with_ref(rpc, session_id=77)
        yield Mistake("a session of another incarnation", rpc, "stale_incarnation", stale)
        yield Mistake("a session that ended or never existed", rpc, "unknown_session", unknown)
        forged = with_ref(rpc, secret=bytes(16))
        yield Mistake("a session with another's secret", rpc, "unknown_session", forged)
    stale = with_ref("SaveStaged", incarnation=bytes(16))
    yield Mistake("a session of another incarnation", "SaveStaged", "stale_incarnation", stale)
    yield Mistake(
        "a session without staging memory", "SaveStaged", "unknown_staging", with_ref("SaveStaged")
    )
    for description, first in (
        ("no Hello first", pb.SessionRequest(heartbeat=pb.Heartbeat())),
        ("nothing in the first message", pb.SessionRequest()),
    ):
        yield Mistake(description, "Session", "malformed_message", _open_with(first))
    yield Mistake("no message at all", "Session", "malformed_message", _open_with())
    for field in ("client_name", "host", "client_version"):
        long = pb.SessionRequest(hello=pb.Hello(**{field: "x" * 121}))
        yield Mistake(f"a {field} of 121 letters", "Session", "invalid_size", _open_with(long))
    yield Mistake("a second Hello", "Session", "malformed_message", _send(hello=pb.Hello()))
    yield Mistake("an empty message", "Session", "malformed_message", _send())
    lie = pb.Heartbeat(usage=pb.Usage(lookups=2, hits=1))
    yield Mistake(
        "usage that does not add up", "Session", "malformed_message", _send(heartbeat=lie)
    )
    label = pb.SessionRequest(hello=pb.Hello(label="no label"))
    yield Mistake("a label with a blank", "Session", "invalid_size", _open_with(label))


def _open_with(*messages: pb.SessionRequest) -> Attempt:
    return lambda daemon, _: answer(daemon.cache.Session(stream(messages)))


# ---- claims, and reads under them


def _read_request(*ranges: pb.ReadRange, claim: int | None = None) -> Attempt:
    """Read under a new claim on one entry of 5,000 bytes, or under the claim of this id."""

    async def attempt(daemon: Running, session: OpenSession) -> None:
        number = (await session.claim([PUBLISHED])).claim_id if claim is None else claim
        await answer(
            daemon.cache.Read(pb.ReadRequest(session=session.ref, claim_id=number, ranges=ranges))
        )

    return attempt


async def _read_after_its_lease(daemon: Running, session: OpenSession) -> None:
    claim = (await session.claim([PUBLISHED], lease_ms=1_000)).claim_id
    daemon.forward(1.0)
    await session.read(claim)


def _claims() -> Iterator[Mistake]:
    def outside(description: str, **fields: Any) -> Mistake:
        return Mistake(description, "Read", "invalid_size", _read_request(pb.ReadRange(**fields)))

    yield outside("an entry that the claim does not have", index=1)
    yield outside("a range that begins after the end", offset_bytes=5001)
    yield outside("a range that ends after the end", offset_bytes=1, length_bytes=5000)
    yield outside("token ids that were not saved", token_ids=True, length_bytes=4)
    unknown = _read_request(pb.ReadRange(), claim=99)
    yield Mistake("a claim that this session does not hold", "Read", "unknown_claim", unknown)
    none = _read_request(pb.ReadRange(), claim=0)
    yield Mistake("claim 0, which claims nothing", "Read", "unknown_claim", none)
    yield Mistake("a claim whose lease has expired", "Read", "claim_lost", _read_after_its_lease)


# ---- streams of bytes


def _save(*parts: pb.WritePart, then: tuple[pb.WritePart, ...] = ()) -> Attempt:
    """Save one item of 5,000 bytes in these parts. `then`: the parts of a second message."""

    async def attempt(daemon: Running, session: OpenSession) -> None:
        header = session.header([item(key(1), DATA)])
        messages = [pb.SaveRequest(header=header, parts=parts)]
        if then:
            messages.append(pb.SaveRequest(parts=then))
        await answer(daemon.cache.Save(stream(messages)))

    return attempt


def _write(*parts: tuple[int, bytes, bool]) -> Attempt:
    """Write to a reservation of 5,000 bytes. A part is its offset, its bytes, and `last`."""

    async def attempt(_: Running, session: OpenSession) -> None:
        (token,) = await session.granted([item(key(1), DATA)])
        written = [pb.WritePart(offset_bytes=at, data=data, last=last) for at, data, last in parts]
        await session.write(token, *written)

    return attempt


def _streams() -> Iterator[Mistake]:
    half = part(0, DATA[:2500], last=False)
    gap, back = part(0, DATA[2600:], offset=2600), part(0, DATA, offset=0)
    yield Mistake("a part after a gap", "Save", "invalid_size", _save(half, gap))
    yield Mistake("a part that goes back", "Save", "invalid_size", _save(half, then=(back,)))
    after = _save(part(0, DATA), part(0, b"", offset=5000))
    yield Mistake("a part after the last one", "Save", "malformed_message", after)
    later = _save(part(0, DATA), then=(part(0, b"", offset=5000),))
    yield Mistake("a message after the last part", "Save", "malformed_message", later)
    other = _save(part(1, DATA))
    yield Mistake("a part of an item that does not exist", "Save", "malformed_message", other)
    halves = (0, DATA[:2500], False), (2600, DATA[2600:], True)
    yield Mistake("a part after a gap", "Save of reservations", "invalid_size", _write(*halves))
    twice = (0, DATA, True), (5000, b"", True)
    after = _write(*twice)
    yield Mistake("a part after the last one", "Save of reservations", "malformed_message", after)

    def without(rpc: str, *messages: Any) -> Attempt:
        return lambda daemon, _: answer(getattr(daemon.cache, rpc)(stream(messages)))

    yield Mistake("no message at all", "Save", "malformed_message", without("Save"))
    for rpc, attempt in (
        ("Save", without("Save", pb.SaveRequest())),
        ("SaveStaged", lambda daemon, _: _save_staged(daemon, pb.SaveStagedRequest())),
    ):
        yield Mistake("a save without its header", rpc, "malformed_message", attempt)


# ---- memory, operators


def _used_up_quotas() -> Iterator[Mistake]:
    """Calls while other calls hold all of a memory quota."""

    def while_used_up(rpc: str, quota_of: Callable[[Running], Quota]) -> Attempt:
        async def attempt(daemon: Running, session: OpenSession) -> None:
            claim = (await session.claim([PUBLISHED])).claim_id
            quota = quota_of(daemon)
            quota.wait_s = 0
            async with quota.room(quota.limit_bytes):
                await answer(_calls(daemon, session.ref, claim)[rpc]())

        return attempt

    attempt = while_used_up("Save", lambda daemon: daemon.front.saves.arriving)
    yield Mistake("no memory for its bytes", "Save", "limit_reached", attempt)
    attempt = while_used_up("Read", lambda daemon: daemon.front.service.reads)
    yield Mistake("no memory for its bytes", "Read", "limit_reached", attempt)


async def two_recordings(daemon: Running, _session: OpenSession) -> None:
    """Raises Refused."""
    calls = [daemon.admin.Record(pb.RecordRequest(sample_permille=1000)) for _ in range(2)]
    try:
        for call in calls:
            await next_of(call)
    finally:
        for call in calls:
            call.cancel()


def _operators() -> Iterator[Mistake]:
    def admin(description: str, rpc: str, error: str, request: Any) -> Mistake:
        return Mistake(
            description, rpc, error, lambda daemon, _: answer(getattr(daemon.admin, rpc)(request))
        )

    long = pb.ListIdentitiesRequest(digest=bytes(33))
    yield admin("a long digest", "ListIdentities", "invalid_key", long)
    yield admin("a key of 31 bytes", "Inspect", "invalid_key", pb.InspectRequest(key=SHORT))
    yield admin("a key of 31 bytes", "Drop", "invalid_key", pb.DropRequest(keys=[SHORT]))
    yield admin("an empty batch", "Drop", "invalid_batch", pb.DropRequest())
    for size_bytes in (0, 1, 2**63, 2**40):
        request = pb.ResizeRequest(tier=pb.TIER_RAM, budget_bytes=size_bytes)
        yield admin(f"a tier of {size_bytes} bytes", "Resize", "invalid_size", request)
    no_tier = pb.ResizeRequest(budget_bytes=2**20)
    yield admin("a resize of no tier", "Resize", "unknown_tier", no_tier)
    both = pb.DrainRequest(stop=True, resume=True)
    yield admin("a stop and a resume at once", "Drain", "malformed_message", both)
    weeks = pb.DrainRequest(within_ms=2**32 - 1)
    yield admin("a drain of weeks", "Drain", "invalid_size", weeks)
    for label in ("", "a b", "x" * 65):
        invalid_name = pb.ClearRequest(namespace=label)
        name = f"an invalid namespace of {len(label)} characters"
        yield admin(name, "Clear", "invalid_size", invalid_name)
    clear = pb.ClearRequest(namespace="a", tiers=[9])  # type: ignore[list-item]
    yield admin("a clear of a tier that does not exist", "Clear", "unknown_tier", clear)
    watch = pb.WatchRequest(tiers=[9])  # type: ignore[list-item]
    yield admin("a watch of a tier that does not exist", "Watch", "unknown_tier", watch)
    yield Mistake("one watcher too many", "Watch", "limit_reached", too_many_watchers)
    for permille in (0, 1001):
        record = pb.RecordRequest(sample_permille=permille)
        yield admin(f"a sample of {permille} permille", "Record", "invalid_size", record)
    yield Mistake("a second recording", "Record", "limit_reached", two_recordings)
    loud = pb.SetLogLevelRequest(level=pb.LogLevel.ValueType(9))
    yield admin("an unknown log level", "SetLogLevel", "malformed_message", loud)
    for beginning in (b"", b"a", bytes(33)):
        request_why = pb.WhyRequest(key=beginning)
        yield admin(f"{len(beginning)} bytes of a key", "Why", "invalid_key", request_why)
    kick = pb.KickRequest(session_id=2**40)
    yield admin("a session that ended or never existed", "Kick", "unknown_session", kick)
    absent = pb.InspectRequest(key=key(1))
    yield admin("a key that is not published", "Inspect", "unknown_entry", absent)
    page = limits.MAX_PAGE_ENTRIES + 1
    for description, fields in (
        ("a page beyond 10,000 entries", {"page_entries": page}),
        ("a cursor that no page returned", {"cursor": bytes(33)}),
    ):
        request = pb.ListEntriesRequest(tier=pb.TIER_RAM, **fields)
        yield admin(description, "ListEntries", "invalid_size", request)
    for tier, description in (
        (0, "no tier"),
        (9, "a tier that does not exist"),
        (2, "a tier that is switched off"),
    ):
        for rpc, request in (
            ("ListEntries", pb.ListEntriesRequest(tier=tier)),
            ("Preview", pb.PreviewRequest(tier=tier, payload_bytes=1)),
            ("Evict", pb.EvictRequest(free_bytes=1, tiers=[tier])),
            ("Curve", pb.CurveRequest(tier=tier)),
            ("Verify", pb.VerifyRequest(tiers=[tier])),
        ):
            yield admin(description, rpc, "unknown_tier", request)
    yield admin("no bytes", "Evict", "invalid_size", pb.EvictRequest())
    yield admin("tiers left out", "Evict", "invalid_batch", pb.EvictRequest(free_bytes=1))
    yield admin("no bytes", "Preview", "invalid_size", pb.PreviewRequest(tier=pb.TIER_RAM))
    many = pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=2**40, entries=2**32 - 1)
    yield admin("more bytes than can be counted", "Preview", "invalid_size", many)
    yield admin(
        "a page beyond 10,000 claims",
        "ListClaims",
        "invalid_size",
        pb.ListClaimsRequest(page_claims=page),
    )
    yield admin(
        "a claim that is not held", "ListClaims", "unknown_claim", pb.ListClaimsRequest(claim_id=7)
    )
    yield admin(
        "a page beyond 10,000 reservations",
        "ListReservations",
        "invalid_size",
        pb.ListReservationsRequest(page_reservations=page),
    )
    huge = pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=limits.MAX_PAYLOAD_BYTES + 1)
    yield admin("a payload beyond 1 TiB", "Preview", "invalid_size", huge)
    curve = pb.CurveRequest(tier=pb.TIER_RAM)
    yield admin("a curve that is switched off", "Curve", "curve_disabled", curve)


# ---- tables that are full


async def _third_session(daemon: Running, _: OpenSession) -> None:
    second = await daemon.open()
    hello = pb.SessionRequest(hello=pb.Hello())
    try:
        await answer(daemon.cache.Session(stream([hello])))
    finally:
        await second.close()


async def _second_claim(_: Running, session: OpenSession) -> None:
    await session.claim([PUBLISHED])
    await session.claim([PUBLISHED])


async def _fifth_reservation(_: Running, session: OpenSession) -> None:
    await session.granted([item(key(number), DATA) for number in range(4)])
    await session.reserve([item(key(5), DATA)])


async def _while_stopping(daemon: Running, session: OpenSession) -> None:
    daemon.core.gate.stopping = True
    try:
        await session.claim([PUBLISHED])
    finally:
        daemon.core.gate.stopping = False


def _full_tables() -> Iterator[Mistake]:
    yield Mistake("too many sessions", "Session", "limit_reached", _third_session)
    yield Mistake("too many claims", "Claim", "limit_reached", _second_claim)
    yield Mistake("too many reservations", "Reserve", "limit_reached", _fifth_reservation)
    yield Mistake("a daemon that is stopping", "Claim", "draining", _while_stopping)


def main() -> None:
    """Print the table."""
    rows = {(m.description, m.error): [] for m in mistakes()}
    for mistake in mistakes():
        rows[mistake.description, mistake.error].append(mistake.rpc)
    lines = ["| mistake | rpcs | code | error | retry? |", "|---|---|---|---|---|"]
    for (description, error), rpcs in rows.items():
        code, retry = ERRORS[error]
        names, retryable = ", ".join(dict.fromkeys(rpcs)), "yes" if retry else "no"
        lines.append(f"| {description} | {names} | {code.name} | {error} | {retryable} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
