"""How `--help` names the values of options and arguments.

Typer names them by the types of Python (`<bool>`, `<int range>`, `<str>`), in another way in each
of its versions.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Annotated, Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

#: Of an option without a name of its own for its value.
_NAMES = {bool: "", int: "N", float: "N", str: "TEXT"}


def name_value(parameter: inspect.Parameter) -> None:
    """Name the value of an option or an argument of a command that has no name for it yet."""
    annotation = parameter.annotation
    if get_origin(annotation) is not Annotated:
        return
    kind, info = get_args(annotation)[:2]
    (kind,) = [each for each in get_args(kind) or (kind,) if each is not type(None)][:1]
    if info.metavar is not None or not isinstance(kind, type):
        return
    if isinstance(info, ArgumentInfo):
        info.metavar = parameter.name.upper()
    elif issubclass(kind, Enum):
        info.metavar = "|".join(str(each.value) for each in kind)
    else:
        info.metavar = _NAMES.get(kind)


class _Plain:
    """Shows no types in the help of a command or of a group."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]  # the command's
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""  # --help and --version, too
            if each.param_type_name == "argument" and hasattr(each, "display_type_rich"):
                each.display_type_rich = lambda **_: None  # of 0.29, behind the argument's name
        return parameters


class PlainCommand(_Plain, TyperCommand):
    """A command."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands."""
