"""What the keys of vLLM's, SGLang's and LMCache's connectors depend on. With stand-ins for the
engines' configurations: `make engines-*` has those of the engines themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from prefixd.client.connectors import lmcache, sglang, vllm
from prefixd.client.identity import StateIdentity, differences
from prefixd.proto.errors import ConfigError

GIVEN = {"fingerprint": "llama 8b, commit 1"}


# ---- vLLM

MODEL = {"name": "m", "dtype": "bfloat16", "max_model_len": 4096}
CONFIG = {"kv_cache_layout": "LBNHC", "canonical_layout": False, "replicated_layout": False}


def of_vllm(
    model: Mapping[str, Any] = MODEL,
    config: Mapping[str, Any] = CONFIG,
    fields: Mapping[str, Any] | None = None,
    rank: int = 0,
    chunk_bytes: int = 4096,
    options: Mapping[str, Any] = GIVEN,
) -> StateIdentity:
    parallel = SimpleNamespace(is_parallelism_agnostic=False)
    spec = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(**model), parallel=parallel, **config)
    )
    return vllm.identity_of(spec, fields or {"model_name": "m"}, rank, chunk_bytes, options)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**MODEL, "dtype": "float16"}},
        {"model": {**MODEL, "max_model_len": 8192}},
        {"config": {**CONFIG, "kv_cache_layout": "LBHNC"}},
        {"config": {**CONFIG, "canonical_layout": True}},
        {"config": {**CONFIG, "replicated_layout": True}},
        {"fields": {"model_name": "n"}},
        {"rank": 1},
        {"chunk_bytes": 8192},
        {"options": {"fingerprint": "llama 8b, commit 2"}},
        {"options": {**GIVEN, "salt": "tenant"}},
    ],
    ids=str,
)
def test_vllm_with_another_state_has_other_keys(change: dict[str, Any]) -> None:
    same, other = of_vllm(), of_vllm(**change)
    assert of_vllm().digest == same.digest
    assert other.digest != same.digest
    assert len(differences(same, other)) == 1


def test_vllm_does_not_say_what_it_runs() -> None:
    one, other = of_vllm(options={}), of_vllm(options={})
    assert one.digest != other.digest
    assert "give the option fingerprint" in str(one.unshared)


# ---- SGLang

ARGUMENTS = {"model_path": "", "dtype": "auto", "kv_cache_dtype": "auto", "quantization": None}


def of_sglang(
    extra: Mapping[str, Any] = GIVEN,
    pool: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = ARGUMENTS,
    **config: Any,
) -> StateIdentity:
    fields = {"model_name": "m", "tp_rank": 0, "tp_size": 2, "is_mla_model": False, **config}
    made = {"layout": "layer_first", "page_size": 16, "dtype": "torch.bfloat16", **(pool or {})}
    given = None if arguments is None else SimpleNamespace(**arguments)
    return sglang.identity_of(
        SimpleNamespace(**fields), extra, SimpleNamespace(**made), "kv", given
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "n"},
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_rank": 1},
        {"dcp_rank": 1},
        {"pool": {"layout": "page_first"}},
        {"pool": {"page_size": 32}},
        {"pool": {"head_num": 4}},
        {"arguments": {**ARGUMENTS, "quantization": "fp8"}},
        {"arguments": {**ARGUMENTS, "json_model_override_args": "{}"}},
        {"extra": {"fingerprint": "llama 8b, commit 2"}},
        {"extra": {**GIVEN, "salt": "tenant"}},
    ],
    ids=str,
)
def test_sglang_with_another_state_has_other_keys(change: dict[str, Any]) -> None:
    same, other = of_sglang(), of_sglang(**change)
    assert of_sglang().digest == same.digest
    assert other.digest != same.digest
    assert len(differences(same, other)) == 1


def test_sglang_tells_both_kinds_of_8_bit_floats_apart() -> None:
    """Its host pool stores both as uint8."""

    def of(device: str | None, kind: str = "auto") -> StateIdentity:
        pool: dict[str, Any] = {"dtype": "torch.uint8"}
        if device is not None:
            pool["device_pool"] = SimpleNamespace(dtype=device)
        return of_sglang(pool=pool, arguments={**ARGUMENTS, "kv_cache_dtype": kind})

    kinds = ["torch.float8_e4m3fn", "torch.float8_e5m2"]
    assert len({of(kind).digest for kind in kinds}) == 2
    assert len({of(None, kind).digest for kind in ("fp8_e4m3", "fp8_e5m2")}) == 2
    assert of(kinds[0]).unshared is None
    assert "unknown kind" in str(of(None).unshared)


def test_sglang_reads_the_weights_that_its_arguments_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    arguments = {**ARGUMENTS, "model_path": str(tmp_path)}
    before = of_sglang({}, arguments=arguments)
    assert before.unshared is None
    assert before.digest == of_sglang({}, arguments=arguments).digest
    weights.write_bytes(b"two")
    assert of_sglang({}, arguments=arguments).digest != before.digest, "the name is the same"
    assert of_sglang({}, arguments={**ARGUMENTS, "model_path": "org/none"}).unshared
    assert of_sglang({}, arguments=None).unshared


def test_sglangs_arguments_are_in_the_key_but_for_those_without_effect() -> None:
    same = of_sglang().digest
    assert of_sglang(arguments={**ARGUMENTS, "an_argument_of_later": 1}).digest != same
    for name in sorted(sglang._WITHOUT_EFFECT - {"lora_paths"}):
        assert of_sglang(arguments={**ARGUMENTS, name: "other"}).digest == same, name
    listed = " ".join(sglang.WITHOUT_EFFECT.values()).split()
    assert len(listed) == len(set(listed))


def test_an_argument_without_exact_text_keeps_the_state_here() -> None:
    assert "server arguments" in str(of_sglang(arguments={**ARGUMENTS, "x": object()}).unshared)


@pytest.mark.parametrize(
    "given",
    [
        ["a={path}"],
        {"a": "{path}"},
        [{"lora_name": "a", "lora_path": "{path}"}],
        [SimpleNamespace(lora_name="a", lora_path="{path}")],
    ],
    ids=["text", "mapping", "mappings", "objects"],
)
def test_sglangs_adapters_are_those_of_their_files(tmp_path: Path, given: Any) -> None:
    """SGLang's hashes have their names and paths only."""
    path = str(tmp_path / "adapter")

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{path}", path)
        if isinstance(value, list):
            return [put(each) for each in value]
        if isinstance(value, dict):
            return {name: put(each) for name, each in value.items()}
        return SimpleNamespace(**put(vars(value)))

    def of(fingerprint: bool = False) -> StateIdentity:
        arguments = {**ARGUMENTS, "model_path": str(tmp_path), "lora_paths": put(given)}
        return of_sglang(GIVEN if fingerprint else {}, arguments=arguments)

    (tmp_path / "model.safetensors").write_bytes(b"model")
    assert "LoRA adapters" in str(of().unshared)
    assert of(fingerprint=True).unshared is None
    (tmp_path / "adapter").mkdir()
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    before = of()
    assert before.unshared is None
    assert of().digest == before.digest
    weights.write_bytes(b"two")
    assert [each.name for each in differences(before, of())] == ["LoRA adapters"]


