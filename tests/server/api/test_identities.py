"""What clients say that their keys depend on: bounded, and for operators only."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import CallerError, InvalidKey
from prefixd.server.api.identities import Identities
from tests.support.event_loop import in_loop
from tests.support.running import Refused, Running, answer, in_ram, key, payload

SECOND_NS = 10**9


def identity(number: int, words: str = "{}") -> pb.Identity:
    return pb.Identity(digest=number.to_bytes(32, "big"), engine="engine 1", words=words)


def numbers(identities: Identities, session: int) -> list[int]:
    return [int.from_bytes(each.digest, "big") for each in identities.of(session)]


def counted(identities: Identities) -> int:
    """What all identities count, added up again."""
    sessions = {**identities._live, **identities._ended}
    return sum(one.size_bytes for each in sessions.values() for one in each.identities.values())


def test_a_session_has_its_latest_identities() -> None:
    identities = Identities()
    for number in (1, 2, 3, 4, 5, 3, 6):
        identities.announce(1, identity(number), now_ns=0)
    assert numbers(identities, 1) == [6, 3, 5, 4]
    assert limits.MAX_IDENTITIES_PER_SESSION == 4
    assert identities.size_bytes == counted(identities)


def test_the_words_of_an_identity_can_change() -> None:
    identities = Identities()
    identities.announce(1, identity(1, "before"), now_ns=0)
    identities.announce(1, identity(1, "after"), now_ns=0)
    assert [each.words for each in identities.of(1)] == ["after"]
    assert identities.size_bytes == counted(identities)


def test_those_that_come_too_often_are_ignored() -> None:
    identities = Identities()
    for number in range(1, 100):
        identities.announce(1, identity(number), now_ns=0)
    assert numbers(identities, 1)[0] == 8
    identities.announce(2, identity(50), now_ns=0)
    assert numbers(identities, 2) == [50]
    identities.announce(1, identity(100), now_ns=SECOND_NS - 1)
    assert numbers(identities, 1)[0] == 8
    identities.announce(1, identity(101), now_ns=SECOND_NS)
    identities.announce(1, identity(102), now_ns=SECOND_NS)
    assert numbers(identities, 1)[0] == 101
    # After a pause as many as at first, and no more.
    for number in range(200, 300):
        identities.announce(1, identity(number), now_ns=1_000 * SECOND_NS)
    assert numbers(identities, 1)[0] == 207


def test_all_sessions_together_have_a_bound() -> None:
    one_bytes = 2_048
    identities = Identities(max_bytes=10 * one_bytes)
    words = "w" * (one_bytes - 1_024)
    for session in range(1, 6):
        identities.announce(session, identity(session, words), now_ns=0)
    # One that takes all that it can get does not crowd the others out.
    for number in range(100, 104):
        identities.announce(9, identity(number, words), now_ns=0)
    for session in range(10, 14):
        identities.announce(session, identity(session, words), now_ns=0)
    assert identities.size_bytes == counted(identities) == 10 * one_bytes
    assert all(numbers(identities, one) == [one] for one in (*range(1, 6), *range(10, 14)))
    assert numbers(identities, 9) == [103]


def test_those_of_ended_sessions_go_first() -> None:
    identities = Identities(max_bytes=3 * 1_026)
    for session in (1, 2, 3):
        identities.announce(session, identity(session), now_ns=0)
    identities.close(2)
    identities.close(1)
    identities.close(77)
    assert [session for session, _ in identities.live()] == [3]
    assert numbers(identities, 2) == [2]
    identities.announce(4, identity(4), now_ns=0)
    assert [numbers(identities, session) for session in (1, 2, 3, 4)] == [[1], [], [3], [4]]
    assert identities.size_bytes == counted(identities)


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": bytes(31)},
        {"engine": ""},
        {"engine": "e" * 121},
        {"engine": "\x1b[2J"},
        {"words": "\n"},
        {"words": "\u202e"},
        {"words": "w" * (16 * 2**10 + 1)},
    ],
)
def test_what_could_not_be_shown_is_refused(fields: dict[str, Any]) -> None:
    identities = Identities()
    with pytest.raises(CallerError):
        identities.announce(
            1, pb.Identity(**{"digest": bytes(32), "engine": "e", "words": "{}"} | fields), 0
        )
    assert identities.size_bytes == counted(identities) == 0


# ---- in the daemon


async def announce(daemon: Running, name: str, *announced: pb.Identity) -> int:
    """Open a session that announces these. Returns its number."""
    session = await daemon.open(name)
    for each in announced:
        await session.send(identity=each)
    await session.beat()  # its answer follows them
    return session.number


async def listed(daemon: Running, digest: bytes = b"") -> list[pb.AnnouncedIdentity]:
    request = pb.ListIdentitiesRequest(digest=digest)
    return list((await answer(daemon.admin.ListIdentities(request))).identities)


@in_loop
async def test_operators_see_the_identities_of_open_sessions(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        assert await listed(daemon) == []
        number = await announce(daemon, "worker", identity(1, "one"), identity(2, "two"))
        found = await listed(daemon)
        assert [each.identity.digest for each in found] == [
            identity(1).digest,
            identity(2).digest,
        ]
        assert {(each.session_id, each.owner, each.label) for each in found} == {
            (number, "worker (pid 1 on here)", "default")
        }
        # Words are for those that ask for them.
        assert {each.identity.words for each in found} == {""}
        (one,) = await listed(daemon, identity(1).digest)
        assert one.identity == identity(1, "one")
        assert [each.identity.words for each in await listed(daemon, bytes(31))] == ["one", "two"]
        assert await listed(daemon, b"\1") == []
        with pytest.raises(Refused) as refused:
            await listed(daemon, bytes(33))
        assert refused.value.name == InvalidKey.name


@in_loop
async def test_many_identities_are_listed_in_bounded_answers(tmp_path: Path) -> None:
    async with in_ram(tmp_path) as daemon:
        for number in range(70):
            await announce(daemon, f"worker {number}", identity(number, "w" * 16_384))
        assert len(await listed(daemon)) == 70
        assert len(await listed(daemon, bytes(31))) == 64


@in_loop
async def test_an_entry_has_the_identities_of_the_session_that_saved_it(tmp_path: Path) -> None:
    # The journal keeps the first half of a key.
    one, two = (hashlib.sha256(key(number)).digest() for number in (1, 2))
    async with in_ram(tmp_path) as daemon:
        silent, session = await daemon.open("silent"), await daemon.open("worker")
        await silent.save({one: payload(1)})
        for each in (identity(1, "one"), identity(2, "two")):
            await session.send(identity=each)
        await session.beat()
        await session.save({two: payload(2)})

        async def announced(of: bytes) -> list[str]:
            request = pb.InspectRequest(key=of)
            return [each.words for each in (await daemon.admin.Inspect(request)).identities]

        assert await announced(one) == []
        assert await announced(two) == ["two", "one"]
        await session.close()
        await daemon.until(lambda: len(daemon.tables.sessions) == 1)
        assert await listed(daemon) == []
        # The session is gone, and its entries are not.
        assert await announced(two) == ["two", "one"]
