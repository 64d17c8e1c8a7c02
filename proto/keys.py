"""Keys: the names of pieces of KV state, the same in every process and every language.

    prefix entry   SHA-256( fingerprint'32 || quantisation8 || context32 || tokens )
    block chain    h[-1] = the prefix key of no tokens, the namespace's root
                   h[i]  = SHA-256( h[i-1] || u32le(i) || tokens of block i )
    adapters       fp1 = SHA-256( fingerprint || sorted( sha256 || i64le(round(scale * 2^32)) ) )
    salt           fp2 = SHA-256( "prefixd/salt/v1\\0"  || u32le(bytes of salt)  || salt  || fp1 )
    shard          fp3 = SHA-256( "prefixd/shard/v1\\0" || u32le(bytes of shard) || shard || fp2 )
    extras         x = SHA-256( "prefixd/extras/v1\\0" || key || u32le(position) || digest ... )
                   of a block: h[i] = SHA-256( x of h[i-1] || u32le(i) || tokens of block i )
                   of a prefix entry: x of its key without extras
    foreign        SHA-256( SHA-256( "prefixd/foreign/v1\\0" || u32le(bytes of engine) || engine ||
                   context hash of the fields ) || kind || id )

Each of the steps to fp1, fp2 and fp3 is skipped when there is nothing to add, and the last result
is fingerprint'. `round` is to the nearest integer, ties to even. Tokens are 32-bit little-endian.
A foreign id is bytes (kind "y") or an integer in decimal (kind "i").

Extras are digests of what the token ids of a prompt do not say, at their positions. An image, an
audio clip or a prompt embedding stands in the prompt as tokens that are the same for every picture.
An adapter that a request chooses changes the state of every token. No key with an extra equals one
without, or one with other extras, or with the same extras at other positions. They are sorted by
position and digest. Their positions count from the first token of the block, or of the prompt. A
block has those of its own tokens, a prefix entry those of its tokens; where there are none, the
step to x is skipped.

A key contains the extras of its own block and of all blocks before it. So the extra of an image
belongs to the first of its tokens, and covers the ones that follow in later blocks, and that of an
adapter belongs to position 0. A digest that stands for different kinds of things has the kind in
its input: `sha256(b"image" + pixels)`.

Keys depend on their inputs only, never on the process that computes them. Tokens come last, so one
pass over a prompt gives the keys of all its prefixes. What holds tokens: `proto/tokens.py`.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, NewType, TypeAlias, cast

from .errors import InvalidExtras, InvalidKey, InvalidNamespace, InvalidSize, InvalidTokens
from .kernel import native
from .limits import FINGERPRINT_BYTES, KEY_BYTES, QUANT_BYTES
from .tokens import TOKEN_BYTES, raw_bytes, sliceable, token_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .tokens import Tokens

    #: In any order, several at one position if need be.
    Extras: TypeAlias = Iterable["Extra | tuple[int, bytes]"]

#: 32 bytes, the only way to address an entry.
Key = NewType("Key", bytes)

_DIGEST_BYTES: Final = 32
_SALT_LABEL: Final = b"prefixd/salt/v1\0"
_SHARD_LABEL: Final = b"prefixd/shard/v1\0"
_EXTRAS_LABEL: Final = b"prefixd/extras/v1\0"
_FOREIGN_LABEL: Final = b"prefixd/foreign/v1\0"
_CONTEXT_LABEL: Final = b"prefixd/context/v1\0"
#: In front of a foreign hash of bytes. In front of a number it is `i`.
_RAW: Final = b"y"
_PADDING: Final = b"\xff" * TOKEN_BYTES
_U32: Final = struct.Struct("<I")
_EXTRA: Final = struct.Struct(f"<I{_DIGEST_BYTES}s")


# ---- keys as such


def check_key(key: Buffer) -> Key:
    """`key` itself, if it is 32 bytes; else raises `InvalidKey`."""
    if not isinstance(key, bytes):
        try:
            key = memoryview(key).tobytes()
        except TypeError:
            raise InvalidKey(
                f"a key is {KEY_BYTES} bytes, this is of type {type(key).__name__}"
            ) from None
    if len(key) != KEY_BYTES:
        raise InvalidKey(f"a key is {KEY_BYTES} bytes, this has {len(key)}")
    return Key(key)


def key_from_hex(text: str) -> Key:
    """The key of 64 hexadecimal digits, upper or lower case; raises `InvalidKey`."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    # fromhex skips white space, so the length of the text is checked as well.
    if len(text) != 2 * KEY_BYTES or len(key) != KEY_BYTES:
        raise InvalidKey(f"a key is {2 * KEY_BYTES} hexadecimal digits, not {text[:80]!r}")
    return Key(key)


