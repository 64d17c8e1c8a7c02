"""Reads the options of a two-level pydantic model from a TOML file, the environment and flags.

An option has the same name everywhere: `[ram] budget` in the file, `PREFIXD_RAM__BUDGET` in the
environment, `--ram.budget` as a flag. Flags win over the environment, which wins over the file.
Only the form is checked here, not the meaning. Every value keeps its origin for error messages.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ...proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """How the values of a type are named and written. Goes beside the type in `Annotated`."""

    metavar: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Given:
    """A configured value: text from flags and environment, anything from a file."""

    value: object
    origin: str


@dataclass(slots=True)
class Sources:
    """The given values by dotted key, and a sentence for each error of form."""

    given: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    print_config: bool = False
    check_config: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One key of the model, as users see it."""

    section: str
    key: str
    #: Name of its attribute in the section.
    attribute: str
    info: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.section}.{self.key}"

    def value_in(self, config: BaseModel) -> Any:
        """The value of the option in an instance of the model."""
        return getattr(getattr(config, self.section), self.attribute)

    @property
    def description(self) -> str:
        return " ".join((self.info.description or "").split())

    @property
    def kind(self) -> Kind:
        for extra in self.info.metadata:
            if isinstance(extra, Kind):
                return extra
        annotation = self.info.annotation
        if get_origin(annotation) is Literal:
            return Kind("|".join(get_args(annotation)))
        if annotation is bool:
            return Kind("BOOL", lambda value: str(value).lower())
        if annotation is float:
            return Kind("SHARE")
        return Kind("N" if annotation is int else "TEXT")

    @property
    def default(self) -> str:
        """As a flag would write it. An option without a default is decided at the start."""
        return "auto" if self.info.is_required() else self.kind.show(self.info.default)

    @property
    def is_text(self) -> bool:
        """Whether TOML quotes it."""
        return self.info.is_required() or self.kind.metavar not in ("N", "SHARE", "BOOL")


def sections(model: type[BaseModel]) -> Iterator[tuple[str, str, list[Option]]]:
    """Name, description and options of every section of a two-level model."""
    for name, info in model.model_fields.items():
        section = info.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        found = [Option(name, f.alias or key, key, f) for key, f in section.model_fields.items()]
        yield name, info.description or "", found


def options(model: type[BaseModel]) -> dict[str, Option]:
    """Every option of a model by its dotted key."""
    return {option.path: option for _, _, found in sections(model) for option in found}


def template(model: type[BaseModel], title: str) -> str:
    """A TOML file with every option, its description and its default."""
    lines = [f"# {line}".rstrip() for line in title.splitlines()]
    for name, about, section in sections(model):
        lines += ["", f"# {about}", f"[{name}]"]
        for option in section:
            value = f'"{option.default}"' if option.is_text else option.default
            lines += ["", *_COMMENT.wrap(f"{option.description} ({option.kind.metavar})")]
            lines.append(f"{option.key} = {value}")
    return "\n".join(lines) + "\n"


_COMMENT = TextWrapper(
    98,
    initial_indent="# ",
    subsequent_indent="# ",
    break_long_words=False,
    break_on_hyphens=False,
)


# ---- flags


class _Wrong(Exception):
    """argparse can't parse the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Wrong(message)


class _Store(argparse.Action):
    """Stores a value with the name of its flag."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.given[self.dest] = Given(values, option_string or self.dest)


@dataclass(frozen=True, slots=True)
class Program:
    """What the command line says about the program itself."""

    name: str
    version: str
    description: str
    #: Short flags: flag -> dotted key.
    flags: Mapping[str, str]
    #: Environment variables that are not named after their key: variable -> dotted key.
    variables: Mapping[str, str]

    @property
    def prefix(self) -> str:
        return f"{self.name.upper()}_"


