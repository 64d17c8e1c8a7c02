"""What counts as a payload, and that it is never copied."""

from __future__ import annotations

import ctypes
import sys
from array import array
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from prefixd.client.buffers import MAX_PIECES, _ready, all_flat, flat_bytes
from prefixd.proto.errors import CallerError, InvalidSize
from prefixd.proto.kernel import native
from prefixd.proto.payload import Pieces, copy

BUFFERS: list[Any] = [
    bytearray(12),
    memoryview(bytearray(12)),
    memoryview(bytearray(12)).cast("I"),
    array("f", [0.0, 0.0, 0.0]),
    (ctypes.c_int * 3)(),
    np.zeros(6, np.float16),
    np.zeros((3, 4), np.uint8),
    np.zeros((), np.float32),
    np.zeros(3, ">f4"),
    np.zeros(2, [("a", "<u2"), ("b", "<f4")]),
    np.zeros(2, "M8[s]"),
    np.zeros((4, 4), np.uint8)[1:3],
]


def raw_bytes(buffer: Any) -> bytes:
    return buffer.tobytes() if isinstance(buffer, np.ndarray) else bytes(buffer)


@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda buffer: type(buffer).__name__)
def test_any_contiguous_buffer_is_seen_as_bytes_in_place(buffer: Any) -> None:
    view = flat_bytes(buffer, writable=True)
    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)
    assert view.nbytes == len(raw_bytes(buffer))
    view[0], view[-1] = 7, 9
    raw = raw_bytes(buffer)
    assert (raw[0], raw[-1]) == (7, 9)


@pytest.mark.skipif(not native, reason="needs the native kernel")
@pytest.mark.parametrize("writable", [False, True])
def test_both_forms_agree_on_what_is_flat_already(writable: bool) -> None:
    plain = memoryview(bytearray(12))
    released = memoryview(bytearray(12))
    released.release()
    read_only, signed, square = memoryview(b"abc"), plain.cast("b"), plain.cast("B", (3, 4))
    for each in (*BUFFERS, plain, plain[::2], plain[:0], read_only, signed, square, b"abc", None):
        ready = _ready([plain, each], writable=writable)
        assert native.flat([plain, each], writable) == (len(ready) == 2)
    # Whoever looks closer says what is wrong.
    assert not native.flat([released], writable)
    assert native.flat([], writable)
    with pytest.raises(TypeError):
        native.flat(plain, writable)


def test_the_callers_list_is_its_own() -> None:
    given = [memoryview(bytearray(12))]
    flat = all_flat(given)
    assert flat is not given
    assert flat == given


def test_bytes_are_a_payload_but_nothing_to_restore_into() -> None:
    assert flat_bytes(b"abc").tobytes() == b"abc"
    with pytest.raises(InvalidSize, match="read-only"):
        flat_bytes(b"abc", writable=True)
    with pytest.raises(InvalidSize, match="read-only"):
        flat_bytes(np.broadcast_to(np.uint8(1), (1,)), writable=True)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(8)[::2],
        np.asfortranarray(np.zeros((3, 4))),
        memoryview(np.zeros((4, 4)))[::2],
        [b"abc", np.zeros(8)[::2]],
    ],
    ids=["every second", "Fortran order", "a memoryview", "one of several"],
)
def test_the_rows_of_a_payload_lie_together_in_c_order(buffer: Any) -> None:
    with pytest.raises(InvalidSize, match="contiguous"):
        flat_bytes(buffer)


def test_a_payload_is_not_empty() -> None:
    for empty in (b"", [], [b"", ()], np.zeros((0, 4))[:, :2]):
        with pytest.raises(InvalidSize, match="at least one byte"):
            flat_bytes(empty)


PIECES: list[Any] = [
    np.arange(16, dtype=np.uint8).reshape(4, 4)[:, :2],
    np.arange(64, dtype=np.uint16).reshape(4, 4, 4)[::2, 1:3],
    np.arange(64, dtype=np.uint8).reshape(4, 4, 4)[:, ::2, ::-1][:, :, ::-1],
]


