"""Whole states of layers, with arrays as tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.client.connectors.transformers_states import pack, unpack


class Tensor(np.ndarray[Any, Any]):
    """An array with those methods of a tensor that count here."""

    def numel(self) -> int:
        return self.size

    def detach(self) -> Tensor:
        return self

    def to(self, _device: str, copy: bool = False) -> Tensor:
        return self.copy() if copy else self

    def contiguous(self) -> Tensor:
        return np.ascontiguousarray(self).view(Tensor)


TORCH = SimpleNamespace(
    float32=np.float32,
    int64=np.int64,
    device=str,
    empty=lambda shape, dtype: np.zeros(shape, dtype).view(Tensor),
    frombuffer=lambda *args, **options: np.frombuffer(*args, **options).view(Tensor),
)


class Layer:
    """A layer with keys, numbered states and plain values."""

    def __init__(self, *, filled: bool = False) -> None:
        some = np.arange(30, dtype=np.float32).reshape(1, 2, 3, 5).view(Tensor)
        self.keys = some if filled else None
        self.states = {0: some[:, :, 1:] + 1 if filled else None, 1: None}
        self.length = 7 if filled else 0
        self.nothing = np.zeros((1, 0), np.float32).view(Tensor) if filled else None


class OtherLayer(Layer):
    """The same attributes by another name."""


def packed(*layers: Layer) -> bytearray:
    return bytearray(b"".join(bytes(piece) for piece in pack(layers)))


def test_what_layers_hold_comes_back() -> None:
    layers = [Layer(filled=True), Layer(filled=True)]
    payload = packed(*layers)
    layers[0].keys += 1  # type: ignore[operator]  # a layer that changes its tensors in place
    fresh = [Layer(), Layer()]
    assert unpack(TORCH, payload, fresh, "cpu")
    expected = Layer(filled=True)
    for layer in fresh:
        assert (layer.keys == expected.keys).all()
        assert (layer.states[0] == expected.states[0]).all()
        assert (layer.states[1], layer.length, layer.nothing.shape) == (None, 7, (1, 0))  # type: ignore[union-attr]
        assert (layer.dtype, layer.device) == (np.float32, "cpu")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda payload: payload[:-64],
        lambda payload: payload[:20],
        lambda payload: payload[:3],
        lambda payload: bytearray(8) + payload[8:],
        lambda payload: payload.replace(b"float32", b"float31"),
        lambda payload: payload.replace(b'"length"', b'"lengt2"'),
        lambda payload: payload.replace(b"{", b"(", 1),
        lambda payload: payload.replace(b"[1,2,3,5]", b"[1,2,3,-5]"),
        lambda _: packed(Layer(filled=True), Layer(filled=True)),
        lambda _: packed(OtherLayer(filled=True)),
    ],
)
def test_anything_else_leaves_the_layers_as_they_are(spoil: Any) -> None:
    layer = Layer()
    assert not unpack(TORCH, spoil(packed(Layer(filled=True))), [layer], "cpu")
    assert vars(layer) == vars(Layer())
