"""Tenants share a daemon. None sees the entries of another, or takes its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.client.wire.security import Security
from prefixd.proto import frames
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.proto.vocabulary import Tier
from prefixd.server.api.access import Role
from prefixd.server.config.loading import load_config
from prefixd.server.credentials import certificates_of, tokens_of
from tests.support.certificates import Authority
from tests.support.columns import Item
from tests.support.data_client import HOST, secured_connection
from tests.support.event_loop import in_loop
from tests.support.running import OpenSession, Outside, Refused, answer, item, key, part, stream
from tests.support.tenants import (
    COMMON,
    DATA,
    IDENTITIES,
    OWN,
    ROOM,
    Identity,
    Tenant,
    flags_of,
    shared,
    stored,
    writer,
)


async def fill(session: OpenSession, count: int, start: int, name: str) -> list[Key]:
    """Save entries of a tenant one by one. Returns the keys of those that were accepted."""
    keys = [key(start + number) for number in range(count)]
    saved = [await session.save({of: DATA[name]}) for of in keys]
    return [of for of, (status,) in zip(keys, saved, strict=True) if status == SAVED]


SAVED = pb.SAVE_STATUS_SAVED
#: Entries of 4 KiB.
SHARE, OTHER_SHARE, BUDGET = 20, 10, 40
SMALL = (
    f"--ram.budget={4 * BUDGET}KiB",
    f"--ram.shares=a={4 * SHARE}KiB, b={4 * OTHER_SHARE}KiB",
)


@in_loop
async def test_a_flood_leaves_another_its_share(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Evictions match what `preview` reported."""
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        a = await writer(clients, "a")
        b = await writer(clients, "b")
        anonymous = await daemon.open()
        mine = await fill(a, SHARE, 100, "a")
        assert len(mine) == SHARE
        for flood, name, start in ((b, "b", 1000), (anonymous, "", 2000)):
            for number in range(100):
                preview = await daemon.admin.Preview(
                    pb.PreviewRequest(tier=pb.TIER_RAM, payload_bytes=4096, namespace=name)
                )
                previewed = [bytes(victim.key) for victim in preview.victims]
                before = set(daemon.tables.entries)
                assert await flood.save({key(start + number): DATA[name]}) == [SAVED]
                assert sorted(before - set(daemon.tables.entries)) == sorted(previewed)
                assert not any(TenantNamespace("a").has(of) for of in previewed)
        assert (
            await clients[Identity(Role.READ, "a")].presence(*mine) == [pb.PRESENCE_PRESENT] * SHARE
        )
        stats = await daemon.admin.Stats(pb.StatsRequest())
        taken = {n.namespace: n.entries for n in stats.tiers[0].namespaces}
        assert taken == {"a": SHARE, "b": OTHER_SHARE + 5, "": 5}, (
            "the unshared part is not divided evenly"
        )
        # A tenant that comes late still gets its share.
        await daemon.admin.Clear(pb.ClearRequest(namespace="a"))
        assert await clients[Identity(Role.READ, "a")].presence(mine[0]) == [pb.PRESENCE_ABSENT]
        await fill(b, 100, 3000, "b")
        again = await fill(a, SHARE, 100, "a")
        assert (
            await clients[Identity(Role.READ, "a")].presence(*again)
            == [pb.PRESENCE_PRESENT] * SHARE
        )
        await daemon.assert_sound()


