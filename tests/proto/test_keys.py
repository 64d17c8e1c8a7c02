"""Keys: golden vectors, one pass against many, keys that must not collide."""

import json
import os
import pickle
import random
import runpy
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.keys import (
    Adapter,
    Namespace,
    block_key,
    block_key_of_bytes,
    block_keys,
    chain_pieces,
    context_hash,
    extend_chain,
    prefix_key,
    prefix_key_of_bytes,
    prefix_keys,
)
from prefixd.proto.tokens import MAX_TOKEN_ID, token_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS = json.loads((GOLDEN / "keys.json").read_text())

WEIGHTS, CONTEXT = b"\x11" * 32, b"\x22" * 32
LORA_A, LORA_B = b"\x33" * 32, b"\x44" * 32

token_lists = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=70)


def namespace(**fields: Any) -> Namespace:
    return Namespace(
        **{"fingerprint": WEIGHTS, "quantisation": "f16", "context_params": CONTEXT, **fields}
    )


NS = namespace()


# ---- golden vectors


def golden_namespace(name: str) -> Namespace:
    fields = VECTORS["namespaces"][name]
    return Namespace(
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        quantisation=bytes.fromhex(fields["quantisation"]),
        context_params=bytes.fromhex(fields["context_params"]),
        adapters=tuple(Adapter(bytes.fromhex(sha), scale) for sha, scale in fields["adapters"]),
        salt=bytes.fromhex(fields["salt"]),
        shard=bytes.fromhex(fields["shard"]),
    )


def test_the_golden_vectors_are_what_their_generator_writes() -> None:
    assert (
        runpy.run_path(str(GOLDEN / "make_keys.py"))["text"]() == (GOLDEN / "keys.json").read_text()
    )


@pytest.mark.parametrize("name", VECTORS["namespaces"])
def test_golden_namespaces(name: str) -> None:
    expected = VECTORS["namespaces"][name]["effective_fingerprint"]
    assert golden_namespace(name).effective_fingerprint.hex() == expected


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['namespace']}-{c['prefix']}")
def test_golden_keys(case: dict[str, Any]) -> None:
    scope = golden_namespace(case["namespace"])
    assert prefix_key(scope, case["tokens"]).hex() == case["prefix"]
    for chain in case["chains"]:
        whole = [k.hex() for k in block_keys(scope, case["tokens"], chain["block_tokens"])]
        assert whole == chain["keys"]
        padded = block_keys(scope, case["tokens"], chain["block_tokens"], include_partial=True)
        partial = [chain["partial"]] if chain["partial"] else []
        assert [k.hex() for k in padded] == chain["keys"] + partial


@pytest.mark.parametrize("case", VECTORS["contexts"], ids=lambda c: c["hash"][:8])
def test_golden_context_hashes(case: dict[str, Any]) -> None:
    assert context_hash(case["params"]).hex() == case["hash"]


# ---- the same keys from everything that holds tokens, in every process

HOLDERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array I": lambda t: array("I", t),
    "array i": lambda t: array("i", t),
    "array q": lambda t: array("q", t),
    "array Q": lambda t: array("Q", t),
    "memoryview": lambda t: memoryview(array("I", t)),
    "read-only memoryview": lambda t: memoryview(array("I", t)).toreadonly(),
    "numpy int32": lambda t: np.array(t, np.int32),
    "numpy uint32": lambda t: np.array(t, np.uint32),
    "numpy int64": lambda t: np.array(t, np.int64),
    "numpy big-endian": lambda t: np.array(t, ">i4"),
    "numpy strided": lambda t: np.repeat(np.array(t, np.uint32), 2)[::2],
    "numpy column": lambda t: np.array([t, t], np.int32).T[:, 0],
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("count", [0, 1, 9, 64])
def test_what_holds_the_tokens_makes_no_difference(holder: str, count: int) -> None:
    plain = [(n * 65_537) % 2**31 for n in range(count)]
    tokens = HOLDERS[holder](plain)
    lengths = [0, count] if count else [0]
    assert bytes(token_bytes(tokens)) == b"".join(t.to_bytes(4, "little") for t in plain)
    assert prefix_key(NS, tokens) == prefix_key(NS, plain)
    assert prefix_keys(NS, tokens, lengths) == prefix_keys(NS, plain, lengths)
    assert block_keys(NS, tokens, 4, include_partial=True) == block_keys(
        NS, plain, 4, include_partial=True
    )


