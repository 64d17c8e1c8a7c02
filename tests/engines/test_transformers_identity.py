"""The keys of transformers against the engine itself: what is not in the key changes no bit of the
state, and what is saved by one model is never found by another. `make engines` runs this file."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.errors import CallerError
from tests.engines.pairs import check_pairs
from tests.engines.tiny_models import VOCABULARY
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from prefixd.client.connectors.engine import UnsupportedEngine  # noqa: E402
from prefixd.client.connectors.transformers import (  # noqa: E402
    identity_of,
    load_cache,
    namespace_of,
    save_cache,
)
from prefixd.client.connectors.transformers_identity import WITHOUT_EFFECT  # noqa: E402

TOKENS = [1] + [3 + (n * n * 31 + n * 7) % 500 for n in range(699)]
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4_096,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="512MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as client:
        yield client


def make(kind: str = "Llama", seed: int = 7, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def empty(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


def logits(model: Any, tokens: list[int], cache: Any, **options: Any) -> Any:
    options[name_of_cache(model)] = cache
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=True, **options).logits[0, -1]


def name_of_cache(model: Any) -> str:
    """The argument that takes the cache: it was renamed in 5.24."""
    inner = getattr(model, "get_base_model", lambda: model)()
    parameters = inspect.signature(type(inner).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def state(model: Any, tokens: list[int] = TOKENS[:300]) -> list[Any]:
    cache = empty(model)
    logits(model, tokens, cache)
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def equal(some: list[Any], others: list[Any]) -> bool:
    """Whether two states are equal bit by bit."""
    return len(some) == len(others) and all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


def save(client: Client, namespace: Any, tokens: list[int], cache: Any) -> int:
    outcomes = save_cache(client, namespace, tokens, cache).result(PATIENCE_S)
    assert all(outcome.ok for outcome in outcomes)
    return len(outcomes)


def check_reuse(client: Client, model: Any, tokens: list[int] = TOKENS, blocks: int = 2) -> None:
    """What the model saves, it loads, and computes the same from it."""
    namespace, cold = namespace_of(model, salt=os.urandom(8)), empty(model)
    expected = logits(model, tokens, cold)
    assert save(client, namespace, tokens, cold) == blocks
    found = load_cache(client, namespace, model.config, tokens)
    assert found.token_count == blocks * 256
    torch.testing.assert_close(logits(model, tokens[found.token_count :], found.cache), expected)


# ---- every field

#: Attributes of a configuration that are in no dictionary of it.
HIDDEN = {
    "_attn_implementation_internal": "in the key, as kernels",
    "_experts_implementation_internal": "in the key, as kernels",
    "_commit_hash": "says where the weights came from, which are in the key",
    "_output_attentions": "output",
    "_name_or_path": "a name",
    "name_or_path": "a name",
    "base_model_tp_plan": "how ranks split the model; which one this is, is in the key",
    "_post_init_done": "whether the configuration is complete",
}
ARCHITECTURES = ["Llama", "Qwen3", "Mistral", "Phi3", "GPT2", "Falcon", "DeepseekV3", "Gemma2"]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_attribute_of_a_configuration_is_decided(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    hidden = {
        name
        for name in vars(config)
        if name not in config.to_dict() and name not in WITHOUT_EFFECT and name not in HIDDEN
    }
    assert hidden == set(), "in no dictionary, and therefore not in the key"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_field_is_in_the_key_or_without_effect(kind: str) -> None:
    """The weights stay those of the model: only the key is made again."""
    small = {**SMALL, "pad_token_id": 0} if kind not in ("GPT2", "Falcon", "DeepseekV3") else {}
    model = {
        "GPT2": lambda: make_gpt2(),
        "Falcon": lambda: make_falcon(),
        "DeepseekV3": lambda: make_deepseek(),
    }.get(kind, lambda: make(kind, **small))()
    plain = identity_of(model, fingerprint=b"f" * 32).digest
    fields = model.config.to_dict()
    for name in fields:
        changed = dict(fields)
        changed[name] = perturbed(fields[name])
        model.config.to_dict = lambda changed=changed: changed
        same = identity_of(model, fingerprint=b"f" * 32).digest == plain
        assert same == (name in WITHOUT_EFFECT), name


def perturbed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case None:
            return 1
        case dict():
            return {**value, "another": 1}
        case list() | tuple():
            return [*value, "another"]
    return "another"


def test_fields_without_effect_change_no_bit() -> None:
    values = {
        "output_attentions": False,  # on, it asks for other kernels
        "id2label": {0: "a"},
        "label2id": {"a": 0},
        "dtype": torch.float16,
        "torch_dtype": torch.float16,
        "_name_or_path": "elsewhere",
        "transformers_version": "4.0",
        "architectures": ["Other"],
        "tokenizer_class": "Other",
        "problem_type": "regression",
        "prefix": "x",
        "finetuning_task": "x",
        "use_cache": False,
        "output_hidden_states": True,
        "return_dict": True,
        "attention_dropout": 0.5,
        "classifier_dropout": 0.5,
        "initializer_range": 0.5,
        "router_aux_loss_coef": 0.5,
    }
    expected = state(make())
    for name in WITHOUT_EFFECT:
        model = make()
        setattr(model.config, name, values.get(name, 1))
        assert equal(state(model), expected), name


# ---- what ordinary set-ups got wrong


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")
def test_adapters_that_are_switched_scaled_edited_and_merged(client: Client) -> None:
    peft = pytest.importorskip("peft")

    def adapted(alpha: int = 8) -> Any:
        lora = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
        config = peft.LoraConfig(lora_alpha=alpha, init_lora_weights=False, **lora)
        model = make()
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config, adapter_name="one")
        torch.manual_seed(2)
        model.add_adapter("two", config)
        return model.eval()

    model, salt = adapted(), os.urandom(8)

    def switch(name: str) -> None:
        if name == "none":
            model.base_model.disable_adapter_layers()
        else:
            model.base_model.enable_adapter_layers()
            model.set_adapter(name)

    expected: dict[str, Any] = {}
    namespaces = set()
    for name in ("one", "two", "none"):
        switch(name)
        namespace, cold = namespace_of(model, salt=salt), empty(model)
        namespaces.add(namespace.root)
        assert load_cache(client, namespace, model.config, TOKENS).token_count == 0
        expected[name] = logits(model, TOKENS, cold)
        assert save(client, namespace, TOKENS, cold) == 2
    assert len(namespaces) == 3
    for name in ("one", "two", "none"):
        switch(name)
        found = load_cache(client, namespace_of(model, salt=salt), model.config, TOKENS)
        assert found.token_count == 512
        got = logits(model, TOKENS[512:], found.cache)
        torch.testing.assert_close(got, expected[name])
    assert namespace_of(make(), salt=salt).root in namespaces, "as a model without peft"
    switch("one")
    plain = namespace_of(model, salt=salt)
    assert namespace_of(adapted(), salt=salt) == plain
    assert namespace_of(adapted(alpha=64), salt=salt) != plain
    # A namespace of an adapter that is no longer the active one is refused, not used.
    filled = empty(model)
    logits(model, TOKENS, filled)
    switch("two")
    with pytest.raises(CallerError, match="changed since namespace_of"):
        load_cache(client, plain, model.config, TOKENS)
    with pytest.raises(CallerError, match="filled with other adapters"):
        save_cache(client, namespace_of(model, salt=salt), TOKENS, filled)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B.two" in n).mul_(2)
    assert namespace_of(model, salt=salt).root not in namespaces
    switch("one")
    model.merge_adapter()
    assert namespace_of(model, salt=salt).root not in namespaces
    model.unmerge_adapter()
    merged = adapted().merge_and_unload()
    assert namespace_of(merged, salt=salt).root not in namespaces
    assert transformers.LlamaForCausalLM is type(merged)


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 512,
            "factor": 8.0,
        },
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ],
    ids=["longrope", "dynamic"],
)
def test_rope_that_depends_on_the_pass(client: Client, rope: dict[str, Any]) -> None:
    length = 512 if rope["rope_type"] == "dynamic" else 4_096

    def fresh() -> Any:
        return make(rope_parameters=dict(rope), max_position_embeddings=length)

    model, salt = fresh(), os.urandom(8)
    namespace, cold = namespace_of(model, salt=salt), empty(model)
    logits(model, TOKENS, cold)
    assert save(client, namespace, TOKENS, cold) == 0, "longer than the original context"
    short, cold = TOKENS[:400], empty(model)
    expected = logits(model, short, cold)
    assert torch.equal(expected, logits(fresh(), short, empty(model)))
    namespace = namespace_of(model, salt=salt)
    assert save(client, namespace, short, cold) == 1
    other = fresh()
    found = load_cache(client, namespace_of(other, salt=salt), other.config, short)
    assert found.token_count == 256
    torch.testing.assert_close(logits(other, short[256:], found.cache), expected)
    assert load_cache(client, namespace, model.config, TOKENS).token_count == 0


def make_llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=56, patch_size=14, projection_dim=32,
    )  # fmt: skip
    text = transformers.LlamaConfig(**SMALL)
    torch.manual_seed(7)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=511)
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_a_chain_ends_before_the_first_image(client: Client) -> None:
    model = make_llava()
    namespace = namespace_of(model, salt=os.urandom(8))
    tokens = [*TOKENS[:300], *[511] * 16, *TOKENS[300:600]]
    torch.manual_seed(1)
    first, second = torch.randn(2, 1, 3, 56, 56)
    cold = empty(model)
    logits(model, tokens, cold, pixel_values=first)
    assert save(client, namespace, tokens, cold) == 1
    found = load_cache(client, namespace, model.config, tokens)
    assert found.token_count == 256
    got = logits(model, tokens[256:], found.cache, pixel_values=second)
    torch.testing.assert_close(got, logits(model, tokens, empty(model), pixel_values=second))


def test_masked_tokens_and_embeddings_are_not_saved(client: Client) -> None:
    model = make()
    namespace = namespace_of(model, salt=os.urandom(8))
    padded = [0] * 100 + TOKENS[:500]
    mask = torch.tensor([[0] * 100 + [1] * 500])
    cold = empty(model)
    logits(model, padded, cold, attention_mask=mask)
    assert save(client, namespace, padded, cold) == 0
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(torch.tensor([TOKENS]))
        cold = model(inputs_embeds=embeds, use_cache=True).past_key_values
    with pytest.raises(CallerError, match="has not filled the cache"):
        save_cache(client, namespace, TOKENS, cold)


# ---- shapes, ids, generate


def make_gpt2() -> Any:
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, vocab_size=VOCABULARY, n_positions=2_048
    )
    return transformers.GPT2LMHeadModel(config).eval()


def make_falcon() -> Any:
    torch.manual_seed(7)
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        multi_query=True, new_decoder_architecture=False, alibi=False,
    )  # fmt: skip
    return transformers.FalconForCausalLM(config).eval()


def make_big_code() -> Any:
    torch.manual_seed(7)
    config = transformers.GPTBigCodeConfig(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, multi_query=True, n_positions=2_048
    )
    return transformers.GPTBigCodeForCausalLM(config).eval()


def make_deepseek() -> Any:
    torch.manual_seed(7)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=4_096,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize(
    "maker",
    [
        make,
        make_gpt2,
        make_falcon,
        make_big_code,
        make_deepseek,
        lambda: make("Qwen3", head_dim=32),
        lambda: make("Phi3", pad_token_id=0),
        lambda: make().to(torch.bfloat16),
    ],
    ids=["Llama", "GPT2", "Falcon", "GPTBigCode", "DeepseekV3", "Qwen3", "Phi3", "bfloat16"],
)
# Some versions compile a part of GPTBigCode in a way that torch no longer likes.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_what_is_saved_is_loaded(client: Client, maker: Any) -> None:
    check_reuse(client, maker())


def make_hybrid(kind: str) -> Any:
    torch.manual_seed(7)
    options = {
        "FalconH1": {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        },
        "Qwen3Next": {
            "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    }  # fmt: skip
    return make(kind, **options[kind])


@pytest.mark.parametrize(
    "maker",
    [
        lambda: make("Mistral", sliding_window=128),
        lambda: make("Gemma2", sliding_window=128, head_dim=16),
        lambda: make_hybrid("Qwen3Next"),
        lambda: make_hybrid("FalconH1"),
    ],
    ids=["Mistral", "Gemma2", "Qwen3Next", "FalconH1"],
)
def test_a_conversation_goes_on_where_layers_do_not_hold_every_token(
    client: Client, maker: Any
) -> None:
    model = maker()
    namespace, cold = namespace_of(model, salt=os.urandom(8)), empty(model)
    logits(model, TOKENS[:400], cold)
    assert save(client, namespace, TOKENS[:400], cold) == 1
    assert save(client, namespace, TOKENS[:400], cold) == 0
    expected = logits(model, TOKENS[400:], cold)
    found = load_cache(client, namespace, model.config, TOKENS)
    assert (found.token_count, found.cache.get_seq_length()) == (400, 400)
    assert torch.equal(logits(model, TOKENS[400:], found.cache), expected)
    assert save(client, namespace, TOKENS, found.cache) == 1
    other = [*TOKENS[:399], 2, *TOKENS[400:]]
    assert load_cache(client, namespace, model.config, other).token_count == 0
    assert load_cache(client, namespace, model.config, TOKENS[:400]).token_count == 0


def test_a_state_of_nothing_but_recurrent_layers_is_refused_by_name(client: Client) -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(UnsupportedEngine, match="LinearAttentionLayer"):
        load_cache(client, namespace_of(model), model.config, TOKENS)


def test_encoders_and_meta_tensors_are_refused_by_name() -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16
    )
    with pytest.raises(UnsupportedEngine, match="T5ForConditionalGeneration: it has an encoder"):
        namespace_of(transformers.T5ForConditionalGeneration(config).eval())
    with torch.device("meta"):
        model = make()
    with pytest.raises(UnsupportedEngine, match=r"LlamaForCausalLM .* is a meta tensor"):
        namespace_of(model)


def test_generate_with_ids_as_a_tokeniser_gives_them(client: Client) -> None:
    model = make()
    ids = torch.tensor([TOKENS[:600]])
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    name = name_of_cache(model)
    namespace = namespace_of(model, salt=os.urandom(8))
    for saved, loaded in ((2, 0), (0, 512)):
        found = load_cache(client, namespace, model.config, ids)
        assert found.token_count == loaded
        out = model.generate(ids, **{name: found.cache}, **options)
        assert out.tolist() == expected.tolist()
        assert save(client, namespace, out, found.cache) == saved


def test_a_model_that_was_saved_and_loaded_shares(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "model")
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert namespace_of(first).root == namespace_of(model).root
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    assert namespace_of(first).root != namespace_of(model).root


# ---- random pairs

POOL = 60
CHANGES: list[tuple[str, Any]] = [
    ("seed", 8),
    ("dtype", "bfloat16"),
    ("rms_norm_eps", 0.5),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5e4}),
    ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    ("max_position_embeddings", 8_192),
    ("num_key_value_heads", 4),
    ("attn_implementation", "eager"),
    ("use_cache", False),
    ("pad_token_id", 2),
    ("bos_token_id", 5),
    ("output_hidden_states", True),
    ("attention_dropout", 0.5),
    ("initializer_range", 0.3),
]


def test_equal_keys_are_equal_states_of_random_pairs() -> None:
    """The state of each set-up is computed once; then any two of them are compared."""
    choose = random.Random(1)
    seen: list[tuple[bytes, list[Any]]] = []
    for _ in range(POOL):
        options = dict(choose.sample(CHANGES, choose.randrange(3)))
        dtype = getattr(torch, options.pop("dtype", "float32"))
        model = make(**options).to(dtype)
        seen.append((identity_of(model).digest, state(model)))
    check_pairs(seen, equal)
