"""What the bytes of an engine's KV state depend on, as one value that keys are made of.

    identity = StateIdentity(
        f"transformers {version}",
        (
            Dimension("weights", found.digest, found.source, Part.FINGERPRINT),
            Dimension("dtype", "bfloat16", "model.dtype", Part.QUANTISATION),
            Dimension("rope", plain(config.rope_scaling), "config.rope_scaling", Part.CONTEXT),
            Dimension("salt", salt, "salt=", Part.SALT),
        ),
    )
    namespace = identity.namespace()
    client.announce(identity)       # into the log, and to operators

A connector declares every dimension, also those whose value is None today. A dimension that the
engine does not reveal is never left out: the connector derives it (see `weights`), asks the user
for it, or enters `unrevealed(...)`, which keeps the state within this process.

How keys follow from an identity (`proto/keys.py` has the rest):

    fingerprint    SHA-256( "prefixd/identity/v1\\0" || context hash of the engine, the process
                   salt and the dimensions of Part.FINGERPRINT )
    quantisation   the first 8 bytes of the context hash of those of Part.QUANTISATION
    context        the context hash of those of Part.QUANTISATION, Part.CONTEXT and Part.ADAPTERS
                   (the latter with a NUL before the name and, as the value, all encoded adapters)
    adapters       those of Part.ADAPTERS
    salt, shard    the context hash of those of Part.SALT and of Part.SHARD, if there are any

Each context hash is over the dimensions' names and values. Sources are words and not hashed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from ..proto.errors import InvalidNamespace
from ..proto.keys import Adapter, ForeignNamespace, Namespace, context_hash
from ..proto.limits import MAX_ENGINE_CHARS, MAX_IDENTITY_WORDS_BYTES, QUANT_BYTES
from .config_values import Value

__all__ = [
    "Difference",
    "Dimension",
    "Part",
    "StateIdentity",
    "differences",
    "unrevealed",
]

_LABEL: Final = b"prefixd/identity/v1\0"
_MAX_NAME: Final = 64
#: Names that the formulas use themselves.
_RESERVED: Final = frozenset({"engine", "process"})
_PROCESS_SALT_BYTES: Final = 16
_SHA256: Final = re.compile(r"\b[0-9a-f]{64}\b")
_DIGEST_DIGITS: Final = 16
#: A value in a line of `lines()`.
_SHOWN: Final = 60
#: Different fields of two mappings that `differences` shows.
_SHOWN_FIELDS: Final = 8


class Part(Enum):
    """The part of a namespace that takes a dimension."""

    FINGERPRINT = "fingerprint"
    QUANTISATION = "quantisation"
    CONTEXT = "context"
    ADAPTERS = "adapters"
    SALT = "salt"
    SHARD = "shard"
    #: Not in the namespace: the keys of the blocks say it (an engine's hashes, extras).
    BLOCKS = "blocks"


class _SaltDigest(bytes):
    """The SHA-256 of a salt. The salt itself is not kept: identities are shown to operators."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One thing that KV bytes depend on. Raises InvalidNamespace.

    `name`: printable, at most 64 characters, unique in its identity. `value`: what
    `proto.keys.context_hash` takes (`config_values.plain` makes it of anything else); for
    Part.ADAPTERS a tuple of `Adapter`, in any order; for Part.SALT text or bytes, of which the
    SHA-256 is kept, or None. `source`: where the value was read, in words. `revealed`: see
    `unrevealed`.
    """

    name: str
    value: Value | tuple[Adapter, ...]
    source: str
    part: Part
    revealed: bool = True

    def __post_init__(self) -> None:
        name, value = self.name, self.value
        if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()):
            raise InvalidNamespace(
                f"a dimension's name is 1 to {_MAX_NAME} printable characters, not {name!r:.80}"
            )
        if name in _RESERVED:
            raise InvalidNamespace(f"a dimension can't be called {name!r}")
        if not isinstance(self.part, Part) or not isinstance(self.source, str):
            raise InvalidNamespace(f"dimension {name!r} has a Part and the words of its source")
        if self.part is Part.ADAPTERS:
            if not (isinstance(value, tuple) and all(isinstance(one, Adapter) for one in value)):
                raise InvalidNamespace(f"dimension {name!r} is a tuple of Adapter")
            # In the order of the namespace, so that equal keys are equal identities.
            object.__setattr__(self, "value", tuple(sorted(value, key=Adapter.encode)))
        elif self.part is Part.SALT:
            object.__setattr__(self, "value", _salt_digest(name, value))
        else:
            context_hash({name: _checked(name, value)})

    @property
    def words(self) -> str:
        """The value for people: printable, in full."""
        return _words(self.value)


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """Everything that an engine's KV bytes depend on, beside the tokens. Raises InvalidNamespace.

    `engine`: name and version. `unshared`: one sentence that says why nothing is shared beyond
    this process; then, and if a dimension is not revealed, a `process_salt` of random bytes is in
    every key. Two identities that are made separately do not share then, even in one process.
    """

    engine: str
    dimensions: tuple[Dimension, ...]
    unshared: str | None = None
    process_salt: bytes = b""

    def __post_init__(self) -> None:
        if not (isinstance(self.engine, str) and self.engine and _encodable(self.engine)):
            raise InvalidNamespace("an identity has the name and version of an engine")
        object.__setattr__(self, "dimensions", tuple(self.dimensions))
        seen: set[str] = set()
        for each in self.dimensions:
            if each.name in seen:
                raise InvalidNamespace(f"dimension {each.name!r} is there twice")
            seen.add(each.name)
        hidden = [each for each in self.dimensions if not each.revealed]
        if hidden and self.unshared is None:
            names = " and ".join(f"{each.name} ({each.source})" for each in hidden)
            object.__setattr__(
                self, "unshared", f"nothing is shared beyond this process: unknown {names}"
            )
        if self.unshared is not None and not self.process_salt:
            object.__setattr__(self, "process_salt", secrets.token_bytes(_PROCESS_SALT_BYTES))
        if self.process_salt and self.unshared is None:
            raise InvalidNamespace("an identity of one process says why it is not shared")

    # ---- what keys are made of

    def namespace(self) -> Namespace:
        """The namespace of an engine that hands over tokens."""
        adapters: list[Adapter] = []
        encoded: dict[str, bytes] = {}
        for each in self.dimensions:
            if isinstance(each.value, tuple):
                adapters += each.value
                encoded[f"\0{each.name}"] = b"".join(map(Adapter.encode, each.value))
        quantisation = self._values(Part.QUANTISATION)
        salt, shard = self._values(Part.SALT), self._values(Part.SHARD)
        fingerprint = {
            **self._values(Part.FINGERPRINT),
            "engine": self.engine,
            "process": self.process_salt or None,
        }
        return Namespace(
            hashlib.sha256(_LABEL + context_hash(fingerprint)).digest(),
            context_hash(quantisation)[:QUANT_BYTES] if quantisation else b"",
            context_hash({**quantisation, **self._values(Part.CONTEXT), **encoded}),
            tuple(adapters),
            context_hash(salt) if salt else b"",
            context_hash(shard) if shard else b"",
        )

    def foreign_namespace(self, engine: str) -> ForeignNamespace:
        """The namespace of an engine that hands over hashes. `engine`: its name, and how it makes
        them (`"vllm/sha256_cbor"`)."""
        return ForeignNamespace(engine, {"identity": self.digest})

    @property
    def digest(self) -> bytes:
        """32 bytes: the root of the namespace. Equal digests share keys, others share none."""
        return bytes(self.namespace().root)

    def renewed(self, why: str) -> StateIdentity:
        """The same engine after its state changed in a way that no dimension tells: weights updated
        in place, a cache that was cleared. Shares no key with anything from before, nor with any
        other process. `why`: one sentence.
        """
        return replace(self, unshared=why, process_salt=b"")

    def _values(self, part: Part) -> dict[str, Any]:
        return {each.name: each.value for each in self.dimensions if each.part is part}

    # ---- words

    def __str__(self) -> str:
        """One line: the beginning of the digest, the engine, and why it is not shared."""
        shown = f"{self.digest[:8].hex()} {printable(self.engine)}"
        shown += f", {len(self.dimensions)} dimensions"
        return shown if self.unshared is None else f"{shown}; {printable(self.unshared)}"

    def lines(self, width: int | None = None) -> list[str]:
        """A table of the dimensions: name, value, part and source. The lines are printable, and
        have the beginnings of digests and salts only: they are for logs. `width`: the longest line,
        in characters; None: long values are cut to 60."""
        rows = [("engine", printable(self.engine), "every key", "the installed package")]
        rows += [
            (each.name, shortened(each.words), each.part.value, printable(each.source))
            for each in self.dimensions
        ]
        if self.unshared is not None:
            rows.append(
                (
                    "process",
                    self.process_salt.hex()[:8],
                    "every key",
                    printable(self.unshared),
                )
            )
        names = max(len(row[0]) for row in rows)
        parts = max(len(row[2]) for row in rows)
        longest = min(max(len(row[1]) for row in rows), _SHOWN)
        if width is not None:
            longest = max(8, min(longest, (width - names - parts - 6) * 3 // 5))
        shown = (
            f"{name:{names}}  {cut(value, longest):{longest}}  {part:{parts}}  {source}".rstrip()
            for name, value, part, source in rows
        )
        return [line if width is None else cut(line, width) for line in shown]

    def announcement(self) -> tuple[str, str]:
        """Engine and words as the daemon takes them (`Identity` in prefixd.proto): printable, and
        no words if they are too long."""
        words = json.dumps(self.to_json(), separators=(",", ":")).replace("\x7f", "\\u007f")
        return (
            printable(self.engine)[:MAX_ENGINE_CHARS],
            words if len(words) <= MAX_IDENTITY_WORDS_BYTES else "",
        )

    def to_json(self) -> dict[str, Any]:
        """The identity as plain JSON, which `from_json` reads. Salts are in it as their SHA-256,
        and that is all that keys need: keep it as confidential as the keys of the namespace."""
        made: dict[str, Any] = {"digest": self.digest.hex(), "engine": self.engine}
        if self.unshared is not None:
            made |= {"unshared": self.unshared, "process_salt": self.process_salt.hex()}
        made["dimensions"] = [
            {
                "name": each.name,
                "value": _to_json(each.value),
                "source": each.source,
                "part": each.part.value,
                **({} if each.revealed else {"revealed": False}),
            }
            for each in self.dimensions
        ]
        return made

    @classmethod
    def from_json(cls, made: object) -> StateIdentity:
        """The identity that `to_json` described. Raises InvalidNamespace for anything else, a
        digest that does not follow from the dimensions included."""
        try:
            if not isinstance(made, dict):
                raise TypeError(f"a {type(made).__name__}")
            dimensions = tuple(
                Dimension(
                    each["name"],
                    _from_json(Part(each["part"]), each["value"]),
                    each["source"],
                    Part(each["part"]),
                    each.get("revealed", True) is True,
                )
                for each in made["dimensions"]
            )
            identity = cls(
                made["engine"],
                dimensions,
                made.get("unshared"),
                bytes.fromhex(made.get("process_salt", "")),
            )
            digest = bytes.fromhex(made["digest"])
        except InvalidNamespace:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            raise InvalidNamespace(f"not an identity: {problem!r:.200}") from None
        if identity.digest != digest:
            raise InvalidNamespace("not an identity: its digest does not follow from it")
        return identity


def unrevealed(name: str, help: str, part: Part = Part.FINGERPRINT) -> Dimension:
    """A dimension that the engine does not reveal and that the user did not give. An identity with
    it shares nothing beyond this process. `help`: what the user can do (`"give fingerprint="`)."""
    return Dimension(name, () if part is Part.ADAPTERS else None, help, part, revealed=False)


# ---- differences


class Difference(NamedTuple):
    """A dimension in which two identities differ, in words."""

    name: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.name}: {self.one} | {self.other}"


_NOTHING: Final = "no such dimension"


def differences(one: StateIdentity, other: StateIdentity) -> list[Difference]:
    """The dimensions in which two identities differ: none if and only if they share keys. Of two
    mappings only the fields that differ are shown."""
    found: list[Difference] = []
    if one.engine != other.engine:
        found.append(Difference("engine", printable(one.engine), printable(other.engine)))
    mine, theirs = _in_keys(one), _in_keys(other)
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        here, there = mine.get(name), theirs.get(name)
        if here is None or there is None:
            words = [_NOTHING if each is None else each.words for each in (here, there)]
            found.append(Difference(name, *words))
        elif _hashed(here.value) != _hashed(there.value):
            found.append(Difference(name, *_unlike(here.value, there.value)))
        elif here.part is not there.part:
            words = [f"in the {each.part.value}" for each in (here, there)]
            found.append(Difference(name, *words))
    if one.process_salt != other.process_salt:
        words = [
            "shared" if each.unshared is None else printable(each.unshared) for each in (one, other)
        ]
        found.append(Difference("process", *words))
    return found


def _in_keys(identity: StateIdentity) -> dict[str, Dimension]:
    return {each.name: each for each in identity.dimensions if each.part is not Part.BLOCKS}


def _hashed(value: Value | tuple[Adapter, ...]) -> list[bytes]:
    """Equal for two values if and only if they give equal keys."""
    if isinstance(value, tuple):
        return [each.encode() for each in value]
    return [context_hash({"": value})]


def _unlike(one: object, other: object) -> tuple[str, str]:
    """The words of two values that differ."""
    trees = [_mapping(value) for value in (one, other)]
    mine, theirs = trees
    if mine is None or theirs is None:
        words = _words(one), _words(other)
        return words if words[0] != words[1] else (_with_type(one), _with_type(other))
    names = sorted(
        name
        for name in mine.keys() | theirs.keys()
        if mine.get(name, _NOTHING) != theirs.get(name, _NOTHING)
    )
    more = len(names) - _SHOWN_FIELDS
    shown = [
        ", ".join(
            f"{printable(name)}={tree.get(name, 'nothing')}" for name in names[:_SHOWN_FIELDS]
        )
        for tree in (mine, theirs)
    ]
    after = f" and {more} more" if more > 0 else ""
    return shown[0] + after, shown[1] + after


def _mapping(value: object) -> dict[str, str] | None:
    """The leaves of a mapping that `plain` made, by their paths; None for any other value."""
    if not (isinstance(value, str) and value.startswith("{")):
        return None
    leaves: dict[str, str] = {}

    def add(path: str, node: object) -> None:
        if isinstance(node, dict) and node:
            for name, each in node.items():
                add(f"{path}.{name}" if path else str(name), each)
        else:
            leaves[path] = printable(json.dumps(node))

    try:
        add("", json.loads(value))
    except (ValueError, RecursionError):
        return None
    return leaves


def _with_type(value: object) -> str:
    return f"{_words(value)} ({type(value).__name__})"


# ---- words


def printable(text: str) -> str:
    """The text with an escape in place of each character that a terminal would not print."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def shortened(words: str) -> str:
    """The words with the beginning of each SHA-256 in its place."""
    return _SHA256.sub(lambda found: found[0][:_DIGEST_DIGITS], words)


