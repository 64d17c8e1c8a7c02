"""The llama-cpp-python connector with a real daemon, and a context made of lists as the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixd.client import Client
from prefixd.client.connectors import llama_cpp, llama_cpp_identity
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.connectors.llama_cpp import PrefixdCache
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.client.identity import Dimension, Part, StateIdentity
from prefixd.client.policy import SavePolicy
from prefixd.client.saves import SaveItem
from prefixd.proto.vocabulary import SaveReason
from tests.support.daemon import private_daemon

BLOCK = 8
PROMPT = list(range(100, 150))


class FakeContext:
    """A context in which the state of a token is the token itself."""

    def __init__(self, *, blocks: bool, can_be_cut: bool = True, model: bytes = b"") -> None:
        self.has_spare_sequence = blocks
        self.can_be_cut = can_be_cut
        self.state_of: list[int] = []
        self.evaluated: list[int] = []
        #: Positions that hold something else than their token says: an image.
        self.images: set[int] = set()
        self.damaged = False
        self.model, self.adapter, self.changed = model, 0, False
        self.evaluated_count = 0

    def run(self, cache: PrefixdCache, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """Do what `Llama` does with a prompt. Returns how many tokens were evaluated for it."""
        self.evaluated_count = 0
        with pytest.raises(KeyError):
            cache[prompt]
        known = 0
        while known < min(len(self.evaluated), len(prompt) - 1) and (
            self.evaluated[known] == prompt[known]
        ):
            known += 1
        if not self.can_be_cut and known < len(self.evaluated):
            known = 0
        self.images &= set(range(known))
        texts = [index for index in range(known) if index not in self.images]
        assert [self.state_of[index] for index in texts] == [prompt[index] for index in texts]
        tokens = list(prompt)
        self.state_of, self.evaluated = [*self.state_of[:known], *tokens[known:]], list(tokens)
        for count, token in enumerate(answer, 1):
            cache._save_growing(count)
            self.state_of, self.evaluated = [*self.state_of, token], [*self.evaluated, token]
        tokens = [*prompt, *answer]
        cache[tokens] = object()
        return self.evaluated_count + len(prompt) - known

    # ---- as LlamaContext

    def identity(self) -> StateIdentity:
        return StateIdentity(
            "test 1",
            (
                Dimension("weights", self.model, "test", Part.FINGERPRINT),
                Dimension("adapter", self.adapter, "test", Part.CONTEXT),
            ),
        )

    def adapters_changed(self) -> bool:
        changed, self.changed = self.changed, False
        return changed

    def verified(self) -> int:
        return min([*self.images, len(self.evaluated)])

    def can_sample(self) -> bool:
        return False

    def evaluate(self, tokens: Sequence[int]) -> None:
        self.evaluated_count += len(tokens)
        self.state_of += tokens
        self.evaluated += tokens

    def forget(self) -> None:
        self.state_of, self.evaluated, self.images = [], [], set()

    def tokens(self) -> list[int]:
        return list(self.evaluated)

    def set_tokens(self, tokens: Sequence[int]) -> None:
        self.evaluated, self.images = list(tokens), set()

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


#: Prompts of the tests are short.
POLICY = SavePolicy(
    min_tokens=8,
    cold_min_tokens=16,
    cold_max_tokens=100,
    continued_interval_tokens=16,
    boundary_trim_tokens=4,
    boundary_align_tokens=16,
)


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, policy=POLICY) as client:
        yield client


def cache_of(context: FakeContext, client: Client) -> PrefixdCache:
    return PrefixdCache(context, client, block_tokens=BLOCK)  # type: ignore[arg-type]


@pytest.fixture
def model() -> bytes:
    return os.urandom(32)


def test_a_prompt_is_found_block_by_block(client: Client, model: bytes) -> None:
    first = FakeContext(blocks=True, model=model)
    assert first.run(cache_of(first, client), PROMPT, [7] * 10) == len(PROMPT)
    assert client.flush()
    again = FakeContext(blocks=True, model=model)
    cache = cache_of(again, client)
    assert PROMPT in cache
    assert again.run(cache, PROMPT) == 1
    diverging = [*PROMPT[:30], 1, *PROMPT[31:]]
    other = FakeContext(blocks=True, model=model)
    assert other.run(cache_of(other, client), diverging) == len(PROMPT) - 24
    continued = FakeContext(blocks=True, model=model)
    assert continued.run(cache_of(continued, client), [*PROMPT, *[7] * 10, 1]) == 5


def test_what_is_in_the_context_is_not_loaded_again(client: Client, model: bytes) -> None:
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
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
def test_whole_states(client: Client, model: bytes, can_be_cut: bool) -> None:
    answer = [7] * 10
    first = FakeContext(blocks=False, can_be_cut=can_be_cut, model=model)
    first.run(cache_of(first, client), PROMPT, answer)
    assert first.state_of == [*PROMPT, *answer]
    assert client.flush()
    turn = FakeContext(blocks=False, can_be_cut=can_be_cut, model=model)
    cache = cache_of(turn, client)
    assert turn.run(cache, [*PROMPT, *answer, 5, 6]) == 2
    again = FakeContext(blocks=False, can_be_cut=can_be_cut, model=model)
    assert again.run(cache_of(again, client), PROMPT) == 1
    assert PROMPT in cache


def test_a_context_that_cannot_go_back_loads_instead(client: Client, model: bytes) -> None:
    context = FakeContext(blocks=False, can_be_cut=False, model=model)
    cache = cache_of(context, client)
    context.run(cache, PROMPT, [7] * 10)
    assert client.flush()
    context.run(cache, [*PROMPT, *[7] * 10, 1, 2], [3])
    assert client.flush()
    assert context.run(cache, [*PROMPT, *[7] * 10, 4, 5]) == 2, "another branch"
    assert context.run(cache, PROMPT) == 1, "the first prompt again"


@pytest.mark.parametrize("can_be_cut", [True, False], ids=["attention", "recurrent"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_nothing_is_saved_from_the_first_image_on(
    client: Client, model: bytes, blocks: bool, can_be_cut: bool
) -> None:
    """Its positions have the ids of an earlier prompt."""
    context = FakeContext(blocks=blocks and can_be_cut, can_be_cut=can_be_cut, model=model)
    cache = cache_of(context, client)
    context.evaluated, context.state_of = list(PROMPT), [*PROMPT[:20], *[0] * 20, *PROMPT[40:]]
    context.images = set(range(20, 40))
    context.run(cache, PROMPT, [7] * 10)
    assert client.flush()
    other = FakeContext(blocks=blocks and can_be_cut, can_be_cut=can_be_cut, model=model)
    saved = 16 if blocks and can_be_cut else 0
    assert other.run(cache_of(other, client), PROMPT) == len(PROMPT) - saved
    assert client.flush(), "what the other has saved is text, and may be loaded"
    # The next text does not reuse the image either.
    context.images, context.state_of = set(range(20, 40)), [*PROMPT[:20], *[0] * 20, *PROMPT[40:]]
    context.evaluated = list(PROMPT)
    text = [*PROMPT[:30], 1]
    reused = 24 if blocks and can_be_cut else 20 if can_be_cut else 0
    assert context.run(cache, text) == len(text) - reused
    assert not context.images


def test_other_adapters_are_other_keys(client: Client, model: bytes) -> None:
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
    context.run(cache, PROMPT)
    assert client.flush()
    first = cache.identity
    context.forget()
    context.adapter, context.changed = 1, True
    assert context.run(cache, PROMPT) == len(PROMPT)
    assert cache.identity.digest != first.digest
    context.forget()
    context.adapter, context.changed = 0, True
    assert context.run(cache, PROMPT) == 1
    assert cache.identity == first


def test_a_completion_is_saved_once(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
    context.run(cache, PROMPT)
    monkeypatch.setattr(client, "save_many_async", lambda *_, **__: 1 / 0)
    cache._save_completion()
    cache[PROMPT] = object()


class Saves:
    """The saves that a client was asked for: reason and tokens of each call."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[SaveReason, int]] = []
        many, one = client.save_many_async, client.save_async

        def save_many(items: list[SaveItem], **more: Any) -> Any:
            self.seen.append((more["reason"], sum(each.token_count for each in items)))
            return many(items, **more)

        def save(key: Any, payload: Any, **more: Any) -> Any:
            self.seen.append((more["reason"], more["token_count"]))
            return one(key, payload, **more)

        monkeypatch.setattr(client, "save_many_async", save_many)
        monkeypatch.setattr(client, "save_async", save)


