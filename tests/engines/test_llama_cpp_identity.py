"""The keys of llama-cpp-python against the engine itself: every parameter of it is in the key, or
changes nothing. `make engines` runs this file."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prefixd.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.pairs import check_pairs
from tests.engines.tiny_models import write_gemma, write_gguf, write_lora, write_mamba
from tests.support.daemon import private_daemon
from tests.support.decisions import fields_of

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from prefixd.client.connectors.llama_cpp import PrefixdCache, block_sequences  # noqa: E402
from prefixd.client.connectors.llama_cpp_identity import (  # noqa: E402
    CONTEXT_PARAMS,
    LOADING,
    MODEL_PARAMS,
    NUMBERS_OF_THREADS,
    OUTPUT,
    FieldTable,
)
from prefixd.client.identity import Part  # noqa: E402

PROMPT = [1] + [3 + (n * n * 31 + n * 7) % 250 for n in range(699)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_gguf(folder / "a.gguf")
    write_gguf(folder / "b.gguf", seed=8)
    write_gguf(folder / "long.gguf", long_rope=1_024)
    write_gemma(folder / "gemma.gguf", window=256)
    write_mamba(folder / "mamba.gguf")
    write_lora(folder / "lora1.gguf", 1)
    write_lora(folder / "lora2.gguf", 2)
    for seed in (7, 8):
        (folder / f"split{seed}").mkdir()
        write_gguf(folder / f"split{seed}" / "m.gguf", seed=seed, shards_of=10)
    return folder


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="512MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as client:
        yield client


@contextmanager
def defaults(name: str, **values: Any) -> Iterator[None]:
    """The low-level module's default parameters have these values: `Llama` does not set them."""
    lib = llama_cpp.llama_cpp
    made = getattr(lib, name)

    def changed() -> Any:
        params = made()
        for field, value in values.items():
            setattr(params, field, value)
        return params

    setattr(lib, name, changed)
    try:
        yield
    finally:
        setattr(lib, name, made)


def make(models: Path, model: str = "a.gguf", *, blocks: bool = True, **changes: Any) -> Any:
    """A Llama; fields that are no parameters of it are set as the low-level module's defaults."""
    parameters = set(inspect.signature(llama_cpp.Llama.__init__).parameters)
    with ExitStack() as stack:
        for table, name in (
            (CONTEXT_PARAMS, "llama_context_default_params"),
            (MODEL_PARAMS, "llama_model_default_params"),
        ):
            known = {*table.parts, *table.irrelevant} - parameters
            values = {field: changes.pop(field) for field in list(changes) if field in known}
            stack.enter_context(defaults(name, **values) if values else nullcontext())
        stack.enter_context(block_sequences() if blocks else nullcontext())
        options = {
            "n_ctx": 2_048,
            "n_threads": 1,
            "n_threads_batch": 1,
            "verbose": False,
            **changes,
        }
        if isinstance(options.get("lora_path"), str):
            options["lora_path"] = str(models / options["lora_path"])
        return llama_cpp.Llama(str(models / model), **options)


def text_of(llama: Any, prompt: list[int] = PROMPT) -> str:
    made = llama.create_completion(prompt, max_tokens=8, temperature=0.0)
    return str(made["choices"][0]["text"])