def test_a_contiguous_view_of_words_is_not_copied() -> None:
    tokens = array("I", range(100))
    raw = token_bytes(tokens)
    assert isinstance(raw, memoryview)
    tokens[0] = 77
    assert bytes(raw[:4]) == b"\x4d\0\0\0"


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_every_process_computes_the_same_keys(seed: str) -> None:
    program = """
from prefixd.proto.keys import *
ns = Namespace(b"w" * 32, "q8_0", context_hash({"n_ctx": 4096, "rope": 0.5, "flash": True}),
               (Adapter(b"a" * 32, 0.3), Adapter(b"b" * 32)), "tenant", "tp0")
print(block_keys(ns, range(100), 16, include_partial=True)[-1].hex())
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    here = Namespace(
        b"w" * 32,
        "q8_0",
        context_hash({"flash": True, "rope": 0.5, "n_ctx": 4096}),
        (Adapter(b"b" * 32), Adapter(b"a" * 32, 0.3)),
        "tenant",
        "tp0",
    )
    last = block_keys(here, range(100), 16, include_partial=True)[-1]
    assert result.stdout.strip() == last.hex()


# ---- one pass is many


@given(token_lists, st.data())
def test_one_pass_gives_the_key_of_every_prefix(tokens: list[int], data: st.DataObject) -> None:
    lengths = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    assert prefix_keys(NS, tokens, lengths) == [prefix_key(NS, tokens[:n]) for n in lengths]


@given(token_lists, st.integers(1, 20), st.booleans(), st.data())
def test_a_chain_can_be_resumed_at_every_block(
    tokens: list[int], block_tokens: int, partial: bool, data: st.DataObject
) -> None:
    keys = block_keys(NS, tokens, block_tokens, include_partial=partial)
    pieces = chain_pieces(NS.root, 0, tokens, block_tokens, include_partial=partial)
    assert [key for piece in pieces for key in piece] == keys
    index = data.draw(st.integers(0, len(tokens) // block_tokens))
    parent = keys[index - 1] if index else NS.root
    rest = tokens[index * block_tokens :]
    assert extend_chain(parent, index, rest, block_tokens, include_partial=partial) == keys[index:]


@given(token_lists, st.integers(1, 20))
def test_a_block_is_hashed_after_its_parent_and_nothing_else(
    tokens: list[int], block_tokens: int
) -> None:
    parent = NS.root
    for index, key in enumerate(block_keys(NS, tokens, block_tokens)):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        assert block_key(parent, index, block) == key
        parent = key


def test_the_raw_forms_agree_with_those_that_check() -> None:
    raw = bytes(token_bytes([5, 6, 7]))
    assert prefix_key_of_bytes(NS, raw) == prefix_key(NS, [5, 6, 7])
    assert block_key_of_bytes(NS.root, 3, raw) == block_key(NS.root, 3, [5, 6, 7])


def test_no_tokens_are_the_root() -> None:
    assert prefix_key(NS, []) == NS.root == prefix_keys(NS, [1, 2], [0])[0]
    assert block_keys(NS, [], 4, include_partial=True) == []
    assert prefix_keys(NS, [1, 2], []) == []


class Counting(Sequence[int]):
    """Tokens that count how many of them were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.seen = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: Any) -> Any:
        assert isinstance(item, slice)
        found = list(range(self.count))[item]
        self.seen += len(found)
        return found


def test_a_walk_that_misses_on_block_0_costs_one_block() -> None:
    tokens = Counting(10_000)
    pieces = chain_pieces(NS.root, 0, tokens, 16)
    first = next(pieces)
    assert tokens.seen == 16
    assert first == block_keys(NS, range(16), 16)
    next(pieces)
    assert tokens.seen in (32, 48)  # the kernel hashes two more blocks at once, then four ...


def test_what_is_behind_the_last_boundary_is_not_looked_at() -> None:
    tokens = Counting(10_000)
    prefix_keys(NS, tokens, [16, 64])
    assert tokens.seen == 64
    assert prefix_keys(NS, [1, 2, -5], [2]) == prefix_keys(NS, [1, 2], [2])


def test_a_trailing_incomplete_block_is_found_by_its_own_tokens_only() -> None:
    padded = block_keys(NS, [1, 2, 3, 4, 5], 4, include_partial=True)
    assert len(padded) == 2
    assert block_keys(NS, [1, 2, 3, 4, 5], 4) == padded[:1]
    others = [[5, 0], [5, 0, 0, 0], [5, MAX_TOKEN_ID, MAX_TOKEN_ID, MAX_TOKEN_ID], [6]]
    for other in others:
        assert block_keys(NS, [1, 2, 3, 4, *other], 4, include_partial=True)[1] != padded[1]


# ---- what may never be the same


