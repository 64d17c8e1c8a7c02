"""Clients that name another client's session: they get nothing, whatever they request.

The requests come from the contract itself: every rpc, and every kind of request on the local socket
and the data socket, that contains a SessionRef. A new one is tried as well, or these tests fail
because they have no example of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from prefixd.proto import prefixd_pb2 as pb
from tests.support.columns import StagedPart, columns, staged
from tests.support.data_client import data_connection
from tests.support.event_loop import in_loop
from tests.support.running import (
    OpenSession,
    Refused,
    Running,
    answer,
    in_ram,
    item,
    key,
    part,
    payload,
    stream,
)
from tests.support.warm import WARM

DATA = payload(1)
MINE, RESERVED = key(1), key(2)
CACHE = pb.DESCRIPTOR.services_by_name["Cache"]


def contains_a_session(message: Descriptor) -> bool:
    return message.name == "SessionRef" or any(
        contains_a_session(field.message_type)
        for field in message.fields
        if field.message_type is not None
    )


#: Requests that have a place on the local socket only.
LOCAL_KINDS = ["hand_over", "save_staged", "save_lent"]
RPCS = [method.name for method in CACHE.methods if contains_a_session(method.input_type)]
KINDS = [
    field.name
    for field in pb.FramedRequest.DESCRIPTOR.oneofs_by_name["kind"].fields
    if contains_a_session(field.message_type)
]


class Victim:
    """A session with a claim, a reservation and staging memory, and a thief's requests for them."""

    def __init__(self, daemon: Running, session: OpenSession) -> None:
        self.daemon = daemon
        self.session = session
        self.claim = 0
        self.token = 0

    async def open(self) -> None:
        await self.session.save({MINE: DATA})
        self.claim = (await self.session.claim([MINE])).claim_id
        (self.token,) = await self.session.granted([item(RESERVED, DATA)])
        self.daemon.front.stagings.open(self.session.number)

    def requests(self, ref: pb.SessionRef) -> dict[str, Any]:
        """A harmful request for each rpc, and for each kind on the local and the data socket."""
        header = pb.SaveHeader(
            session=ref,
            tier=pb.TIER_RAM,
            reason=pb.SAVE_REASON_COLD,
            **columns([item(key(3), DATA)]),
        )
        release = pb.ReleaseRequest(session=ref, claim_ids=[self.claim])
        reserved = pb.GrantedReservations(session=ref, tokens=[self.token])
        generation = self.daemon.tables.entries[MINE].generation if self.claim else 0
        whole = StagedPart(length_bytes=len(DATA), last=True)
        return {
            "Claim": pb.ClaimRequest(session=ref, keys=[MINE], mode=pb.CLAIM_MODE_RUN),
            "Release": release,
            "Reserve": pb.ReserveRequest(header=header),
            "Cancel": pb.CancelRequest(session=ref, tokens=[self.token]),
            "Delete": pb.DeleteRequest(session=ref, keys=[RESERVED]),
            "Pull": pb.PullRequest(session=ref, keys=[MINE], mode=pb.CLAIM_MODE_RUN),
            "Read": pb.ReadRequest(session=ref, claim_id=self.claim, ranges=[pb.ReadRange()]),
            "Save": pb.SaveRequest(reserved=reserved, parts=[part(0, DATA)]),
            "hand_over": pb.HandOverRequest(session=ref),
            "claim": pb.ClaimRequest(session=ref, keys=[MINE], mode=pb.CLAIM_MODE_RUN),
            "release": release,
            "give_back": release,
            "reserve": pb.ReserveRequest(header=header),
            "cancel": pb.CancelRequest(session=ref, tokens=[self.token]),
            "save_lent": pb.SaveLentRequest(reserved=reserved, token=bytes(16), pieces=[0]),
            "save_staged": pb.SaveStagedRequest(reserved=reserved, **staged([whole]), last=True),
            "attach": ref,
            "read": pb.ReadRequest(session=ref, claim_id=self.claim, ranges=[pb.ReadRange()]),
            "fetch": pb.FetchRequest(
                session=ref, keys=[MINE], generations=[generation], ranges=[pb.ReadRange()]
            ),
            "save": pb.RawSaveRequest(reserved=reserved),
        }

    async def assert_unharmed(self) -> None:
        t = self.daemon.tables
        assert [*t.claims] == [self.claim]
        assert [*t.reservations] == [self.token]
        assert [*t.entries] == [MINE]
        assert self.session.number in t.sessions
        assert await self.session.read(self.claim) == [DATA]


