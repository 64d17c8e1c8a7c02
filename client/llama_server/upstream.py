"""The calls of llama-server's own interface that the proxy makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from .requests import are_tokens
from .slot_file import Tokens

#: Its server closes idle connections without a warning, so each call has its own.
_CONNECT_TIMEOUT_S: Final = 5.0
#: Calls that answer as soon as the server is between two batches, which may be long.
_CALL_TIMEOUT_S: Final = 120.0
#: A long prompt on a slow machine, or the end of one.
EVALUATION_TIMEOUT_S: Final = 3600.0
#: Requests of clients have no end of their own.
_NO_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)

Auth = Mapping[str, str]


class UpstreamRefused(Exception):
    """llama-server did not do what it was asked for."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        #: Of its answer; 0: the answer is no such answer.
        self.status = status

    @property
    def for_good(self) -> bool:
        """Whether it would refuse this again."""
        return 400 <= self.status < 500 or self.status == 501


#: What a call of ours may fail with. None of it is a reason for a request to fail.
FAILURES: Final = (UpstreamRefused, aiohttp.ClientError, asyncio.TimeoutError, OSError)


class Upstream:
    """One llama-server, which may be a router of several models."""

    def __init__(self, url: str, unix_socket: str | None = None) -> None:
        """`url`: with the prefix of its paths. `unix_socket`: where it listens, if not on TCP. To
        be made in the loop that uses it."""
        self.url = url.rstrip("/")
        connector = (
            aiohttp.UnixConnector(unix_socket, limit=0, force_close=True)
            if unix_socket
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        self.session = aiohttp.ClientSession(
            connector=connector,
            timeout=_NO_TIMEOUT,
            auto_decompress=False,
            # One client's cookies are nothing to the next one.
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self.session.close()


class ModelServer:
    """The server of one model: of a router's models one, else the only one."""

    def __init__(self, upstream: Upstream, model: str, auth: Auth, *, load: bool = True) -> None:
        """`auth`: the headers that authorise. `load`: a router may load the model for a call."""
        self._upstream = upstream
        self._auth = auth
        self._model = {"model": model} if model else {}
        self._query = self._model if load or not model else {**self._model, "autoload": "false"}

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        **query: str,
    ) -> Any:
        """POST `body`, or GET without one, and return the JSON of the answer. Raises one of
        `FAILURES`."""
        async with self._upstream.session.request(
            "GET" if body is None else "POST",
            self._upstream.url + path,
            json=None if body is None else body | self._model,
            params=self._query | query,
            headers=self._auth,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
        ) as answer:
            raw = await answer.read()
            if answer.status != 200:
                said = raw[:200].decode(errors="replace")
                raise UpstreamRefused(f"{path}: {answer.status} {said}", answer.status)
            try:
                return json.loads(raw)
            except (ValueError, RecursionError):
                raise UpstreamRefused(f"{path}: {raw[:200].decode(errors='replace')}") from None

    async def tokenize(self, text: str) -> list[int]:
        """The tokens of a prompt, as a completion makes them."""
        body = {"content": text, "add_special": True, "parse_special": True}
        tokens = _field(await self.call("/tokenize", body), "tokens")
        if not isinstance(tokens, list) or not are_tokens(tokens):
            raise UpstreamRefused("/tokenize: these are no tokens")
        return tokens

    async def apply_template(self, body: dict[str, Any]) -> str:
        """The prompt of a chat."""
        prompt = _field(await self.call("/apply-template", body), "prompt")
        if not isinstance(prompt, str):
            raise UpstreamRefused("/apply-template: no prompt")
        return prompt

    async def evaluate(self, slot: int, tokens: Tokens, *, keep: bool = True) -> Any:
        """Evaluate a prompt in a slot, and nothing after it, however long it takes. Returns the
        answer, with its timings; None: some builds make no answer of a token that is no text. What
        was evaluated is in the slot all the same."""
        body = {
            "prompt": tokens.tolist(),
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": keep,
            "temperature": 0.0,
        }
        try:
            return await self.call("/completion", body, timeout_s=EVALUATION_TIMEOUT_S)
        except UpstreamRefused as why:
            if why.status != 500:
                raise
            return None

    async def save(self, slot: int, name: str, timeout_s: float) -> int:
        """Save a slot to a file of its folder. Returns how many bytes it wrote."""
        body = {"filename": name}
        answer = await self.call(f"/slots/{slot}", body, action="save", timeout_s=timeout_s)
        return _number(answer, "n_written")

    async def restore(self, slot: int, name: str) -> int:
        """Restore a slot from a file of its folder. Returns how many tokens are in it."""
        body = {"filename": name}
        answer = await self.call(f"/slots/{slot}", body, action="restore")
        return _number(answer, "n_restored")

    async def erase(self, slot: int, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        """Empty a slot. It waits until nothing is evaluated in it."""
        await self.call(f"/slots/{slot}", {}, action="erase", timeout_s=timeout_s)


def _field(answer: Any, name: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise UpstreamRefused(f"an answer without {name!r}")
    return answer[name]


def _number(answer: Any, name: str) -> int:
    found = _field(answer, name)
    if type(found) is not int:
        raise UpstreamRefused(f"an answer with {name!r} {found!r}")
    return found
