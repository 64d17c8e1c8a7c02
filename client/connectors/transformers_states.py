"""Whole states of transformers' caches, for layers that do not hold every token: sliding windows,
recurrent states, and both beside attention.

A payload is everything that the layers hold, whatever the version calls it:

    magic       8 bytes, "prefixdH"
    length      u32 little-endian: bytes of the description
    description JSON: for each layer its class and its attributes; a tensor is described by number
                type, shape and offset behind the description, which is padded to 64 bytes
    tensors     each at a multiple of 64 bytes

A description is checked against the fresh layers of the same model, and is data only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

from ..buffers import flat_bytes

_MAGIC: Final = b"prefixdH"
_LENGTH: Final = struct.Struct("<I")
_ALIGNMENT: Final = 64
#: Classes whose attributes are plain values, tensors, and dicts of those.
LAYERS: Final = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)
_TENSOR: Final = "tensor"
#: Attributes that follow from the tensors.
_DERIVED: Final = ("dtype", "device")


def kinds(layers: Sequence[Any]) -> list[str]:
    """The classes of the layers."""
    return [type(layer).__name__ for layer in layers]


def pack(layers: Sequence[Any]) -> list[Any]:
    """The pieces of a payload. Tensors are copied: some layers change theirs in place."""
    tensors: list[Any] = []
    offset = 0

    def describe(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, Mapping):
            return {"dict": [[key, describe(each)] for key, each in value.items()]}
        if not hasattr(value, "numel"):
            return value
        copy = value.detach().to("cpu", copy=True).contiguous()
        described = {_TENSOR: [str(copy.dtype).removeprefix("torch."), list(copy.shape), offset]}
        if copy.numel():
            raw = flat_bytes(copy)
            tensors.append(raw)
            padding = -len(raw) % _ALIGNMENT
            if padding:
                tensors.append(bytes(padding))
            offset += len(raw) + padding
        return described

    made = [
        {
            "kind": type(layer).__name__,
            "held": {
                name: describe(value) for name, value in vars(layer).items() if name not in _DERIVED
            },
        }
        for layer in layers
    ]
    text = json.dumps(made, separators=(",", ":")).encode()
    head = _MAGIC + _LENGTH.pack(len(text)) + text
    return [head + bytes(-len(head) % _ALIGNMENT), *tensors]


def unpack(torch: Any, payload: bytearray, layers: Sequence[Any], device: Any) -> bool:
    """Fill fresh layers. False: this is no state of such layers; they are as they were."""
    try:
        made, start = _described(payload)
        filled = [
            _values(torch, payload, start, each, layer, device)
            for each, layer in zip(made, layers, strict=True)
        ]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, struct.error):
        return False
    for layer, values in zip(layers, filled, strict=True):
        for name, value in values.items():
            setattr(layer, name, value)
    return True


def _described(payload: bytearray) -> tuple[list[dict[str, Any]], int]:
    """The description, and where the tensors begin."""
    if payload[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a state")
    first = len(_MAGIC) + _LENGTH.size
    end = first + _LENGTH.unpack_from(payload, len(_MAGIC))[0]
    return json.loads(payload[first:end]), end + -end % _ALIGNMENT


def _values(
    torch: Any, payload: bytearray, start: int, made: dict[str, Any], layer: Any, device: Any
) -> dict[str, Any]:
    """The attributes of a layer."""
    held: dict[str, Any] = made["held"]
    if made["kind"] != type(layer).__name__ or set(held) != set(vars(layer)) - set(_DERIVED):
        raise ValueError("the state of other layers")
    types: list[Any] = []

    def restore(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if _TENSOR not in value:
            return {key: restore(each) for key, each in value["dict"]}
        name, shape, offset = value[_TENSOR]
        dtype = getattr(torch, name)
        tensor = torch.empty(shape, dtype=dtype)
        if prod(shape):
            tensor = torch.frombuffer(
                payload, dtype=dtype, count=prod(shape), offset=start + offset
            ).reshape(shape)
        if shape:  # a number on its own is the width of a window, which stays where it is
            tensor = tensor.to(device)
            types.append(dtype)
        return tensor

    values = {name: restore(value) for name, value in held.items()}
    if types:
        values |= {"dtype": types[0], "device": torch.device(device)}
    return values