def evaluated_by(llama: Any, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """The text, and how many tokens were evaluated for it."""
    count, kind = 0, type(llama)
    real = kind.eval

    def counting(self: Any, tokens: list[int]) -> None:
        nonlocal count
        count += len(tokens)
        real(self, tokens)

    kind.eval = counting
    try:
        return text_of(llama, prompt), count
    finally:
        kind.eval = real


def attach(llama: Any, client: Client) -> PrefixdCache:
    cache = PrefixdCache.of(llama, client)
    llama.set_cache(cache)
    return cache


# ---- every parameter is decided

TEXT = "how text becomes token ids; the ids are in the keys"
#: Of `Llama`, beside those that have the name of a field above. The parts are where a parameter
#: ends up.
LLAMA_PARAMETERS = FieldTable(
    {
        "model_path": Part.FINGERPRINT,
        "lora_path": Part.ADAPTERS,
        "lora_scale": Part.ADAPTERS,
        # flash_attn_type
        "flash_attn": Part.CONTEXT,
        # Refused: prefixd keeps no scores.
        "logits_all": Part.CONTEXT,
        "draft_model": Part.CONTEXT,
    },
    {
        "embedding": OUTPUT,
        "use_mmap": LOADING,
        "use_mlock": LOADING,
        "seed": OUTPUT,
        "last_n_tokens_size": OUTPUT,
        "lora_base": "kept by Llama, and used by nothing",
        "numa": NUMBERS_OF_THREADS,
        "chat_format": TEXT,
        "chat_handler": "text becomes token ids; what else it evaluates is not `verified`",
        "tokenizer": TEXT,
        "spm_infill": TEXT,
        "verbose": OUTPUT,
        "kwargs": "dropped by Llama",
    },
)


@pytest.mark.parametrize(
    ("of", "table"),
    [("llama_context_params", CONTEXT_PARAMS), ("llama_model_params", MODEL_PARAMS)],
)
def test_every_field_is_decided(of: str, table: FieldTable) -> None:
    fields = fields_of(getattr(llama_cpp.llama_cpp, of))
    assert sorted([*table.parts, *table.irrelevant]) == sorted(fields)


def test_every_parameter_of_llama_is_decided() -> None:
    parameters = set(inspect.signature(llama_cpp.Llama.__init__).parameters) - {"self"}
    tables = (CONTEXT_PARAMS, MODEL_PARAMS, LLAMA_PARAMETERS)
    decided = {name for table in tables for name in (*table.parts, *table.irrelevant)}
    assert parameters - decided == set()
    own = {*LLAMA_PARAMETERS.parts, *LLAMA_PARAMETERS.irrelevant}
    assert own - parameters == set(), "no longer a parameter"


#: Of what is in the key: another value. Those that need another device, or a pointer, are in
#: tests/client/connectors, with the others.
IN_KEY: dict[str, Any] = {
    "model": "b.gguf",
    "lora_path": "lora1.gguf",
    "flash_attn": True,
    "rope_scaling_type": 2,
    "rope_freq_base": 5e4,
    "rope_freq_scale": 0.5,
    "yarn_ext_factor": 0.5,
    "yarn_attn_factor": 0.9,
    "yarn_beta_fast": 30.0,
    "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 1_024,
    "type_k": 0,
    "type_v": 0,
    "n_rs_seq": 1,
    "use_extra_bufts": False,
    "load_mtp": True,
    "kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 0.5},
}


def test_what_is_in_the_key_changes_it(models: Path, client: Client) -> None:
    plain = PrefixdCache.of(make(models), client).identity
    print("\n".join(plain.lines()))
    assert plain.unshared is None
    for name, value in IN_KEY.items():
        changed = PrefixdCache.of(make(models, **{name: value}), client).identity
        assert changed.digest != plain.digest, name
        assert changed.unshared is None, name


#: Of what is not in the key: other values, with which the text is the same from a loaded state.
IRRELEVANT: dict[str, list[Any]] = {
    "n_ctx": [1_024, 8_192],
    "n_batch": [64],
    "n_ubatch": [64],
    "n_threads": [2],
    "n_threads_batch": [2],
    "n_seq_max": [2],
    "pooling_type": [1],
    "embedding": [True],
    "offload_kqv": [False],
    "op_offload": [False],
    "no_perf": [True],
    "defrag_thold": [0.5],
    "n_outputs_max": [64],
    "n_gpu_layers": [2],
    "split_mode": [2],
    "main_gpu": [0],
    "tensor_split": [[1.0]],
    "use_mmap": [False],
    "use_mlock": [False],
    "lazy_mode": [1],
    "check_tensors": [True],
    "no_host": [True],
    "seed": [5],
    "last_n_tokens_size": [16],
    "lora_base": ["nothing"],
    "chat_format": ["chatml"],
    "spm_infill": [True],
    "swa_full": [False],  # of a model without windows
}
#: Those that are not perturbed here, and why.
NOT_PERTURBED = {
    "kv_unified": "with it off there is no spare sequence",
    "embeddings": "is `embedding`",
    "samplers": "a pointer; sampling on the device begins behind the state",
    "n_samplers": "counts the samplers",
    "n_outputs_max_per_seq": "within n_outputs_max",
    "cb_eval_user_data": "a pointer for a callback that is refused",
    "abort_callback": "a pointer; an aborted evaluation is an error",
    "abort_callback_data": "a pointer for it",
    "load_mode": "is use_mmap and use_mlock",
    "no_alloc": "loads nothing",
    "vocab_only": "evaluates nothing",
    "progress_callback": "a pointer",
    "progress_callback_user_data": "a pointer",
    "numa": "changes the whole process",
    "chat_handler": "an object; makes ids",
    "tokenizer": "an object; makes ids",
    "verbose": "prints",
    "kwargs": "is not read",
}


def test_what_is_not_in_the_key_is_perturbed_or_has_a_reason() -> None:
    irrelevant = {
        name
        for table in (CONTEXT_PARAMS, MODEL_PARAMS, LLAMA_PARAMETERS)
        for name in table.irrelevant
    }
    assert irrelevant - {*IRRELEVANT, *NOT_PERTURBED} == set()


def test_what_is_not_in_the_key_changes_no_text(models: Path, client: Client) -> None:
    saving = make(models)
    plain = attach(saving, client).identity
    text_of(saving)
    assert client.flush()
    for name, values in IRRELEVANT.items():
        for value in values:
            expected = text_of(make(models, **{name: value}))
            loading = make(models, **{name: value})
            assert attach(loading, client).identity.digest == plain.digest, name
            text, evaluated = evaluated_by(loading)
            assert (text, evaluated <= 16) == (expected, True), (name, value, evaluated)


# ---- what ordinary set-ups got wrong


class Case(NamedTuple):
    """A state that is saved with `first` must not be found with `second`."""

    first: dict[str, Any]
    second: dict[str, Any]


CASES = {
    "another model": Case({}, {"model": "b.gguf"}),
    "another second shard": Case(
        {"model": "split7/m-00001-of-00005.gguf"}, {"model": "split8/m-00001-of-00005.gguf"}
    ),
    "kv_overrides": Case({}, {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 0.5}}),
    "another base of RoPE by kv_overrides": Case(
        {}, {"kv_overrides": {"llama.rope.freq_base": 5e4}}
    ),
    "the regime of a LongRoPE": Case(
        {"model": "long.gguf", "n_ctx": 2_048}, {"model": "long.gguf", "n_ctx": 1_024}
    ),
    "an adapter": Case({}, {"lora_path": "lora1.gguf"}),
    "another adapter": Case({"lora_path": "lora1.gguf"}, {"lora_path": "lora2.gguf"}),
    "another scale": Case(
        {"lora_path": "lora1.gguf"}, {"lora_path": "lora1.gguf", "lora_scale": 0.5}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_another_state_is_not_found(models: Path, daemon: PrivateDaemon, name: str) -> None:
    with Client(daemon.address) as client:
        case = CASES[name]
        saving = make(models, **case.first)
        attach(saving, client)
        text_of(saving)
        assert client.flush()
        expected = text_of(make(models, **case.second))
        other = make(models, **case.second)
        attach(other, client)
        text, evaluated = evaluated_by(other)
        assert (text, evaluated >= len(PROMPT)) == (expected, True)
        assert client.flush()
        again = make(models, **case.second)
        attach(again, client)
        text, evaluated = evaluated_by(again)
        assert (text, evaluated <= 16) == (expected, True)


def test_an_adapter_that_is_set_by_the_low_level_call(models: Path, client: Client) -> None:
    expected = text_of(make(models, lora_path="lora1.gguf"))
    plain = text_of(make(models))
    llama = make(models)
    attach(llama, client)
    assert text_of(llama) == plain
    assert client.flush()
    path = str(models / "lora1.gguf").encode()
    adapter = llama_cpp.llama_adapter_lora_init(llama._model.model, path)
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    llama_cpp.llama_set_adapters_lora(llama._ctx.ctx, adapters, 1, (ctypes.c_float * 1)(1.0))
    assert text_of(llama) == expected
    assert client.flush()
    other = make(models, lora_path="lora1.gguf")
    attach(other, client)
    assert evaluated_by(other) == (expected, 8), "they share"
    llama_cpp.llama_set_adapters_lora(llama._ctx.ctx, None, 0, None)
    assert text_of(llama) == plain
    vector = (ctypes.c_float * (256 * 3))(*itertools.repeat(0.5, 256 * 3))
    llama_cpp.llama_set_adapter_cvec(llama._ctx.ctx, vector, len(vector), 256, 1, 3)
    assert text_of(llama) != plain
    llama_cpp.llama_set_adapter_cvec(llama._ctx.ctx, None, 0, 256, 1, 3)
    assert text_of(llama) == plain


def test_an_image_is_never_found_as_text(models: Path, client: Client) -> None:
    """What handlers of images do: embeddings are evaluated, and the ids stay those of a text."""
    text = [1] + [3 + (n * n * 17 + n * 5) % 250 for n in range(699)]
    llama = make(models)
    expected = text_of(llama, text)
    attach(llama, client)
    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.eval(text[:20])
    ids = llama.input_ids.copy()
    type(llama).eval(llama, [7] * 580)
    llama.input_ids[:] = ids
    llama.eval([11, 12, 13, 14])
    text_of(llama, llama.input_ids[: llama.n_tokens].tolist())
    assert client.flush()
    other = make(models)
    attach(other, client)
    assert text_of(other, text) == expected
    assert text_of(llama, text) == expected


# ---- reuse


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gemma.gguf", {}),
        ("gemma.gguf", {"swa_full": False}),
        ("mamba.gguf", {}),
        ("a.gguf", {"blocks": False}),
    ],
    ids=["windows", "forgetful windows", "recurrent", "whole states"],
)
def test_the_same_prompt_and_another_branch(
    models: Path, daemon: PrivateDaemon, model: str, options: dict[str, Any]
) -> None:
    def fresh() -> Any:
        return make(models, model, **options)

    with Client(daemon.address) as client:
        # With 700 tokens this engine finds no memory for the windows of this model.
        prompt = PROMPT[:600]
        saving = fresh()
        attach(saving, client)
        expected = text_of(saving, prompt)
        whole = saving.input_ids[: saving.n_tokens].tolist()
        assert client.flush()
        other = fresh()
        attach(other, client)
        text, evaluated = evaluated_by(other, prompt)
        assert (text, evaluated <= 16) == (expected, True)
        text_of(other, [*whole, 9, 10, 11])
        assert client.flush()
        branch = [*whole, 12, 13, 14]
        text, evaluated = evaluated_by(other, branch)
        assert text == text_of(fresh(), branch)
        assert evaluated <= 16
        text, evaluated = evaluated_by(other, prompt)
        assert (text, evaluated <= 16) == (expected, True), "the first prompt again"