@in_loop
async def test_shares_of_others_can_not_be_pinned_or_reserved(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        b = await writer(clients, "b")
        most = BUDGET - SHARE  # its own share, and the part without a share
        welcome = b.welcome.tiers[0]
        assert (welcome.max_payload_bytes, welcome.max_reserved_bytes) == (4096 * most, 4096 * most)
        await fill(b, most, 100, "b")
        await b.claim([key(100 + number) for number in range(most)], mode=pb.CLAIM_MODE_ANY)
        refused = await save_result(b, [item(key(500), DATA["b"])], DATA["b"])
        assert refused.status == pb.SAVE_STATUS_NO_ROOM
        assert "ram.shares" in refused.message
        # Nor may any other client: the free room belongs to a.
        anonymous = await daemon.open()
        assert await anonymous.save({key(501): DATA[""]}) == [pb.SAVE_STATUS_NO_ROOM]
        await assert_share_of_a_is_free(clients)
        large = item(key(700), bytes(4096 * (most + 1)))
        refused = await save_result(b, [large], b"")
        assert refused.status == pb.SAVE_STATUS_TOO_LARGE
        assert "ram.shares" in refused.message
        assert len(daemon.tables.entries) == BUDGET, "a refused save evicted an entry"
        await daemon.assert_sound()


async def assert_share_of_a_is_free(clients: dict[Identity, Tenant]) -> None:
    a = await writer(clients, "a")
    assert len(await fill(a, SHARE, 600, "a")) == SHARE


async def save_result(session: OpenSession, items: list[Item], data: bytes) -> pb.SaveResult:
    """The result of the first item."""
    parts = [part(0, data)] if data else []
    first = pb.SaveRequest(header=session.header(items), parts=parts)
    result: pb.SaveResult = (await answer(session.daemon.cache.Save(stream([first])))).results[0]
    return result


@in_loop
async def test_claims_do_not_pin_shares_of_others(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Entries saved while there was room may exceed what a namespace can pin."""
    async with shared(tmp_path, authority, flags, *SMALL) as (daemon, clients):
        b = await writer(clients, "b")
        saved = await fill(b, BUDGET, 100, "b")
        assert len(saved) == BUDGET, "unused shares are not available to others"
        most = BUDGET - SHARE
        with pytest.raises(Refused, match=r"limit_reached.*ram\.shares"):
            await b.claim(saved[: most + 1], mode=pb.CLAIM_MODE_ANY)
        assert (await b.claim(saved[:most], mode=pb.CLAIM_MODE_ANY)).claim_id
        await assert_share_of_a_is_free(clients)
        await daemon.assert_sound()


@in_loop
async def test_session_messages_stay_within_their_namespace(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Touches, reports of damage, reasons of misses, and labels."""
    async with shared(tmp_path, authority, flags, *ROOM) as (daemon, clients):
        a = await writer(clients, "a")
        b = await writer(clients, "b")
        await a.save({COMMON: DATA["a"], OWN["a"]: DATA["a"]})
        await b.save({COMMON: DATA["b"]})
        entries = daemon.tables.entries
        theirs = entries[stored("a", COMMON)]
        before = theirs.hits, theirs.last_used_ns
        # By its own key, by the key that another tenant uses, and by the daemon's internal key.
        for of in (COMMON, OWN["a"], stored("a", COMMON), stored("a", OWN["a"])):
            await b.send(touch=pb.Touch(keys=[of]))
            await b.send(suspect=pb.Suspect(keys=[of]))
            miss = pb.AbsentMiss(keys=[of], lookups=1)
            usage = pb.Usage(lookups=1, misses={"absent": 1}, absent=[miss])
            await b.send(heartbeat=pb.Heartbeat(sequence=9, usage=usage))
        await b.beat(10)
        assert (theirs.hits, theirs.last_used_ns) == before
        assert entries[stored("b", COMMON)].hits == 1
        assert daemon.tables.counters.suspects == 1
        stats = await daemon.admin.Stats(pb.StatsRequest())
        assert set(stats.usage) == {"a", "b"}
        # The own entry was saved since, and the others never existed in this namespace.
        assert [(m.reason, m.lookups) for m in stats.usage["b"].missed] == [
            (pb.MISS_REASON_NEVER_SAVED, 4)
        ]
        assert {e.label for e in entries.values()} == {"a", "b"}


@in_loop
async def test_labels_are_of_the_namespace(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async def label(client: Outside, requested: str) -> str:
        call = client.cache.Session()
        await call.write(pb.SessionRequest(hello=pb.Hello(client_name="x", label=requested)))
        first = await answer_of_stream(call)
        return str(daemon.tables.sessions[first.welcome.session_id].label)

    async with shared(tmp_path, authority, flags, *ROOM) as (daemon, clients):
        tenant = clients[Identity(Role.READ, "a")]
        assert await label(tenant, "") == "a"
        assert await label(tenant, "a") == "a"
        assert await label(tenant, "a/llama") == "a/llama"
        for foreign in ("b", "b/llama", "ab", "default"):
            with pytest.raises(Refused, match=r"not_permitted.*namespace"):
                await label(tenant, foreign)
        for outside in (daemon, clients[Identity(Role.WRITE, "")]):
            assert await label(outside, "llama") == "llama"
            for foreign in ("a", "b/llama"):
                with pytest.raises(Refused, match=r"not_permitted.*namespace"):
                    await label(outside, foreign)


async def answer_of_stream(call: Any) -> Any:
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        raise Refused(error) from None


@in_loop
async def test_a_client_without_a_namespace_can_not_name_entries_of_one(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async with shared(tmp_path, authority, flags, *ROOM) as (daemon, clients):
        a = await writer(clients, "a")
        await a.save({COMMON: DATA["a"]})
        theirs = stored("a", COMMON)
        anonymous = clients[Identity(Role.WRITE, "")]
        session = await anonymous.open()
        for attempt in (
            lambda: session.claim([theirs]),
            lambda: session.save({theirs: DATA[""]}),
            lambda: anonymous.lookup(theirs),
            lambda: session.reserve([item(key(5), DATA[""])], ancestors=[theirs]),
        ):
            with pytest.raises(Refused, match=r"not_permitted.*namespace 'a'"):
                await attempt()
        # Nodes and operators handle the entries of all namespaces, and this host is trusted.
        for client in (
            clients[Identity(Role.WRITE, "*")],
            clients[Identity(Role.ADMIN, "")],
            daemon,
        ):
            assert await client.presence(theirs) == [pb.PRESENCE_PRESENT]
            assert await (await client.open()).restore(theirs) == DATA["a"]


@in_loop
async def test_a_session_with_a_token_is_given_nothing_in_place(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    async with shared(tmp_path, authority, flags, *ROOM, tiers=[Tier.RAM, Tier.SHM]) as (
        daemon,
        clients,
    ):
        for identity in IDENTITIES:
            session = await clients[identity].open()
            assert session.welcome.local_socket == ""
            # A client that knows the socket's path anyway, and may open it.
            membership = daemon.front.sessions._open[session.number]
            package = daemon.local_server.hand_over.pack(membership)
            try:
                handed = {each.name for each in package.response.descriptors}
            finally:
                package.close()
            if identity.of:
                assert handed == {frames.STAGING}
                assert "of all namespaces" in package.response.refused[frames.INDEX]
            else:
                assert {frames.INDEX, frames.RAM, frames.SHM} <= handed


@in_loop
async def test_entries_keep_their_namespace_after_a_restart(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    over = ("--shm.shares=a=64KiB", "--shm.budget=256KiB")
    async with shared(tmp_path, authority, flags, *over, tiers=[Tier.SHM]) as (daemon, clients):
        for name in ("a", "b"):
            session = await writer(clients, name)
            assert await session.save({COMMON: DATA[name]}, Tier.SHM) == [SAVED]
    async with shared(tmp_path, authority, flags, *over, tiers=[Tier.SHM]) as (daemon, clients):
        for name in ("a", "b"):
            session = await clients[Identity(Role.READ, name)].open()
            assert await session.restore(COMMON) == DATA[name]
        assert await daemon.presence(COMMON) == [pb.PRESENCE_ABSENT]
        stats = await daemon.admin.Stats(pb.StatsRequest())
        taken = {n.namespace: n.entries for n in stats.tiers[0].namespaces}
        assert taken == {"": 1, "a": 1}
        anonymous = await daemon.open()
        for number in range(100):
            await anonymous.save({key(100 + number): DATA[""]}, Tier.SHM)
        assert await clients[Identity(Role.READ, "a")].presence(COMMON) == [pb.PRESENCE_PRESENT]
        cleared = await daemon.admin.Clear(pb.ClearRequest(namespace="a"))
        assert (cleared.entries, cleared.unknown_entries) == (1, 0)
        await daemon.assert_sound()


@in_loop
async def test_a_token_that_is_taken_out_ends_its_sessions(
    tmp_path: Path, authority: Authority
) -> None:
    """They end when a reload reads the file again. Other sessions continue."""
    flags = flags_of(tmp_path, authority)
    async with shared(tmp_path, authority, flags, *ROOM) as (daemon, clients):
        gone, moved, kept = (
            Identity(Role.WRITE, "a"),
            Identity(Role.READ, "a"),
            Identity(Role.WRITE, "b"),
        )
        sessions = {identity: await clients[identity].open() for identity in (gone, moved, kept)}
        lines = [identity.line for identity in IDENTITIES if identity not in (gone, moved)]
        (tmp_path / "tokens").write_text("\n".join([*lines, f"{moved.line[:-1]}b"]))
        assert daemon.front.tokens is not None
        daemon.front.use_tokens(daemon.front.tokens.read())
        for identity in (gone, moved):
            with pytest.raises(Refused, match=r"not_permitted.*not known any more"):
                await sessions[identity].event()
        await sessions[kept].beat()
        with pytest.raises(Refused, match="not_authenticated"):
            await clients[gone].presence(COMMON)
        again = await clients[moved].open()
        assert daemon.tables.sessions[again.number].label == "b", (
            "the token now belongs to another namespace"
        )


@in_loop
async def test_on_the_data_socket_the_token_is_of_the_sessions_namespace(
    tmp_path: Path, authority: Authority, flags: list[str]
) -> None:
    """Each connection presents a token of its own; the lower of the two roles applies."""
    config = load_config(flags, {})
    context = Security(str(authority.certificate), "", "").context()
    assert context is not None
    async with shared(tmp_path, authority, flags, *ROOM) as (daemon, clients):
        certificates = certificates_of(config.server)
        assert certificates is not None
        tls = certificates.material.context
        port = daemon.front.data.start(HOST, 0, tls, tokens_of(config))
        saver = await writer(clients, "a")
        reader = await clients[Identity(Role.READ, "a")].open()
        assert saver.welcome.data_port == port
        await saver.save({COMMON: DATA["a"]})
        look = pb.LookupRequest(keys=[COMMON])
        new = [item(key(77), DATA["a"])]
        for identity in IDENTITIES:
            for session in (reader, saver):
                async with secured_connection(port, context, session, identity.token) as line:
                    if identity.name != "a":
                        with pytest.raises(Refused, match=r"not_permitted.*the namespace 'a'"):
                            await line.ask(lookup=look)
                        continue
                    found = (await line.ask(lookup=look)).lookup.results
                    assert [each.presence for each in found] == [pb.PRESENCE_PRESENT]
                    ask = line.ask(reserve=pb.ReserveRequest(header=session.header(new)))
                    if identity.role is Role.WRITE and session is saver:
                        assert (await ask).reserve.results
                    else:
                        with pytest.raises(Refused, match=r"not_permitted.*the role read"):
                            await ask