def cut(text: str, length: int) -> str:
    """The text in at most `length` characters."""
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"


def _words(value: object) -> str:
    match value:
        case None:
            return "none"
        case bytes():
            return value.hex() if value else "no bytes"
        case tuple():
            return ", ".join(f"{one.sha256.hex()} x {one.scale:g}" for one in value) or "none"
        case str():
            return printable(value) if value else "empty text"
    return str(value)


def _checked(name: str, value: object) -> Value:
    if isinstance(value, str) and not _encodable(value):
        raise InvalidNamespace(f"dimension {name!r} is no Unicode text: {value!r:.80}")
    if not isinstance(value, Value):
        raise InvalidNamespace(f"dimension {name!r} can't be {value!r:.80}: see plain()")
    return value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _salt_digest(name: str, value: object) -> _SaltDigest | None:
    match value:
        case _SaltDigest() | None | "" | b"":
            return value or None
        case str() if _encodable(value):
            return _SaltDigest(hashlib.sha256(value.encode()).digest())
        case bytes():
            return _SaltDigest(hashlib.sha256(value).digest())
    raise InvalidNamespace(f"dimension {name!r} is text, bytes or None, not {value!r:.80}")


def _to_json(value: object) -> Any:
    match value:
        case bytes():
            return {"bytes": value.hex()}
        case tuple():
            return [{"sha256": one.sha256.hex(), "scale": one.scale} for one in value]
    return value


def _from_json(part: Part, value: Any) -> Any:
    if part is Part.ADAPTERS:
        return tuple(Adapter(bytes.fromhex(one["sha256"]), one["scale"]) for one in value)
    if isinstance(value, dict):
        value = bytes.fromhex(value["bytes"])
        return _SaltDigest(value) if part is Part.SALT else value
    return value
