"""The transformers connector against hand-written twins of the few types that it uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.client import Client, Namespace
from prefixd.client.connectors import transformers
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.connectors.transformers import ModelNamespace, load_cache, save_cache
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S

LAYERS, HEADS, WIDTH, BLOCK = 3, 2, 4, 8
TOKENS = list(range(50))


class Tensor(np.ndarray[Any, Any]):
    """An array with those methods of a tensor that the connector uses."""

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def to(self, device: str) -> Tensor:
        self.place = device
        return self


class DynamicLayer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None

    def lazy_initialization(self, keys: Any, values: Any) -> None:
        assert keys.shape[:3:2] == values.shape[:3:2]

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])


class SlidingLayer(DynamicLayer):
    pass


class DynamicCache:
    def __init__(self, config: Any) -> None:
        self.layers = [config.layer() for _ in range(LAYERS)]


def config_of(layer: type = DynamicLayer, width: int = WIDTH) -> Any:
    config = SimpleNamespace(
        layer=layer,
        num_key_value_heads=HEADS,
        num_attention_heads=2 * HEADS,
        head_dim=width,
        dtype=np.dtype(np.float32),
    )
    config.get_text_config = lambda: config
    config.to_dict = lambda: {"width": width}
    return config


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = ModuleType("transformers.cache_utils")
    torch = ModuleType("torch")
    for module, name, value in (
        (utils, "DynamicCache", DynamicCache),
        (utils, "DynamicLayer", DynamicLayer),
        (torch, "float32", np.dtype(np.float32)),
        (torch, "device", lambda device: device),
        (torch, "empty", lambda shape, dtype: np.empty(shape, dtype).view(Tensor)),
    ):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", utils)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def client(request: pytest.FixtureRequest, daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, local=request.param) as client:
        yield client


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(os.urandom(32), "hf", b"c" * 32)


def filled(tokens: int, batch: int = 1) -> DynamicCache:
    cache = DynamicCache(config_of())
    random = np.random.default_rng(1)
    for layer in cache.layers:
        shape = (batch, HEADS, tokens, WIDTH)
        layer.keys = random.random(shape, np.float32).view(Tensor)
        layer.values = random.random(shape, np.float32).view(Tensor)
    return cache


def save(client: Client, namespace: Namespace, tokens: list[int], cache: Any) -> int:
    saving = save_cache(client, namespace, tokens, cache, block_tokens=BLOCK)
    outcomes = saving.result(PATIENCE_S)
    assert all(outcome.ok for outcome in outcomes)
    return len(outcomes)


def test_whole_blocks_come_back_bit_by_bit(client: Client, namespace: Namespace) -> None:
    cache = filled(50)
    assert save(client, namespace, TOKENS, cache) == 6
    assert save(client, namespace, TOKENS, cache) == 0
    found = load_cache(client, namespace, config_of(), TOKENS, block_tokens=BLOCK)
    assert found.token_count == 48
    for layer, saved in zip(found.cache.layers, cache.layers, strict=True):
        assert (layer.keys == saved.keys[:, :, :48]).all()
        assert (layer.values == saved.values[:, :, :48]).all()
    other = [*TOKENS[:20], 1, *TOKENS[21:]]
    found = load_cache(client, namespace, config_of(), other, block_tokens=BLOCK)
    assert (found.token_count, found.cache.layers[0].get_seq_length()) == (16, 16)


@pytest.mark.parametrize(
    "tokens", [[TOKENS], np.array(TOKENS), np.array([TOKENS]), {"input_ids": [TOKENS]}]
)
def test_ids_are_taken_as_tokenisers_give_them(
    client: Client, namespace: Namespace, tokens: Any
) -> None:
    saving = save_cache(client, namespace, tokens, filled(50), block_tokens=BLOCK)
    assert len(saving.result(PATIENCE_S)) == 6
    assert load_cache(client, namespace, config_of(), tokens, block_tokens=BLOCK).token_count == 48
    with pytest.raises(CallerError, match="2 prompts"):
        load_cache(client, namespace, config_of(), [TOKENS, TOKENS])


@pytest.mark.parametrize(
    ("heads", "value_heads", "key_width", "value_width", "fields"),
    [
        (1, 1, WIDTH, WIDTH, {"num_key_value_heads": None}),
        (4, 4, WIDTH, WIDTH, {"num_key_value_heads": None}),
        (1, 1, 6, 2, {"kv_lora_rank": 6, "qk_rope_head_dim": 2}),
        (4, 4, 5, 3, {"qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3}),
    ],
    ids=["one head for all", "every head", "latent", "latent, given apart"],
)
def test_keys_and_values_of_other_shapes_are_found(
    client: Client,
    namespace: Namespace,
    heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    fields: dict[str, Any],
) -> None:
    config = config_of()
    for name, value in fields.items():
        setattr(config, name, value)
    cache = DynamicCache(config)
    random = np.random.default_rng(1)
    for layer in cache.layers:
        layer.keys = random.random((1, heads, 50, key_width), np.float32).view(Tensor)
        layer.values = random.random((1, value_heads, 50, value_width), np.float32).view(Tensor)
    assert save(client, namespace, TOKENS, cache) == 6
    found = load_cache(client, namespace, config, TOKENS, block_tokens=BLOCK)
    assert found.token_count == 48
    for layer, saved in zip(found.cache.layers, cache.layers, strict=True):
        assert (layer.keys == saved.keys[:, :, :48]).all()
        assert (layer.values == saved.values[:, :, :48]).all()


def test_another_number_type_is_a_miss(client: Client, namespace: Namespace) -> None:
    save(client, namespace, TOKENS, filled(50))
    found = load_cache(
        client, namespace, config_of(), TOKENS, dtype=np.dtype(np.int32), block_tokens=BLOCK
    )
    assert found.token_count == 0


def test_the_last_token_is_left_to_be_evaluated(client: Client, namespace: Namespace) -> None:
    save(client, namespace, TOKENS, filled(50))
    found = load_cache(client, namespace, config_of(), TOKENS[:48], block_tokens=BLOCK)
    assert found.token_count == 40


def test_another_layout_is_a_miss(client: Client, namespace: Namespace) -> None:
    save(client, namespace, TOKENS, filled(50))
    config = config_of(width=2 * WIDTH)
    found = load_cache(client, namespace, config, TOKENS, block_tokens=BLOCK)
    assert (found.token_count, found.cache.layers[0].keys) == (0, None)
    assert load_cache(client, namespace, config_of(), [], block_tokens=BLOCK).token_count == 0


def test_what_it_does_not_know_is_refused_by_name(client: Client, namespace: Namespace) -> None:
    with pytest.raises(UnsupportedEngine, match="SlidingLayer"):
        load_cache(client, namespace, config_of(SlidingLayer), TOKENS)
    with pytest.raises(UnsupportedEngine, match="SlidingLayer"):
        save_cache(client, namespace, TOKENS, DynamicCache(config_of(SlidingLayer)))
    with pytest.raises(CallerError, match="batch"):
        save_cache(client, namespace, TOKENS, filled(50, batch=2))


def test_one_whose_layers_are_filled_in_another_way_is_refused(
    client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DynamicLayer, "lazy_initialization", lambda _self, _keys: None)
    with pytest.raises(UnsupportedEngine, match=r"it was made for 5\.18 to 5\.24"):
        load_cache(client, namespace, config_of(), TOKENS)


def test_without_the_engine_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, client: Client, namespace: Namespace
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    with pytest.raises(UnsupportedEngine, match=r"needs transformers \(made for 5\.18 to 5\.24\)"):
        load_cache(client, namespace, config_of(), TOKENS)


def test_each_layer_gets_its_own_where_it_computes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(device="gpu:0")
    parts: dict[str, Any] = {
        "identity": None,
        "config": None,
        "dtype": np.dtype(np.float32),
        "passes": SimpleNamespace(loaded=lambda *_: None),
        "stamp": None,
        "model": lambda: model,
        "told": {client},
    }
    plain = Namespace(os.urandom(32), "hf", b"c" * 32)
    parts["identity"] = SimpleNamespace(namespace=lambda: plain)
    namespace = ModelNamespace(plain.fingerprint, "hf", b"c" * 32, **parts)
    with pytest.raises(CallerError, match="use namespace_of"):
        replace(namespace, salt=b"another tenant")
    monkeypatch.setattr(transformers, "stamp", lambda _: None)
    monkeypatch.setattr(transformers, "layer_devices", lambda _: {0: "gpu:0", 2: "gpu:1"})
    save(client, plain, TOKENS, filled(50))
    found = load_cache(client, namespace, config_of(), TOKENS, block_tokens=BLOCK)
    assert found.token_count == 48
    places = [(each.keys.place, each.values.place) for each in found.cache.layers]
    assert places == [("gpu:0", "gpu:0"), ("gpu:0", "gpu:0"), ("gpu:1", "gpu:1")]
    sliding = type("DynamicSlidingWindowLayer", (DynamicLayer,), {})
    monkeypatch.setattr(
        sys.modules["transformers.cache_utils"], sliding.__name__, sliding, raising=False
    )
    with pytest.raises(UnsupportedEngine, match="spread over several devices"):
        load_cache(client, namespace, config_of(sliding), TOKENS)
