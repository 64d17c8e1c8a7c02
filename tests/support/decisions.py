"""The guard that a connector's table of dimensions is complete.

A connector's key is exact only if somebody decided about every field of the engine's configuration.
`check_decided` enumerates the fields of the engine's own object, and fails with the names of those
that nobody decided about: a new version's new field fails the test until somebody does.

    DECIDED = {
        "rope_theta": InKey("rope"),            # the name of a Dimension of the identity
        "n_batch": Irrelevant("how many tokens a pass takes",
                              "tests/engines/test_x.py::test_kv_is_equal_for_any_batch"),
    }

    def test_every_field_is_decided() -> None:
        check_decided(llama.context_params, DECIDED, identity)

`Irrelevant` names a test that perturbs the field in the real engine and finds bit-equal KV, or
equal greedy text. That a perturbed `InKey` field changes the namespace is for the connector's own
tests; `undecided` and `fields_of` help to write them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from prefixd.client.identity import StateIdentity

_ROOT: Final = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class InKey:
    """The field is part of a dimension. `dimension`: its name in the identity."""

    dimension: str


@dataclass(frozen=True, slots=True)
class Irrelevant:
    """KV bytes don't depend on the field. `reason`: why, in words. `test`: what shows it, as
    `tests/engines/test_x.py::test_name`."""

    reason: str
    test: str


def fields_of(config: object) -> list[str]:
    """The names of the fields of a configuration, in its own order: of a dataclass, a pydantic
    model (1 or 2), a C structure, a NamedTuple (instances or classes), a mapping, an object with
    `to_dict` (Hugging Face), or the slots and attributes of any other object."""
    kind = config if isinstance(config, type) else type(config)
    if is_dataclass(kind):
        return [each.name for each in fields(kind)]
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        return [name for base in kind.__mro__[::-1] for name in _c_fields(base)]
    for attribute in ("model_fields", "__fields__", "_fields", "__struct_fields__"):
        found = getattr(kind, attribute, None)
        if isinstance(found, Mapping | tuple) and found:
            return [str(name) for name in found]
    if isinstance(config, Mapping):
        return [str(name) for name in config]
    if callable(getattr(config, "to_dict", None)) and not isinstance(config, type):
        return [str(name) for name in config.to_dict()]  # type: ignore[attr-defined]
    slots = [name for base in kind.__mro__[::-1] for name in _slots(base)]
    names = dict.fromkeys([*slots, *getattr(config, "__dict__", {})])
    if isinstance(config, type) or not names:
        raise TypeError(f"{config!r:.80} has no fields that can be enumerated")
    return list(names)


def _c_fields(kind: Any) -> Iterator[str]:
    return (str(field[0]) for field in vars(kind).get("_fields_", ()))


def _slots(kind: Any) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    return (name for name in ([slots] if isinstance(slots, str) else slots) if name != "__dict__")


def undecided(config: object, table: Mapping[str, InKey | Irrelevant]) -> list[str]:
    """The fields that nobody decided about."""
    return [name for name in fields_of(config) if name not in table]


def check_decided(
    config: object,
    table: Mapping[str, InKey | Irrelevant],
    identity: StateIdentity | None = None,
) -> None:
    """Check that `table` decides about exactly the fields of `config`. With `identity`, also that
    it has every dimension that the table names. Raises AssertionError, naming every problem."""
    there = set(fields_of(config))
    problems = [f"undecided: {name}" for name in undecided(config, table)]
    problems += [f"no longer a field: {name}" for name in table if name not in there]
    names = None if identity is None else {"engine", *(each.name for each in identity.dimensions)}
    for field, decision in table.items():
        if isinstance(decision, InKey):
            if names is not None and decision.dimension not in names:
                problems.append(f"{field}: the identity has no dimension {decision.dimension!r}")
        elif not decision.reason.strip():
            problems.append(f"{field}: irrelevant without a reason")
        elif not _exists(decision.test):
            problems.append(f"{field}: there is no test {decision.test!r}")
    if problems:
        kind = config if isinstance(config, type) else type(config)
        raise AssertionError("\n".join([f"{kind.__module__}.{kind.__qualname__}:", *problems]))


def _exists(test: str) -> bool:
    name, _, function = test.partition("::")
    path = (_ROOT / name).resolve()
    if not (function and path.is_relative_to(_ROOT / "tests") and path.is_file()):
        return False
    last = re.escape(function.split("::")[-1].partition("[")[0])
    return re.search(rf"^\s*(?:async )?def {last}\(", path.read_text(), re.MULTILINE) is not None