def test_anything_that_differs_gives_another_key() -> None:
    variants = [
        NS,
        namespace(fingerprint=b"\x12" * 32),
        namespace(quantisation="f32"),
        namespace(quantisation=""),
        namespace(context_params=b"\x23" * 32),
        namespace(adapters=(Adapter(LORA_A),)),
        namespace(adapters=(Adapter(LORA_B),)),
        namespace(adapters=(Adapter(LORA_A), Adapter(LORA_B))),
        namespace(adapters=(Adapter(LORA_A), Adapter(LORA_A))),
        namespace(adapters=(Adapter(LORA_A, 0.5),)),
        namespace(adapters=(Adapter(LORA_A, -1.0),)),
        namespace(adapters=(Adapter(LORA_A, 0.0),)),
        namespace(salt="x"),
        namespace(shard="x"),
        namespace(salt="x", shard="x"),
        namespace(salt="ab", shard="c"),
        namespace(salt="a", shard="bc"),
        namespace(salt="abc"),
        namespace(shard="abc"),
        namespace(salt="abc\0"),
        namespace(salt="\0abc"),
        namespace(salt="x", adapters=(Adapter(LORA_A),)),
    ]
    assert len({prefix_key(v, [1, 2, 3]) for v in variants}) == len(variants)
    assert len({v.root for v in variants}) == len(variants)
    assert len(set(variants)) == len(variants)


@given(st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6), st.binary(max_size=6))
def test_salt_and_shard_never_run_into_each_other(
    salt: bytes, shard: bytes, other_salt: bytes, other_shard: bytes
) -> None:
    same = (
        namespace(salt=salt, shard=shard).root == namespace(salt=other_salt, shard=other_shard).root
    )
    assert same == ((salt, shard) == (other_salt, other_shard))


def test_a_salt_that_spells_out_another_step_is_still_only_a_salt() -> None:
    plain = namespace(shard="s")
    spelled = b"prefixd/shard/v1\0" + (1).to_bytes(4, "little") + b"s" + WEIGHTS
    assert namespace(salt=spelled).root != plain.root


def test_a_prefix_is_no_chain() -> None:
    tokens = list(range(16))
    found = {*prefix_keys(NS, tokens, range(1, 17)), *block_keys(NS, tokens, 4)}
    found |= {*block_keys(NS, tokens, 8), *block_keys(NS, tokens, 16)}
    assert len(found) == 16 + 4 + 2 + 1


def test_a_block_is_bound_to_its_place() -> None:
    block = [7, 7, 7, 7]
    keys = block_keys(NS, block * 3, 4)
    assert len(set(keys)) == 3
    assert block_key(NS.root, 0, block) != block_key(NS.root, 1, block)


# ---- what is the same


def test_the_order_of_adapters_makes_no_difference() -> None:
    adapters = [Adapter(LORA_B, 0.5), Adapter(LORA_A, 2.0), Adapter(LORA_A, -2.0)]
    expected = namespace(adapters=tuple(adapters))
    for seed in range(6):
        random.Random(seed).shuffle(adapters)
        assert namespace(adapters=tuple(adapters)) == expected
        assert namespace(adapters=tuple(adapters)).root == expected.root


@pytest.mark.parametrize(
    ("scale", "steps"),
    [
        (1.0, 2**32),
        (-1.0, -(2**32)),
        (0.1, 429_496_730),
        (0.1 + 1e-17, 429_496_730),
        (2.0**-33, 0),  # half a step: rounded to even
        (3 * 2.0**-33, 2),
        (-3 * 2.0**-33, -2),
        (2.0**31 - 2.0**-22, 2**63 - 2**10),
        (-0.0, 0),
    ],
)
def test_scales_are_rounded_to_steps_of_2_to_the_minus_32(scale: float, steps: int) -> None:
    assert Adapter(LORA_A, scale).encode() == LORA_A + steps.to_bytes(8, "little", signed=True)


def test_text_and_its_utf8_are_the_same_namespace() -> None:
    text = namespace(quantisation="q4é", salt="ü", shard="s")
    assert text == namespace(quantisation="q4é".encode(), salt="ü".encode(), shard=b"s")
    assert namespace(quantisation=b"f16\0\0") == NS
    assert hash(namespace(quantisation=b"f16\0\0")) == hash(NS)


def test_a_namespace_travels_to_another_process() -> None:
    original = namespace(adapters=(Adapter(LORA_A, 0.5),), salt="x")
    copy = pickle.loads(pickle.dumps(original))
    assert copy == original
    assert copy.root == original.root


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5)
        | st.binary(max_size=5),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_context_params_are_a_set_of_pairs(params: dict[str, Any], rng: random.Random) -> None:
    items = list(params.items())
    rng.shuffle(items)
    assert context_hash(dict(items)) == context_hash(params)
    assert context_hash({**params, "one more name": 1}) != context_hash(params)


def test_context_values_of_different_types_differ_and_equal_numbers_do_not() -> None:
    values = [None, True, False, 0, 1, -1, 0.5, "", "1", b"", b"1", 2**70]
    assert len({context_hash({"x": value}) for value in values}) == len(values)
    assert context_hash({"x": 1.0}) == context_hash({"x": 1})
    assert context_hash({"x": -0.0}) == context_hash({"x": 0})
    assert context_hash({"a": "b"}) != context_hash({"ab": ""})