def parser(
    model: type[BaseModel], program: Program, *, forgiving: bool = False
) -> argparse.ArgumentParser:
    """The command line of `program`, with a group of flags for every section of `model`.

    `forgiving`: a flag without its value is not an error here, so that it is reported together
    with all other errors.
    """
    nargs = "?" if forgiving else None
    made = _Parser(
        prog=program.name,
        description=program.description,
        epilog=f"Every option can be set in the file, as {program.prefix}SECTION__KEY in the "
        "environment and by a flag; a flag wins over the environment, which wins over the file.",
        usage=f"{program.name} [--config FILE] [--SECTION.KEY VALUE ...]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    general = made.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="show this and exit")
    general.add_argument("--version", action="store_true", help="show the version and exit")
    general.add_argument(
        "--config",
        metavar="FILE",
        nargs=nargs,
        const="" if forgiving else None,
        help=f"read options from a TOML file [${program.prefix}CONFIG]",
    )
    general.add_argument(
        "--print-config",
        action="store_true",
        help="print a configuration file with every option, its meaning and default, and exit",
    )
    general.add_argument(
        "--check-config",
        action="store_true",
        help="say whether the configuration is good and what each tier gets here, and exit",
    )
    for name, about, section in sections(model):
        group = made.add_argument_group(name, about)
        for option in section:
            names = [flag for flag, path in program.flags.items() if path == option.path]
            text = f"{option.description} [{option.default or 'none'}]"
            flag_alone = "true" if option.kind.metavar == "BOOL" else None
            group.add_argument(
                f"--{option.path}",
                *names,
                dest=option.path,
                action=_Store,
                nargs=nargs,
                const=flag_alone if forgiving else None,
                metavar=option.kind.metavar,
                help=text.replace("%", "%%"),
            )
    return made


def _flags(
    model: type[BaseModel], program: Program, argv: Sequence[str], found: Sources
) -> tuple[str | None, dict[str, Given]]:
    """The name after --config, and the values of the flags."""
    given: dict[str, Given] = {}
    try:
        names, extra = parser(model, program, forgiving=True).parse_known_args(
            list(argv), argparse.Namespace(given=given)
        )
    except _Wrong as wrong:
        found.problems.append(f"command line: {wrong}")
        return None, {}
    if names.help:
        parser(model, program).print_help()
        raise SystemExit(0)
    if names.version:
        print(program.name, program.version)
        raise SystemExit(0)
    for position, word in enumerate(extra):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if not value and position + 1 < len(extra):
                value = extra[position + 1]
            given[name.removeprefix("--")] = Given(value, name)
        elif not position or not extra[position - 1].startswith("--"):
            found.problems.append(
                f"command line: {word!r} belongs to no flag (commands are those of prefixctl)"
            )
    for path, flag in list(given.items()):
        if flag.value is None:
            found.problems.append(f"{path} ({flag.origin}): the value is missing")
            del given[path]
    found.print_config = names.print_config
    found.check_config = names.check_config
    if names.config == "":
        found.problems.append("--config: the name of the file is missing")
    return names.config or None, given


# ---- file and environment


def _file(name: str, found: Sources) -> dict[str, Given]:
    try:
        document = tomllib.loads(Path(name).read_text("utf-8"))
    except OSError as problem:
        found.problems.append(f"{name}: can't be read: {problem.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        found.problems.append(f"{name}: is no TOML: {problem}")
        return {}
    except ValueError:
        found.problems.append(f"{name!r} has a NUL in it, which no name of a file may have")
        return {}
    given: dict[str, Given] = {}
    for section, body in document.items():
        if not isinstance(body, dict):
            given[section] = Given(body, name)
            continue
        for key, value in body.items():
            given[f"{section}.{key}"] = Given(value, name)
    return given


def _environment(env: Mapping[str, str], program: Program) -> dict[str, Given]:
    """Variables with `__` in them are options. Others with the prefix are left alone: Kubernetes
    sets some for every service called prefixd."""
    given = {
        path: Given(env[name], name) for name, path in program.variables.items() if env.get(name)
    }
    for name, value in env.items():
        if name.startswith(program.prefix) and "__" in name:
            path = name.removeprefix(program.prefix).lower().replace("__", ".", 1)
            given[path] = Given(value, name)
    return given


def _one_underscore(
    model: type[BaseModel], program: Program, env: Mapping[str, str]
) -> Iterator[str]:
    """Variables that lack the second underscore of an option."""
    for option in options(model).values():
        right = f"{program.prefix}{option.section}__{option.key}".upper()
        name = right.replace("__", "_", 1)
        if name in env and name not in program.variables:
            yield f"{name}: two underscores are between section and key: {right}"


def read(
    model: type[BaseModel], program: Program, argv: Sequence[str], env: Mapping[str, str]
) -> Sources:
    """Read all sources. `--help` and `--version` print and raise SystemExit."""
    found = Sources()
    named, flags = _flags(model, program, argv, found)
    file = named or env.get(f"{program.prefix}CONFIG")
    if file:
        found.given |= _file(file, found)
    found.given |= _environment(env, program)
    found.problems += _one_underscore(model, program, env)
    found.given |= flags
    return found


def refuse(problems: Sequence[str]) -> NoReturn:
    """Raise one ConfigError that lists all problems."""
    count = len(problems)
    what = "one thing is" if count == 1 else f"{count} things are"
    raise ConfigError(
        f"{what} wrong with the configuration:" + "".join(f"\n  {p}" for p in problems)
    )