@pytest.mark.parametrize("array", PIECES, ids=lambda array: str(array.strides))
def test_an_array_that_does_not_lie_together_is_its_rows(array: Any) -> None:
    view = flat_bytes(array, writable=True)
    assert isinstance(view, Pieces)
    assert (len(view), view.tobytes()) == (array.nbytes, array.tobytes())
    copy(view, bytes(len(view)))
    assert not array.any()


def test_several_buffers_are_one_payload() -> None:
    parts = [bytearray(b"abc"), np.arange(4, dtype=np.uint8), (b"", array("B", b"xyz"))]
    view = flat_bytes(parts)
    assert view.tobytes() == b"abc\0\1\2\3xyz"
    assert flat_bytes([b"", [b"alone"]]).tobytes() == b"alone"
    with pytest.raises(InvalidSize, match="read-only"):
        flat_bytes([bytearray(1), b"a"], writable=True)
    with pytest.raises(InvalidSize, match="pieces"):
        flat_bytes([b"a"] * (MAX_PIECES + 1))


def test_views_of_bytes_are_pieces_as_they_are() -> None:
    views = [memoryview(bytearray(b"ab")), memoryview(bytearray(b"c"))]
    made = flat_bytes(views, writable=True)
    assert isinstance(made, Pieces)
    assert all(one is other for one, other in zip(made.views, views, strict=True))
    assert made.views is not views, "what becomes of the list is the caller's"
    assert flat_bytes([*views, memoryview(b"")]).tobytes() == b"abc"
    assert flat_bytes([views[0], memoryview(array("H", [1, 2]))]).tobytes() == b"ab\1\0\2\0"
    with pytest.raises(InvalidSize, match="read-only"):
        flat_bytes([*views, memoryview(b"d")], writable=True)


@pytest.mark.parametrize("thing", [None, 5, "text", object()])
def test_anything_else_is_the_callers_mistake(thing: object) -> None:
    with pytest.raises(CallerError, match=type(thing).__name__):
        flat_bytes(thing)


class Pointers(ctypes.Structure):
    """A format in which a name follows a pointer: `T{<Z:d:<d:x:}`."""

    _fields_ = (("d", ctypes.c_wchar_p), ("x", ctypes.c_double))


ADDRESSES: list[Any] = [
    np.array([object(), "a", [1]], dtype=object),
    np.zeros((4, 4), dtype=object)[:, :2],
    np.zeros(2, [("a", "i4"), ("b", "O")]),
    np.zeros(2, [("a", "M8[s]"), ("b", "O")]),
    (ctypes.c_void_p * 2)(),
    (ctypes.c_char_p * 2)(),
    (ctypes.c_wchar_p * 2)(),
    (ctypes.py_object * 2)(),
    (ctypes.CFUNCTYPE(None) * 2)(),
    ctypes.pointer(ctypes.c_int(1)),
    Pointers(),
    memoryview((ctypes.c_void_p * 2)()),
    [bytearray(3), (ctypes.c_void_p * 2)()],
]


@pytest.mark.parametrize("buffer", ADDRESSES, ids=lambda buffer: type(buffer).__name__)
@pytest.mark.parametrize("writable", [False, True])
def test_addresses_are_no_payload(buffer: Any, writable: bool) -> None:
    """They would be saved as pointers of this process, and crash the one that restores them."""
    with pytest.raises(CallerError, match="addresses of objects"):
        flat_bytes(buffer, writable=writable)
    with pytest.raises(CallerError, match="addresses of objects"):
        all_flat([memoryview(bytearray(1)), buffer])


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="needs numpy 2")
def test_texts_of_any_length_are_no_payload() -> None:
    with pytest.raises(CallerError, match="not such a ndarray"):
        flat_bytes(np.array(["a", "b" * 100], dtype=np.dtypes.StringDType()))


