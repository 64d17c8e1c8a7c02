"""What clients, other requests and a strange server may do to the proxy: every request is answered,
nothing foreign is believed or kept, and nothing grows."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import aiohttp
import numpy as np
import pytest

from prefixd.client.aio import AsyncHit
from prefixd.client.llama_server import gateway as gateway_module
from prefixd.client.llama_server.folder import SlotFolder
from prefixd.client.llama_server.model import Model
from prefixd.client.llama_server.slots import Slot
from prefixd.client.llama_server.states import States
from tests.client.llama_server.conftest import Proxy
from tests.support.fake_llama import leftovers, plain_answer

Through = Callable[..., None]

P = "".join(chr(97 + (n * n + 7 * n) % 26) for n in range(1_000))
Q = "".join(chr(65 + (n * n + 3 * n) % 26) for n in range(1_000))


def expected(proxy: Proxy, prompt: str, wanted: int = 4) -> str:
    return plain_answer(proxy.llama, proxy.llama.tokenize(prompt), wanted)


async def raw(proxy: Proxy, sent: bytes, *, ends: bool = False) -> bytes:
    """What comes back for these bytes, to the end of the connection."""
    reader, writer = await asyncio.open_unix_connection(str(proxy.listens))
    writer.write(sent)
    if ends:
        writer.write_eof()
    found = await reader.read()
    writer.close()
    return found


# ---- bodies and targets


@pytest.mark.parametrize(
    "prompt", [[2**40], [-1], [True], [2**31]], ids=["large", "negative", "bool", "just"]
)
def test_tokens_that_are_none(through: Through, prompt: list[Any]) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(prompt)
        assert proxy.llama.bodies[-1]["prompt"] == prompt

    through(test, weights="no tokens")


def test_a_body_as_deep_as_it_can_be_read(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        for depth in range(900, 1_000, 7):
            body = '{"prompt": "a", "x": ' + "[" * depth + "]" * depth + "}"
            async with proxy.session.post("/completion", data=body) as answer:
                assert answer.status in (200, 400), "the server's own answer"

    through(test, weights="deep")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_passes_unread(
    through: Through, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(gateway_module, "_MOST_READ_BYTES", 1 << 20)
    large = bytes(range(256)) * 10_000

    async def pieces() -> Any:
        for at in range(0, len(large), 100_000):
            yield large[at : at + 100_000]

    async def test(proxy: Proxy) -> None:
        data: Any = pieces() if chunked else io.BytesIO(large)
        async with proxy.session.post("/echo", data=data) as answer:
            assert await answer.read() == large
        told = dict(proxy.llama.heads[-1])
        assert told.get("Content-Length") == (None if chunked else str(len(large)))
        assert proxy.count("bypassed", "large body") == 1

    through(test, weights="large")


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 100\r\n\r\n{",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["short", "short chunk", "no chunk"],
)
def test_bodies_that_do_not_end(through: Through, sent: bytes) -> None:
    async def test(proxy: Proxy) -> None:
        head = b"POST /completion HTTP/1.1\r\nHost: a\r\n"
        found = await raw(proxy, head + sent, ends=True)
        # It names version 1.0 if head and broken chunk came at once: then it has read no head.
        assert found == b"" or found.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert not proxy.llama.bodies
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="unended")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://elsewhere.invalid/echo?a=1", b"418"),
        ("*", b"404"),
        ("@elsewhere.invalid/echo", b"400"),
        ("//elsewhere.invalid/echo", b"404"),
    ],
)
def test_no_target_leads_elsewhere(through: Through, target: str, status: bytes) -> None:
    async def test(proxy: Proxy) -> None:
        method = "OPTIONS" if target == "*" else "GET"
        head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        found = await raw(proxy, head.encode())
        assert found.split(b" ", 2)[1] == status

    through(test, weights="targets")


# ---- headers and methods


def test_headers_of_one_connection_stay_there_and_none_is_added(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        head = (
            b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n"
            b"Proxy-Connection: x\r\nKeep-Alive: x\r\nTE: x\r\nUpgrade: websocket\r\n"
            b"Authorization: Bearer k\r\nX-End: 1\r\nContent-Length: 2\r\n\r\nab"
        )
        found = await raw(proxy, head)
        told = {name.lower(): value for name, value in proxy.llama.heads[-1]}
        assert told.pop("host")
        assert told.pop("connection") == "close", "its own"
        assert told == {"authorization": "Bearer k", "x-end": "1", "content-length": "2"}
        assert b"X-Own: 1" in found
        assert b"X-Mine" not in found

    through(test, weights="headers")


def test_cookies_are_the_clients_own(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        for _ in range(2):
            async with proxy.session.post("/echo", data=b"a") as answer:
                assert answer.headers["Set-Cookie"] == "a=1"
            proxy.session.cookie_jar.clear()
        assert not any(name == "Cookie" for name, _ in proxy.llama.heads[-1])

    through(test, weights="cookies")


def test_a_compressed_body_stays_so(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        body = gzip.compress(json.dumps({"prompt": P}).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with proxy.session.post("/completion", data=body, headers=headers) as answer:
            assert answer.status == 200
        assert proxy.count("bypassed", "unreadable body") == 1
        assert proxy.llama.bodies[-1] == {"prompt": P}

    through(test, weights="compressed")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET"])
def test_other_methods(through: Through, method: str) -> None:
    async def test(proxy: Proxy) -> None:
        async with proxy.session.request(method, "/health") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Length"] == "16"
            assert (await answer.read() == b"") == (method == "HEAD")

    through(test, weights="methods")


def test_an_event_is_passed_on_at_once(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.go_on.clear()
        body = {"prompt": "a", "n_predict": 2, "stream": True}
        async with proxy.session.post("/completion", json=body) as answer:
            step = asyncio.ensure_future(answer.content.readline())
            await proxy.llama.generating.wait()
            assert not step.done()
            proxy.llama.go_on.set()
            proxy.llama.go_on = asyncio.Event()  # the next one waits
            assert (await step).startswith(b"data: ")
            proxy.llama.go_on.set()
            await answer.read()

    through(test, weights="flush")


# ---- what else gets into a slot


def test_adapters_of_one_request_are_in_no_other(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(Q)
        await proxy.settled()
        lora = [{"id": 0, "scale": 1.0}]
        other = await proxy.ask(P, lora=lora)
        assert other != expected(proxy, P)
        await proxy.settled()
        assert await proxy.ask(P) == expected(proxy, P)
        await proxy.forget()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="own adapters", settings={"idle_s": 0.0})


def test_a_slot_is_not_saved_while_others_may_have_it(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        proxy.llama.go_on.clear()
        lora = asyncio.ensure_future(proxy.ask(P, lora=[{"id": 0, "scale": 1.0}]))
        await proxy.llama.generating.wait()
        asking = asyncio.ensure_future(proxy.ask(P))
        proxy.llama.go_on.set()
        await asyncio.gather(lora, asking)
        assert asking.result() == expected(proxy, P)
        await proxy.forget()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="meanwhile", settings={"idle_s": 0.0})


def test_a_file_that_a_client_restores_is_used_by_its_requests_only(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        foreign = type(proxy.llama)(proxy.folder, weights="foreign file")
        tokens = foreign.tokenize(P)
        foreign._evaluate(foreign.slots[0], tokens, None, keep=False)
        (proxy.folder / "theirs.bin").write_bytes(foreign.write(foreign.slots[0], 0))
        restore = proxy.session.post("/slots/0?action=restore", json={"filename": "theirs.bin"})
        async with restore as answer:
            assert (await answer.json())["n_restored"] == len(tokens)
        assert await proxy.ask(P) == expected(proxy, P)
        await proxy.forget()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="their file")


def test_a_request_that_passes_takes_a_slot_that_is_not_saved_yet(through: Through) -> None:
    """What is saved is what the server has, under its own tokens, and the next prompt is served."""

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.ask(P + Q[:100])
        await proxy.ask(Q, n=2)
        assert proxy.count("bypassed", "several answers") == 1
        text, evaluated = await proxy.evaluated(proxy.ask(P))
        assert text == expected(proxy, P)
        assert evaluated == 1, "it was restored all the same"

    through(test, weights="taken", settings={"idle_s": 3600.0})


@pytest.mark.parametrize("kind", ["plain", "windows"])
def test_a_slot_that_cannot_be_erased_is_not_gone_on_from(through: Through, kind: str) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        await proxy.ask(P, lora=[{"id": 0, "scale": 1.0}])
        proxy.llama.refuses["?erase"] = 500
        assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.llama.bodies[-1]["cache_prompt"] is False
        del proxy.llama.refuses["?erase"]
        await proxy.settled()
        assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.llama.bodies[-1]["cache_prompt"] is True

    through(test, weights=f"not erased {kind}", kind=kind)


@pytest.mark.parametrize("moment", ["restore", "save"])
def test_a_client_that_hangs_up_in_the_middle(through: Through, moment: str) -> None:
    """The server goes on with what it was asked for, unseen."""

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        if moment == "save":
            await proxy.ask(P + Q[:200])
            proxy.llama.save_goes_on.clear()
        else:
            proxy.llama.restore_goes_on.clear()
        path = f"/slots/0?{moment}"
        before = proxy.llama.calls[path]
        asking = asyncio.ensure_future(proxy.ask(Q if moment == "save" else P))
        while proxy.llama.calls[path] == before:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        proxy.llama.save_goes_on.set()
        proxy.llama.restore_goes_on.set()
        for prompt in (P[:600] + Q[:20], P, Q):
            assert await proxy.ask(prompt) == expected(proxy, prompt)
        await proxy.settled()
        assert leftovers(proxy.folder) == []

    kind = {"kind": "windows", "swa_full": True}
    through(test, weights=f"hangs up {moment}", settings={"idle_s": 3600.0}, **kind)


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("moment", ["made", "released"])
def test_a_client_that_hangs_up_before_the_load_leaves_no_file(
    through: Through, kind: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are memory: as large as a state. Hanging up while a thread is about to make one, or
    while the claim on its entries is given back."""
    create, leave, restore = SlotFolder.create, AsyncHit.__aexit__, States.restore
    restoring: list[asyncio.Task[Any]] = []
    making, goes_on, made, released = (threading.Event() for _ in range(4))

    def slowly(*arguments: Any) -> memoryview:
        making.set()
        goes_on.wait()
        memory = create(*arguments)
        made.set()
        return memory

    async def waiting(hit: AsyncHit, *arguments: Any) -> None:
        await leave(hit, *arguments)
        if made.is_set() and not released.is_set():
            released.set()
            await asyncio.Event().wait()

    async def noted(*arguments: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        restoring.append(task)
        return await restore(*arguments)

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        (model,) = proxy.gateway._models.values()
        with monkeypatch.context() as patch, ExitStack() as stack:
            stack.callback(goes_on.set)
            patch.setattr(SlotFolder, "create", slowly)
            patch.setattr(States, "restore", noted)
            if moment == "released":
                goes_on.set()
                patch.setattr(AsyncHit, "__aexit__", waiting)
            asking = asyncio.ensure_future(proxy.ask(P))
            while not {"made": making, "released": released}[moment].is_set():
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while not restoring[-1].cancelling():
                await asyncio.sleep(0)
            for _ in range(10):  # who does not wait for the thread is gone by then
                await asyncio.sleep(0)
            goes_on.set()
            while not made.is_set() or any(slot.busy for slot in model.slots):
                await asyncio.sleep(0)
        assert leftovers(proxy.folder) == []
        assert await proxy.ask(Q) == expected(proxy, Q)

    through(test, weights=f"hangs up early {kind} {moment}", kind=kind)


def test_a_folder_that_is_gone_takes_no_slot_its_tokens(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        shutil.rmtree(proxy.folder)
        text, evaluated = await proxy.evaluated(proxy.ask(P + Q))
        assert text == expected(proxy, P + Q)
        assert evaluated < len(Q) + 100, "it goes on from what its slot has"
        proxy.folder.mkdir(mode=0o700)

    through(test, weights="no folder")


def test_who_waits_for_a_slot_and_hangs_up_holds_nobody_up(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        (model,) = proxy.gateway._models.values()
        proxy.llama.go_on.clear()
        asking = [asyncio.ensure_future(proxy.ask(P + str(n))) for n in range(6)]
        while len(model._waiting) < 5:
            await asyncio.sleep(0)
        for each in asking[1:5]:
            each.cancel()
        await asyncio.wait(asking[1:5])
        proxy.llama.go_on.set()
        assert await asking[0] == expected(proxy, P + "0")
        assert await asking[5] == expected(proxy, P + "5")
        assert not model._waiting

    through(test, weights="queue")


# ---- a strange server


@pytest.mark.parametrize(
    "answers",
    [
        {"/props": []},
        {"/props": {"total_slots": True, "build_info": 1, "model_path": []}},
        {"/slots": [1, None, {"id": "a"}, {"id": 0, "n_prompt_tokens": "many"}]},
        {"/slots": {}},
        {"/tokenize": {"tokens": [2**40]}},
        {"/tokenize": {"tokens": []}},
        {"/lora-adapters": [1]},
        {"/lora-adapters": {"a": 1}},
        {"/slots/0": {"n_written": "many", "n_restored": None}},
        {"/slots/0": [1]},
    ],
    ids=json.dumps,
)
def test_answers_of_another_form(through: Through, answers: dict[str, Any]) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.answers = answers
        for prompt in (P, Q, P):
            assert await proxy.ask(prompt) == expected(proxy, prompt)
        proxy.llama.answers = {}

    through(test, weights="strange")


def test_a_template_that_takes_no_shorter_chat(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        template = proxy.llama.template

        def strict(body: dict[str, Any]) -> str:
            if body["messages"][-1]["role"] != "user":
                raise ValueError("roles must alternate")
            return template(body)

        proxy.llama.template = strict
        turns = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": P[:200]} for role in turns]
        body = {"messages": messages, "max_tokens": 4}
        async with proxy.session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        assert proxy.count("requests", "missed") == 1
        assert proxy.count("requests", "bypassed") == 0

    through(test, weights="strict", kind="recurrent")


def test_a_probe_whose_slot_another_request_took(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.save_goes_on.clear()
        asking = asyncio.ensure_future(proxy.ask(P))
        while not proxy.llama.calls["/slots/0?save"]:
            await asyncio.sleep(0)
        proxy.llama._evaluate(proxy.llama.slots[0], [5, 6, 7], None, keep=False)
        proxy.llama.save_goes_on.set()
        assert await asking == expected(proxy, P)
        (model,) = proxy.gateway._models.values()
        assert model.identity is None
        model._began_s -= 60.0  # a while later
        assert await proxy.ask(P) == expected(proxy, P)
        assert model.identity is not None

    through(test, weights="probe")


def test_an_identification_that_fails_empties_the_slots_once_in_a_while(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.refuses["?save"] = 500
        for _ in range(5):
            assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.llama.calls["/slots/0?save"] == 1
        assert proxy.llama.evaluated <= 56 + len(P) + 3 * 5 + 5

    through(test, weights="fails")


def test_a_late_list_of_slots_forgets_nothing(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        model = Model(proxy.cache, None, None)  # type: ignore[arg-type]
        slot = Slot(0)
        slot.was_restored(np.arange(10, dtype="<i4"), b"")
        model.slots, model.locks = [slot], [asyncio.Lock()]
        listed = [{"id": 0, "n_prompt_tokens": 3}]
        slot.used = 2
        model._compare(listed, {slot: 1})  # it was used since they were asked for
        assert slot.length == 10
        model._compare(listed, {slot: 2})
        assert slot.length == 0

    through(test, weights="late")


def test_status_pages_want_the_servers_key(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        for page in ("/prefixd/stats", "/prefixd/metrics"):
            async with proxy.session.get(page) as answer:
                assert answer.status == 401
            headers = {"Authorization": "Bearer secret"}
            async with proxy.session.get(page, headers=headers) as answer:
                assert answer.status == 200
        proxy.llama.alive = False
        async with proxy.session.get("/prefixd/stats") as answer:
            assert answer.status == 200, "that is when it is looked at"

    through(test, weights="pages", api_key="secret")


def test_where_nothing_can_be_kept_nothing_is_asked(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        assert await proxy.ask(P) == expected(proxy, P)
        assert set(proxy.llama.calls) == {"/completion"}

    through(test, weights="unsupported", settings={"unsupported": "contexts are shifted"})


# ---- a router


def test_models_that_a_router_does_not_have_take_no_room(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.names = {"a"}
        for number in range(100):
            body = {"prompt": P, "model": f"none {number}"}
            async with proxy.session.post("/completion", json=body) as answer:
                assert answer.status == 400
        assert await proxy.ask(P, model="a") == expected(proxy, P)
        assert list(proxy.gateway._models) == ["a"]
        assert not proxy.gateway._asked

    through(test, weights="router")


def test_one_model_by_two_names(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.names = {"a", "b"}
        for name in ("a", "b", "a"):
            assert await proxy.ask(P, model=name) == expected(proxy, P)
        assert len(set(map(id, proxy.gateway._models.values()))) == 1
        assert set(proxy.gateway._models) == {"a", "b"}

    through(test, weights="names")


def test_the_models_that_were_used_last_are_known(
    through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "_MOST_MODELS", 3)

    async def test(proxy: Proxy) -> None:
        proxy.llama.names = set("abcde")
        for name in "abcadae":
            assert await proxy.ask(P, model=name) == expected(proxy, P)
        assert list(proxy.gateway._models) == ["d", "a", "e"]
        assert set(proxy.gateway._auth) == set("dae")

    through(test, weights="many names")


def test_the_proxy_goes_on_without_a_server(
    through: Through, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.alive = False
        with caplog.at_level("WARNING"):
            for _ in range(3):
                async with proxy.session.get("/health") as answer:
                    assert answer.status == 503
        assert caplog.text.count("can't be reached") == 1, "said once"
        proxy.llama.start()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="no server")


def test_a_client_without_a_session_of_its_own_is_told_so(through: Through) -> None:
    """An answer that ends in the middle does not look like a whole one."""

    async def test(proxy: Proxy) -> None:
        proxy.llama.go_on.clear()
        asking = asyncio.ensure_future(proxy.ask(P, 50, stream=True))
        await proxy.llama.generating.wait()
        proxy.llama.alive = False
        proxy.llama.go_on.set()
        with pytest.raises(aiohttp.ClientError):
            await asking

    through(test, weights="cut")


# ---- another server in the middle


def test_a_server_that_became_another_model_while_a_state_was_restored(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        proxy.llama.restore_goes_on.clear()
        asking = asyncio.ensure_future(proxy.ask(P))
        while not proxy.llama.calls["/slots/0?restore"]:
            await asyncio.sleep(0)
        proxy.llama.start()
        proxy.llama.weights = "became another"
        proxy.llama.restore_goes_on.set()
        assert await asking == expected(proxy, P)
        await proxy.forget()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="became")


def test_a_server_that_became_another_model_while_a_slot_was_saved(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        proxy.llama.save_goes_on.clear()
        before = proxy.llama.calls["/slots/0?save"]
        await proxy.ask(P)
        while proxy.llama.calls["/slots/0?save"] == before:
            await asyncio.sleep(0)
        weights = proxy.llama.weights
        proxy.llama.start()
        proxy.llama.weights = "saved another"
        tokens = proxy.llama.tokenize(P)
        proxy.llama._evaluate(proxy.llama.slots[0], tokens, None, keep=False)
        proxy.llama.save_goes_on.set()
        await proxy.settled()
        proxy.llama.start()
        proxy.llama.weights = weights
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="saved one")


def test_a_tenant_that_hangs_up_leaves_nothing_to_the_next(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        await proxy.ask(P, headers=one)
        await proxy.forget()
        await proxy.gateway.identify()
        proxy.llama.restore_goes_on.clear()
        asking = asyncio.ensure_future(proxy.ask(P, headers=one))
        while not proxy.llama.calls["/slots/0?restore"]:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        slot = proxy.llama.slots[0]
        slot.tokens = proxy.llama.tokenize(P)  # it went on all the same
        slot.rows = [b"\0" * 16 for _ in slot.tokens]
        proxy.llama.restore_goes_on.set()
        assert await proxy.ask(P, headers=two) == expected(proxy, P)

    through(test, weights="tenant hangs up", settings={"tenants": True})
