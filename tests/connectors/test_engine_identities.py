"""What the keys of vLLM's, SGLang's and LMCache's connectors depend on. With stand-ins for the
engines' configurations: `make engines-*` has those of the engines themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.client.identity import StateIdentity, differences
from prefixd.connectors import lmcache, sglang, vllm
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
