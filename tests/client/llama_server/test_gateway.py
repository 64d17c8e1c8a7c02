"""The proxy between a client and a fake llama-server, with a real daemon: by counts of evaluated
tokens, and with the text that the model says without a cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.aio import AsyncClient
from prefixd.client.llama_server.states import States
from prefixd.proto.vocabulary import Tier
from tests.client.llama_server.conftest import Proxy
from tests.support.fake_llama import leftovers, plain_answer

Through = Callable[..., None]

P = "".join(chr(97 + (n * n + 7 * n) % 26) for n in range(1_000))
Q = "".join(chr(65 + (n * n + 3 * n) % 26) for n in range(1_000))


def expected(proxy: Proxy, prompt: str, wanted: int = 4) -> str:
    return plain_answer(proxy.llama, proxy.llama.tokenize(prompt), wanted)


def test_a_prompt_survives_the_server(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        text, evaluated = await proxy.evaluated(proxy.ask(P))
        assert text == expected(proxy, P)
        assert evaluated >= len(P)
        assert await proxy.evaluated(proxy.ask(P)) == (text, 1)
        await proxy.forget()
        again, evaluated = await proxy.evaluated(proxy.ask(P, stream=True))
        assert again == text
        assert evaluated == 1 + 56, "the last token, and the probe of a new process"
        assert proxy.count("requests", "restored") == 1
        assert leftovers(proxy.folder) == []

    through(test, weights="survives")


def test_a_slot_that_has_the_prompt_asks_nothing_of_the_cache(
    through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(proxy: Proxy) -> None:
        text = await proxy.ask(P)
        asked = []
        restore = States.restore

        async def counted(*arguments: Any) -> Any:
            asked.append(arguments)
            return await restore(*arguments)

        monkeypatch.setattr(States, "restore", counted)
        assert await proxy.evaluated(proxy.ask(P)) == (text, 1)
        assert await proxy.evaluated(proxy.ask(P + Q[:8])) == (expected(proxy, P + Q[:8]), 8)
        assert (proxy.count("requests", "live"), asked) == (2, [])
        await proxy.ask(P + Q[:200])
        assert len(asked) == 1, "more of it might be there"

    through(test, weights="live")


@pytest.mark.parametrize("kind", ["plain", "recurrent"])
def test_no_slot_file_stays_in_memory_behind_its_save(through: Through, kind: str) -> None:
    """It has no name any more, and is as large as the state."""

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.ask(P)
        await proxy.settled()
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines()
                  if str(proxy.folder) in line]  # fmt: skip
        assert mapped == []
        assert proxy.count("requests", "restored") == 1

    through(test, weights=f"mapped {kind}", kind=kind)


def test_a_save_is_pending_until_the_daemon_has_taken_it(
    through: Through, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment when its slot counts as saved."""

    async def test(proxy: Proxy) -> None:
        taken: asyncio.Future[list[object]] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(AsyncClient, "save_many_async", lambda *_all, **_more: taken)

        async def stats() -> Any:
            async with proxy.session.get("/prefixd/stats") as answer:
                return await answer.json()

        await proxy.ask(P)
        while not (found := await stats())["models"][""]["slots"][0]["saved"]:
            assert found["pending_saves"] == 0
        assert found["pending_saves"] == 1
        taken.set_result([])
        await proxy.settled()
        assert (await stats())["pending_saves"] == 0

    through(test, weights="pending")


