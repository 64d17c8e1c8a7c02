"""llama-cpp-python itself, on a small model that the tests make. `make engines` runs this file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client, Tier
from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.tiny_models import write_gguf
from tests.support.daemon import private_daemon

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from prefixd.client.connectors.llama_cpp import (  # noqa: E402
    PrefixdCache,
    attach_to_server,
    block_sequences,
)

PROMPT = [1] + [3 + (n * n * 31 + n * 7) % 250 for n in range(2_999)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="256MiB", shm="256MiB") as daemon:
        yield daemon


def make(model: Path, *, blocks: bool) -> Any:
    options = {"n_ctx": 4096, "verbose": False, "seed": 1, "n_threads": 1, "n_threads_batch": 1}
    if not blocks:
        return llama_cpp.Llama(str(model), **options)
    with block_sequences():
        return llama_cpp.Llama(str(model), **options)


def run(llama: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The text of a greedy completion, and how many tokens were evaluated for it."""
    evaluated = 0
    real = type(llama).eval

    def counting(self: Any, tokens: list[int]) -> Any:
        nonlocal evaluated
        evaluated += len(tokens)
        return real(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "eval", counting)
        out = llama.create_completion(prompt, max_tokens=16, temperature=0.0)
    return out["choices"][0]["text"], evaluated


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_the_same_text_from_fewer_tokens(
    daemon: PrivateDaemon, model: Path, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging = [*PROMPT[:2_600], *range(5, 205)]
    plain = make(model, blocks=blocks)
    expected, all_tokens = run(plain, PROMPT, monkeypatch)
    assert all_tokens >= len(PROMPT)
    plain.reset()
    other, _ = run(plain, diverging, monkeypatch)
    with Client(daemon.address) as client:
        for number in range(2):
            llama = make(model, blocks=blocks)
            cache = PrefixdCache.of(llama, client)
            assert cache._context.has_spare_sequence == blocks
            llama.set_cache(cache)
            text, evaluated = run(llama, PROMPT, monkeypatch)
            assert text == expected
            assert client.flush()
            if number:
                print(f"{blocks=}: the same prompt again, {evaluated} of {all_tokens}")
                assert evaluated <= 30
                text, evaluated = run(llama, PROMPT, monkeypatch)
                assert (text, evaluated <= 30) == (expected, True)
        llama = make(model, blocks=blocks)
        llama.set_cache(PrefixdCache.of(llama, client))
        text, evaluated = run(llama, diverging, monkeypatch)
        print(f"{blocks=}: diverging at 2,600, {evaluated}")
        assert text == other
        assert evaluated <= 300 or not blocks


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize("how", ["truncated", "longer", "foreign", "another block"])
def test_a_spoilt_state_never_affects_the_text(
    daemon: PrivateDaemon, model: Path, blocks: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client has saved it under the right keys, with valid checksums."""
    expected, _ = run(make(model, blocks=blocks), PROMPT, monkeypatch)
    with Client(daemon.address) as client:
        llama = make(model, blocks=blocks)
        cache = PrefixdCache.of(llama, client)
        llama.set_cache(cache)
        run(llama, PROMPT, monkeypatch)
        assert client.flush()
        keys = cache._blocks(PROMPT)[0] if blocks else cache._prefixes(PROMPT)[0][:1]
        with client.claim(keys) as hit:
            states = [bytearray(entry.payload_bytes) for entry in hit.entries]
            assert all(hit.restore_into(states).restored)
        spoilt = {
            "truncated": [bytes(state[:-1]) for state in states],
            "longer": [bytes(state) + bytes(8) for state in states],
            "foreign": [os.urandom(len(state)) for state in states],
            "another block": [bytes(state) for state in states[1:] + states[:1]],
        }[how]
        assert {status.name for status in client.delete(keys)} == {"DELETED"}
        for key, state in zip(keys, spoilt, strict=True):
            assert client.save(key, state, tier=Tier.RAM).ok
        other = make(model, blocks=blocks)
        other.set_cache(PrefixdCache.of(other, client))
        text, evaluated = run(other, PROMPT, monkeypatch)
    assert text == expected
    print(f"{blocks=}, {how}: {evaluated} evaluated")
    if blocks or how != "another block":  # a single state has no other to be swapped with
        assert evaluated >= len(PROMPT)


def test_the_server_of_llama_cpp_python_finds_the_prompt_too(
    daemon: PrivateDaemon, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sse_starlette")
    app = pytest.importorskip("llama_cpp.server.app")
    proxy = pytest.importorskip("llama_cpp.server.model").LlamaProxy
    settings = pytest.importorskip("llama_cpp.server.settings")
    testclient = pytest.importorskip("starlette.testclient")
    # `attach_to_server` replaces this function for the whole process, so it is restored.
    name = "load_llama_from_model_settings"
    monkeypatch.setattr(proxy, name, staticmethod(getattr(proxy, name)))
    evaluated: list[int] = []
    real = llama_cpp.Llama.eval

    def counting(self: Any, tokens: list[int]) -> Any:
        evaluated.append(len(tokens))
        return real(self, tokens)

    monkeypatch.setattr(llama_cpp.Llama, "eval", counting)
    request = {
        "prompt": "".join(chr(97 + (n * n * 31 + n * 7) % 26) for n in range(1_500)),
        "max_tokens": 8,
        "temperature": 0.0,
        "logprobs": None,
    }

    def complete() -> tuple[str, int]:
        """Complete the prompt on a new server. Returns the text, and the tokens evaluated."""
        evaluated.clear()
        of_model = settings.ModelSettings(
            model=str(model), n_ctx=4096, verbose=False, n_threads=1, n_threads_batch=1
        )
        made = app.create_app(server_settings=settings.ServerSettings(), model_settings=[of_model])
        with testclient.TestClient(made) as http:
            answer = http.post("/v1/completions", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], sum(evaluated)

    expected, alone = complete()
    with Client(daemon.address) as client:
        attach_to_server(lambda llama: PrefixdCache.of(llama, client))
        first, cold = complete()
        assert client.flush()
        second, warm = complete()
    print(f"server: {alone} without a cache, {cold} with an empty one, {warm} with a full one")
    assert first == second == expected
    assert alone >= 1_500 <= cold
    assert warm <= 30


CHILD = """
import sys
from pathlib import Path
from prefixd.client import Client, Tier
from prefixd.client.connectors.llama_cpp import PrefixdCache
from tests.engines.test_llama_cpp import PROMPT, make
address, model = sys.argv[1:]
llama = make(Path(model), blocks=True)
client = Client(address)
llama.set_cache(PrefixdCache.of(llama, client, tier=Tier.SHM))
evaluated = 0
real = llama.eval
def counting(tokens):
    global evaluated
    evaluated += len(tokens)
    return real(tokens)
llama.eval = counting
out = llama.create_completion(PROMPT, max_tokens=16, temperature=0.0)
print(evaluated, repr(out["choices"][0]["text"]))
client.flush()
client.close()
"""


def test_another_process_after_a_killed_daemon(daemon: PrivateDaemon, model: Path) -> None:
    def child() -> tuple[int, str]:
        args = [sys.executable, "-c", CHILD, daemon.address, str(model)]
        output = subprocess.run(args, capture_output=True, text=True, check=True).stdout
        count, text = output.split(" ", 1)
        return int(count), text

    first, text = child()
    daemon.kill()
    down, while_down = child()
    daemon.start()
    second, again = child()
    print(f"other process, after kill -9: {first}, {down} while it was down, {second}")
    assert (while_down, again) == (text, text)
    assert down >= len(PROMPT) <= first
    assert second <= 30
