"""A thousand combinations of transport, token, session and rpc behave as SECURITY.md says."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.access import Role
from tests.support.certificates import Authority
from tests.support.columns import columns
from tests.support.data_client import DataConnection, data_connection
from tests.support.event_loop import in_loop
from tests.support.running import (
    LocalConnection,
    OpenSession,
    Refused,
    Running,
    answer,
    item,
    key,
    part,
    running,
    stream,
)
from tests.support.tenants import (
    COMMON,
    DATA,
    IDENTITIES,
    MARKS,
    MISSING,
    NAMESPACES,
    OWN,
    ROOM,
    Identity,
    Tenant,
    stored,
    tenants,
)
from tests.test_security import section

CASES = 1_000


def needed() -> dict[str, Role]:
    """The role that each rpc needs, from SECURITY.md."""
    rows = {role: rpcs.split(", ") for role, rpcs in section("Roles")}
    found = dict.fromkeys(rows["read"], Role.READ) | dict.fromkeys(rows["write"], Role.WRITE)
    admin = pb.DESCRIPTOR.services_by_name["Admin"].methods
    return found | {method.name: Role.ADMIN for method in admin}


class World:
    """The daemon, a session of each kind, and the permissions of each."""

    def __init__(self, daemon: Running, clients: dict[Identity, Tenant]) -> None:
        self.daemon = daemon
        self.clients = clients
        self.sessions: dict[Identity, OpenSession] = {}
        self.claims: dict[Identity, int] = {}
        self.locals: dict[Identity, LocalConnection] = {}
        self.datas: dict[Identity, DataConnection] = {}
        self.needed = needed()
        self.fresh = 100

    async def open(self, stack: AsyncExitStack) -> None:
        for name in NAMESPACES:
            writer = await self.clients[Identity(Role.WRITE, name)].open()
            saved = await writer.save({COMMON: DATA[name], OWN[name]: DATA[name]})
            assert saved == [pb.SAVE_STATUS_SAVED] * 2
        for identity in IDENTITIES:
            session = self.sessions[identity] = await self.clients[identity].open()
            self.claims[identity] = (await session.claim([COMMON])).claim_id
            self.locals[identity] = await self.daemon.connect_locally(session)
            data = data_connection(self.daemon, session)
            self.datas[identity] = await stack.enter_async_context(data)

    def entries(self, but: str = "-") -> set[tuple[str, bytes, int]]:
        """The entries of all other namespaces: (namespace, key, generation)."""
        of = self.daemon.front.sessions.namespaces.name_of
        entries = self.daemon.tables.entries.values()
        return {(of(e.key), e.key, e.generation) for e in entries if of(e.key) != but}

    def request(self, call: str, identity: Identity) -> Any:
        """A request in the session of `identity` that also names entries of others."""
        ref, claim = self.sessions[identity].ref, self.claims[identity]
        self.fresh += 1
        new, data = key(self.fresh), DATA[identity.of]
        header = pb.SaveHeader(
            session=ref,
            tier=pb.TIER_RAM,
            reason=pb.SAVE_REASON_COLD,
            **columns([item(new, data)]),
            touched=[] if identity.of == "" else [*OWN.values()],
            ancestors=[COMMON],
        )
        everything = [COMMON, *OWN.values()]
        others = [of for name, of in OWN.items() if name != identity.of]
        ranges = [pb.ReadRange(index=0)]
        entry = self.daemon.tables.entries[stored(identity.of, COMMON)]
        return {
            "Lookup": lambda: pb.LookupRequest(keys=everything),
            "Claim": lambda: pb.ClaimRequest(session=ref, keys=everything, mode=pb.CLAIM_MODE_ANY),
            "Release": lambda: pb.ReleaseRequest(session=ref, claim_ids=[2**40]),
            "Read": lambda: pb.ReadRequest(session=ref, claim_id=claim, ranges=ranges),
            "Reserve": lambda: pb.ReserveRequest(header=header),
            "Save": lambda: pb.SaveRequest(header=header, parts=[part(0, data)]),
            "Cancel": lambda: pb.CancelRequest(session=ref, tokens=[2**40]),
            "Delete": lambda: pb.DeleteRequest(session=ref, keys=[MISSING, *others]),
            "Pull": lambda: pb.PullRequest(session=ref, keys=everything, mode=pb.CLAIM_MODE_RUN),
            "HandOver": lambda: pb.HandOverRequest(session=ref),
            "Fetch": lambda: pb.FetchRequest(
                session=ref, keys=[COMMON], generations=[entry.generation], ranges=ranges
            ),
            "FetchFound": lambda: pb.FetchRequest(
                session=ref,
                keys=[COMMON],
                room_bytes=[entry.payload_bytes],
                mode=pb.CLAIM_MODE_RUN,
            ),
        }[call]()

    async def by_grpc(self, caller: Identity, call: str, session: Identity) -> Any:
        client = self.clients[caller]
        if call not in CACHE:
            return await answer(getattr(client.admin, call)(ADMIN[call]()))
        request = self.request(call, session)
        method = getattr(client.cache, call)
        streamed = call == "Save"
        return await answer(method(stream([request]) if streamed else request))

    async def by_local_socket(self, call: str, session: Identity) -> Any:
        kind = LOCAL[call]
        return await self.locals[session].ask(**{kind: self.request(call, session)})

    async def by_data_socket(self, call: str, session: Identity) -> Any:
        connection = self.datas[session]
        response = await connection.ask(**{DATA_CALLS[call]: self.request(call, session)})
        if call not in ("Read", "Fetch", "FetchFound"):
            return response
        if call == "FetchFound":
            assert response.claim.results[0].claimed
            response = await connection.response()
        payload = await connection.exactly(response.part.length_bytes)
        assert await connection.part() is None
        return payload

    async def attempt(
        self, transport: str, caller: Identity, call: str, session: Identity
    ) -> tuple[Any, Refused | None]:
        """The response, or the error."""
        try:
            if transport == "grpc":
                return await self.by_grpc(caller, call, session), None
            if transport == "local":
                return await self.by_local_socket(call, session), None
            return await self.by_data_socket(call, session), None
        except Refused as refused:
            return None, refused

    def expected(self, transport: str, caller: Identity, call: str, session: Identity) -> str:
        """The name of the expected error, or empty."""
        needed = self.needed[ROLE_OF.get(call, call)]
        if transport == "grpc":
            if caller.role < needed:
                return "not_permitted"
            if needed is Role.ADMIN or call == "Lookup":
                return ""  # these name no session
            if caller.reach != session.reach:
                return "not_permitted"
        return "not_permitted" if session.role < needed else ""


CACHE = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["Cache"].methods
    if method.name != "Session"
]
#: The operators' calls that do no harm here; the others need the same role.
ADMIN: dict[str, Any] = {
    "Stats": pb.StatsRequest,
    "ListSessions": pb.ListSessionsRequest,
    "ListIdentities": pb.ListIdentitiesRequest,
    "ListEntries": lambda: pb.ListEntriesRequest(tier=pb.TIER_RAM),
    "Clear": lambda: pb.ClearRequest(namespace="nothing-of-that-name"),
    "Inspect": lambda: pb.InspectRequest(key=COMMON),
    "Drop": lambda: pb.DropRequest(keys=[MISSING]),
    "Why": lambda: pb.WhyRequest(key=COMMON),
}
LOCAL = {
    "Lookup": "lookup",
    "Claim": "claim",
    "Release": "release",
    "Reserve": "reserve",
    "Cancel": "cancel",
}
DATA_CALLS = {**LOCAL, "Read": "read", "Fetch": "fetch", "FetchFound": "fetch"}
#: Requests of the sockets that are no rpcs -> the rpc that does the same.
ROLE_OF = {"Fetch": "Read", "FetchFound": "Read"}


@in_loop
async def test_a_thousand_combinations_are_as_the_table_says(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Combinations of transport, token, session and rpc. A refused call changes nothing; any other
    reveals and changes nothing of another namespace."""
    chance = random.Random(12)
    async with (
        running(tmp_path, *flags, *ROOM, tiers=[Tier.RAM]) as daemon,
        tenants(daemon, authority, flags) as clients,
        AsyncExitStack() as stack,
    ):
        world = World(daemon, clients)
        await world.open(stack)
        seen: dict[tuple[str, str], int] = {}
        for _ in range(CASES):
            transport = chance.choice(["grpc", "grpc", "local", "data"])
            caller, session = chance.choice(IDENTITIES), chance.choice(IDENTITIES)
            calls = {"grpc": [*CACHE, *ADMIN], "local": [*LOCAL], "data": [*DATA_CALLS]}
            call = chance.choice(calls[transport])
            if transport != "grpc" or chance.random() < 0.5:
                caller = session  # otherwise nearly all combinations would mix namespaces
            acting = caller if call == "Lookup" else session
            expected = world.expected(transport, caller, call, session)
            before, others = world.entries(), world.entries(but=acting.of)
            where = transport, caller, call, session
            got, refused = await world.attempt(transport, caller, call, acting)
            assert (refused.name if refused else "") == expected, (where, refused)
            seen[transport, expected] = seen.get((transport, expected), 0) + 1
            if refused is not None:
                assert world.entries() == before
                assert all(identity.token not in str(refused) for identity in IDENTITIES)
                continue
            if call in ADMIN:
                continue
            assert others <= world.entries(), (where, "an entry of another namespace is gone")
            assert others == world.entries(but=acting.of), where
            said = got if isinstance(got, bytes) else repr(got).encode()
            for name, mark in MARKS.items():
                assert name == acting.of or mark not in said, where
            assert_its_own(world, call, acting, got)
        for transport in ("grpc", "local", "data"):
            assert min(seen[transport, ""], seen[transport, "not_permitted"]) > 15
        await daemon.assert_sound()


def assert_its_own(world: World, call: str, identity: Identity, got: Any) -> None:
    """Every entry that is reported as present belongs to this namespace, by its generation."""
    entries = world.daemon.tables.entries
    if call in ("Read", "Fetch", "FetchFound"):
        payload = got if isinstance(got, bytes) else b"".join(p.data for m in got for p in m.parts)
        assert payload == DATA[identity.of]
    if call not in ("Lookup", "Claim"):
        return
    results = (got if hasattr(got, "results") else getattr(got, call.lower())).results
    found = [result.entry.generation for result in results]
    named = [COMMON, *OWN.values()]
    mine = [entries.get(stored(identity.of, of)) for of in named]
    assert found == [entry.generation if entry is not None else 0 for entry in mine]
    assert sum(map(bool, found)) == 2
