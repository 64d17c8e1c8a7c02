"""A llama-server in this process, as far as the proxy before it can tell.

Its "model" hashes: the row of a token is a hash of the rows that it attends to, of the token, and
of the weights, and the next token follows from the last row. So a foreign or incomplete state gives
other text, as it would in a real one. It writes and reads slot files of the real form, counts what
it evaluates, and ends on files that the real one would not survive.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

#: Bytes of a row, in each of two layers' K and V.
ROW: Final = 16
LAYERS: Final = 2
WINDOW: Final = 8
MAGIC: Final = 0x67677371
BOS: Final = 1


class Dead(Exception):
    """The process ended with an assertion."""


@dataclass
class FakeSlot:
    tokens: list[int] = field(default_factory=list)
    #: The row of each token; None: a cell that no file brought.
    rows: list[bytes | None] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: bool = False


class FakeLlama:
    """One model. Its attributes are its command line and its counters."""

    def __init__(
        self,
        folder: Path,
        *,
        weights: str = "weights",
        kind: str = "plain",
        slots: int = 1,
        version: int = 3,
        swa_full: bool = False,
        cache_ram: bool = False,
        api_key: str | None = None,
        rope: float = 1.0,
    ) -> None:
        """`kind`: plain, windows or recurrent. `folder`: its --slot-save-path and its weights."""
        self.folder = folder
        self.weights, self.kind, self.version = weights, kind, version
        self.swa_full, self.cache_ram, self.api_key, self.rope = swa_full, cache_ram, api_key, rope
        self.path = folder / f"{hashlib.sha256(weights.encode()).hexdigest()[:8]}.gguf"
        self.path.write_text(weights)
        self.drafts = False
        #: Names of its one model, of which a router knows no others; empty: it is no router.
        self.names: set[str] = set()
        self.adapters: list[dict[str, Any]] = []
        self.context = 8192
        self.count = slots
        self.alive = True
        #: Calls by path and action; tokens evaluated; the bodies of generations.
        self.calls: Counter[str] = Counter()
        self.evaluated = 0
        self.bodies: list[dict[str, Any]] = []
        #: Wait for this before each generated token, or before a save.
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.save_goes_on = asyncio.Event()
        self.save_goes_on.set()
        self.restore_goes_on = asyncio.Event()
        self.restore_goes_on.set()
        self.generating = asyncio.Event()
        #: Answer calls to a path with this status, instead of what they ask for.
        self.refuses: dict[str, int] = {}
        #: Other answers, by path; the headers of what was echoed.
        self.answers: dict[str, Any] = {}
        self.heads: list[list[tuple[str, str]]] = []
        #: What becomes of the bytes of a saved slot.
        self.on_disk: Callable[[bytes], bytes] = bytes
        self.start()

    def start(self) -> None:
        """A new process."""
        self.alive = True
        self.marker = secrets.token_hex(8)
        self.slots = [FakeSlot() for _ in range(self.count)]

    # ---- the model

    def tokenize(self, text: str) -> list[int]:
        return [BOS, *(3 + byte for byte in text.encode())]

    def _row(self, rows: list[bytes | None], token: int, own: Any = None) -> bytes:
        """`own`: adapters of one request."""
        seen = rows[-(WINDOW - 1) :] if self.kind == "windows" else rows[-1:]
        scales = [(each.get("path"), each["scale"]) for each in own or self.adapters]
        form = (self.weights, self.rope, scales if any(s for _, s in scales) else None, token)
        attended = b"".join(bytes(ROW) if each is None else each for each in seen)
        return hashlib.sha256(repr(form).encode() + attended).digest()[:ROW]

    def _usable(self, slot: FakeSlot, prompt: list[int]) -> int:
        """How many tokens of a prompt need not be evaluated."""
        common = 0
        for one, other in zip(slot.tokens, prompt, strict=False):
            if one != other:
                break
            common += 1
        if self.kind == "recurrent":
            return common if common == len(slot.tokens) < len(prompt) else 0
        common = min(common, len(prompt) - 1)
        if self.kind == "windows" and not self.swa_full:
            # It wants one cell more than the window that the next token attends to.
            oldest = max(0, common - WINDOW)
            if any(row is None for row in slot.rows[oldest:common]):
                return 0
        return common

    def _evaluate(self, slot: FakeSlot, prompt: list[int], own: Any, *, keep: bool) -> int:
        """Returns how many tokens it had already. As in the real one, adapters of a request begin
        anew, and a request without any goes on with what such a request left."""
        cached = self._usable(slot, prompt) if keep and not own else 0
        del slot.tokens[cached:], slot.rows[cached:]
        for token in prompt[cached:]:
            slot.rows.append(self._row(slot.rows, token, own))
            slot.tokens.append(token)
            self.evaluated += 1
        slot.used = True
        return cached

    @staticmethod
    def _next(slot: FakeSlot) -> int:
        row = slot.rows[-1]
        assert row is not None
        return 3 + 97 + row[0] % 26

    # ---- slot files

    def write(self, slot: FakeSlot, number: int) -> bytes:
        """The file of a slot."""
        tokens = slot.tokens
        words = [-1, 1, len(tokens), *tokens, 0] if self.version >= 3 else tokens
        head = struct.pack(f"<3I{len(words)}i", MAGIC, self.version, len(words), *words)
        if not tokens:
            return head
        if self.kind == "recurrent":
            last = slot.rows[-1]
            assert last is not None
            return head + struct.pack("<4I", 1, len(tokens) - 1, 1, number) + last
        cells = [(n, row or bytes(ROW)) for n, row in enumerate(slot.rows)]
        out = head + self._section(cells, number)
        if self.kind == "windows":
            out += self._section(cells[-WINDOW:], number)
        return out

    def _section(self, cells: list[tuple[int, bytes]], number: int) -> bytes:
        out = struct.pack("<2I", 1, len(cells))
        for position, _ in cells:
            out += struct.pack("<3I", position, 1, number)
        out += struct.pack("<2I", 0, LAYERS) + (bytes(8) if self.version >= 4 else b"")
        for layer in range(2 * LAYERS):
            out += struct.pack("<iQ", 1, ROW)
            out += b"".join(bytes(byte ^ layer for byte in row) for _, row in cells)
        return out

    def read(self, data: bytes) -> FakeSlot:
        """The slot that a file makes. Raises Dead where the real server asserts."""
        try:
            magic, version, count = struct.unpack_from("<3I", data)
            if (magic, version) != (MAGIC, self.version):
                raise ValueError
            words = list(struct.unpack_from(f"<{count}i", data, 12))
        except (struct.error, ValueError):
            raise ValueError("unknown (magic, version)") from None
        tokens = words[3:-1] if self.version >= 3 else words
        at = 12 + 4 * count
        if self.kind == "recurrent":
            if len(data) != at + 16 + ROW:
                raise Dead
            return FakeSlot(tokens, [None] * (len(tokens) - 1) + [data[at + 16 :]], used=True)
        cells, at = self._read_section(data, at)
        if self.kind == "windows":
            cells, at = self._read_section(data, at)
        if at != len(data) or not cells:
            raise Dead
        return FakeSlot(tokens, [cells.get(n) for n in range(len(tokens))], used=True)

    def _read_section(self, data: bytes, at: int) -> tuple[dict[int, bytes], int]:
        try:
            _, count = struct.unpack_from("<2I", data, at)
            positions = [struct.unpack_from("<3I", data, at + 8 + 12 * n)[0] for n in range(count)]
        except struct.error:
            raise Dead from None
        at += 8 + 12 * count + 8 + (8 if self.version >= 4 else 0)
        first = at + 12
        cells = {p: data[first + ROW * n : first + ROW * (n + 1)] for n, p in enumerate(positions)}
        return cells, at + 2 * LAYERS * (12 + ROW * count)

    # ---- HTTP

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Every call."""
        action = request.query.get("action", "")
        path = request.path + (f"?{action}" if action else "")
        self.calls[path] += 1
        if not self.alive:
            _hang_up(request)
        if self.api_key and request.path != "/health":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if given != self.api_key:
                return _error(401, "Invalid API Key")
        for refused, status in self.refuses.items():
            if path.endswith(refused):
                return _error(status, "refused")
        try:
            return await self._answer(request, action)
        except Dead:
            self.alive = False
            self.calls["assertions"] += 1
            _hang_up(request)
        return _error(500, "unreachable")

    async def _answer(self, request: web.Request, action: str) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/echo":
            self.heads.append(list(request.headers.items()))
            headers = {"X-Seen": request.headers.get("X-Given", ""), "X-Own": "1"}
            own = {"Connection": "X-Mine", "X-Mine": "1", "Set-Cookie": "a=1"}
            return web.Response(status=418, body=body, headers={**headers, **own})
        if request.path in self.answers:
            return web.json_response(self.answers[request.path])
        try:
            read: Any = json.loads(body) if body else {}
        except RecursionError:
            return _error(400, "deeper than it can read")
        if self.names:
            named = request.query.get("model") or (read.get("model") if body else None)
            if named is None and request.path == "/props":
                return web.json_response({"role": "router"})
            if named not in self.names and request.path != "/health":
                return _error(400, "model not found")
        match request.path:
            case "/health":
                return web.json_response({"status": "ok"})
            case "/props":
                return web.json_response(self.props())
            case "/slots":
                return web.json_response([self._told(n, s) for n, s in enumerate(self.slots)])
            case "/lora-adapters" if request.method == "GET":
                return web.json_response(self.adapters)
            case "/lora-adapters":
                for each in read:
                    self.adapters[each["id"]]["scale"] = each["scale"]
                return web.json_response({"success": True})
            case "/tokenize":
                return web.json_response({"tokens": self.tokenize(read["content"])})
            case "/apply-template":
                return web.json_response({"prompt": self.template(read)})
            case path if path.startswith("/slots/"):
                return await self._act(int(path.rpartition("/")[2]), action, read)
            case "/completion" | "/v1/completions":
                prompt = read["prompt"]
                tokens = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
                return await self._generate(request, read, tokens)
            case "/v1/chat/completions" | "/v1/messages":
                return await self._generate(request, read, self.tokenize(self.template(read)))
        return _error(404, "File Not Found")

    def props(self) -> dict[str, Any]:
        return {
            "media_marker": self.marker,
            "build_info": "b1-fake",
            "model_path": str(self.path),
            "total_slots": self.count,
            "default_generation_settings": {"n_ctx": self.context},
        }

    @staticmethod
    def template(body: dict[str, Any]) -> str:
        text = "".join(f"<{each['role']}>{each['content']}\n" for each in body["messages"])
        return text + ("<assistant>" if body.get("add_generation_prompt", True) else "")

    def _told(self, number: int, slot: FakeSlot) -> dict[str, Any]:
        told = {
            "id": number,
            "speculative": self.drafts,
            "is_processing": slot.busy.locked(),
        }
        if slot.used:
            told["n_prompt_tokens"] = len(slot.tokens)
        return told

    async def _act(self, number: int, action: str, body: dict[str, Any]) -> web.Response:
        slot = self.slots[number]
        async with slot.busy:
            if action == "erase":
                self.slots[number].tokens, self.slots[number].rows = [], []
                return web.json_response({"id_slot": number, "n_erased": len(slot.tokens)})
            path = self.folder / body["filename"]
            if action == "save":
                await self.save_goes_on.wait()
                if self.cache_ram:
                    slot.tokens, slot.rows = [], []
                data = self.write(slot, number)
                path.write_bytes(self.on_disk(data))
                told = {"n_saved": len(slot.tokens), "n_written": len(data)}
                return web.json_response({"id_slot": number, **told})
            await self.restore_goes_on.wait()
            try:
                read = self.read(path.read_bytes())
            except (OSError, ValueError) as why:
                slot.tokens, slot.rows = [], []
                return _error(400, f"Unable to restore slot: {why}")
            slot.tokens, slot.rows, slot.used = read.tokens, read.rows, True
            return web.json_response({"id_slot": number, "n_restored": len(slot.tokens)})

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: list[int]
    ) -> web.StreamResponse:
        if body.get("n_predict") != 0:
            self.bodies.append(body)
        wanted = body.get("n_predict", body.get("max_tokens", 4))
        number = body.get("id_slot", -1)
        slot = self.slots[number % self.count] if number >= 0 else self._chosen(prompt)
        async with slot.busy:
            keep = body.get("cache_prompt", True)
            cached = self._evaluate(slot, prompt, body.get("lora"), keep=keep)
            answer: web.StreamResponse | None = None
            if body.get("stream"):
                answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await answer.prepare(request)
            text = ""
            if wanted:
                self.generating.set()
            for number in range(wanted):
                await self.go_on.wait()
                if not self.alive:
                    _hang_up(request)
                if number:
                    token = self._next(slot)
                    slot.rows.append(self._row(slot.rows, token))
                    slot.tokens.append(token)
                text += chr(self._next(slot) - 3)
                if answer is not None:
                    await answer.write(_event({"content": text[-1], "stop": False}))
        timings = {
            "cache_n": cached,
            "prompt_n": len(prompt) - cached,
            "prompt_ms": 100.0 * (len(prompt) - cached),  # slow: a restore is always worth it
            "predicted_n": wanted,
        }
        last = {"content": "" if answer is not None else text, "stop": True, "timings": timings}
        if answer is None:
            return web.json_response(last)
        await answer.write(_event(last))
        await answer.write_eof()
        return answer

    def _chosen(self, prompt: list[int]) -> FakeSlot:
        return max(self.slots, key=lambda slot: (not slot.busy.locked(), slot.tokens == prompt))

    def application(self) -> web.Application:
        """To be served."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message}}, status=status)


def _hang_up(request: web.Request) -> None:
    transport = request.transport
    if transport is not None:
        transport.abort()
    raise ConnectionResetError


def plain_answer(llama: FakeLlama, prompt: list[int], wanted: int) -> str:
    """What the model says without any cache."""
    rows: list[bytes | None] = []
    for token in prompt:
        rows.append(llama._row(rows, token))
    text = ""
    for _ in range(wanted):
        last = rows[-1]
        assert last is not None
        token = 3 + 97 + last[0] % 26
        text += chr(token - 3)
        rows.append(llama._row(rows, token))
    return text


def leftovers(folder: Path) -> list[str]:
    """Slot files that are still there."""
    return sorted(path.name for path in folder.glob("*.bin"))


async def _main(arguments: list[str]) -> int:
    """A program that takes llama-server's arguments as far as the wrapper sets them, and ends as
    `--exit` says, with a signal or a POST to /exit. After a POST to /hang its saves hang. On TCP it
    tells its port in the file `--tell-port`."""
    import signal

    pairs = [each for each in arguments if each != "--no-context-shift"]
    options = dict(zip(pairs[::2], pairs[1::2], strict=True))
    llama = FakeLlama(
        Path(options["--slot-save-path"]),
        weights=options.get("-m", "w"),
        api_key=options.get("--api-key"),
    )
    llama.cache_ram = options.get("--cache-ram") != "0"
    stop: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.put_nowait, number)
    app = llama.application()

    async def end(_request: web.Request) -> web.Response:
        stop.put_nowait(0)
        return web.Response()

    async def hang(_request: web.Request) -> web.Response:
        llama.save_goes_on.clear()
        return web.Response()

    app.router.add_post("/exit", end)
    app.router.add_post("/hang", hang)
    app.router._resources.reverse()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    if told_port := options.get("--tell-port"):
        await web.TCPSite(runner, options["--host"], int(options["--port"])).start()
        Path(told_port).write_text(str(runner.addresses[0][1]))
    else:
        await web.UnixSite(runner, options["--host"]).start()
    number = await stop.get()
    await runner.cleanup()
    if told := options.get("--tell"):
        Path(told).write_text(f"{int(number)}\n{options['--slot-save-path']}\n")
    return int(options.get("--exit", 0))


if __name__ == "__main__":
    import sys

    sys.exit(asyncio.run(_main(sys.argv[1:])))
