"""transformers itself, on a small random model. `make engines` runs this file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest

from prefixd.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError
from tests.engines.tiny_models import make_transformer
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from prefixd.client.connectors.engine import UnsupportedEngine  # noqa: E402
from prefixd.client.connectors.transformers import load_cache, namespace_of, save_cache  # noqa: E402

TOKENS = [1] + [3 + (n * n * 31 + n * 7) % 500 for n in range(1_024)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="512MiB") as daemon:
        yield daemon


@pytest.fixture(params=[True, False], ids=["local", "remote"])
def client(request: pytest.FixtureRequest, daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address, local=request.param) as client:
        yield client


def logits(model: Any, tokens: list[int], cache: Any) -> Any:
    # Renamed in 5.24.
    parameters = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    with torch.inference_mode():
        return model(torch.tensor([tokens]), **{name: cache}, use_cache=True).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_as_the_same_split_without_a_cache(client: Client, dtype: str) -> None:
    model = make_transformer().to(getattr(torch, dtype))
    namespace = namespace_of(model, salt=os.urandom(8))
    split = len(TOKENS) - 1
    cold = transformers.DynamicCache(config=model.config)
    began = perf_counter()
    logits(model, TOKENS[:split], cold)
    prefill_s = perf_counter() - began
    outcomes = save_cache(client, namespace, TOKENS[:split], cold).result(PATIENCE_S)
    assert all(outcome.ok for outcome in outcomes)
    expected = logits(model, TOKENS[split:], cold)
    began = perf_counter()
    found = load_cache(client, namespace, model.config, TOKENS, dtype=model.dtype)
    load_s = perf_counter() - began
    print(f"{dtype}: prefill {prefill_s * 1e3:.1f} ms, loaded in {load_s * 1e3:.1f} ms")
    assert found.token_count == split
    assert torch.equal(logits(model, TOKENS[split:], found.cache), expected)
    assert save_cache(client, namespace, TOKENS, found.cache).result(PATIENCE_S) == []


def test_a_prompt_that_diverges_and_another_model(client: Client) -> None:
    model = make_transformer()
    namespace = namespace_of(model, salt=os.urandom(8))
    cold = transformers.DynamicCache(config=model.config)
    logits(model, TOKENS[:1_000], cold)
    assert len(save_cache(client, namespace, TOKENS[:1_000], cold).result(PATIENCE_S)) == 3
    other = [*TOKENS[:600], 2, *TOKENS[601:1_000]]
    found = load_cache(client, namespace, model.config, other)
    assert (found.token_count, found.cache.get_seq_length()) == (512, 512)
    torch.testing.assert_close(
        logits(model, other[512:], found.cache)[:, -1], logits(model, other, None)[:, -1]
    )
    with torch.no_grad():
        next(iter(model.parameters())).add_(1e-3)
    changed = namespace_of(model)
    assert load_cache(client, changed, model.config, TOKENS).token_count == 0


def test_an_unsupported_cache_is_refused_by_name(client: Client) -> None:
    model = make_transformer()
    static = transformers.StaticCache(config=model.config, max_cache_len=512)
    with pytest.raises(UnsupportedEngine, match="StaticLayer"):
        save_cache(client, namespace_of(model), TOKENS, static)
    cache = transformers.DynamicCache(config=model.config)
    logits(model, TOKENS[:300], cache)
    cache.batch_repeat_interleave(2)
    with pytest.raises(CallerError, match="batch"):
        save_cache(client, namespace_of(model), TOKENS, cache)