def test_a_stream_whose_reader_leaves_is_saved(models: Path, client: Client) -> None:
    llama = make(models)
    attach(llama, client)
    prompt = [1, 2, *PROMPT]
    stream = llama.create_completion(prompt, max_tokens=8, temperature=0.0, stream=True)
    next(stream)
    stream.close()
    assert client.flush()
    other = make(models)
    attach(other, client)
    assert evaluated_by(other, prompt)[1] <= 16


# ---- random pairs


POOL = 40
CHANGES: list[tuple[str, Any]] = [
    ("model", "b.gguf"),
    ("model", "long.gguf"),
    ("n_ctx", 1_024),
    ("n_ctx", 4_096),
    ("n_batch", 128),
    ("n_threads", 2),
    ("flash_attn", True),
    ("type_k", 0),
    ("rope_freq_base", 5e4),
    ("rope_freq_scale", 0.5),
    ("rope_freq_scale", 1.0),
    ("yarn_beta_fast", 30.0),
    ("kv_overrides", {"llama.attention.layer_norm_rms_epsilon": 0.5}),
    ("lora_path", "lora1.gguf"),
    ("lora_scale", 0.5),
    ("embedding", True),
    ("use_mmap", False),
    ("seed", 3),
]


def test_equal_keys_are_equal_states_of_random_pairs(models: Path, client: Client) -> None:
    """State and text of each set-up are computed once; then any two of them are compared."""
    choose = random.Random(1)
    seen: list[tuple[bytes, tuple[bytes, str]]] = []
    for _ in range(POOL):
        options = dict(choose.sample(CHANGES, choose.randrange(3)))
        llama = make(models, **options)
        cache = PrefixdCache.of(llama, client)
        text = text_of(llama, PROMPT[:400])
        state = hashlib.sha256(cache._context.block(0, 256)).digest()
        seen.append((cache.identity.digest, (state, text)))
    check_pairs(seen, may_share=lambda one, other: bool(one[1] == other[1]))