def test_the_pool_of_a_draft_has_the_weights_of_the_draft(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    arguments = SimpleNamespace(
        model_path=str(tmp_path), speculative_draft_model_path=str(tmp_path)
    )

    def of(pool: str, path: Path = tmp_path) -> StateIdentity:
        arguments.speculative_draft_model_path = str(path)
        config = SimpleNamespace(tp_rank=0, tp_size=1)
        return sglang.identity_of(config, {}, SimpleNamespace(dtype="bf16"), pool, arguments)

    before = of("draft")
    assert before.unshared is None
    assert of("draft").digest == before.digest
    weights.write_bytes(b"two")
    assert "draft weights" in {each.name for each in differences(before, of("draft"))}
    assert "draft weights" in str(of("draft", tmp_path / "none").unshared)
    assert of("kv", tmp_path / "none").unshared is None


@pytest.mark.parametrize("name", sglang._NAMES_OF_CONTENTS)
def test_files_that_arguments_name_are_unknown_without_a_fingerprint(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"model")
    arguments = {**ARGUMENTS, "model_path": str(tmp_path)}
    assert of_sglang({}, arguments=arguments).unshared is None
    arguments[name] = "some/path"
    assert name in str(of_sglang({}, arguments=arguments).unshared)
    assert of_sglang(arguments=arguments).unshared is None


def test_a_served_model_name_is_not_the_model() -> None:
    one, other = of_sglang({}, arguments=None), of_sglang({}, arguments=None)
    assert one.digest != other.digest


# ---- LMCache


def test_lmcache_with_other_weights_or_fields_has_other_keys() -> None:
    given = lmcache.identity_of(GIVEN)
    assert lmcache.identity_of(GIVEN).digest == given.digest
    others: list[dict[str, Any]] = [
        {"fingerprint": "another"},
        {**GIVEN, "fields": {"layout": 2}},
        {},
        {},
    ]
    digests = {lmcache.identity_of(other).digest for other in others}
    assert len(digests | {given.digest}) == 5
    assert "fingerprint" in str(lmcache.identity_of({}).unshared)


@pytest.mark.parametrize("wrong", ["", 7, b"bytes", ["list"]])
def test_a_fingerprint_is_text(wrong: object) -> None:
    options = {"fingerprint": wrong}
    with pytest.raises(ConfigError, match="fingerprint is text"):
        of_vllm(options=options)
    with pytest.raises(ConfigError, match="fingerprint is text"):
        of_sglang(options)
    with pytest.raises(ConfigError, match="fingerprint is text"):
        lmcache.identity_of(options)


def test_the_fields_of_lmcache_are_a_dictionary() -> None:
    with pytest.raises(ConfigError, match="fields is a dictionary, not 5"):
        lmcache.identity_of({"fields": 5})


# ---- random pairs


class Field(NamedTuple):
    """A field of a configuration: its values, and whether bytes depend on it."""

    values: tuple[Any, ...]
    matters: bool = True


_ONE_OF = {"fingerprint": Field(("a", "b")), "salt": Field((None, "x"))}
_PAIRS: dict[str, tuple[dict[str, Field], Callable[[dict[str, Any]], StateIdentity]]] = {
    "vllm": (
        {
            **_ONE_OF,
            "dtype": Field(("bfloat16", "fp8_e4m3", "fp8_e5m2")),
            "kv_cache_layout": Field(("LBNHC", "LBHNC")),
            "rank": Field((0, 1)),
            "chunk_bytes": Field((4096, 8192)),
            # Without a regime that it picks, which vLLM does not tell.
            "max_model_len": Field((4096, 8192), matters=False),
            "name": Field(("m", "n"), matters=False),
        },
        lambda one: of_vllm(
            {each: one[each] for each in ("name", "dtype", "max_model_len")},
            {**CONFIG, "kv_cache_layout": one["kv_cache_layout"]},
            {"model_name": one["name"]},
            one["rank"],
            one["chunk_bytes"],
            {each: one[each] for each in _ONE_OF},
        ),
    ),
    "sglang": (
        {
            **_ONE_OF,
            "tp_rank": Field((0, 1)),
            "layout": Field(("layer_first", "page_first")),
            "kv_cache_dtype": Field(("fp8_e4m3", "fp8_e5m2")),
            "quantization": Field((None, "fp8")),
            "port": Field((1, 2), matters=False),
            "max_running_requests": Field((8, 16), matters=False),
            "model_name": Field(("m", "n"), matters=False),
        },
        lambda one: of_sglang(
            {each: one[each] for each in _ONE_OF},
            {"layout": one["layout"], "dtype": "torch.uint8"},
            {
                **ARGUMENTS,
                **{
                    each: one[each]
                    for each in ("kv_cache_dtype", "quantization", "port", "max_running_requests")
                },
            },
            tp_rank=one["tp_rank"],
            model_name=one["model_name"],
        ),
    ),
    "lmcache": (
        {
            "fingerprint": Field(("a", "b")),
            "layout": Field((1, 2)),
            "tier": Field(("ram", "shm"), False),
        },
        lambda one: lmcache.identity_of(
            {
                "fingerprint": one["fingerprint"],
                "fields": {"layout": one["layout"]},
                "tier": one["tier"],
            }
        ),
    ),
}
#: Of 200 pairs, those that could share and don't, because a name or a length is in the key.
_LOST = {"vllm": 21, "sglang": 7, "lmcache": 0}


@pytest.mark.parametrize("engine", _PAIRS)
def test_random_pairs_share_only_the_same_state(engine: str) -> None:
    fields, identity = _PAIRS[engine]
    chance, lost, shared = random.Random(29), 0, 0
    for _ in range(200):
        one = {name: chance.choice(field.values) for name, field in fields.items()}
        changed = chance.sample(sorted(fields), chance.randrange(3))
        other = one | {name: chance.choice(fields[name].values) for name in changed}
        same = all(one[name] == other[name] for name, field in fields.items() if field.matters)
        shares = identity(one).digest == identity(other).digest
        assert same or not shares, (one, other)
        shared += shares
        lost += same and not shares
    assert shared > 50
    assert lost <= _LOST[engine]
