"""Which requests are looked up, which pass through, and what answers tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixd.client.llama_server.requests import (
    Asked,
    Bypassed,
    Timings,
    shorter_chats,
    timings_of,
    understand,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def asked(path: str, body: Any) -> Asked | Bypassed:
    return understand("POST", path, json.dumps(body).encode())


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/chat/completions", "/prefix/v1/chat/completions/"]
)
def test_chats(path: str) -> None:
    found = asked(path, CHAT)
    assert isinstance(found, Asked)
    assert found.chat
    sent = json.loads(found.in_slot(3))
    assert sent == {**CHAT, "id_slot": 3, "cache_prompt": True, "n_cache_reuse": 0}


def test_the_rest_of_a_body_stays_as_it_came() -> None:
    body = b'{ "prompt":"\\u00e4",  "seed": 1e400, "x": 0.10 }\n'
    found = understand("POST", "/completion", body)
    assert isinstance(found, Asked)
    sent = found.in_slot(2, reuse=False)
    assert sent.startswith(body[:-3])
    assert json.loads(sent)["cache_prompt"] is False
    # What it said of its slot itself is said once.
    body = b'{"prompt": "a", "id_slot": -1, "cache_prompt": true}'
    found = understand("POST", "/completion", body)
    assert isinstance(found, Asked)
    assert found.in_slot(2).count(b"id_slot") == 1


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completions"])
@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]])
def test_completions(path: str, prompt: Any) -> None:
    found = asked(path, {"prompt": prompt, "model": "m"})
    assert isinstance(found, Asked)
    assert (found.chat, found.model) == (False, "m")


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/completion", {"prompt": [2**31]}, "several or mixed prompts"),
        ("/completion", {"prompt": [-1]}, "several or mixed prompts"),
        ("/completion", {"prompt": "a", "n": 2}, "several answers"),
        ("/completion", {"prompt": "a", "cache_prompt": False}, "cache_prompt is false"),
        ("/completion", {"prompt": "a", "id_slot": 0}, "a slot of its own"),
        ("/completion", {"prompt": ["a", "b"]}, "several or mixed prompts"),
        ("/completion", {"prompt": [1, "b"]}, "several or mixed prompts"),
        ("/completion", {"prompt": [True]}, "several or mixed prompts"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": []}}, "media"),
        ("/completion", {"prompt": []}, "unreadable body"),
        ("/completion", {}, "unreadable body"),
        ("/v1/chat/completions", {"messages": "hi"}, "unreadable body"),
        ("/v1/chat/completions", {"messages": ["hi"]}, "unreadable body"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "media",
        ),
        ("/v1/messages", CHAT, "another endpoint"),
        ("/v1/responses", {"input": "a"}, "another endpoint"),
        ("/infill", {"prompt": "a"}, "another endpoint"),
    ],
)
def test_what_passes_through_untouched(path: str, body: Any, why: str) -> None:
    assert asked(path, body) == Bypassed(why)


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/infill", "/v1/messages"])
def test_what_leaves_other_states_in_a_slot(path: str) -> None:
    lora = {**CHAT, "prompt": "a", "lora": [{"id": 0, "scale": 1}]}
    assert asked(path, lora) == Bypassed("adapters of its own", taints=True)
    shifted = {**CHAT, "prompt": "a", "n_cache_reuse": 256}
    assert asked(path, shifted) == Bypassed("reuse by shifting", taints=True)
    assert asked(path, [1]) == Bypassed("unreadable body", taints=True)


def test_text_in_parts_is_no_media() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert isinstance(
        asked("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}), Asked
    )


@pytest.mark.parametrize(
    "body", [b"{", b"\xff", b"[" * 100_000, json.dumps({"prompt": "a"}).encode("utf-16")]
)
def test_bodies_that_cannot_be_read(body: bytes) -> None:
    assert understand("POST", "/completion", body) == Bypassed("unreadable body", taints=True)


def test_a_request_without_a_body_leaves_nothing() -> None:
    assert understand("POST", "/completion", b"") == Bypassed("no body")


def test_a_slot_that_a_client_restores() -> None:
    found = understand("POST", "/slots/0", b"{}", "restore")
    assert found == Bypassed("not a completion", takes_a_slot=False, taints=True)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/slots/0"),
        ("POST", "/lora-adapters"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
def test_what_evaluates_nothing(method: str, path: str) -> None:
    found = understand(method, path, b"{}")
    assert isinstance(found, Bypassed)
    assert not found.takes_a_slot
    assert not found.taints


def test_the_chats_that_later_ones_begin_with() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    without_last, system = shorter_chats({"messages": messages, "tools": [1]})
    assert without_last["messages"] == messages[:-1]
    assert system["messages"] == messages[:1]
    assert all(each["tools"] == [1] and not each["add_generation_prompt"] for each in (system,))
    assert shorter_chats(CHAT) == []
    assert len(shorter_chats({"messages": messages[1:]})) == 1


TIMINGS = {"cache_n": 5, "prompt_n": 7, "prompt_ms": 2.5, "predicted_n": 3}


def test_timings_of_whole_answers_and_of_streams() -> None:
    expected = Timings(5, 7, 2.5, 2)
    whole = json.dumps({"content": "a", "timings": TIMINGS}).encode()
    assert timings_of(whole) == expected
    stream = b'data: {"content": "\\"timings\\": {"}\n\ndata: ' + whole + b"\n\n"
    assert timings_of(stream) == expected
    assert timings_of(stream + b"data: [DONE]\n\n") == expected
    assert timings_of(stream[20:] + b"data: [DONE]\n\n") == expected, "its beginning was dropped"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"data: [DONE]\n\n",
        b'{"timings": 1}',
        b'{"timings": {"cache_n": null}}',
        b'{"content": "\\"timings\\""}',
        b"\xff\xfe",
        b'data: {"timings"',
    ],
)
def test_answers_without_timings(answer: bytes) -> None:
    assert timings_of(answer) is None