COLD, CONTINUED, FINISH = SaveReason.COLD, SaveReason.CONTINUED, SaveReason.FINISH


def test_blocks_are_saved_behind_the_prefill_as_they_grow_and_at_the_end(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(client, monkeypatch)
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
    with pytest.raises(KeyError):
        cache[PROMPT]
    context.state_of, context.evaluated = list(PROMPT), list(PROMPT)
    cache._save_growing(1)
    assert saves.seen == [(COLD, 32)], "the trimmed boundary"
    assert client.flush()
    for count in range(2, 30):
        context.state_of, context.evaluated = [*context.state_of, 7], [*context.evaluated, 7]
        cache._save_growing(count)
        assert client.flush()
    # By 16 tokens since the last one, in whole blocks, and once the rest of the prompt.
    assert saves.seen[1:] == [(CONTINUED, 16), (CONTINUED, 2), (CONTINUED, 16)]
    cache._save_completion()
    assert client.flush()
    assert saves.seen[4:] == [(FINISH, 8)]


def test_whole_states_are_saved_behind_the_prefill_as_they_grow_and_at_the_end(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(client, monkeypatch)
    context = FakeContext(blocks=False, model=model)
    context.run(cache_of(context, client), PROMPT, [7] * 30)
    assert saves.seen == [(COLD, 50), (CONTINUED, 66), (FINISH, 80)]


def test_a_recurrent_state_is_saved_at_the_boundary_too(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(client, monkeypatch)
    first = FakeContext(blocks=False, can_be_cut=False, model=model)
    first.run(cache_of(first, client), PROMPT)
    assert saves.seen == [(COLD, 32), (COLD, 49), (FINISH, 50)]
    assert client.flush()
    other = FakeContext(blocks=False, can_be_cut=False, model=model)
    diverging = [*PROMPT[:40], 1, 2, 3]
    assert other.run(cache_of(other, client), diverging) == len(diverging) - 32


@pytest.mark.parametrize("can_be_cut", [True, False], ids=["attention", "recurrent"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_what_is_short_is_not_saved(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch, blocks: bool, can_be_cut: bool
) -> None:
    monkeypatch.setattr(client, "policy", SavePolicy())
    saves = Saves(client, monkeypatch)
    context = FakeContext(blocks=blocks and can_be_cut, can_be_cut=can_be_cut, model=model)
    assert context.run(cache_of(context, client), PROMPT, [7] * 300) == len(PROMPT)
    assert saves.seen == []


def test_a_generation_that_nobody_looked_up_is_not_saved(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(client, monkeypatch)
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
    context.state_of, context.evaluated = list(PROMPT), list(PROMPT)
    cache._save_growing(1)
    cache._save_completion()
    assert saves.seen == []


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_a_state_that_the_engine_refuses_is_not_there(
    client: Client, model: bytes, blocks: bool
) -> None:
    first = FakeContext(blocks=blocks, model=model)
    first.run(cache_of(first, client), PROMPT)
    assert client.flush()
    other = FakeContext(blocks=blocks, model=model)
    other.damaged = True
    assert other.run(cache_of(other, client), PROMPT) == len(PROMPT)


def test_without_a_daemon_everything_is_evaluated(model: bytes, tmp_path: os.PathLike[str]) -> None:
    with Client(f"unix:{tmp_path}/none.sock") as client:
        for blocks in (True, False):
            context = FakeContext(blocks=blocks, model=model)
            assert context.run(cache_of(context, client), PROMPT) == len(PROMPT)


def test_what_fails_on_the_way_is_no_failed_request(
    client: Client, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = FakeContext(blocks=True, model=model)
    cache = cache_of(context, client)
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
    for name in llama_cpp_identity._NEEDED:
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
