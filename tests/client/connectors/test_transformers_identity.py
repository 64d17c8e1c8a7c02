"""What the keys of transformers say, with twins of the few types of the engine that count."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.client.connectors import transformers_identity
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.connectors.transformers import ModelNamespace, namespace_of
from prefixd.client.connectors.transformers_identity import (
    WITHOUT_EFFECT,
    Passes,
    identity_of,
    layer_devices,
    media_tokens,
    rope_limit,
)
from prefixd.client.ranks import Rank
from prefixd.proto.errors import CallerError


class Tensor(np.ndarray[Any, Any]):
    """An array with those methods of a tensor that the connector uses."""

    is_meta = False
    _version = 0
    device: Any = SimpleNamespace(type="cpu")

    def __new__(cls, values: Any) -> Tensor:
        return np.asarray(values).view(cls)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return self

    def numel(self) -> int:
        return self.size


class Config:
    """A configuration; `text` is that of the text inside, if it is another."""

    def __init__(self, text: Config | None = None, **fields: Any) -> None:
        self.text = text
        self.fields = {"rope_parameters": {"rope_type": "default"}, **fields}
        for name, value in self.fields.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return self.fields

    def get_text_config(self) -> Config:
        return self.text or self


class Layer:
    """A layer that peft has replaced: two adapters, of which some are active."""

    adapter_layer_names = ("lora_A",)

    def __init__(self, active: list[str], *, scale: float = 2.0, edit: float = 0.0) -> None:
        self.active_adapters = active
        self.disable_adapters = False
        self.merged_adapters: list[str] = []
        self.lora_A = {"a": Tensor([1.0 + edit]), "b": Tensor([2.0])}
        self.scaling = {"a": scale, "b": 2.0}


class Model:
    """A model; `layer`: one of its layers in peft."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, layer: Layer | None = None, **fields: Any) -> None:
        self.config = Config(**fields)
        self.dtype = "float32"
        self.training = False
        self.weights = {"w": Tensor([1.0, 2.0])}
        self.buffers: dict[str, Tensor] = {}
        self.layer = layer
        self.hooks: list[Callable[..., None]] = []

    def state_dict(self) -> dict[str, Any]:
        held = self.layer.lora_A if self.layer else {}
        return {**self.weights, **{f"q.lora_A.{name}": held[name] for name in held}}

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        return iter(self.buffers.items())

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("", self), *([("q", self.layer)] if self.layer else [])]

    def parameters(self) -> list[Any]:
        return list(self.state_dict().values())

    def register_forward_pre_hook(self, hook: Callable[..., None], *, with_kwargs: bool) -> None:
        assert with_kwargs
        self.hooks.append(hook)

    def __call__(self, *args: Any, **options: Any) -> None:
        for hook in self.hooks:
            hook(self, args, options)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def digest(model: Any, **options: Any) -> bytes:
    return identity_of(model, **options).digest


def changed(**changes: Any) -> Model:
    model = Model()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


# ---- the model


