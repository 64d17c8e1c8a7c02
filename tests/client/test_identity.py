"""Identities: what is in a key and what is not, said in words, and never left out silently."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.identity import (
    Dimension,
    Part,
    StateIdentity,
    differences,
    unrevealed,
)
from prefixd.proto.errors import InvalidNamespace
from prefixd.proto.keys import Adapter

ADAPTER = Adapter(b"l" * 32, 0.5)
DIMENSIONS = (
    Dimension("weights", b"w" * 32, "SHA-256 of 3 files", Part.FINGERPRINT),
    Dimension("kv dtype", "fp8_e4m3", "cache_config.cache_dtype", Part.QUANTISATION),
    Dimension("rope", '{"rope_theta": 10000.0, "rope_type": "yarn"}', "config", Part.CONTEXT),
    Dimension("lora", (ADAPTER,), "model.peft_config", Part.ADAPTERS),
    Dimension("salt", "tenant", "salt=", Part.SALT),
    Dimension("tp rank", 1, "parallel_config.rank", Part.SHARD),
    Dimension("images", "their hashes", "the engine's block hashes", Part.BLOCKS),
)
PLAIN = StateIdentity("engine 1.2", DIMENSIONS)


def changed(name: str, value: object) -> StateIdentity:
    return replace(
        PLAIN,
        dimensions=tuple(
            replace(each, value=value) if each.name == name else each for each in DIMENSIONS
        ),
    )


OTHERS = {
    "weights": changed("weights", b"v" * 32),
    "kv dtype": changed("kv dtype", "fp8_e5m2"),
    "rope": changed("rope", '{"rope_theta": 500000.0, "rope_type": "yarn"}'),
    "lora": changed("lora", (Adapter(b"l" * 32, 0.25),)),
    "salt": changed("salt", "another"),
    "tp rank": changed("tp rank", 0),
    "engine": replace(PLAIN, engine="engine 1.3"),
}


def test_every_dimension_makes_another_namespace() -> None:
    for one, other in combinations((PLAIN, *OTHERS.values()), 2):
        assert one.digest != other.digest
        assert one.namespace().root != other.namespace().root
        assert one.foreign_namespace("e").root != other.foreign_namespace("e").root


def test_the_digest_is_the_root_of_the_namespace() -> None:
    assert PLAIN.digest == PLAIN.namespace().root
    assert PLAIN.foreign_namespace("a").root != PLAIN.foreign_namespace("b").root


def test_keys_are_the_same_in_every_process() -> None:
    """A change of this digest makes everything that connectors saved a miss."""
    assert PLAIN.digest.hex() == (
        "cab7c753d06bd628194187d7e146a71fd54b2f4536f9ec132de5e10085b56ccb"
    )


def test_sources_and_what_the_blocks_say_are_not_in_the_key() -> None:
    worded = replace(PLAIN, dimensions=tuple(replace(d, source="elsewhere") for d in DIMENSIONS))
    assert worded.digest == PLAIN.digest
    assert changed("images", None).digest == PLAIN.digest
    assert differences(PLAIN, worded) == differences(PLAIN, changed("images", None)) == []


def test_the_order_of_dimensions_and_of_adapters_does_not_matter() -> None:
    both = (ADAPTER, Adapter(b"m" * 32))
    assert replace(PLAIN, dimensions=DIMENSIONS[::-1]).digest == PLAIN.digest
    assert changed("lora", both).digest == changed("lora", both[::-1]).digest
    assert changed("lora", both) == changed("lora", both[::-1])


@pytest.mark.parametrize("part", [p for p in Part if p not in (Part.ADAPTERS, Part.BLOCKS)])
def test_a_dimension_that_is_none_differs_from_one_that_is_not_there(part: Part) -> None:
    without = StateIdentity("e", ())
    none = StateIdentity("e", (Dimension("one", None, "", part),))
    some = StateIdentity("e", (Dimension("one", "1", "", part),))
    renamed = StateIdentity("e", (Dimension("two", "1", "", part),))
    assert len({each.digest for each in (without, none, some, renamed)}) == 4


def test_a_dimension_moves_between_parts_with_another_key() -> None:
    made = [
        StateIdentity("e", (Dimension("one", "1", "", part),))
        for part in Part
        if part not in (Part.ADAPTERS, Part.BLOCKS)
    ]
    assert len({each.digest for each in made}) == len(made)
    for one, other in combinations(made, 2):
        # A salt is kept as its hash, so there the value differs already.
        assert [each.name for each in differences(one, other)] == ["one"]


def test_names_of_adapters_are_in_the_key() -> None:
    draft = StateIdentity("e", (Dimension("draft lora", (ADAPTER,), "", Part.ADAPTERS),))
    main = StateIdentity("e", (Dimension("lora", (ADAPTER,), "", Part.ADAPTERS),))
    assert draft.digest != main.digest
    assert len(differences(draft, main)) == 2


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(-2, 2, width=16),
    st.text("ab1", max_size=2),
    st.binary(max_size=2),
)


@st.composite
def identities(draw: st.DrawFn) -> StateIdentity:
    parts = draw(st.dictionaries(st.sampled_from("xyz"), st.sampled_from(list(Part)), max_size=3))
    dimensions = []
    for name, part in parts.items():
        value = draw(values)
        if part is Part.ADAPTERS:
            value = tuple(draw(st.lists(st.sampled_from([ADAPTER, Adapter(b"m" * 32)]))))
        elif part is Part.SALT:
            value = draw(st.none() | st.text("ab", max_size=2) | st.binary(max_size=2))
        dimensions.append(Dimension(name, value, "", part))
    return StateIdentity(draw(st.sampled_from(["e 1", "e 2"])), tuple(dimensions))


@given(identities(), identities())
def test_identities_differ_in_words_if_and_only_if_they_differ_in_keys(
    one: StateIdentity, other: StateIdentity
) -> None:
    assert (one.digest == other.digest) == (differences(one, other) == [])
    for each in differences(one, other):
        assert each.one != each.other


@given(identities())
def test_an_identity_survives_json(identity: StateIdentity) -> None:
    again = StateIdentity.from_json(json.loads(json.dumps(identity.to_json())))
    assert again.digest == identity.digest
    assert again.lines() == identity.lines()
    assert differences(identity, again) == []


# ---- what is not revealed


def hidden() -> StateIdentity:
    return StateIdentity("e 1", (*DIMENSIONS, unrevealed("revision", "give fingerprint=")))


def test_what_is_not_revealed_is_not_shared() -> None:
    one, other = hidden(), hidden()
    assert one.unshared == (
        "nothing is shared beyond this process: unknown revision (give fingerprint=)"
    )
    assert len(one.process_salt) == 16
    assert one.digest != other.digest
    assert [each.name for each in differences(one, other)] == ["process"]
    assert one.unshared in str(one)
    assert "give fingerprint=" in "\n".join(one.lines())
    assert StateIdentity.from_json(one.to_json()) == one


def test_an_engine_whose_weights_changed_in_place_goes_on_in_a_namespace_of_its_own() -> None:
    first = PLAIN.renewed("weights were updated in place")
    second = first.renewed("weights were updated in place")
    assert len({PLAIN.digest, first.digest, second.digest}) == 3
    assert first.unshared == "weights were updated in place"
    assert differences(PLAIN, first)[0].one == "shared"


def test_a_process_salt_has_its_reason() -> None:
    with pytest.raises(InvalidNamespace, match="says why"):
        StateIdentity("e", (), None, b"salt")


# ---- words


def test_differences_are_those_of_the_dimensions() -> None:
    for name, other in OTHERS.items():
        assert [each.name for each in differences(PLAIN, other)] == [name]
    (rope,) = differences(PLAIN, OTHERS["rope"])
    assert str(rope) == "rope: rope_theta=10000.0 | rope_theta=500000.0"
    (kind,) = differences(changed("tp rank", 1), changed("tp rank", "1"))
    assert str(kind) == "tp rank: 1 (int) | 1 (str)"
    (gone,) = differences(PLAIN, replace(PLAIN, dimensions=DIMENSIONS[1:]))
    assert gone.other == "no such dimension"


def test_many_different_fields_of_a_mapping_are_counted() -> None:
    one, other = (json.dumps({f"{i:02}": i + add for i in range(20)}) for add in (0, 1))
    (found,) = differences(changed("rope", one), changed("rope", other))
    assert found.one.startswith("00=0, 01=1, ")
    assert found.one.endswith(" and 12 more")


def test_a_deeply_nested_text_is_no_mapping() -> None:
    for depth in (900, 100_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        (found,) = differences(changed("rope", deep), PLAIN)
        assert found.one == deep or depth == 900


@pytest.mark.parametrize("width", [None, 80, 100, 200])
def test_lines_are_a_table(width: int | None) -> None:
    lines = PLAIN.lines(width)
    assert len(lines) == 1 + len(DIMENSIONS)
    assert all(line.isprintable() for line in lines)
    columns = {
        line.index(f"  {each.part.value:12}  ")
        for line, each in zip(lines[1:], DIMENSIONS, strict=True)
    }
    assert len(columns) == 1
    assert width is None or max(map(len, lines)) <= width
    assert "fp8_e4m3" in lines[2]


def test_a_salt_is_kept_as_its_hash_only() -> None:
    shown = json.dumps(PLAIN.to_json()) + "\n".join(PLAIN.lines()) + str(PLAIN) + repr(PLAIN)
    assert "tenant" not in shown
    salt = hashlib.sha256(b"tenant").hexdigest()
    assert salt not in "\n".join(PLAIN.lines())
    assert f"{salt[:16]} " in "\n".join(PLAIN.lines())
    unshared = PLAIN.renewed("why")
    assert unshared.process_salt.hex()[:10] not in "\n".join(unshared.lines())
    assert changed("salt", b"tenant").digest == PLAIN.digest


def test_nothing_unprintable_is_shown() -> None:
    evil = "\x1b[2J\n\u202e"
    identity = StateIdentity(f"e{evil}", (Dimension("one", evil, evil, Part.CONTEXT),), evil)
    other = StateIdentity("e", (Dimension("one", json.dumps({evil: evil}), "", Part.CONTEXT),))
    shown = [str(identity), *identity.lines(), *map(str, differences(identity, other))]
    assert all(each.isprintable() for each in shown)


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("", 1, Part.CONTEXT),
        ("n" * 65, 1, Part.CONTEXT),
        ("a\nb", 1, Part.CONTEXT),
        ("engine", 1, Part.FINGERPRINT),
        ("process", 1, Part.FINGERPRINT),
        ("a", float("nan"), Part.CONTEXT),
        ("a", [1], Part.CONTEXT),
        ("a", (1,), Part.CONTEXT),
        ("a", (ADAPTER,), Part.CONTEXT),
        ("a", "\ud800", Part.CONTEXT),
        ("a", "\ud800", Part.SALT),
        ("a", 1, Part.SALT),
        ("a", "lora", Part.ADAPTERS),
        ("a", ("lora",), Part.ADAPTERS),
        ("a", 1, "context"),
    ],
)
def test_dimensions_that_no_key_can_be_made_of(name: str, value: object, part: Part) -> None:
    with pytest.raises(InvalidNamespace):
        Dimension(name, value, "", part)  # type: ignore[arg-type]


def test_a_dimension_is_there_once() -> None:
    with pytest.raises(InvalidNamespace, match="twice"):
        StateIdentity("e", (DIMENSIONS[0], DIMENSIONS[0]))


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {},
        {"digest": "00"},
        PLAIN.to_json() | {"digest": "00" * 32},
        PLAIN.to_json() | {"digest": 5},
        PLAIN.to_json() | {"engine": "another"},
        PLAIN.to_json() | {"engine": "\ud800"},
        PLAIN.to_json() | {"dimensions": 5},
        PLAIN.to_json() | {"dimensions": [5]},
        PLAIN.to_json() | {"dimensions": [{"name": "a", "value": {}, "source": "", "part": "x"}]},
        PLAIN.to_json() | {"process_salt": "00"},
        PLAIN.to_json() | {"unshared": 5, "process_salt": "zz"},
    ],
)
def test_json_that_is_no_identity(damaged: object) -> None:
    with pytest.raises(InvalidNamespace):
        StateIdentity.from_json(damaged)
