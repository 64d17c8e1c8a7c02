"""Labels: names that clients give their traffic, under which the daemon adds it up."""

from __future__ import annotations

import re
from typing import Final

from .errors import InvalidSize
from .limits import MAX_LABEL_CHARS

_LABEL: Final = re.compile(rf"[A-Za-z0-9._:/@+-]{{1,{MAX_LABEL_CHARS}}}")


def check_label(label: str) -> str:
    """`label` itself, under which traffic is added up. Raises InvalidSize if it can't be one."""
    if not _LABEL.fullmatch(label):
        raise InvalidSize(
            f"a label has 1 ... {MAX_LABEL_CHARS} letters, digits or ._:/@+-, not {label[:80]!r}"
        )
    return label


def printable(text: str) -> str:
    """The same text, with a `?` for everything that a terminal might take for a command. For what
    others say of themselves, such as the name of a client."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