def test_everything_of_a_model_is_in_its_key() -> None:
    plain = digest(Model())
    assert digest(Model()) == plain
    others = [
        changed(weights={"w": Tensor([1.0, 2.5])}),
        changed(weights={"v": Tensor([1.0, 2.0])}),
        changed(weights={"w": Tensor([[1.0], [2.0]])}),
        changed(weights={"w": Tensor(np.float32([1, 2]))}),
        changed(weights={"w": Tensor([1.0, 2.0]), "extra": {"a": 1}}),
        changed(buffers={"inv_freq": Tensor([0.5])}),
        changed(dtype="bfloat16"),
        changed(device=SimpleNamespace(type="cuda")),
        Model(hidden_act="gelu"),
        Model(_attn_implementation="eager"),
        Model(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        Model(text_config={"hidden_act": "gelu"}),
    ]
    digests = {digest(each) for each in others}
    digests |= {digest(Model(), salt="tenant"), digest(Model(), fingerprint=b"f" * 32)}
    assert len(digests | {plain}) == len(others) + 3
    assert digest(Model(text_config={"use_cache": True})) == digest(Model(text_config={}))


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_field_without_effect_is_not_in_the_key(name: str) -> None:
    assert digest(Model(**{name: 1})) == digest(Model())


def test_a_table_of_changing_rope_is_not_in_the_key() -> None:
    changing = {"rope_type": "dynamic", "original_max_position_embeddings": 512}
    digests = set()
    for value in (0.5, 0.6):
        model = Model(rope_parameters=changing)
        model.buffers = {"rotary.inv_freq": Tensor([value])}
        digests.add(digest(model))
    assert len(digests) == 1


def test_models_whose_state_cannot_be_named_are_refused_by_name() -> None:
    meta = Model()
    meta.weights["w"].is_meta = True
    with pytest.raises(UnsupportedEngine, match=r"Model \(w is a meta tensor"):
        identity_of(meta)
    assert identity_of(meta, fingerprint=b"f" * 32).unshared is None
    with pytest.raises(UnsupportedEngine, match="Model: it has an encoder"):
        identity_of(Model(is_encoder_decoder=True))
    prompt = changed(peft_config={"default": SimpleNamespace(is_prompt_learning=True)})
    with pytest.raises(UnsupportedEngine, match="its tokens have no ids"):
        identity_of(prompt)


def test_a_model_in_training_shares_nothing() -> None:
    identity = identity_of(changed(training=True))
    assert identity.unshared is not None
    assert "model.eval()" in identity.unshared


def test_ranks_of_a_split_model_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {digest(Model()), digest(changed(tp_size=1))}
    for rank in ("0", "1"):
        here = Rank(rank, 2, "test")
        monkeypatch.setattr(
            "prefixd.client.connectors.transformers_identity.rank_here", lambda here=here: here
        )
        digests |= {digest(changed(tp_size=2)), digest(Model())}
    assert len(digests) == 3


# ---- adapters


def test_adapters_are_in_the_key_if_they_are_active_and_by_content() -> None:
    plain = digest(Model())
    off, merged = Layer(["a"]), Layer(["a"])
    off.disable_adapters = True
    merged.merged_adapters = ["a"]
    assert digest(Model(off)) == plain, "peft changes nothing without an active adapter"
    assert digest(Model(merged)) == plain, "what is merged is in the weights"
    layers = [
        Layer(["a"]),
        Layer(["b"]),
        Layer(["a", "b"]),
        Layer(["b", "a"]),
        Layer(["a"], scale=3.0),
        Layer(["a"], edit=0.5),
    ]
    digests = {digest(Model(layer)) for layer in layers}
    assert len(digests | {plain}) == len(layers) + 1
    renamed = Layer(["c"])
    renamed.lora_A["c"], renamed.scaling["c"] = renamed.lora_A.pop("a"), renamed.scaling.pop("a")
    assert digest(Model(renamed)) == digest(Model(Layer(["a"])))
    inactive = Layer(["a"])
    inactive.lora_A["b"] += 1
    assert digest(Model(inactive)) == digest(Model(Layer(["a"])))


def test_a_namespace_ends_when_the_model_changes() -> None:
    layer = Layer(["a"])
    model = Model(layer)
    namespace = namespace_of(model)
    namespace.check()
    for owner, name, value in (
        (layer, "active_adapters", ["b"]),
        (layer, "scaling", {"a": 5.0}),
        (layer, "disable_adapters", True),
        (model.weights["w"], "_version", 1),
        (model.weights["w"], "device", SimpleNamespace(type="cuda")),
        (model, "training", True),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        with pytest.raises(CallerError, match="changed since namespace_of"):
            namespace.check()
        setattr(owner, name, before)
        namespace.check()
    again = namespace_of(model)
    assert (again == namespace, again.root == namespace.root) == (True, True)
    assert len(model.hooks) == 1, "a model is watched once"


def test_a_namespace_keeps_no_model() -> None:
    model = Model()
    namespace, there = namespace_of(model), weakref.ref(model)
    model.hooks.clear()
    del model
    gc.collect()
    assert there() is None
    namespace.check()


# ---- positions and media


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "yarn", "original_max_position_embeddings": 512}, None),
        ({"rope_type": "longrope", "original_max_position_embeddings": 512}, 512),
        ({"type": "dynamic"}, 2_048),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}, 2_048),
        ({}, None),
        (None, None),
    ],
)
def test_where_the_factors_of_rope_begin_to_change(parameters: Any, limit: int | None) -> None:
    config = Config(rope_parameters=parameters, max_position_embeddings=2_048)
    assert rope_limit(config) == limit


def test_rope_of_a_new_type_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="'spiral'"):
        identity_of(Model(rope_parameters={"rope_type": "spiral"}))


def test_which_ids_stand_for_media() -> None:
    fields = {"image_token_id": 7, "audio_token_index": 8, "bos_token_id": 1, "image_size": 9}
    assert media_tokens(Config(text=Config(), **fields)) == {7, 8}
    assert media_tokens(Config()) == set()
    with pytest.raises(UnsupportedEngine, match="which ids stand for images"):
        media_tokens(Config(text=Config()))


# ---- passes


class Cache:
    """As much of a cache as a hook looks at."""

    def __init__(self) -> None:
        self.held = 0

    def get_seq_length(self) -> int:
        return self.held


def ids(*tokens: int) -> Any:
    return Tensor([list(tokens)])


