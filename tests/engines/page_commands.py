"""The commands of a page, as a shell takes them apart."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

_DOCS: Final = Path(__file__).resolve().parent.parent.parent / "docs"


def command(page: str, *begin: str) -> list[str]:
    """The arguments of the one command of a page that begins with these words."""
    blocks = re.findall(r"```console\n(.*?)```", (_DOCS / page).read_text(), re.DOTALL)
    found = [
        words
        for block in blocks
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        if (words := shlex.split(each.replace("\\\n", " ")))[: len(begin)] == list(begin)
    ]
    (one,) = found
    return one[len(begin) :]


def option(arguments: list[str], name: str) -> str:
    """The value of an option."""
    return arguments[arguments.index(name) + 1]
