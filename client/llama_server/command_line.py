"""The command line of llama-server, as far as a wrapper in its place has to know it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Options with a value that the wrapper takes over, by the variable that means the same.
_TAKEN: Final = {
    "LLAMA_ARG_HOST": ("--host",),
    "LLAMA_ARG_PORT": ("--port",),
    "LLAMA_ARG_SSL_KEY_FILE": ("--ssl-key-file",),
    "LLAMA_ARG_SSL_CERT_FILE": ("--ssl-cert-file",),
}
#: Options with a value that it reads only.
_READ: Final = {
    "LLAMA_ARG_API_PREFIX": ("--api-prefix",),
    "LLAMA_API_KEY": ("--api-key",),
    "LLAMA_ARG_SLOT_SAVE_PATH": ("--slot-save-path",),
    "LLAMA_ARG_CACHE_RAM": ("--cache-ram", "-cram"),
}
#: Switches, by what they set; the last one counts. Variables say it with a word.
_SWITCHES: Final = {
    "--swa-full": ("LLAMA_ARG_SWA_FULL", True),
    "--context-shift": ("LLAMA_ARG_CONTEXT_SHIFT", True),
    "--no-context-shift": ("LLAMA_ARG_CONTEXT_SHIFT", False),
}
_ON: Final = ("on", "enabled", "true", "1")
_KEY_FILE: Final = "--api-key-file"
_DEFAULTS: Final = {"LLAMA_ARG_HOST": "127.0.0.1", "LLAMA_ARG_PORT": "8080"}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How llama-server would have listened, and the command that starts it behind the wrapper."""

    #: Addresses, or paths that end in `.sock`.
    hosts: tuple[str, ...]
    port: int
    certificate: str | None
    private_key: str | None
    #: Before all paths.
    prefix: str
    #: The first of its keys; None: it wants none, or they are in `api_key_file`.
    api_key: str | None
    api_key_file: str | None
    #: The user's own folder of slot files.
    slots: str | None
    #: It keeps the keys and values before a sliding window.
    swa_full: bool
    #: It goes on at the end of the context, with keys that it shifts.
    shifts: bool
    #: Variables that the server must not get.
    unset: tuple[str, ...]
    _command: tuple[str, ...]
    _keeps_idle_slots: bool

    def command(self, socket_path: str, slots: str) -> list[str]:
        """The command that listens on a Unix socket and saves its slots to a folder. Its own cache
        in memory, which empties idle slots before they can be saved, is off unless the user chose
        its size. Keys that were shifted are not those of their tokens, so none are."""
        made = [*self._command, "--host", socket_path, "--cache-reuse", "0"]
        if not self.shifts:
            made += ["--no-context-shift"]
        if self.slots is None:
            made += ["--slot-save-path", slots]
        if not self._keeps_idle_slots:
            made += ["--cache-ram", "0"]
        return made


def parse_command(command: Sequence[str], environment: Mapping[str, str]) -> ServerCommand:
    """Read the command of a llama-server. Raises ValueError, in words for the user."""
    if not command:
        raise ValueError("after -- comes the command that starts llama-server")
    names = {
        option: variable
        for variable, options in (*_TAKEN.items(), *_READ.items())
        for option in options
    }
    found = {name: environment[name] for name in (*_TAKEN, *_READ) if name in environment}
    switches = {name: environment.get(name, "") in _ON for name, _ in _SWITCHES.values()}
    kept, key_file = [command[0]], None
    arguments = iter(command[1:])
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option.startswith("--"):
            option = option.replace("_", "-")  # as llama-server reads it
        if option in _SWITCHES:
            name, switched = _SWITCHES[option]
            switches[name] = switched
        variable = names.get(option)
        if variable is None and option != _KEY_FILE:
            kept.append(argument)
            continue
        whole = [argument]
        if not equals:
            try:
                value = next(arguments)
            except StopIteration:
                raise ValueError(f"{option} has no value") from None
            whole.append(value)
        if variable is None:
            key_file = value
        else:
            found[variable] = value
        if variable not in _TAKEN:
            kept += whole
    port = found.get("LLAMA_ARG_PORT", _DEFAULTS["LLAMA_ARG_PORT"])
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError(f"--port is a number below 65536, not {port}")
    hosts = found.get("LLAMA_ARG_HOST", _DEFAULTS["LLAMA_ARG_HOST"])
    if not hosts.strip(", "):
        raise ValueError("--host names no address")
    key = found.get("LLAMA_API_KEY", "").split(",")[0].strip()
    return ServerCommand(
        hosts=tuple(each.strip() for each in hosts.split(",") if each.strip()),
        port=int(port),
        certificate=found.get("LLAMA_ARG_SSL_CERT_FILE"),
        private_key=found.get("LLAMA_ARG_SSL_KEY_FILE"),
        prefix=found.get("LLAMA_ARG_API_PREFIX", "").rstrip("/"),
        api_key=key or None,
        api_key_file=key_file,
        slots=found.get("LLAMA_ARG_SLOT_SAVE_PATH"),
        swa_full=switches["LLAMA_ARG_SWA_FULL"],
        shifts=switches["LLAMA_ARG_CONTEXT_SHIFT"],
        unset=tuple(_TAKEN),
        _command=tuple(kept),
        _keeps_idle_slots="LLAMA_ARG_CACHE_RAM" in found,
    )