def forgeries(session: OpenSession, other: OpenSession) -> Iterator[tuple[str, pb.SessionRef]]:
    """References to `session` from clients that know everything about it except its secret."""
    right = session.ref

    def like(**fields: Any) -> pb.SessionRef:
        ref = pb.SessionRef()
        ref.CopyFrom(right)
        for name, value in fields.items():
            setattr(ref, name, value)
        return ref

    yield "no secret", like(secret=b"")
    yield "a secret of zeros", like(secret=bytes(16))
    yield "another session's secret", like(secret=other.ref.secret)
    yield "a part of the secret", like(secret=right.secret[:-1])
    yield "more than the secret", like(secret=right.secret + b"\0")
    yield "one bit flipped", like(secret=bytes([right.secret[0] ^ 1]) + right.secret[1:])
    yield "a session that never existed", like(session_id=10**6)


def test_every_request_of_the_contract_is_tried() -> None:
    assert {*RPCS, *KINDS} == Victim(None, None).requests(pb.SessionRef()).keys()  # type: ignore[arg-type]  # neither is used
    assert len(RPCS) >= 8
    assert len(KINDS) >= 8


async def over_grpc(daemon: Running, name: str, request: Any) -> None:
    (method,) = [method for method in CACHE.methods if method.name == name]
    call = getattr(daemon.cache, name)
    await answer(call(stream([request]) if method.client_streaming else request))


@pytest.mark.parametrize("name", RPCS)
@in_loop
async def test_no_rpc_acts_for_a_session_without_its_secret(tmp_path: Path, name: str) -> None:
    async with in_ram(tmp_path) as daemon:
        session, other = await daemon.open("victim"), await daemon.open("thief")
        victim = Victim(daemon, session)
        await victim.open()
        messages = set()
        for forgery, ref in forgeries(session, other):
            with pytest.raises(Refused) as refused:
                await over_grpc(daemon, name, victim.requests(ref)[name])
            assert refused.value.name == "unknown_session", forgery
            messages.add(refused.value.sentence.replace(str(ref.session_id), "N"))
        assert len(messages) == 1, "a difference would show which session ids exist"
        await victim.assert_unharmed()
        await over_grpc(daemon, name, victim.requests(session.ref)[name])


async def forge(daemon: Running, kind: str, *, local: bool) -> None:
    """On a connection of the thief's own session, not even the victim's secret helps."""
    session, other = await daemon.open("victim"), await daemon.open("thief")
    victim = Victim(daemon, session)
    await victim.open()
    for forgery, ref in (*forgeries(session, other), ("the right secret", session.ref)):
        own = None if kind == "attach" else other
        if kind == "attach" and ref is session.ref:
            continue
        async with data_connection(daemon, own, local=local) as thief:
            await thief.send(**{kind: victim.requests(ref)[kind]})
            if kind == "give_back":
                await thief.ask(lookup=pb.LookupRequest(keys=[MINE]))
                continue
            with pytest.raises(Refused) as refused:
                await thief.response()
            assert refused.value.name == "unknown_session", forgery
    server = daemon.front.local if local else daemon.front.data
    await daemon.until(lambda: not server.attached)
    await victim.assert_unharmed()


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_the_local_socket_acts_for_no_session_without_its_secret(
    tmp_path: Path, kind: str
) -> None:
    async with in_ram(tmp_path) as daemon:
        await forge(daemon, kind, local=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LOCAL_KINDS])
@in_loop
async def test_the_data_socket_acts_for_no_session_without_its_secret(
    tmp_path: Path, kind: str
) -> None:
    async with in_ram(tmp_path) as daemon:
        await forge(daemon, kind, local=False)


