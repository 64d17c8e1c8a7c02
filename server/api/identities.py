"""What clients say that their keys depend on, for operators.

Clients say it of themselves, so it is bounded and printable, and only the Admin service shows it. A
session keeps its latest identities. All sessions together have `max_bytes`; beyond it, the
identities of ended sessions go first, and then those of the session that has most. Those of ended
sessions stay as long as there is room: the entries that they saved stay as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import MalformedMessage
from ...proto.keys import Key, check_key
from ..core.journal import Happening, Journal
from ..runtime.rounds import Slices

log = structlog.get_logger("prefixd.sessions")

MAX_TOTAL_BYTES: Final = 16 * 2**20
#: What an identity takes beside its words.
_OVERHEAD_BYTES: Final = 1024
#: How many identities a session may announce at once, and how often after that.
_BURST: Final = 8
_EVERY_NS: Final = 1_000_000_000
#: Identities that are listed with their words.
_MOST_WITH_WORDS: Final = 64


class Announced(NamedTuple):
    """An identity. A copy: a part of the message that it came in would keep all of that."""

    digest: bytes
    engine: str
    words: str

    @property
    def size_bytes(self) -> int:
        """What it counts."""
        return _OVERHEAD_BYTES + len(self.words)

    def message(self) -> pb.Identity:
        return pb.Identity(digest=self.digest, engine=self.engine, words=self.words)


@dataclass(slots=True)
class _Session:
    """Those of one session, by digest, the latest last."""

    #: The time at which its announcements so far would be paid for, each with `_EVERY_NS`.
    paid_until_ns: int = 0
    ignored: int = 0
    size_bytes: int = 0
    identities: dict[bytes, Announced] = field(default_factory=dict)

    def add(self, identity: Announced) -> int:
        """Add one. Returns by how much it all grows."""
        before_bytes = self.size_bytes
        if (same := self.identities.pop(identity.digest, None)) is not None:
            self.size_bytes -= same.size_bytes
        while len(self.identities) >= limits.MAX_IDENTITIES_PER_SESSION:
            self.drop_oldest()
        self.identities[identity.digest] = identity
        self.size_bytes += identity.size_bytes
        return self.size_bytes - before_bytes

    def drop_oldest(self) -> int:
        """Forget one. Returns its size."""
        dropped = self.identities.pop(next(iter(self.identities)))
        self.size_bytes -= dropped.size_bytes
        return dropped.size_bytes


class Identities:
    """The identities of all sessions. The event loop's."""

    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        """`max_bytes`: more than one session can have."""
        self._max_bytes: Final = max_bytes
        self._live: dict[int, _Session] = {}
        #: Those of sessions that have ended, the earliest first.
        self._ended: dict[int, _Session] = {}
        self.size_bytes = 0

    def announce(self, session: int, identity: pb.Identity, now_ns: int) -> None:
        """Take what the client of an open session says. Raises MalformedMessage for anything that
        could not be shown as it is."""
        announced = _checked(identity)
        mine = self._live.setdefault(session, _Session())
        if max(mine.paid_until_ns - now_ns, 0) > (_BURST - 1) * _EVERY_NS:
            if not mine.ignored:
                log.warning("identities_ignored", session=session, why="too many at once")
            mine.ignored += 1
            return
        mine.paid_until_ns = max(mine.paid_until_ns, now_ns) + _EVERY_NS
        self.size_bytes += mine.add(announced)
        self._make_room()

    def _make_room(self) -> None:
        while self.size_bytes > self._max_bytes:
            if self._ended:
                self.size_bytes -= self._ended.pop(next(iter(self._ended))).size_bytes
            else:
                largest = max(self._live.values(), key=lambda each: each.size_bytes)
                self.size_bytes -= largest.drop_oldest()

    def close(self, session: int) -> None:
        """A session has ended."""
        if (mine := self._live.pop(session, None)) is not None and mine.identities:
            self._ended[session] = mine

    def of(self, session: int) -> list[Announced]:
        """What this session has announced, the latest first, also if it has ended."""
        mine = self._live.get(session) or self._ended.get(session)
        return [] if mine is None else list(mine.identities.values())[::-1]

    def live(self) -> Iterator[tuple[int, list[Announced]]]:
        """The open sessions that have announced something, with what they have."""
        for session in list(self._live):
            if (mine := self._live.get(session)) is not None:
                yield session, list(mine.identities.values())


def _checked(identity: pb.Identity) -> Announced:
    engine, words = identity.engine, identity.words
    if not (0 < len(engine) <= limits.MAX_ENGINE_CHARS and engine.isprintable()):
        raise MalformedMessage(
            f"the engine of an identity is 1 to {limits.MAX_ENGINE_CHARS} printable characters"
        )
    if len(words) > limits.MAX_IDENTITY_WORDS_BYTES:
        raise MalformedMessage(
            f"an identity has at most {limits.MAX_IDENTITY_WORDS_BYTES} characters of words"
        )
    if not (words.isascii() and words.isprintable()):
        raise MalformedMessage("the words of an identity are printable ASCII")
    return Announced(check_key(identity.digest), engine, words)


# ---- for operators


async def list_identities(
    identities: Identities, journal: Journal, beginning: bytes
) -> pb.ListIdentitiesResponse:
    """Those of open sessions: all, without their words, or the first whose digest has this
    beginning."""
    response, slices = pb.ListIdentitiesResponse(), Slices()
    for session, announced in identities.live():
        owner, label = journal.who(session)
        for each in announced:
            if not each.digest.startswith(beginning):
                continue
            shown = each.message() if beginning else each._replace(words="").message()
            response.identities.add(identity=shown, session_id=session, owner=owner, label=label)
            if beginning and len(response.identities) == _MOST_WITH_WORDS:
                return response
        await slices.pause()
    return response


async def saver_of(journal: Journal, key: Key) -> int:
    """The session that saved a published entry. 0: not known."""
    slices = Slices()
    for happened in journal.newest_of(key):
        if happened is not None and happened.what is Happening.SAVED:
            return happened.session
        await slices.pause()
    return 0
