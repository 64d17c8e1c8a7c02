"""What the keys of llama-cpp-python say, with twins of the few types of the engine that count."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prefixd.client import Client
from prefixd.client.connectors import llama_cpp, llama_cpp_identity
from prefixd.client.connectors.engine import UnsupportedEngine
from prefixd.client.connectors.llama_cpp import LlamaContext
from prefixd.client.connectors.llama_cpp_identity import CONTEXT_PARAMS, MODEL_PARAMS

MODEL_ADDRESS, CONTEXT_ADDRESS = 1_000, 2_000


class Engine:
    """The low-level module: functions that note their calls as ctypes' own do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lib = ModuleType("llama_cpp.llama_cpp")
        self.watch = llama_cpp_identity.FileWatch()
        monkeypatch.setattr(llama_cpp_identity, "watch", self.watch)
        monkeypatch.setattr(llama_cpp, "watch", self.watch)
        for name in llama_cpp_identity._NEEDED:
            setattr(self.lib, name, lambda *_: 0)
        monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
        monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", self.lib)
        self.give(llama_model_n_ctx_train=8_192, llama_n_ctx_seq=4_096, llama_n_seq_max=2)
        llama_cpp_identity.low_level()

    def give(self, **results: object) -> None:
        """The functions return these from now on."""
        for name, result in results.items():
            function: Any = lambda *_, result=result: result  # noqa: E731
            function.errcheck = getattr(getattr(self.lib, name), "errcheck", None)
            setattr(self.lib, name, function)

    def call(self, name: str, result: object, *arguments: object) -> None:
        """A call of a function of the engine, by anyone."""
        function = getattr(self.lib, name)
        assert function.errcheck(result, function, arguments) is result

    def load(self, path: Path, **changes: Any) -> Any:
        """A Llama of this file."""
        self.call("llama_model_load_from_file", MODEL_ADDRESS, os.fsencode(path), None)
        self.call("llama_init_from_model", CONTEXT_ADDRESS, MODEL_ADDRESS, None)
        return Llama(path, **changes)


class Params(SimpleNamespace):
    """A structure of parameters."""

    @property
    def _fields_(self) -> list[tuple[str, type]]:
        return [(name, int) for name in vars(self)]


