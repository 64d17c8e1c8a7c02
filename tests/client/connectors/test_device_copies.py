"""Keys and values on a GPU, against a twin of PyTorch's CUDA whose copies are made as late as they
may be: a copy that nobody waited for has not happened."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from prefixd.client import Client, Namespace
from prefixd.client.connectors import device_copies
from prefixd.client.connectors.transformers import load_cache, save_cache
from prefixd.client.ctl.private import PrivateDaemon
from tests.support.daemon import private_daemon
from tests.support.fakes import PATIENCE_S

LAYERS, HEADS, WIDTH, BLOCK = 3, 2, 4, 8
BLOCK_BYTES = LAYERS * 2 * HEADS * WIDTH * BLOCK * 4
TOKENS = list(range(BLOCK * 20 + 3))


class Device(NamedTuple):
    type: str


GPU = Device("cuda")


class Stream:
    """Work of a device, in order, done when somebody waits for it."""

    def __init__(self, _device: Any = None) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.done = self.queued = 0

    def add(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.queued += 1

    def run_to(self, number: int) -> None:
        while self.done < number:
            self.done += 1
            self.work.popleft()()

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)


class Event:
    def __init__(self) -> None:
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.at = stream, stream.queued

    def synchronize(self) -> None:
        if self.at is not None:
            self.at[0].run_to(self.at[1])


class Cuda:
    """`torch.cuda`."""

    Event, Stream = Event, Stream

    def __init__(self) -> None:
        self.first = self.current = Stream()

    def current_stream(self, _device: Any) -> Stream:
        return self.current

    def stream(self, stream: Stream) -> Any:
        cuda = self

        class Within:
            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, stream

            def __exit__(self, *_: object) -> None:
                cuda.current = self.before

        return Within()


class Tensor(np.ndarray[Any, Any]):
    """An array with those methods of a tensor that the connector uses."""

    cuda: Cuda
    device: Any = GPU

    def __array_finalize__(self, of: Any) -> None:
        self.cuda = getattr(of, "cuda", None)  # type: ignore[assignment]
        self.device = getattr(of, "device", GPU)

    def detach(self) -> Tensor:
        return self

    def to(self, _device: Any) -> Tensor:
        return self

    def element_size(self) -> int:
        return self.itemsize

    def unflatten(self, axis: int, sizes: tuple[int, ...]) -> Tensor:
        made = self.reshape(*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        assert np.shares_memory(made, self), "a tensor's unflatten is a view"
        return made

    def transpose(self, first: Any, second: int) -> Tensor:  # type: ignore[override]
        return self.swapaxes(first, second)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        assert self.shape == source.shape
        self.cuda.current.add(lambda: np.copyto(self, source))
        if not non_blocking and self.device is not source.device:
            self.cuda.current.run_to(self.cuda.current.queued)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """A device, and bunches of three blocks, of which six are placed at once."""
    cuda = Cuda()

    def empty(shape: Any, dtype: Any, device: Any = None, pin_memory: bool = False) -> Tensor:
        made = np.full(shape, 255, np.uint8).view(Tensor) if dtype is np.uint8 else None
        if made is None:
            made = np.full(shape, np.nan, dtype).view(Tensor)
        assert (device is GPU) != pin_memory
        made.cuda, made.device = cuda, device or "pinned"
        return made

    utils, torch = ModuleType("transformers.cache_utils"), ModuleType("torch")
    for module, name, value in (
        (utils, "DynamicCache", DynamicCache),
        (utils, "DynamicLayer", DynamicLayer),
        (torch, "float32", np.dtype(np.float32)),
        (torch, "uint8", np.uint8),
        (torch, "empty", empty),
        (torch, "device", lambda device: device),
        (torch, "cuda", cuda),
    ):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", utils)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(device_copies, "_BUNCH_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(device_copies, "_PLACED_BYTES", 7 * BLOCK_BYTES)
    return cuda


class DynamicLayer:
    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None

    def lazy_initialization(self, keys: Any, values: Any) -> None:
        assert keys.shape[:3:2] == values.shape[:3:2]

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])


class DynamicCache:
    def __init__(self, config: Any) -> None:
        self.layers = [config.layer() for _ in range(LAYERS)]


def config_of() -> Any:
    config = SimpleNamespace(
        layer=DynamicLayer,
        num_key_value_heads=HEADS,
        num_attention_heads=2 * HEADS,
        head_dim=WIDTH,
        dtype=np.dtype(np.float32),
        to_dict=dict,
    )
    config.get_text_config = lambda: config
    return config


def filling(cuda: Cuda, tokens: int) -> tuple[DynamicCache, Any]:
    """A cache that the device fills when its turn comes, and what it will hold."""
    cache = DynamicCache(config_of())
    random = np.random.default_rng(1)
    expected = random.random((LAYERS, 2, 1, HEADS, tokens, WIDTH), np.float32)
    for layer, pair in zip(cache.layers, expected, strict=True):
        made = []
        for each in pair:
            tensor = np.full(each.shape, np.nan, np.float32).view(Tensor)
            tensor.cuda, tensor.device = cuda, GPU
            source = each.view(Tensor)
            source.cuda, source.device = cuda, GPU
            tensor.copy_(source)
            made.append(tensor)
        layer.keys, layer.values = made
    return cache, expected


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[Client]:
    with Client(daemon.address) as client:
        yield client


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(os.urandom(32), "hf", b"c" * 32)


def load(client: Client, namespace: Namespace, tokens: list[int] = TOKENS) -> Any:
    return load_cache(client, namespace, config_of(), tokens, device=GPU, block_tokens=BLOCK)


def test_blocks_pass_through_pinned_memory_bit_by_bit(
    cuda: Cuda, client: Client, namespace: Namespace
) -> None:
    cache, expected = filling(cuda, len(TOKENS))
    first = save_cache(client, namespace, TOKENS[: BLOCK * 5], cache, block_tokens=BLOCK)
    assert [each.ok for each in first.result(PATIENCE_S)] == [True] * 5
    saving = save_cache(client, namespace, TOKENS, cache, block_tokens=BLOCK)
    assert [each.ok for each in saving.result(PATIENCE_S)] == [True] * 15, "the others are there"
    found = load(client, namespace)
    assert found.token_count == BLOCK * 20
    cuda.first.run_to(cuda.first.queued)
    for layer, pair in zip(found.cache.layers, expected, strict=True):
        assert np.array_equal(layer.keys, pair[0][:, :, : BLOCK * 20])
        assert np.array_equal(layer.values, pair[1][:, :, : BLOCK * 20])


@pytest.mark.parametrize("good", [0, 1, 3, 7, 14, 19])
def test_what_can_not_be_restored_ends_the_prefix(
    good: int,
    cuda: Cuda,
    client: Client,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, expected = filling(cuda, len(TOKENS))
    save_cache(client, namespace, TOKENS, cache, block_tokens=BLOCK).result(PATIENCE_S)
    sound = device_copies.Hit.restore_async

    def restore_async(hit: Any, rooms: Any, *, indices: range) -> Any:
        """Blocks from `good` on are given buffers that are too short, which is a miss."""
        kept = [room if n < good else room[:1] for n, room in zip(indices, rooms, strict=True)]
        return sound(hit, kept, indices=indices)

    monkeypatch.setattr(device_copies.Hit, "restore_async", restore_async)
    found = load(client, namespace)
    assert found.token_count == BLOCK * good
    cuda.first.run_to(cuda.first.queued)
    for layer, pair in zip(found.cache.layers if good else (), expected, strict=False):
        assert np.array_equal(layer.keys, pair[0][:, :, : BLOCK * good])
        assert np.array_equal(layer.values, pair[1][:, :, : BLOCK * good])


def test_a_copy_that_fails_on_the_device_fails_the_rest(
    cuda: Cuda, client: Client, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = filling(cuda, len(TOKENS))
    made: list[int] = []

    class Broken(Stream):
        def wait_event(self, event: Event) -> None:
            super().wait_event(event)

        def add(self, work: Callable[[], None]) -> None:
            made.append(1)
            if len(made) > 2 * (2 * LAYERS + 1) + 3:
                raise RuntimeError("the device is gone")
            super().add(work)

    monkeypatch.setattr(cuda, "Stream", Broken)
    saving = save_cache(client, namespace, TOKENS, cache, block_tokens=BLOCK)
    outcomes = saving.result(PATIENCE_S)
    assert [each.ok for each in outcomes] == [True] * 3 + [False] * 17
    assert outcomes[-1].message == "the device is gone"
    monkeypatch.setattr(cuda, "Stream", Stream)
    assert load(client, namespace).token_count == BLOCK * 3
