"""What a request to llama-server asks for, and what its answer tells. Pure.

Everything that is not understood here passes through untouched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

#: By the end of a path: the requests that are looked up in the cache.
_CHAT: Final = ("/chat/completions",)
_COMPLETION: Final = ("/completion", "/completions")
#: POST requests that evaluate nothing in a slot.
_HARMLESS: Final = (
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/lora-adapters",
    "/props",
    "/count_tokens",
    "/input_tokens",
    "/models/load",
    "/models/unload",
)
#: Fields that change what is in the slot afterwards: adapters for one request, and shifted keys.
_TAINTING: Final = {"lora": "adapters of its own", "n_cache_reuse": "reuse by shifting"}
#: Fields of a chat that do not change its prompt, and would be refused by or lost on the template.
_NOT_OF_THE_PROMPT: Final = ("stream", "stream_options", "max_tokens", "n_predict")
#: An answer's end that is kept to find its timings: the last event of a stream repeats all
#: settings, with the prompt.
KEPT_BYTES: Final = 1 << 20


class Asked(NamedTuple):
    """A request that the cache can serve."""

    chat: bool
    body: dict[str, Any]
    #: As it came.
    raw: bytes

    @property
    def model(self) -> str:
        """The model that a router is to use; empty: none was named."""
        name = self.body.get("model")
        return name if isinstance(name, str) else ""

    def in_slot(self, number: int, *, reuse: bool = True) -> bytes:
        """The body that llama-server gets: the same bytes, with a slot of our choice. `reuse`: of
        what is in there."""
        given = {"id_slot": number, "cache_prompt": reuse, "n_cache_reuse": 0}
        if any(name in self.body for name in given):
            return json.dumps({**self.body, **given}).encode()
        return self.raw.rstrip()[:-1] + b", " + json.dumps(given).encode()[1:]

    def template_body(self) -> dict[str, Any]:
        """What to ask `/apply-template` for."""
        return {k: v for k, v in self.body.items() if k not in _NOT_OF_THE_PROMPT}


class Bypassed(NamedTuple):
    """A request that passes through: why, in a few words that are counted."""

    why: str
    #: It may evaluate tokens in a slot that the server chooses.
    takes_a_slot: bool = True
    #: What it leaves in a slot is not the model's own state of its tokens.
    taints: bool = False


#: llama-server may read it, and do any of this.
UNREADABLE: Final = Bypassed("unreadable body", taints=True)


def understand(method: str, path: str, body: bytes, action: str = "") -> Asked | Bypassed:
    """What to do with a request. `path`: without its query, of which it is the `action`."""
    path = path.rstrip("/")
    if method != "POST" or path.endswith(_HARMLESS):
        return Bypassed("not a completion", takes_a_slot=False)
    if "/slots/" in path:
        # A restore may be of a file that somebody else made.
        return Bypassed("not a completion", takes_a_slot=False, taints=action == "restore")
    try:
        read = json.loads(str(body, "utf-8"))
    except (ValueError, RecursionError):
        return UNREADABLE if body else Bypassed("no body")
    if not isinstance(read, dict):
        return UNREADABLE
    for name, why in _TAINTING.items():
        if read.get(name):
            return Bypassed(why, taints=True)
    chat = path.endswith(_CHAT)
    if not chat and not path.endswith(_COMPLETION):
        return Bypassed("another endpoint")
    found = _why_bypassed(read) or (
        _why_chat_bypassed(read) if chat else _why_prompt_bypassed(read)
    )
    return Bypassed(found) if found else Asked(chat, read, body)


def _why_bypassed(body: Mapping[str, Any]) -> str | None:
    for name in ("n", "n_cmpl"):
        if body.get(name, 1) not in (1, None):
            return "several answers"
    if body.get("cache_prompt") is False:
        return "cache_prompt is false"
    if body.get("id_slot", -1) not in (-1, None):
        return "a slot of its own"
    return None


def _why_chat_bypassed(body: Mapping[str, Any]) -> str | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "unreadable body"
    for message in messages:
        if not isinstance(message, dict):
            return "unreadable body"
        content = message.get("content")
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return "media"
    return None


def _why_prompt_bypassed(body: Mapping[str, Any]) -> str | None:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return None
    if isinstance(prompt, dict):
        return "media"
    if not isinstance(prompt, list) or not prompt:
        return "unreadable body"
    if are_tokens(prompt):
        return None
    return "several or mixed prompts"


def are_tokens(values: Sequence[Any]) -> bool:
    """Whether they can be tokens: numbers that fit a slot file."""
    return all(type(each) is int and 0 <= each < 1 << 31 for each in values)


def shorter_chats(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Chats whose prompts are the likely beginnings of later ones: without the last message, and
    the system prompt (with the tools) alone."""
    messages: list[Any] = body["messages"]
    heads = [messages[:-1]] if len(messages) > 1 else []
    system = [each for each in messages[:1] if each.get("role") in ("system", "developer")]
    if system and len(messages) > 2:
        heads.append(system)
    return [{**body, "messages": head, "add_generation_prompt": False} for head in heads]


class Timings(NamedTuple):
    """What llama-server says about the prompt of one answer."""

    #: Tokens of the prompt that were in the slot, and those that it evaluated, in how long.
    cached_tokens: int
    evaluated_tokens: int
    evaluated_ms: float
    #: Those that are in the slot: the last one is not evaluated.
    generated_tokens: int


def timings_of(answer: bytes) -> Timings | None:
    """The timings in (the end of) an answer, streamed or not; None: there are none."""
    last = answer.rstrip()
    for line in [last, *reversed(last.splitlines())]:
        text = line.removeprefix(b"data: ")
        if not text.startswith(b"{") or b'"timings"' not in text:
            continue
        try:
            found = json.loads(text)["timings"]
            return Timings(
                int(found["cache_n"]),
                int(found["prompt_n"]),
                float(found["prompt_ms"]),
                max(0, int(found.get("predicted_n", 0)) - 1),
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return None