def test_diverging_prompts_share_what_they_have_in_common(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        diverging = P[:900] + Q[:100]
        text, evaluated = await proxy.evaluated(proxy.ask(diverging))
        assert text == expected(proxy, diverging)
        assert evaluated == 1 + len(diverging) - 768, "three blocks of 256"

    through(test, weights="diverges")


@pytest.mark.parametrize("version", [2, 3, 4])
def test_each_version_of_slot_files(through: Through, version: int) -> None:
    async def test(proxy: Proxy) -> None:
        text = await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (text, 1)

    through(test, weights=f"version {version}", version=version)


@pytest.mark.parametrize("kind", ["recurrent", "windows", "unknown"])
def test_states_that_cannot_be_cut(through: Through, kind: str) -> None:
    async def test(proxy: Proxy) -> None:
        text, evaluated = await proxy.evaluated(proxy.ask(P))
        assert text == expected(proxy, P)
        assert evaluated <= len(P) + 1 + 60, "stopping to save evaluates nothing twice"
        await proxy.forget()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (text, 1)
        # The trimmed boundary is where another prompt goes on.
        await proxy.forget()
        await proxy.gateway.identify()
        diverging = P[:950] + Q[:50]
        text, evaluated = await proxy.evaluated(proxy.ask(diverging))
        assert text == expected(proxy, diverging)
        assert evaluated == len(diverging) + 1 - 896

    version = 9 if kind == "unknown" else 3
    real = "recurrent" if kind == "unknown" else kind
    through(test, weights=f"whole {kind}", kind=real, version=version)


def test_a_chat_goes_on_from_its_last_message_where_states_cannot_be_cut(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        system = {"role": "system", "content": P[:300]}
        user = {"role": "user", "content": Q[:300]}

        async def chat(*messages: dict[str, str]) -> tuple[str, int]:
            body = {"messages": list(messages), "max_tokens": 4}
            before = proxy.llama.evaluated
            async with proxy.session.post("/v1/chat/completions", json=body) as answer:
                read = await answer.json()
            return read["content"], proxy.llama.evaluated - before

        text, _ = await chat(system, user)
        turns = [system, user, {"role": "assistant", "content": text}]
        await chat(*turns, {"role": "user", "content": P[:200]})
        await proxy.forget()
        await proxy.gateway.identify()
        # Another last message: everything before it is there.
        _, evaluated = await chat(*turns, {"role": "user", "content": Q[:200]})
        assert evaluated <= 200 + 30

    through(test, weights="chat", kind="recurrent")


def test_swa_full_never_reuses_cells_that_no_file_has(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (expected(proxy, P), 1)
        for prompt in (P[:940] + Q[:60], P[:700], P[:500] + Q[:100], P):
            assert await proxy.ask(prompt) == expected(proxy, prompt)

    through(test, weights="swa full", kind="windows", swa_full=True)


def test_swa_full_and_requests_that_pass_through(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        await proxy.ask(P)
        shorter = P[:600] + Q[:20]
        assert await proxy.ask(shorter, n=2) == expected(proxy, shorter)
        assert proxy.count("bypassed", "several answers") == 1

    through(test, weights="swa bypass", kind="windows", swa_full=True)


@pytest.mark.parametrize("change", [{"weights": "foreign b"}, {"rope": 2.0}])
def test_foreign_states_are_never_restored(through: Through, change: dict[str, Any]) -> None:
    """The server would take them, and say other things."""

    async def first(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()

    async def second(proxy: Proxy) -> None:
        assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.count("requests", "restored") == 0

    through(first, weights="foreign a")
    through(second, **{"weights": "foreign a", **change})


def test_adapters_that_change_scale(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        adapter = proxy.folder.parent / "adapter.gguf"
        adapter.write_text("adapter")
        proxy.llama.adapters = [{"id": 0, "path": str(adapter), "scale": 1.0}]
        one = await proxy.ask(P)
        await proxy.settled()
        async with proxy.session.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}]) as answer:
            assert answer.status == 200
        half = await proxy.ask(P)
        assert half == expected(proxy, P) != one
        await proxy.settled()
        proxy.llama.adapters[0]["scale"] = 1.0
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (one, 1)

    through(test, weights="adapters")


def test_idle_slots_that_the_server_empties(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        for _ in range(2):
            assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.count("bypassed", "not prepared") == 2

    through(test, weights="cache-ram", cache_ram=True)


def test_draft_models_are_restored_only_for_much(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.drafts = True
        await proxy.ask(P)
        await proxy.forget()
        assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.count("missed", "small gain") == 1

    through(test, weights="drafts")


def test_twelve_conversations_on_four_slots(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        at_once = asyncio.Semaphore(6)

        async def converse(number: int) -> None:
            prompt = f"{number}: " + P[number : number + 600]
            for turn in range(3):
                async with at_once:
                    text = await proxy.ask(prompt, stream=turn % 2 == 0)
                assert text == expected(proxy, prompt)
                prompt += text + Q[10 * number : 10 * number + 100]

        await asyncio.gather(*(converse(number) for number in range(12)))
        await proxy.settled()
        whole = 12 * (600 + 2 * 104)
        assert proxy.llama.evaluated < whole + 12 * 3 * 256
        assert leftovers(proxy.folder) == []

    through(test, weights="twelve", slots=4)


def test_a_second_turn_after_another_conversation_took_the_slot(through: Through) -> None:
    """The agents' pattern: a summary prompt in between."""

    async def test(proxy: Proxy) -> None:
        text = await proxy.ask(P)
        await proxy.ask("summary of " + Q[:400])
        turn = P + text + Q[:100]
        again, evaluated = await proxy.evaluated(proxy.ask(turn))
        assert again == expected(proxy, turn)
        assert evaluated <= 104 + 1, "what the server had not seen"

    through(test, weights="agents")


def test_a_cancelled_stream_keeps_what_was_evaluated(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.go_on.clear()
        asking = asyncio.ensure_future(proxy.ask(P, 50, stream=True))
        await proxy.llama.generating.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        proxy.llama.go_on.set()
        while not proxy.count("saves", "cold"):
            await proxy.settled()
            await asyncio.sleep(0)
        await proxy.forget()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (expected(proxy, P), 1)

    through(test, weights="cancelled")


def test_a_server_that_dies_in_the_middle_and_comes_back(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        proxy.llama.go_on.clear()
        proxy.llama.generating.clear()
        asking = asyncio.ensure_future(proxy.ask(P, 50, stream=True))
        await proxy.llama.generating.wait()
        proxy.llama.alive = False
        proxy.llama.go_on.set()
        with pytest.raises((Exception,)):
            await asking
        async with proxy.session.post("/completion", json={"prompt": P}) as answer:
            assert answer.status == 503
        proxy.llama.start()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P)) == (expected(proxy, P), 1)
        assert leftovers(proxy.folder) == []

    through(test, weights="dies")


def test_a_server_that_was_restarted_unseen(through: Through) -> None:
    """Its marker is the same, as in builds that have none: its slots tell."""

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        marker = proxy.llama.marker
        proxy.llama.start()
        proxy.llama.marker = marker
        assert await proxy.evaluated(proxy.ask(P)) == (expected(proxy, P), 1)
        assert proxy.count("requests", "restored") == 1

    through(test, weights="unseen")


def test_a_save_that_hangs_delays_nothing_but_itself(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        proxy.llama.save_goes_on.clear()
        await proxy.ask(P)
        await asyncio.wait(list(proxy.gateway._background), timeout=60)
        assert proxy.count("failures", "save") == 1
        proxy.llama.save_goes_on.set()
        assert await proxy.ask(P) == expected(proxy, P)

    through(test, weights="hangs", settings={"save_timeout_ms": 50})


@pytest.mark.parametrize(
    "refused", ["/props", "/slots", "/tokenize", "?save", "/lora-adapters"], ids=lambda each: each
)
def test_whatever_it_refuses_the_request_is_answered(through: Through, refused: str) -> None:
    async def test(proxy: Proxy) -> None:
        proxy.llama.refuses[refused] = 501
        for _ in range(2):
            assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.count("requests", "bypassed") == 2
        assert "id_slot" not in proxy.llama.bodies[-1]

    through(test, weights="refuses")


@pytest.mark.parametrize("refused", ["?restore", "?save", "?erase"])
def test_refusals_later_on(through: Through, refused: str) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.gateway.identify()
        proxy.llama.refuses[refused] = 400
        for prompt in (P, Q, P):
            assert await proxy.ask(prompt) == expected(proxy, prompt)
        await proxy.settled()
        assert leftovers(proxy.folder) == []

    through(test, weights=f"refuses {refused}")


@pytest.mark.parametrize("kind", ["plain", "windows", "recurrent"])
@pytest.mark.parametrize("damage", ["short", "long", "empty"])
def test_files_that_are_not_whole_never_come_back(through: Through, kind: str, damage: str) -> None:
    """The real server ends with an assertion on a file that lacks a byte."""

    def damaged(data: bytes) -> bytes:
        return {"short": data[:-1], "long": data + b"\0", "empty": b""}[damage]

    async def test(proxy: Proxy) -> None:
        await proxy.gateway.identify()
        proxy.llama.on_disk = damaged
        assert await proxy.ask(P) == expected(proxy, P)
        await proxy.settled()
        assert proxy.count("failures", "save") + proxy.count("failures", "evaluate") > 0
        proxy.llama.on_disk = bytes
        proxy.llama.start()
        assert await proxy.ask(P) == expected(proxy, P)
        assert proxy.count("requests", "restored") == 0
        assert proxy.llama.calls["assertions"] == 0
        await proxy.settled()
        assert leftovers(proxy.folder) == []

    through(test, weights=f"damaged {kind} {damage}", kind=kind)


def test_without_a_daemon_it_is_a_plain_proxy(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        for prompt in (P, Q, P):
            assert await proxy.ask(prompt) == expected(proxy, prompt)
        assert proxy.count("missed", "no daemon") == 3
        assert proxy.count("failures", "restore") == 0

    through(test, weights="no daemon", address="unix:/nonexistent/prefixd.sock")


def test_an_api_key_is_passed_on_and_used_for_saves(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        async with proxy.session.post("/completion", json={"prompt": P}) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer secret"}
        text = await proxy.ask(P, headers=headers)
        await proxy.forget()
        assert await proxy.ask(P, headers=headers) == text
        assert proxy.count("requests", "restored") == 1

    through(test, weights="api key", api_key="secret")


def test_tenants_share_nothing(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        await proxy.ask(P, headers=one)
        await proxy.settled()
        text, evaluated = await proxy.evaluated(proxy.ask(P, headers=two))
        assert text == expected(proxy, P)
        assert evaluated >= len(P)
        await proxy.settled()
        assert await proxy.evaluated(proxy.ask(P, headers=one)) == (text, 1)

    through(test, weights="tenants", settings={"tenants": True})


def test_what_is_not_understood_passes_through_untouched(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        body, headers = bytes(range(256)), {"X-Given": "yes"}
        async with proxy.session.post("/echo?a=%2F+b", data=body, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (418, body)
            assert (answer.headers["X-Seen"], answer.headers["X-Own"]) == ("yes", "1")
        async with proxy.session.get("/nothing") as answer:
            assert answer.status == 404
        async with proxy.session.post("/v1/messages", json={"messages": []}) as answer:
            assert "id_slot" not in proxy.llama.bodies[-1]

    through(test, weights="untouched")


def test_the_last_save_is_at_the_end(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        text = await proxy.ask(P + Q[:100])
        await proxy.gateway.close()
        assert proxy.count("saves", "shutdown") == 1
        await proxy.cache.flush()
        proxy.llama.start()
        await proxy.gateway.identify()
        assert await proxy.evaluated(proxy.ask(P + Q[:100])) == (text, 1)

    through(test, weights="end", settings={"idle_s": 3600.0})


def test_an_idle_slot_is_saved(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        await proxy.ask(P + Q[:100])
        while not proxy.count("saves", "finish"):
            await asyncio.sleep(0)
        await proxy.settled()

    through(test, weights="idle")


def test_saves_are_lazy(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        prompt = P
        for _ in range(5):
            prompt += await proxy.ask(prompt) + Q[:20]
            await proxy.settled()
        saves = {path: n for path, n in proxy.llama.calls.items() if path.endswith("?save")}
        assert sum(saves.values()) == 2, "the probe, and after the first turn"

    through(test, weights="lazy", settings={"idle_s": 3600.0})


def test_a_save_that_the_daemon_refuses_is_tried_again(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.settled()
        (model,) = proxy.gateway._models.values()
        (slot,) = model.slots
        assert slot.saved == 0, "there is no disk tier"
        await proxy.ask(P)
        await proxy.settled()
        assert proxy.count("saves", "cold") == 2

    through(test, weights="refused", settings={"tier": Tier.DISK})


def test_status_pages(through: Through) -> None:
    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        await proxy.ask(P)
        async with proxy.session.get("/prefixd/stats") as answer:
            stats = json.loads(await answer.text())
        assert stats["connected"]
        assert stats["requests"] == {"missed": 1, "restored": 1}
        assert stats["tokens"]["restored"] > 1_000
        assert stats["models"][""]["block_tokens"] == 256
        async with proxy.session.get("/prefixd/metrics") as answer:
            metrics = await answer.text()
        assert 'prefixd_llama_server_requests_total{outcome="restored"} 1.0' in metrics

    through(test, weights="status")


@pytest.mark.parametrize("kind", ["plain", "windows", "recurrent"])
def test_a_request_is_one_look_up(through: Through, kind: str) -> None:
    """Neither the parts of a search nor the questions before a save are look-ups of their own."""

    async def test(proxy: Proxy) -> None:
        await proxy.ask(P)
        await proxy.forget()
        missed = proxy.cache.client.counters
        assert (missed["lookups"], missed["hits"]) == (1, 0)
        await proxy.ask(P)
        await proxy.settled()
        found = proxy.cache.client.counters
        assert (found["lookups"], found["hits"]) == (2, 1)
        assert found["lookup_tokens"] == 2 * missed["lookup_tokens"] >= 2 * 768
        assert found["hit_tokens"] == (768 if kind == "plain" else len(P))

    through(test, weights=f"one look-up {kind}", kind=kind)
