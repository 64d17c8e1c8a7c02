"""What a search in the index finds: rows become entries, and stay known for the reading of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, cast

from ...proto.index import entry_of, unpacked
from ...proto.index_reader import Placed
from ...proto.keys import Key
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from ..results import Entry
from .node import InPlace, LocalNode

#: Where a search for what a claim wants ends; see `IndexReader.find`.
_STOPS_AT: Final = {ClaimMode.RUN: False, ClaimMode.FIRST: True, ClaimMode.ANY: None}
_TIERS: Final = {int(tier): tier for tier in Tier}
#: `Entry._make` without a call in Python: for every block.
_made: Final = partial(tuple.__new__, Entry)
_REASONS: Final = {int(reason): reason for reason in SaveReason}


def found_in(
    node: LocalNode, keys: Iterable[Key], mode: ClaimMode
) -> tuple[Sequence[int], list[Entry], list[Placed]]:
    """What `mode` wants of the keys: positions, entries and their rows. Takes no more keys than it
    needs."""
    assert node.index is not None
    found = node.index.find(keys, _STOPS_AT[mode])
    placed = [each for each in found if each is not None]
    if not placed:
        return (), [], placed
    entries = _entries([row for _, row in placed])
    if None not in entries:
        known = cast("list[Entry]", entries)
        if mode is ClaimMode.FIRST:
            return (len(found) - 1,), known, placed
        if mode is ClaimMode.RUN or len(placed) == len(found):
            return range(len(placed)), known, placed
    positions: list[int] = []
    known = []
    rows: list[Placed] = []
    listed = iter(entries)
    for position, each in enumerate(found):
        entry = None if each is None else next(listed)
        if each is not None and entry is not None:
            positions.append(position)
            known.append(entry)
            rows.append(each)
        elif mode is ClaimMode.RUN:
            break
    return positions, known, rows


def in_place(node: LocalNode, entries: Sequence[Entry], rows: Sequence[Placed]) -> InPlace:
    """Entries and their rows, to be read with."""
    return InPlace(node, dict(zip([entry.key for entry in entries], rows, strict=True)))


def _entries(rows: Sequence[bytes]) -> list[Entry | None]:
    """None: of a tier or a reason that this version does not know."""
    tiers, reasons = _TIERS, _REASONS
    try:
        return [
            _made((key, tiers[tier], size, tokens, crc, layers, ids, generation, reasons[reason]))
            for key, generation, size, _, _, tokens, crc, ids, layers, tier, reason, _ in unpacked(
                rows
            )
        ]
    except (KeyError, ValueError):
        return list(map(_entry, rows))


def _entry(row: bytes) -> Entry | None:
    """None: of a tier or a reason that this version does not know."""
    key, generation, payload_bytes, tokens, crc, ids_bytes, layers, tier, reason = entry_of(row)
    known_tier, known_reason = _TIERS.get(tier), _REASONS.get(reason)
    if known_tier is None or known_reason is None:
        return None
    return Entry(
        key,
        known_tier,
        payload_bytes,
        tokens,
        crc,
        layers,
        ids_bytes,
        generation,
        known_reason,
    )