class Llama:
    """As much of `llama_cpp.Llama` as the connector looks at."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.model_path = str(path)
        self._ctx, self._model = SimpleNamespace(ctx=CONTEXT_ADDRESS), SimpleNamespace(model=1_000)
        self.n_tokens, self.input_ids, self._requires_eval = 0, [0] * 100, True
        self.metadata: dict[str, str] = {"general.architecture": "llama"}
        self.kv_overrides: dict[str, Any] | None = None
        self.draft_model, self._logits_all, self.tensor_split = None, False, None
        self.context_params = Params(
            **dict.fromkeys([*CONTEXT_PARAMS.parts, *CONTEXT_PARAMS.irrelevant], 0)
        )
        self.context_params.kv_unified = True
        self.model_params = Params(
            **dict.fromkeys([*MODEL_PARAMS.parts, *MODEL_PARAMS.irrelevant], 0)
        )
        self.model_params.tensor_split = None
        for name, value in changes.items():
            owner = next(
                each
                for each in (self, self.context_params, self.model_params)
                if name in vars(each)
            )
            setattr(owner, name, value)

    def eval(self, tokens: list[int]) -> None:
        end = self.n_tokens + len(tokens)
        self.input_ids[self.n_tokens : end] = tokens
        self.n_tokens = end

    def reset(self) -> None:
        self.n_tokens = 0

    def generate(self, tokens: list[int]) -> Any:
        self.eval(tokens)
        yield from (7, 8, 9)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Engine(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def digest(llama: Any, **options: Any) -> bytes:
    return LlamaContext(llama, **options).identity().digest


# ---- every parameter


@pytest.mark.parametrize("table", [CONTEXT_PARAMS, MODEL_PARAMS], ids=["context", "model"])
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_every_parameter_is_in_the_key_or_not_as_the_table_says(
    engine: Engine, file: Path, table: Any, gpu: bool
) -> None:
    engine.give(llama_supports_gpu_offload=gpu, llama_model_n_swa=512)
    special = {"kv_overrides", "tensor_split", "attention_type", *llama_cpp_identity._POINTERS}
    plain = digest(engine.load(file))
    for name in table.parts:
        if name not in special:
            on_devices = name in llama_cpp_identity._DEVICES
            assert (digest(engine.load(file, **{name: 3})) != plain) == (gpu or not on_devices), (
                name
            )
    for name in table.irrelevant:
        if name not in ("kv_unified", "n_seq_max"):
            assert digest(engine.load(file, **{name: 3})) == plain, name


def test_a_parameter_that_is_new_keeps_the_state_in_the_process(engine: Engine, file: Path) -> None:
    llama = engine.load(file)
    llama.context_params.new_in_this_version = 0
    identity = LlamaContext(llama).identity()
    assert identity.unshared is not None
    assert "new_in_this_version" in identity.unshared


@pytest.mark.parametrize("name", sorted(llama_cpp_identity._POINTERS))
def test_a_pointer_that_cannot_be_read_keeps_the_state_in_the_process(
    engine: Engine, file: Path, name: str
) -> None:
    identity = LlamaContext(engine.load(file, **{name: 4_096})).identity()
    assert identity.unshared is not None
    assert name in identity.unshared


def test_values_that_are_no_fields_of_structures(engine: Engine, file: Path) -> None:
    overrides = [None, {"llama.rope.freq_base": 5e4}, {"llama.rope.freq_base": 5}, {"a": "5"}]
    digests = {digest(engine.load(file, kv_overrides=each)) for each in overrides}
    assert len(digests) == len(overrides)
    plain = digest(engine.load(file))
    assert digest(engine.load(file), salt="tenant") != plain
    assert digest(engine.load(file), fingerprint=b"f" * 32) != plain
    engine.give(llama_supports_gpu_offload=True)
    splits = [[0.5, 0.5], [0.4, 0.6]]
    made = [Llama(file, model_params=None) for _ in splits]
    for llama, split in zip(made, splits, strict=True):
        llama.model_params = Params(**dict.fromkeys(MODEL_PARAMS.parts, 0))
        llama.model_params.tensor_split, llama.tensor_split = [1.0], split
    assert digest(made[0]) != digest(made[1])


def test_the_regime_of_a_long_rope(engine: Engine, file: Path) -> None:
    name = "llama.rope.scaling.original_context_length"
    seen = []
    for length, metadata, overrides in (
        (2_048, {}, None),
        (2_048, {name: "2048"}, None),
        (4_096, {name: "2048"}, None),
        (4_096, {name: "2048"}, {name: 4_096}),
        (9_000, {}, None),
    ):
        engine.give(llama_n_ctx_seq=length)
        llama = engine.load(file, kv_overrides=overrides)
        llama.metadata |= metadata
        identity = LlamaContext(llama).identity()
        seen += [each.value for each in identity.dimensions if each.name == "rope regime"]
    assert seen == ["short", "short", "long", "short", "long"]


# ---- files


def test_all_shards_are_the_weights(engine: Engine, tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(b"metadata")
    second.write_bytes(b"one")
    before = digest(engine.load(first))
    second.write_bytes(b"two")
    assert digest(engine.load(first)) != before


def test_a_file_that_changed_after_it_was_loaded_identifies_nothing(
    engine: Engine, file: Path
) -> None:
    llama = engine.load(file)
    file.write_bytes(b"other weights")
    identity = LlamaContext(llama).identity()
    assert identity.unshared is not None
    assert "no longer those that were loaded" in identity.unshared
    assert LlamaContext(engine.load(file)).identity().unshared is None


@pytest.mark.usefixtures("engine")
def test_a_llama_from_before_the_watch_shares_nothing(file: Path) -> None:
    first, second = (LlamaContext(Llama(file)).identity() for _ in range(2))
    assert first.unshared is not None
    assert "import prefixd.connectors.llama_cpp before" in first.unshared
    assert first.digest != second.digest


def test_another_library_is_in_the_key(
    engine: Engine, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = digest(engine.load(file))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    library = tmp_path / "libllama.so"
    library.write_bytes(b"patched")
    engine.lib._lib = SimpleNamespace(_name=str(library))  # type: ignore[attr-defined]
    assert digest(engine.load(file)) != plain


# ---- adapters


def test_adapters_and_control_vectors_as_they_are_set(engine: Engine, file: Path) -> None:
    context = LlamaContext(engine.load(file))
    plain = context.identity().digest
    for address in (1, 2):
        lora = file.with_name(f"{address}.gguf")
        lora.write_bytes(bytes([address]))
        engine.call("llama_adapter_lora_init", address, MODEL_ADDRESS, os.fsencode(lora))

    def set_adapters(*pairs: tuple[int, float]) -> bytes:
        adapters = (ctypes.c_void_p * len(pairs))(*(address for address, _ in pairs))
        scales = (ctypes.c_float * len(pairs))(*(scale for _, scale in pairs))
        engine.call(
            "llama_set_adapters_lora", 0, CONTEXT_ADDRESS, list(adapters), len(pairs), scales
        )
        assert context.adapters_changed()
        assert not context.adapters_changed()
        return context.identity().digest

    ways = [[(1, 1.0)], [(2, 1.0)], [(1, 0.5)], [(1, 1.0), (2, 1.0)]]
    digests = [set_adapters(*way) for way in ways]
    assert len({plain, *digests}) == len(ways) + 1
    assert set_adapters((2, 1.0), (1, 1.0)) == digests[3]
    assert set_adapters() == plain
    vector = (ctypes.c_float * 4)(1, 2, 3, 4)
    engine.call("llama_set_adapter_cvec", 0, CONTEXT_ADDRESS, vector, 4, 2, 1, 2)
    steered = context.identity().digest
    assert steered != plain
    engine.call("llama_set_adapter_cvec", 0, CONTEXT_ADDRESS, vector, 4, 2, 1, 1)
    assert context.identity().digest not in (plain, steered)
    engine.call("llama_set_adapter_cvec", 0, CONTEXT_ADDRESS, None, 0, 0, 0, 0)
    assert context.identity().digest == plain
    # One from an open file, say, or from before the watch.
    engine.call("llama_set_adapters_lora", 0, CONTEXT_ADDRESS, [3], 1, [1.0])
    assert context.identity().unshared is not None


# ---- which tokens are verified


def test_tokens_that_were_evaluated_as_text_are_verified(engine: Engine, file: Path) -> None:
    llama = engine.load(file)
    llama.eval([1, 2, 3])
    context = LlamaContext(llama)
    assert context.verified() == 0, "they are from before"
    llama.eval([4])
    assert context.verified() == 0
    llama.reset()
    llama.eval([1, 2, 3])
    llama.n_tokens = 2
    llama.eval([4, 5])
    assert (context.verified(), context.tokens()) == (4, [1, 2, 4, 5])
    # A handler evaluates an image, and leaves the ids that are there.
    llama.reset()
    llama.n_tokens = 2
    assert context.verified() == 0
    llama.eval([6])
    assert context.verified() == 0
    llama.reset()
    llama.eval([1])
    llama.n_tokens = 3
    llama.eval([7])
    assert context.verified() == 1
    context.set_tokens([8, 9])
    assert context.verified() == 2
    engine.call("llama_set_adapters_lora", 0, CONTEXT_ADDRESS, [], 0, [])
    llama.eval([10])
    assert context.verified() == 0, "they were evaluated with other adapters"


def test_a_generation_ends_when_its_reader_leaves(engine: Engine, file: Path) -> None:
    llama, ended, during = engine.load(file), [], []
    context = LlamaContext(llama)
    context.watch_generation(during.append, lambda: ended.append(llama.n_tokens))
    assert list(llama.generate([1, 2])) == [7, 8, 9]
    assert during == [1, 2, 3], "after each token that was taken"
    reader = llama.generate([1])
    next(reader)
    reader.close()
    assert ended == [2, 3]
    assert during == [1, 2, 3]


# ---- what is refused


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda engine: engine.give(llama_model_has_encoder=True), "encoder"),
        (lambda engine: engine.give(llama_model_is_diffusion=True), "diffusion"),
    ],
)
def test_models_whose_state_depends_on_later_tokens_are_refused(
    engine: Engine, file: Path, prepare: Callable[[Engine], None], why: str
) -> None:
    prepare(engine)
    with pytest.raises(UnsupportedEngine, match=why):
        LlamaContext(engine.load(file))


def test_contexts_that_cannot_be_kept_are_refused_with_the_reason(
    engine: Engine, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedEngine, match="not causal"):
        LlamaContext(engine.load(file, attention_type=1))
    # Llama turns logits_all on for a draft_model.
    llama = engine.load(file, draft_model=object(), _logits_all=True)
    with (
        Client(f"unix:{tmp_path}/none") as client,
        pytest.raises(UnsupportedEngine, match="without draft_model"),
    ):
        llama_cpp.PrefixdCache.of(llama, client)
    with pytest.raises(UnsupportedEngine, match="without logits_all"):
        LlamaContext(engine.load(file, _logits_all=True))


def test_sliding_windows_keep_blocks_if_nothing_is_forgotten(engine: Engine, file: Path) -> None:
    engine.give(llama_model_n_swa=512)
    assert LlamaContext(engine.load(file, swa_full=True)).has_spare_sequence
    context = LlamaContext(engine.load(file, swa_full=False))
    assert (context.can_be_cut, context.has_spare_sequence) == (False, False)
