"""The llama-cpp-python connector with a real daemon, and a context made of lists as the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace

import pytest

from prefixd.client import Client, Namespace
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.connectors import llama_cpp
from prefixd.connectors.engine import UnsupportedEngine
from prefixd.connectors.llama_cpp import PrefixdCache
from tests.support.daemon import private_daemon

BLOCK = 8
PROMPT = list(range(100, 150))


class FakeContext:
    """A context in which the state of a token is the token itself."""

    def __init__(self, *, blocks: bool, can_be_cut: bool = True) -> None:
        self.has_spare_sequence = blocks
        self.can_be_cut = can_be_cut
        self.state_of: list[int] = []
        self.evaluated: list[int] = []
        self.damaged = False

    def run(self, cache: PrefixdCache, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """Do what `Llama` does with a prompt. Returns how many tokens it had to evaluate."""
        with pytest.raises(KeyError):
            cache[prompt]
        known = 0
        while known < min(len(self.evaluated), len(prompt) - 1) and (
            self.evaluated[known] == prompt[known]
        ):
            known += 1
        if not self.can_be_cut and known < len(self.evaluated):
            known = 0
        assert self.state_of[:known] == list(prompt[:known])
        tokens = [*prompt, *answer]
        self.state_of, self.evaluated = list(tokens), list(tokens)
        cache[tokens] = object()
        return len(prompt) - known

    # ---- as LlamaContext

    def tokens(self) -> list[int]:
        return list(self.evaluated)

    def set_tokens(self, tokens: Sequence[int]) -> None:
        self.evaluated = list(tokens)

    def cut(self, token_count: int) -> None:
        self.state_of = self.state_of[:token_count]

    def block(self, first: int, last: int) -> bytearray:
        return self._bytes(self.state_of[first:last])

    def load_block(self, data: bytearray, first: int, last: int) -> bool:
        tokens = self._tokens(data)
        if self.damaged or len(tokens) != last - first or len(self.state_of) != first:
            return False
        self.state_of += tokens
        return True

    def state(self) -> bytearray:
        return self._bytes(self.state_of)

    def load_state(self, data: bytearray, token_count: int) -> bool:
        tokens = self._tokens(data)
        good = not self.damaged and len(tokens) == token_count
        self.state_of = tokens if good else []
        return good

    def _bytes(self, tokens: Sequence[int]) -> bytearray:
        return bytearray(b"".join(token.to_bytes(4, "little") for token in tokens))

    def _tokens(self, data: bytearray) -> list[int]:
        return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as client:
        yield client


def cache_of(context: FakeContext, client: Client, namespace: Namespace) -> PrefixdCache:
    return PrefixdCache(context, namespace, client, block_tokens=BLOCK)


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(os.urandom(32), "gguf", b"c" * 32)


def test_a_prompt_is_found_block_by_block(client: Client, namespace: Namespace) -> None:
    first = FakeContext(blocks=True)
    assert first.run(cache_of(first, client, namespace), PROMPT, [7] * 10) == len(PROMPT)
    assert client.flush()
    again = FakeContext(blocks=True)
    cache = cache_of(again, client, namespace)
    assert PROMPT in cache
    assert again.run(cache, PROMPT) == 1
    diverging = [*PROMPT[:30], 1, *PROMPT[31:]]
    other = FakeContext(blocks=True)
    assert other.run(cache_of(other, client, namespace), diverging) == len(PROMPT) - 24
    continued = FakeContext(blocks=True)
    assert continued.run(cache_of(continued, client, namespace), [*PROMPT, *[7] * 10, 1]) == 5


def test_what_is_in_the_context_is_not_loaded_again(client: Client, namespace: Namespace) -> None:
    context = FakeContext(blocks=True)
    cache = cache_of(context, client, namespace)
    context.run(cache, PROMPT)
    assert client.flush()
    before = client.counters["restored_entries"]
    assert context.run(cache, PROMPT) == 1
    assert client.counters["restored_entries"] == before
    context.evaluated = context.state_of = PROMPT[:20]
    assert context.run(cache, PROMPT) == 1
    assert client.counters["restored_entries"] == before + 5, (
        "only the blocks behind the first 20 tokens"
    )  # type: ignore[operator]


@pytest.mark.parametrize("can_be_cut", [True, False], ids=["attention", "recurrent"])
def test_whole_states(client: Client, namespace: Namespace, can_be_cut: bool) -> None:
    answer = [7] * 10
    first = FakeContext(blocks=False, can_be_cut=can_be_cut)
    first.run(cache_of(first, client, namespace), PROMPT, answer)
    assert first.state_of == [*PROMPT, *answer]
    assert client.flush()
    turn = FakeContext(blocks=False, can_be_cut=can_be_cut)
    cache = cache_of(turn, client, namespace)
    assert turn.run(cache, [*PROMPT, *answer, 5, 6]) == 2
    again = FakeContext(blocks=False, can_be_cut=can_be_cut)
    evaluated = again.run(cache_of(again, client, namespace), PROMPT)
    assert evaluated == (1 if can_be_cut else len(PROMPT))
    assert (PROMPT in cache) == can_be_cut


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_a_state_that_the_engine_refuses_is_not_there(
    client: Client, namespace: Namespace, blocks: bool
) -> None:
    first = FakeContext(blocks=blocks)
    first.run(cache_of(first, client, namespace), PROMPT)
    assert client.flush()
    other = FakeContext(blocks=blocks)
    other.damaged = True
    assert other.run(cache_of(other, client, namespace), PROMPT) == len(PROMPT)


def test_without_a_daemon_everything_is_evaluated(
    namespace: Namespace, tmp_path: os.PathLike[str]
) -> None:
    with Client(f"unix:{tmp_path}/none.sock") as client:
        for blocks in (True, False):
            context = FakeContext(blocks=blocks)
            assert context.run(cache_of(context, client, namespace), PROMPT) == len(PROMPT)


def test_what_fails_on_the_way_is_no_failed_request(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = FakeContext(blocks=True)
    cache = cache_of(context, client, namespace)
    monkeypatch.setattr(client, "leading_run", lambda *_: 1 / 0)
    assert context.run(cache, PROMPT) == len(PROMPT)
    assert PROMPT not in cache


# ---- the adapter


def test_without_the_engine_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", None)
    with pytest.raises(UnsupportedEngine, match=r"needs llama-cpp-python \(made for 0\.3\.36\)"):
        llama_cpp.low_level()


def fake_library(monkeypatch: pytest.MonkeyPatch, *without: str) -> ModuleType:
    library = ModuleType("llama_cpp.llama_cpp")
    for name in llama_cpp._NEEDED:
        if name not in without:
            setattr(library, name, lambda *_: 0)
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", library)
    return library


def test_another_engine_is_refused_when_it_is_attached(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    fake_library(monkeypatch, "llama_memory_seq_cp")
    with pytest.raises(UnsupportedEngine, match="it has no llama_memory_seq_cp; it was made for"):
        PrefixdCache.of(SimpleNamespace(), client)
    fake_library(monkeypatch)
    with pytest.raises(UnsupportedEngine, match="no attribute '_ctx'"):
        PrefixdCache.of(SimpleNamespace(), client)


def test_a_llama_made_within_has_a_spare_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_library(monkeypatch)
    default = SimpleNamespace(n_seq_max=1, kv_unified=False)
    library.llama_context_default_params = lambda: default  # type: ignore[attr-defined]
    made = library.llama_context_default_params
    with llama_cpp.block_sequences():
        params = library.llama_context_default_params()
    assert (params.n_seq_max, params.kv_unified) == (2, True)
    assert library.llama_context_default_params is made


def test_every_model_of_the_server_gets_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fake_library(monkeypatch)
    library.llama_context_default_params = SimpleNamespace  # type: ignore[attr-defined]
    set_caches: list[object] = []

    class LlamaProxy:
        @staticmethod
        def load_llama_from_model_settings(settings: object) -> object:
            return SimpleNamespace(settings=settings, set_cache=set_caches.append)

    server = ModuleType("llama_cpp.server.model")
    server.LlamaProxy = LlamaProxy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp.server", ModuleType("llama_cpp.server"))
    monkeypatch.setitem(sys.modules, "llama_cpp.server.model", server)
    llama_cpp.attach_to_server(lambda llama: ("cache of", llama.settings))
    LlamaProxy.load_llama_from_model_settings("settings")
    assert set_caches == [("cache of", "settings")]
    # The server's default, which the cache can't serve.
    scores = SimpleNamespace(logits_all=True, model="m")
    LlamaProxy.load_llama_from_model_settings(scores)
    assert set_caches[1:] == [("cache of", SimpleNamespace(logits_all=False, model="m"))]
    assert scores.logits_all, "the caller's settings stay as they were"