@pytest.mark.parametrize("kind", LOCAL_KINDS)
@in_loop
async def test_nobody_elsewhere_shares_memory_with_the_daemon(tmp_path: Path, kind: str) -> None:
    async with in_ram(tmp_path) as daemon:
        victim = Victim(daemon, await daemon.open("victim"))
        await victim.open()
        async with data_connection(daemon, victim.session) as connection:
            with pytest.raises(Refused, match="no place here"):
                await connection.ask(**{kind: victim.requests(victim.session.ref)[kind]})
            await connection.hung_up()
        await victim.assert_unharmed()


#: Another process, which has stolen the secret: sends each request, and prints each response.
THIEF = """
import socket, sys
from prefixd.proto import frames, prefixd_pb2 as pb
path, ref, *stolen = sys.argv[1:]
for request in map(bytes.fromhex, stolen):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        attach = frames.frame(pb.FramedRequest(attach=pb.SessionRef.FromString(bytes.fromhex(ref))))
        connection.sendall(attach + len(request).to_bytes(4, "little") + request)
        data, fds, _, _ = socket.recv_fds(connection, 2**16, frames.MAX_DESCRIPTORS)
        length, = frames.HEAD.unpack_from(data)
        answer = frames.response_of(data[frames.HEAD.size : frames.HEAD.size + length])
        print(answer.WhichOneof("kind"), answer.failure.error or "-", len(fds))
"""


@in_loop
async def test_another_process_with_the_secret_itself_gets_nothing_on_the_local_socket(
    tmp_path: Path,
) -> None:
    """A forked child, or a thief. A session belongs to the process that first used it."""
    async with in_ram(tmp_path) as daemon:
        session = await daemon.open("victim")
        victim = Victim(daemon, session)
        await victim.open()
        own = await daemon.connect_locally()
        await own.ask(
            claim=pb.ClaimRequest(session=session.ref, keys=[key(77)], mode=pb.CLAIM_MODE_RUN)
        )
        requests = victim.requests(session.ref)
        stolen = [pb.FramedRequest(**{kind: requests[kind]}).SerializeToString() for kind in KINDS]
        thief = await asyncio.create_subprocess_exec(
            *(*WARM, "-c", THIEF, daemon.config.server.local_socket),
            session.ref.SerializeToString().hex(),
            *(each.hex() for each in stolen),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await thief.communicate()
        for kind, line in zip(KINDS, output.decode().splitlines(), strict=True):
            assert (kind, line) == (kind, "failure unknown_session 0")
        await victim.assert_unharmed()


# ---- the session stream, claim ids and tokens


@in_loop
async def test_a_stream_acts_for_its_own_session_only(tmp_path: Path) -> None:
    """Its messages name no session, so there is nothing to forge."""
    messages = pb.SessionRequest.DESCRIPTOR
    assert not contains_a_session(messages)
    async with in_ram(tmp_path) as daemon:
        session, thief = await daemon.open("victim"), await daemon.open("thief")
        victim = Victim(daemon, session)
        await victim.open()
        await thief.send(give_back=pb.GiveBack(claim_ids=[victim.claim]))
        await thief.beat()
        await victim.assert_unharmed()


@in_loop
async def test_a_session_can_not_use_another_sessions_claims_and_tokens(tmp_path: Path) -> None:
    """Claim ids and tokens are plain numbers, but are valid in their own session only."""
    async with in_ram(tmp_path) as daemon:
        session, thief = await daemon.open("victim"), await daemon.open("thief")
        victim = Victim(daemon, session)
        await victim.open()
        assert await thief.release(victim.claim) == [pb.RELEASE_STATUS_UNKNOWN]
        with pytest.raises(Refused, match="unknown_claim"):
            await thief.read(victim.claim)
        cancel = pb.CancelRequest(session=thief.ref, tokens=[victim.token])
        assert list((await answer(daemon.cache.Cancel(cancel))).cancelled) == [False]
        result = await thief.write(victim.token, pb.WritePart(data=DATA, last=True))
        assert result.status == pb.SAVE_STATUS_LOST
        await victim.assert_unharmed()


def test_a_secret_is_in_no_log_and_no_list() -> None:
    """Operators see the number and the owner of a session, but not its secret. (That of a Record
    proves nothing: it only makes ids.)"""
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        secrets = [field.name for field in message.fields if "secret" in field.name]
        assert not secrets or message.name in ("SessionRef", "Welcome", "Record")
