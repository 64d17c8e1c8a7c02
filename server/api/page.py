"""The page beside `/metrics`: what `prefixctl top` shows, for a browser. Read only.

`/` is one HTML file that asks `/status.json` again and again. What that has is named here, field by
field: no key, no address, no secret. Its samples are taken on the event loop, one for all who ask
at the same time, so that any number of viewers cost the daemon a look each half second.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import structlog

from ...proto import prefixd_pb2 as pb
from ...proto.vocabulary import Tier
from .admin import AdminService
from .calls import PlainCaller

log = structlog.get_logger("prefixd.page")

#: How long a sample is as good as a new one.
FRESH_S: Final = 0.5
#: How long the event loop may take for one.
_ANSWERED_WITHIN_S: Final = 5.0
_OLDEST_CLAIMS: Final = 5
_TIER_FIELDS: Final = (
    "budget_bytes", "published_bytes", "reserved_bytes", "pinned_bytes", "entries", "hits",
    "saved_bytes", "evicted_bytes",
)  # fmt: skip


class NoSample(Exception):  # what is wrong is the daemon's, and the viewer's to read
    """Says why."""


class Board:
    """Samples of a running daemon, for threads. Owned by the daemon; belongs to its loop."""

    def __init__(self, admin: AdminService, now_s: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._now_s = now_s
        self._loop = asyncio.get_running_loop()
        self._one = threading.Lock()
        self._sample = b""
        self._taken_s = 0.0
        #: kept, for asyncio itself holds no reference to a running task
        self._taking: asyncio.Task[bytes] | None = None

    def sample(self) -> bytes:
        """The daemon as JSON, not older than `FRESH_S`. On any thread but the loop's.
        Threads that ask while a sample is being taken get that one. Raises NoSample."""
        if not self._one.acquire(timeout=2 * _ANSWERED_WITHIN_S):
            raise NoSample("too many wait for a sample")
        try:
            if not self._sample or self._now_s() - self._taken_s > FRESH_S:
                self._sample = b""
                self._sample = self._asked()
                self._taken_s = self._now_s()
            return self._sample
        finally:
            self._one.release()

    def _asked(self) -> bytes:
        """On a thread. Raises NoSample."""
        asked: Future[bytes] = Future()
        try:
            self._loop.call_soon_threadsafe(self._begin, asked)
        except RuntimeError:
            raise NoSample("the daemon stops") from None
        try:
            return asked.result(_ANSWERED_WITHIN_S)
        except NoAnswer:
            raise NoSample("the event loop does not answer") from None

    def _begin(self, asked: Future[bytes]) -> None:
        """On the loop, for a coroutine that is made and never run is an error."""
        self._taking = self._loop.create_task(self._take())
        self._taking.add_done_callback(partial(_tell, asked))

    async def _take(self) -> bytes:
        caller = PlainCaller()
        stats = await self._admin.stats(pb.StatsRequest(), caller)
        oldest = pb.ListClaimsRequest(page_claims=_OLDEST_CLAIMS)
        claims = await self._admin.list_claims(oldest, caller)
        return json.dumps(status_of(stats, claims.claims)).encode()


def _tell(asked: Future[bytes], taking: asyncio.Task[bytes]) -> None:
    if taking.cancelled():
        asked.set_exception(NoSample("the daemon stops"))
    elif (problem := taking.exception()) is not None:
        log.error("sample_failed", exc_info=problem)
        asked.set_exception(NoSample(f"the daemon failed: {type(problem).__name__}"))
    else:
        asked.set_result(taking.result())


def status_of(stats: pb.StatsResponse, claims: Iterable[pb.ClaimDetail]) -> dict[str, Any]:
    """What the page shows, and no more. Counts are since the start."""
    return {
        "version": stats.daemon_version,
        "health": stats.health,
        "notices": dict(stats.notices),
        "uptime_ms": stats.uptime_ms,
        "pid": stats.pid,
        "sessions": stats.sessions,
        "claims": stats.claims,
        "reservations": stats.reservations,
        "waiters": stats.waiters,
        "tiers": {
            Tier(tier.tier).label: {
                "state": tier.state or "serving",
                **{field: getattr(tier, field) for field in _TIER_FIELDS},
            }
            for tier in stats.tiers
        },
        "usage": {
            label: {
                "lookups": usage.lookups,
                "lookup_tokens": usage.lookup_tokens,
                "hit_tokens": sum(tier.hit_tokens for tier in usage.tiers),
                "restored_bytes": sum(sum(t.restored_bytes.values()) for t in usage.tiers),
                "misses": dict(usage.misses),
            }
            for label, usage in stats.usage.items()
        },
        "stages": {
            stage.stage: {"bounds_ns": list(stage.bounds_ns), "times": list(stage.times)}
            for stage in stats.stages
        },
        "oldest_claims": [
            {
                "claim_id": claim.claim_id,
                "owner": claim.owner,
                "age_ms": claim.age_ms,
                "lease_left_ms": claim.lease_left_ms,
                "entries": claim.entries,
                "payload_bytes": claim.payload_bytes,
            }
            for claim in claims
        ],
    }


def load_page() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy under which nothing runs but its own script: not
    what a client's name or label might smuggle in."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    hashes = {
        tag: b64encode(sha256(inner.encode()).digest()).decode()
        for tag in ("style", "script")
        for inner in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    }
    policy = [
        "default-src 'none'",
        f"script-src 'sha256-{hashes['script']}'",
        f"style-src 'sha256-{hashes['style']}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return html.encode(), "; ".join(policy)
