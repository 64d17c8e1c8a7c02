"""What the states of one llama-server depend on, found by a probe.

HTTP tells neither RoPE parameters nor the types of the cache nor which kernels compute it, and
llama-server accepts a foreign state in silence. So a fixed text is evaluated and its slot saved:
equal bytes of keys and values mean that everything on the way to them is equal, for these tokens.
The weights that other tokens use are identified by their files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...proto.keys import Adapter
from ..identity import Dimension, Part, StateIdentity, unrevealed
from ..weights import fingerprint_of_files, weights_of
from .slot_file import BadSlotFile, SlotFile, SlotLayout, Tokens, UnknownVersion

#: Short, and of many different tokens.
PROBE: Final = "The quick brown fox jumps over the lazy dog. 0123456789"
#: Blocks are about as large as this: small, as a prompt that diverges evaluates the rest of one.
_BLOCK_BYTES: Final = 512 << 10
_LEAST_BLOCK_TOKENS: Final = 16
_MOST_BLOCK_TOKENS: Final = 256


class Unsupported(Exception):
    """The states of this server can't be kept, in words for its user."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What the saved slot of the probe says."""

    digest: bytes
    #: How its keys and values are cut into blocks; None: the state is kept whole.
    layout: SlotLayout | None
    #: The state has a part that belongs to exactly its tokens.
    has_remainder: bool
    #: What entries depend on as well: their form.
    form: str
    #: What was in the slot; None: the file does not tell.
    tokens: Tokens | None = field(default=None, compare=False)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: a power of two; 0 without blocks."""
        return 0 if self.layout is None else _block_tokens(self.layout)


def _block_tokens(layout: SlotLayout) -> int:
    tokens = max(1, _BLOCK_BYTES // layout.token_bytes)
    tokens = 1 << (tokens.bit_length() - 1)
    return max(_LEAST_BLOCK_TOKENS, min(_MOST_BLOCK_TOKENS, tokens))


def read_probe(memory: memoryview, slots: int) -> Probe:
    """The probe's slot file. Raises Unsupported."""
    found = hashlib.sha256()
    try:
        file = SlotFile(memory)
    except UnknownVersion as why:
        found.update(memory)
        return Probe(found.digest(), None, True, f"whole: {why}, {slots} slots")
    except BadSlotFile as why:
        raise Unsupported(f"the slot file can't be read: {why}") from None
    if not len(file.tokens):
        raise Unsupported(
            "a saved slot is empty: start llama-server with --cache-ram 0, "
            "which keeps idle slots as they are"
        )
    if file.base is None:
        found.update(memory)
        form = f"whole, version {file.version}, {slots} slots"
        return Probe(found.digest(), None, True, form, file.tokens)
    file = file.sorted()
    layout = file.layout
    # The number of streams says nothing about the rows, but is in the remainder.
    found.update(repr(replace(layout, streams=1)).encode())
    for piece in (*file.block(0, len(file.tokens)), file.remainder):
        found.update(piece)
    form = f"blocks of {_block_tokens(layout)} tokens"
    if remainder := len(file.remainder) > 0:
        form += f" and a remainder, {slots} slots"
    return Probe(found.digest(), layout, remainder, form, file.tokens)


def identity_of(
    build: str,
    model_path: str,
    probe: Probe,
    adapters: list[dict[str, Any]],
    *,
    fingerprint: str | None = None,
) -> StateIdentity:
    """The identity of a server's states. Reads the model's files, once on a host. `adapters`: as
    `/lora-adapters` lists them. `fingerprint`: text for the weights, from the user."""
    return StateIdentity(
        f"llama-server {build}",
        (
            _weights(model_path, fingerprint),
            Dimension("probe", probe.digest, "a text that it evaluated", Part.CONTEXT),
            Dimension("entries", probe.form, "the file of its slot", Part.CONTEXT),
            _adapters(adapters),
        ),
    )


def with_salt(identity: StateIdentity, salt: bytes) -> StateIdentity:
    """The same identity for one tenant."""
    if not salt:
        return identity
    salted = Dimension("salt", salt, "the request's API key", Part.SALT)
    return replace(identity, dimensions=(*identity.dimensions, salted))


def _weights(model_path: str, fingerprint: str | None) -> Dimension:
    if fingerprint:
        return Dimension("weights", fingerprint, "--fingerprint", Part.FINGERPRINT)
    try:
        found = weights_of(model_path)
    except OSError:
        found = None
    if found is None:
        help = "the model's file is not on this host: give --fingerprint TEXT"
        return unrevealed("weights", help)
    return Dimension("weights", found.digest, found.source, Part.FINGERPRINT)


def _adapters(listed: list[dict[str, Any]]) -> Dimension:
    try:
        applied = [
            Adapter(fingerprint_of_files([each["path"]]), float(each["scale"]))
            for each in listed
            if each["scale"]
        ]
    except (OSError, LookupError, TypeError, ValueError):
        help = "an adapter's file is not on this host"
        return unrevealed("adapters", help, Part.ADAPTERS)
    return Dimension("adapters", tuple(applied), "/lora-adapters", Part.ADAPTERS)
