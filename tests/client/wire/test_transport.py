"""The interface that every transport has."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from prefixd.client.wire.remote_transport import RemoteTransport
from prefixd.client.wire.transport import Transport


def test_the_remote_transport_has_every_method_as_declared() -> None:
    names = [name for name in vars(Transport) if not name.startswith("_")]
    assert {"claim", "read", "save", "close", "max_batch_keys"} <= set(names)
    for name in names:
        declared, made = getattr(Transport, name), getattr(RemoteTransport, name)
        assert isinstance(declared, property) == isinstance(made, property), name
        if not isinstance(declared, property):
            assert shape(made) == shape(declared), name


def shape(method: Callable[..., object]) -> list[tuple[str, object, object]]:
    """The parameters of a method."""
    parameters = inspect.signature(method).parameters.values()
    return [(each.name.lstrip("_"), each.kind, each.annotation) for each in parameters]


def test_every_method_says_what_it_does() -> None:
    assert not [
        name for name, member in vars(Transport).items() if name[0] != "_" and not member.__doc__
    ]
