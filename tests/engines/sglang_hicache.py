"""SGLang's own HiCache controller and host pool on CPU, without a model or a GPU."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import fields
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from tests.support.decisions import fields_of

MODULE: Final = "prefixd.client.connectors.sglang"
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")


class _Anything:
    """Stands for any attribute of a package that is imported but not used."""

    def __init__(self, *_args: object, **_options: object) -> None:
        pass

    def __getattr__(self, _name: str) -> _Anything:
        return self

    def __call__(self, *_args: object, **_options: object) -> _Anything:
        return self


def without_torchvision() -> None:
    """Replace torchvision if it can't be imported: it must match torch's version exactly, and
    SGLang needs it only for images, which these tests do not use."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()  # caches that it is not installed
        below = ("transforms", "transforms.functional", "transforms.v2", "io")
        for name in ("torchvision", *(f"torchvision.{each}" for each in below)):
            module = ModuleType(name)
            module.__path__ = []
            vars(module)["__getattr__"] = _attribute
            sys.modules[name] = module


def _attribute(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


def host_pool(layout: str, *, pages: int, page_tokens: int, layers: int, heads: int = 4) -> Any:
    """`MHATokenToKVPoolHost` with memory of its own, 16 bits a value and 64 values a head."""
    import torch
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    pool = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    vars(pool).update(
        layout=layout,
        page_size=page_tokens,
        page_num=pages,
        size=pages * page_tokens,
        layer_num=layers,
        head_num=heads,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.bfloat16,
        device="cpu",
        pin_memory=False,
    )
    tokens, head = pages * page_tokens, (heads, 64)
    shapes = {
        "layer_first": (2, layers, tokens, *head),
        "page_first": (2, tokens, layers, *head),
        "page_first_direct": (2, pages, layers, page_tokens, *head),
        "page_head": (2, pages, heads, page_tokens, layers, 64),
    }
    pool.kv_buffer = torch.zeros(shapes[layout], dtype=torch.bfloat16)
    return pool


def controller(pool: Any, backend: str, extra: dict[str, Any]) -> Any:
    """`HiCacheController` with the storage backend that SGLang's factory makes, in the state after
    `attach_storage_backend`, but without threads."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name="test/model",
        extra_config=extra,
    )
    made = HiCacheController.__new__(HiCacheController)
    vars(made).update(
        page_size=pool.page_size,
        storage_host_pool=pool,
        storage_config=config,
        storage_backend_type=backend,
        prefetch_sync_queue=Queue(),
        storage_stop_event=threading.Event(),
    )
    made.storage_backend = StorageBackendFactory.create_backend(backend, config, pool)
    made.storage_backend.register_mem_pool_host(pool)
    zero_copy = backend == "dynamic" and bool(extra.get("interface_v1"))
    made.page_get_func = made._page_get_zero_copy if zero_copy else made._generic_page_get
    made.page_set_func = made._page_set_zero_copy if zero_copy else made._generic_page_set
    return made


def prefixd_extra(address: str, tier: str) -> dict[str, Any]:
    """The extra configuration that SGLang's command line takes for prefixd."""
    named = {"backend_name": "prefixd", "module_path": MODULE, "class_name": "PrefixdStorage"}
    return {**named, "interface_v1": 1, "address": address, "tier": tier, "fingerprint": "t"}


def backup(of: Any, hashes: list[str], indices: Any) -> int:
    """Back up these pages. Returns the number of tokens that were saved."""
    from sglang.srt.managers.cache_controller import StorageOperation

    operation = StorageOperation(indices, [], hash_value=hashes)
    of._page_backup(operation)
    return int(operation.completed_tokens)


def prefetch(of: Any, hashes: list[str], indices: Any) -> int:
    """Prefetch the leading pages that exist. Returns the number of pages that were restored."""
    from sglang.srt.managers.cache_controller import PrefetchOperation

    present = of.storage_backend.batch_exists(hashes)
    operation = PrefetchOperation("request", [])
    operation.hash_value = hashes[:present]
    operation.host_indices = indices[: present * of.page_size]
    return int(of._page_transfer(operation))


def fresh_hashes(count: int) -> list[str]:
    return [os.urandom(32).hex() for _ in range(count)]


def storage_config(**changes: Any) -> Any:
    """A rank's configuration of its storage backend."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    values = dict.fromkeys((each.name for each in fields(HiCacheStorageConfig)), 0)
    return HiCacheStorageConfig(
        **{**values, "tp_size": 1, "dcp_size": 1, "is_mla_model": False, **changes}
    )


def arguments(**changes: Any) -> Any:
    """SGLang's own defaults, in an object that can be changed."""
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path="/none")
    values = {name: getattr(given, name) for name in fields_of(ServerArgs)}
    return SimpleNamespace(**values | changes)