@pytest.mark.parametrize(
    "plain",
    [
        np.zeros(3, "?"),
        np.zeros(3, "c16"),
        np.zeros(3, "S3"),
        np.zeros(3, "U3"),
        np.zeros(3, "V8"),
        np.zeros(3, "g"),
        np.zeros(3, "m8[s]"),
        # Names of fields are no formats.
        np.zeros(3, [("O", "<i4"), ("P", ">f8", (2, 2)), ("Z", "c8"), ("x y", "V3")]),
        np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        (ctypes.c_wchar * 2)(),
        (ctypes.c_bool * 2)(),
        (ctypes.c_longdouble * 2)(),
    ],
    ids=lambda plain: str(getattr(plain, "dtype", type(plain).__name__)),
)
def test_numbers_characters_and_structures_of_them_are_a_payload(plain: Any) -> None:
    size_bytes = plain.nbytes if isinstance(plain, np.ndarray) else ctypes.sizeof(plain)
    assert flat_bytes(plain, writable=True).nbytes == size_bytes


class FakeTensor:
    """The part of a tensor that `flat_bytes` uses; `numpy()` fails for types that numpy lacks."""

    def __init__(self, data: np.ndarray[Any, Any], *, has_numpy: bool = False) -> None:
        self._data = data
        self._has_numpy = has_numpy
        self.device = "cpu"
        self.ndim = data.ndim

    def detach(self) -> FakeTensor:
        return self

    def reshape(self, length: int) -> FakeTensor:
        return FakeTensor(self._data.reshape(length))

    def view(self, dtype: type) -> FakeTensor:
        if not self._data.flags.c_contiguous:
            raise RuntimeError("view needs contiguous memory")
        return FakeTensor(self._data.view(dtype), has_numpy=True)

    def numpy(self) -> np.ndarray[Any, Any]:
        if not self._has_numpy:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._data


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("fake_torch")
    library.uint8 = np.uint8  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_torch", library)
    monkeypatch.setattr(FakeTensor, "__module__", "fake_torch.tensors")


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor_of_numbers_that_numpy_lacks_is_seen_as_bytes() -> None:
    data = np.zeros((2, 3), np.uint16)
    view = flat_bytes(FakeTensor(data), writable=True)
    view[0] = 1
    assert view.nbytes == 12
    assert data[0, 0] == 1


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor_of_one_number_is_seen_as_bytes() -> None:
    assert flat_bytes(FakeTensor(np.zeros((), np.uint16))).nbytes == 2


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("state", ["conj", "neg"])
def test_a_tensor_whose_bytes_are_not_its_numbers_is_refused(state: str) -> None:
    lazy = FakeTensor(np.zeros(4, np.uint16))
    setattr(lazy, f"is_{state}", lambda: True)
    with pytest.raises(CallerError, match=rf"call resolve_{state}\(\) first"):
        flat_bytes(lazy)


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor_on_another_device_is_refused() -> None:
    far = FakeTensor(np.zeros((4, 4), np.uint16)[:, :2])
    far.device = "cuda:0"
    with pytest.raises(CallerError, match="FakeTensor on device cuda:0: copy it to the CPU first"):
        flat_bytes(far)


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor_that_does_not_lie_together_is_refused() -> None:
    with pytest.raises(CallerError, match="contiguous buffer in CPU memory"):
        flat_bytes(FakeTensor(np.zeros((4, 4), np.uint16)[:, :2]))


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        tensor = torch.zeros(2, 4, dtype=dtype, requires_grad=dtype is torch.float32)
        view = flat_bytes(tensor, writable=True)
        view[:] = bytes(range(view.nbytes))
        assert bytes(tensor.detach().view(torch.uint8).numpy()) == bytes(range(view.nbytes))
    with pytest.raises(CallerError, match="on device meta: copy it to the CPU first"):
        flat_bytes(torch.zeros(2, device="meta"))
    numbers = torch.ones(4, dtype=torch.complex64)
    with pytest.raises(CallerError, match=r"call resolve_conj\(\) first"):
        flat_bytes(numbers.conj())
    with pytest.raises(CallerError, match=r"call resolve_neg\(\) first"):
        flat_bytes(numbers.conj().imag)