@pytest.fixture
def model() -> Model:
    return Model(image_token_id=99)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"attention_mask": Tensor([[1, 1, 1]])}, None),
        ({"attention_mask": Tensor([[0, 1, 1]])}, 0),
        ({"attention_mask": Tensor([[[[1, 1, 1]]]])}, 0),
        ({"position_ids": Tensor([[0, 1, 2]])}, None),
        ({"position_ids": Tensor([[[0, 1, 2]], [[0, 1, 2]]])}, None),
        ({"position_ids": Tensor([[0, 0, 1]])}, 0),
        ({"position_ids": Tensor([[5, 6, 7]])}, 0),
        ({"input_ids": None, "inputs_embeds": Tensor([[[1.0]]])}, 0),
        ({"encoder_hidden_states": Tensor([[1.0]])}, 0),
        ({"adapter_names": ["a"]}, 0),
        ({"pixel_values": Tensor([1.0]), "input_ids": ids(1, 2, 99, 99, 3)}, 2),
        ({"input_ids": ids(1, 99)}, 1),
        ({"use_cache": True, "labels": None, "output_attentions": False}, None),
        ({"input_features": None}, None),
    ],
)
def test_a_pass_is_named_by_its_ids_as_far_as_they_say_everything(
    model: Model, options: dict[str, Any], named: int | None
) -> None:
    passes, cache = Passes(model), Cache()
    model(**{"input_ids": ids(1, 2, 3), "past_key_values": cache, **options})
    assert passes.filled(cache).named == named


def test_later_passes_shorten_what_is_named(model: Model) -> None:
    passes, cache = Passes(model), Cache()
    model(ids(1, 2, 3), cache=cache)
    cache.held = 3
    model(ids(4), past_key_values=cache)
    assert passes.filled(cache).named is None
    cache.held = 4
    model(input_ids=ids(4, 5), past_key_values=cache, attention_mask=Tensor([[1, 0]]))
    cache.held = 6
    model(input_ids=ids(4, 5), past_key_values=cache)
    assert passes.filled(cache).named == 4
    cache.held = 0
    model(input_ids=ids(4, 5), past_key_values=cache)
    assert passes.filled(cache).named is None, "it was emptied"


def test_other_adapters_in_between_end_what_is_named() -> None:
    layer = Layer(["a"])
    model = Model(layer)
    passes, cache = Passes(model), Cache()
    model(input_ids=ids(1, 2), past_key_values=cache)
    cache.held = 2
    layer.active_adapters = ["b"]
    model(input_ids=ids(3, 4), past_key_values=cache)
    assert passes.filled(cache).named == 2


def test_a_cache_from_elsewhere_is_not_believed(model: Model) -> None:
    passes, cache = Passes(model), Cache()
    with pytest.raises(CallerError, match="has not filled the cache"):
        passes.filled(cache)
    cache.held = 5
    model(input_ids=ids(1, 2), past_key_values=cache)
    assert passes.filled(cache).named == 0
    loaded = Cache()
    loaded.held = 5
    passes.loaded(loaded, "stamp")
    assert (passes.filled(loaded).stamp, passes.filled(loaded).named) == ("stamp", None)


def test_passes_without_a_cache_are_not_looked_at(model: Model) -> None:
    Passes(model)
    model(input_ids=ids(1))
    model(input_ids=ids(1), past_key_values=((1, 2),))


def test_a_model_namespace_is_a_namespace() -> None:
    made = namespace_of(Model())
    assert isinstance(made, ModelNamespace)
    plain = made.identity.namespace()
    assert (made.root, repr(made), hash(made)) == (plain.root, repr(plain), hash(plain))
    assert made == namespace_of(Model())


# ---- ranks


def test_a_rank_that_may_hold_a_part_of_the_model_has_keys_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, given = digest(Model()), digest(Model(), fingerprint=b"f" * 32)
    seen = {given}
    for rank in ("0", "1"):
        here = Rank(rank, 2, "$WORLD_SIZE and $RANK")
        monkeypatch.setattr(transformers_identity, "rank_here", lambda here=here: here)
        # The tensors of this rank say what it holds: all of them, as in one process.
        assert digest(Model()) == alone
        seen |= {digest(Model(), fingerprint=b"f" * 32), digest(changed(tp_size=2))}
    assert len(seen) == 5


def test_a_model_on_several_devices_says_where_each_layer_computes() -> None:
    class Attention:
        def __init__(self, number: int | None, device: str, runs_on: str = "") -> None:
            self.layer_idx = number
            self.held = [SimpleNamespace(device=SimpleNamespace(type=device))]
            if runs_on:
                self._hf_hook = SimpleNamespace(execution_device=SimpleNamespace(type=runs_on))

        def parameters(self) -> Iterator[Any]:
            return iter(self.held)

    model = Model()
    assert layer_devices(model) == {}
    alone = identity_of(model, fingerprint=b"f" * 32)
    parts = [Attention(0, "cuda"), Attention(1, "meta", "cuda"), Attention(None, "cpu")]
    model.named_modules = lambda: [("", model), *((str(n), each) for n, each in enumerate(parts))]  # type: ignore[method-assign]
    assert [each.type for each in layer_devices(model).values()] == ["cuda", "cuda"]
    there = identity_of(model, fingerprint=b"f" * 32)
    parts.append(Attention(2, "cpu"))
    mixed = identity_of(model, fingerprint=b"f" * 32)
    found = [
        {each.name: each.value for each in identity.dimensions}["device"]
        for identity in (alone, there, mixed)
    ]
    assert found == ["cpu", "cuda", "cpu, cuda"]
    assert len({each.namespace() for each in (alone, there, mixed)}) == 3