# ---- namespaces


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the SHA-256 of its weights, and its scale in steps of 2^-32.

    Raises `InvalidNamespace`.
    """

    sha256: bytes
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_bytes("an adapter's sha256", self.sha256, 32)
        if not (math.isfinite(self.scale) and abs(self.scale) < 2**31):
            raise InvalidNamespace(f"an adapter's scale is below 2^31, not {self.scale}")

    def encode(self) -> bytes:
        """The 40 bytes of this adapter in a fingerprint."""
        return self.sha256 + struct.pack("<q", round(self.scale * 2**32))


@dataclass(frozen=True, slots=True, repr=False)
class Namespace:
    """The scope of keys: two namespaces that differ in anything share no key.

    `fingerprint`: 32 bytes that identify the weights and the tokeniser. `quantisation`: at most
    8 bytes (text becomes UTF-8), padded with NUL. `context_params`: 32 bytes, see `context_hash`.
    `adapters` may be in any order. `salt` separates tenants. `shard` separates the ranks of one
    model, each of which holds a part of its state (`"tp 0/2"`); ranks that hold the whole state
    share one (`"whole"`). Raises `InvalidNamespace`. Namespaces are cheap to compare and hash;
    derived fields are computed once.
    """

    fingerprint: bytes
    quantisation: bytes | str
    context_params: bytes
    adapters: tuple[Adapter, ...] = ()
    salt: bytes | str = b""
    shard: bytes | str = b""
    #: The fingerprint combined with adapters, salt and shard, 32 bytes.
    effective_fingerprint: bytes = field(init=False, repr=False, compare=False)
    #: What every prefix key of this namespace begins with, 72 bytes.
    preamble: bytes = field(init=False, repr=False, compare=False)
    #: The prefix key of no tokens: the parent of block 0 of every chain.
    root: Key = field(init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        # Without the salt, which separates tenants.
        quantisation = _encoded("", self.quantisation).decode(errors="replace")
        shard = _encoded("", self.shard).decode(errors="replace")
        parts = [f"root {self.root.hex()[:16]}", repr(quantisation)]
        parts += [f"{len(self.adapters)} adapters"] if self.adapters else []
        parts += [f"shard {shard!r}"] if shard else []
        parts += ["with a salt"] if self.salt else []
        return f"<Namespace: {', '.join(parts)}>"

    def __post_init__(self) -> None:
        _check_bytes("fingerprint", self.fingerprint, FINGERPRINT_BYTES)
        _check_bytes("context_params", self.context_params, 32)
        quantisation = _encoded("quantisation", self.quantisation)
        if len(quantisation) > QUANT_BYTES:
            raise InvalidNamespace(
                f"quantisation is at most {QUANT_BYTES} bytes, not {len(quantisation)}"
            )
        adapters = tuple(sorted(self.adapters, key=Adapter.encode))
        salt, shard = _encoded("salt", self.salt), _encoded("shard", self.shard)

        effective = self.fingerprint
        if adapters:
            effective = _sha256(effective, *(adapter.encode() for adapter in adapters))
        if salt:
            effective = _sha256(_SALT_LABEL, _U32.pack(len(salt)), salt, effective)
        if shard:
            effective = _sha256(_SHARD_LABEL, _U32.pack(len(shard)), shard, effective)
        preamble = effective + quantisation.ljust(QUANT_BYTES, b"\0") + self.context_params

        # Normalise the fields, so that namespaces with equal keys are equal.
        for name, value in (
            ("quantisation", quantisation.rstrip(b"\0")),
            ("adapters", adapters),
            ("salt", salt),
            ("shard", shard),
            ("effective_fingerprint", effective),
            ("preamble", preamble),
            ("root", Key(_sha256(preamble))),
        ):
            object.__setattr__(self, name, value)


def context_hash(params: Mapping[str, bool | int | float | str | bytes | None]) -> bytes:
    """32 bytes that identify the parameters of a context that change its KV state (RoPE, sizes,
    types).

    SHA-256 over "prefixd/context/v1\\0" and then, by name in the order of its UTF-8 bytes,
    u32le(bytes of name) || name || type || u32le(bytes of value) || value. Types and values:
    "n" nothing, "b" one byte 0 or 1, "i" a whole number in decimal ASCII (2.0 is one: equal
    numbers are equal parameters), "f" any other number as f64le, "s" UTF-8 text, "y" bytes.
    Raises `InvalidNamespace` for anything else, NaN and infinities included.
    """
    parts = [_CONTEXT_LABEL]
    for name in sorted(params, key=str.encode):
        kind, value = _context_value(name, params[name])
        encoded = name.encode()
        parts += [_U32.pack(len(encoded)), encoded, kind, _U32.pack(len(value)), value]
    return _sha256(*parts)


def _context_value(name: str, value: object) -> tuple[bytes, bytes]:
    match value:
        case None:
            return b"n", b""
        case bool():
            return b"b", bytes([value])
        case int():
            return b"i", str(value).encode()
        case float() if value.is_integer():
            return b"i", str(int(value)).encode()
        case float() if math.isfinite(value):
            return b"f", struct.pack("<d", value)
        case str():
            return b"s", value.encode()
        case bytes():
            return b"y", value
    raise InvalidNamespace(f"context parameter {name!r} can't be {value!r}")


def _check_bytes(what: str, value: object, length_bytes: int) -> None:
    if not isinstance(value, bytes):
        kind = type(value).__name__
        raise InvalidNamespace(
            f"{what} is {length_bytes} bytes, such as sha256(...).digest(), not of type {kind}"
        )
    if len(value) != length_bytes:
        raise InvalidNamespace(f"{what} is {length_bytes} bytes, this has {len(value)}")


def _encoded(what: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise InvalidNamespace(f"{what} is bytes or text, not a {type(value).__name__}")


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


# ---- keys from other programs' hashes


@dataclass(frozen=True, slots=True)
class ForeignNamespace:
    """Keys made of the hashes that an engine has already computed.

    `engine` names the engine and how it makes its hashes (`"vllm/sha256_cbor"`). `fields` holds
    everything else that the bytes of an entry depend on: model, revision, dtype, layout, rank, page
    size. Its values are those that `context_hash` takes. Two foreign namespaces that differ in
    anything share no key, and none shares a key with a `Namespace`. Raises `InvalidNamespace`.
    """

    engine: str = field(compare=False)
    fields: Mapping[str, bool | int | float | str | bytes | None] = field(compare=False)
    #: SHA-256 of engine and fields, 32 bytes. The input of every key's hash begins with it.
    root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        engine = _encoded("engine", self.engine)
        if not engine:
            raise InvalidNamespace("a foreign namespace has the name of an engine")
        root = _sha256(_FOREIGN_LABEL, _U32.pack(len(engine)), engine, context_hash(self.fields))
        object.__setattr__(self, "root", root)

    def key(self, foreign: bytes | str | int) -> Key:
        """The key of one hash: bytes, the same bytes as hexadecimal digits, or an integer.

        Raises `InvalidKey` for anything else, and for empty bytes.
        """
        return Key(_sha256(self.root, _foreign_id(foreign)))

    def keys(self, foreign: Iterable[bytes | str | int]) -> list[Key]:
        """The keys of these hashes, in the same order."""
        hashes = list(foreign)
        head = self.root
        ids: list[bytes]
        if set(map(type, hashes)) == {bytes} and all(hashes):
            head += _RAW  # the usual case, at half the cost
            ids = cast("list[bytes]", hashes)
        else:
            ids = list(map(_foreign_id, hashes))
        if native:
            return cast("list[Key]", native.digests(head, ids))
        begun = hashlib.sha256(head)
        keys: list[Key] = []
        for each in ids:
            digest = begun.copy()
            digest.update(each)
            keys.append(Key(digest.digest()))
        return keys


def _foreign_id(foreign: bytes | str | int) -> bytes:
    raw = b""
    match foreign:
        case bytes():
            raw = foreign
        case bool():
            pass
        case int():
            return b"i%d" % foreign
        case str():
            try:
                raw = bytes.fromhex(foreign)
            except ValueError:
                raw = b""
            # bytes.fromhex skips white space, which is refused here.
            if 2 * len(raw) != len(foreign):
                raw = b""
    if not raw:
        shown = repr(foreign)[:80]
        raise InvalidKey(f"a foreign hash is bytes, hexadecimal digits or an int, not {shown}")
    return _RAW + raw


# ---- extras


class Extra(NamedTuple):
    """`position`: the index of a token of the prompt. `digest`: 32 bytes."""

    position: int
    digest: bytes


def checked_extras(extras: Extras, token_count: int) -> list[Extra]:
    """The extras by position, and by digest at one position. Raises `InvalidExtras` for a position
    that no token has, and for what is no digest of 32 bytes."""
    checked: list[Extra] = []
    try:
        for position, digest in extras:
            if not isinstance(digest, bytes) or len(digest) != _DIGEST_BYTES:
                raise InvalidExtras(f"the digest of an extra is {_DIGEST_BYTES} bytes")
            checked.append(Extra(operator.index(position), digest))
    except (TypeError, ValueError) as problem:
        if isinstance(problem, InvalidExtras):
            raise
        raise InvalidExtras(f"extras are pairs of position and digest: {problem}") from None
    checked.sort()
    if checked and not 0 <= checked[0].position <= checked[-1].position < token_count:
        raise InvalidExtras(
            f"positions of extras are in 0 ... {token_count - 1}, the tokens of this prompt"
        )
    return checked


def with_extras(key: bytes, extras: Sequence[Extra], start: int = 0) -> bytes:
    """`key` combined with extras that are sorted; `key` itself without any. Their positions count
    from `start`."""
    if not extras:
        return key
    packed = (_EXTRA.pack(position - start, digest) for position, digest in extras)
    return hashlib.sha256(b"".join((_EXTRAS_LABEL, key, *packed))).digest()


# ---- prefix entries


def check_namespace(namespace: Namespace) -> Namespace:
    """`namespace` itself. Raises InvalidNamespace for what is none."""
    if not isinstance(namespace, Namespace):
        raise InvalidNamespace(f"a namespace is a Namespace, not a {type(namespace).__name__}")
    return namespace


def prefix_key(namespace: Namespace, tokens: Tokens, extras: Extras = ()) -> Key:
    """The key of the complete state after `tokens`."""
    check_namespace(namespace)
    raw = token_bytes(tokens)
    key = prefix_key_of_bytes(namespace, raw)
    return Key(with_extras(key, checked_extras(extras, len(raw) // TOKEN_BYTES)))


def prefix_key_of_bytes(namespace: Namespace, raw: Buffer) -> Key:
    """`prefix_key` of token ids that are u32 little-endian already. Does not check them."""
    digest = hashlib.sha256(namespace.preamble)
    digest.update(raw)
    return Key(digest.digest())


def prefix_keys(
    namespace: Namespace, tokens: Tokens, lengths_tokens: Sequence[int], extras: Extras = ()
) -> list[Key]:
    """The keys of the prefixes of these lengths, in one pass over the tokens.

    `lengths_tokens` must ascend strictly, within 0 ... len(tokens); else raises `InvalidSize`.
    Tokens after the last length are neither hashed nor checked. Each key has the `extras` whose
    positions are below its length.
    """
    check_namespace(namespace)
    if not lengths_tokens:
        return []
    sequence = sliceable(tokens)
    _check_lengths(lengths_tokens, len(sequence))
    placed = checked_extras(extras, len(sequence))
    raw = token_bytes(sequence[: lengths_tokens[-1]])
    digest = hashlib.sha256(namespace.preamble)
    update, copy = digest.update, digest.copy
    keys: list[bytes] = []
    done_bytes = 0
    for length_tokens in lengths_tokens:
        end_bytes = length_tokens * TOKEN_BYTES
        update(raw[done_bytes:end_bytes])
        keys.append(copy().digest())
        done_bytes = end_bytes
    if placed:
        keys = [
            with_extras(key, placed[: bisect_left(placed, (length_tokens,))])
            for key, length_tokens in zip(keys, lengths_tokens, strict=True)
        ]
    return cast("list[Key]", keys)


def _check_lengths(lengths_tokens: Sequence[int], available_tokens: int) -> None:
    previous = -1
    for length_tokens in lengths_tokens:
        if length_tokens <= previous:
            raise InvalidSize(f"prefix lengths ascend: {length_tokens} follows {previous}")
        previous = length_tokens
    if previous > available_tokens:
        raise InvalidSize(f"a prefix of {previous} tokens of {available_tokens}")


# ---- block chains


def block_key(parent: Key, index: int, tokens: Tokens, extras: Extras = ()) -> Key:
    """The key of block `index` with these tokens, after `parent` (the root for block 0). `extras`:
    of this block, with positions in it."""
    raw = token_bytes(tokens)
    placed = checked_extras(extras, len(raw) // TOKEN_BYTES)
    return block_key_of_bytes(Key(with_extras(parent, placed)), index, raw)


def block_key_of_bytes(parent: Key, index: int, raw: Buffer) -> Key:
    """`block_key` of a complete or padded block whose tokens are 32-bit little-endian already."""
    try:
        position = _U32.pack(index)
    except struct.error:
        raise InvalidSize(f"a block index is in 0 ... 2^32 - 1, not {index}") from None
    digest = hashlib.sha256(parent)
    digest.update(position)
    digest.update(raw)
    return Key(digest.digest())


def block_keys(
    namespace: Namespace,
    tokens: Tokens,
    block_tokens: int,
    *,
    include_partial: bool = False,
    extras: Extras = (),
) -> list[Key]:
    """The keys of `tokens` in blocks of `block_tokens`, root first.

    A trailing incomplete block has no key. With `include_partial` it has the key of the block
    padded with -1, so that it can be saved; only exactly the same tokens (and extras) find it.
    `extras`: digests at positions of `tokens`; those of a trailing incomplete block are in its key
    only.
    """
    return extend_chain(
        namespace.root, 0, tokens, block_tokens, include_partial=include_partial, extras=extras
    )


def extend_chain(
    parent: Key,
    index: int,
    tokens: Tokens,
    block_tokens: int,
    *,
    include_partial: bool = False,
    extras: Extras = (),
) -> list[Key]:
    """The keys of blocks `index`, `index + 1`, ... of `tokens`, which follow block `index - 1`.

    `parent` is the key of that block, or the namespace's root for `index` 0. `extras`: with
    positions in `tokens`; those before are in `parent` already.
    """
    pieces = chain_pieces(
        parent,
        index,
        tokens,
        block_tokens,
        include_partial=include_partial,
        extras=extras,
        first_blocks=_ALL_BLOCKS,
    )
    return list(chain.from_iterable(pieces))


def chain_pieces(
    parent: Key,
    index: int,
    tokens: Tokens,
    block_tokens: int,
    *,
    include_partial: bool = False,
    extras: Extras = (),
    first_blocks: int = 1,
) -> Iterator[list[Key]]:
    """`extend_chain` in pieces that grow, the first of them of `first_blocks` blocks at most: a
    search that misses early should not hash the rest."""
    if block_tokens < 1:
        raise InvalidSize(f"a block has at least one token, not {block_tokens}")
    sequence = sliceable(tokens)
    placed = checked_extras(extras, len(sequence))
    return _chain(
        check_key(parent), index, sequence, block_tokens, include_partial, placed, first_blocks
    )


#: Blocks that one call of the kernel hashes, if they may not all be needed.
_MOST_BLOCKS: Final = 64
#: As many as there are.
_ALL_BLOCKS: Final = 2**32


def _chain(
    key: Key,
    index: int,
    tokens: Sequence[int] | memoryview,
    block_tokens: int,
    include_partial: bool,
    extras: Sequence[Extra],
    blocks: int,
) -> Iterator[list[Key]]:
    whole_tokens = len(tokens) - len(tokens) % block_tokens
    begin = 0
    while native and not extras and begin < whole_tokens:
        end = min(begin + blocks * block_tokens, whole_tokens)
        try:
            part = tokens if end - begin == len(tokens) else tokens[begin:end]
            keys = native.chain_keys(key, index, raw_bytes(part), block_tokens)
        except (InvalidTokens, ValueError, OverflowError):
            break  # hashed block by block, the error comes with the block that has it
        yield cast("list[Key]", keys)
        key = Key(keys[-1])
        begin, index, blocks = end, index + len(keys), min(2 * blocks, _MOST_BLOCKS)
    taken = 0
    for start in range(begin, len(tokens) if include_partial else whole_tokens, block_tokens):
        end = start + block_tokens
        raw = token_bytes(tokens[start:end])
        if start == whole_tokens:
            raw = bytes(raw).ljust(block_tokens * TOKEN_BYTES, _PADDING[:1])
        first = taken
        while taken < len(extras) and extras[taken].position < end:
            taken += 1
        if first < taken:
            key = Key(with_extras(key, extras[first:taken], start))
        key = block_key_of_bytes(key, index, raw)
        yield [key]
        index += 1
