"""SGLang: a HiCache storage backend, for its `dynamic` kind.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "prefixd", "module_path": "prefixd.connectors.sglang",
      "class_name": "PrefixdStorage", "interface_v1": 1, "tier": "shm"}'

A page is one entry; its pieces are saved and restored where they lie. Whatever goes wrong counts
as an absent page (False), and is never an exception.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, TypeVar

from ..client.client import Client
from ..client.config_values import plain
from ..client.identity import Dimension, Part, StateIdentity, unrevealed
from ..client.saves import SaveItem
from ..proto.errors import ConfigError
from ..proto.keys import ForeignNamespace
from ..proto.vocabulary import ClaimMode, Tier
from .engine import Engine, attach, fingerprint_of, weights_dimension

ENGINE: Final = Engine("SGLang", "sglang", "0.5.23")

#: The pool that version 1 of the interface uses.
_ANCHOR: Final = "kv"
#: The pools whose pages are the same on all ranks of an MLA model. A draft's heads, windows and
#: recurrent states are split.
_REPLICATED: Final = frozenset({_ANCHOR, "indexer"})

T = TypeVar("T")
logger = logging.getLogger("prefixd.connectors")


class Pages:
    """Pages by the engine's hashes, each a list of pieces. No method raises."""

    def __init__(
        self,
        client: Client,
        namespace: ForeignNamespace,
        tier: Tier,
        page_tokens: int | None = None,
    ) -> None:
        self._page_tokens = page_tokens
        self._client = client
        self._namespace = namespace
        self._tier = tier

    def leading_run(self, hashes: Sequence[str]) -> int:
        """How many pages are there, before the first that is not."""
        return _or(0, lambda: self._client.leading_run(self._namespace.keys(hashes)))

    def exist(self, hashes: Sequence[str]) -> list[bool]:
        """Which pages are there."""
        return _or([False] * len(hashes), lambda: self._client.exists(self._namespace.keys(hashes)))

    def get(self, hashes: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Restore pages into their pieces, each independently of the others."""

        def work() -> list[bool]:
            keys = self._namespace.keys(hashes)
            return [*self._client.restore_keys(keys, targets, mode=ClaimMode.ANY).restored]

        return _or([False] * len(hashes), work)

    def set(self, hashes: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Save pages. A page that is there already, or is being saved, counts as saved."""

        def work() -> list[bool]:
            keys = self._namespace.keys(hashes)
            items = [
                SaveItem(key, page, self._page_tokens)
                for key, page in zip(keys, pages, strict=True)
            ]
            return [each.ok for each in self._client.save_many(items, tier=self._tier)]

        return _or([False] * len(hashes), work)


def pieces(pointers: Sequence[int], sizes: Sequence[int], pages: int) -> list[list[memoryview]]:
    """The memory of each page, from the results of `get_page_buffer_meta`; every page has the same
    number of pieces.

    Raises ValueError if the pieces can't be divided evenly. The memory is the pool's, and has to
    outlive the views.
    """
    if not pages or len(pointers) != len(sizes) or len(pointers) % pages:
        raise ValueError(f"{len(pointers)} pieces, {len(sizes)} sizes for {pages} pages")
    views = [
        memoryview((ctypes.c_uint8 * size).from_address(pointer)).cast("B")
        for pointer, size in zip(pointers, sizes, strict=True)
    ]
    each = len(views) // pages
    return [views[start : start + each] for start in range(0, len(views), each)]


def restorable_lengths(there: Sequence[bool], trailing: int | None) -> list[int]:
    """The lengths of prefixes that one pool can restore: all pages of the prefix are there, or its
    last `trailing` pages."""
    if trailing is None:
        run = next((page for page, each in enumerate(there) if not each), len(there))
        return list(range(1, run + 1))
    return [
        length
        for length in range(1, len(there) + 1)
        if all(there[max(0, length - trailing) : length])
    ]


#: Of SGLang's configuration of a storage backend.
_CONFIG: Final = (
    *("model_name", "pp_rank", "pp_size", "is_mla_model", "attn_cp_rank", "attn_cp_size"),
    *("dcp_rank", "dcp_size", "logical_page_size", "tp_lcm_size", "should_split_heads"),
    "is_page_first_layout",
)
#: Of a host pool.
_POOL: Final = (
    *("layout", "page_size", "dtype", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("head_group_num", "storage_format_tag"),
)
#: Of the server's arguments, beside the model's path and revision.
_ARGUMENTS: Final = (
    *("dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "load_format"),
    *("json_model_override_args", "context_length", "model_impl", "weight_version"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("speculative_algorithm", "speculative_draft_model_path", "enable_dp_attention"),
)


def server_arguments() -> Any:
    """The arguments of the server in this process; None: there is no server here."""
    with suppress(Exception):  # SGLang's own error if none were set, or an older version
        return import_module("sglang.srt.runtime_context").get_server_args()
    return None


def identity_of(
    config: Any, extra: Mapping[str, Any], pool: Any, name: str = _ANCHOR, arguments: Any = None
) -> StateIdentity:
    """Everything that the bytes of a page in the pool `name` depend on, beside SGLang's hash of it.

    `arguments`: those of the server; None: they are not known, and without the option
    `fingerprint` nothing is shared beyond this process.
    """
    context, mla = Part.CONTEXT, getattr(config, "is_mla_model", None) and name in _REPLICATED
    # The pages of all MLA ranks are the same, and SGLang lets one rank write them.
    rank, size = (None, None) if mla else (config.tp_rank, config.tp_size)
    given = fingerprint_of("sglang", extra)
    path, revision = (getattr(arguments, each, None) for each in ("model_path", "revision"))
    dimensions = [
        weights_dimension(given, path, revision),
        Dimension("pool", name, "the name of the pool", context),
        _kv_dtype(pool, arguments),
        Dimension("tp rank", rank, "the same for all ranks of MLA", Part.SHARD),
        Dimension("tp size", size, "storage_config.tp_size", Part.SHARD),
        Dimension("salt", extra.get("salt"), "the option salt", Part.SALT),
        Dimension(
            "tokens, extra_key", None, "SGLang's hashes have them, LoRA among them", Part.BLOCKS
        ),
    ]
    for owner, names, source in (
        (config, _CONFIG, "storage_config"),
        (pool, _POOL, "host pool"),
        (arguments, _ARGUMENTS, "server arguments"),
    ):
        for each in names:
            value = getattr(owner, each, None)
            dimensions.append(Dimension(f"{source}: {each}", plain(value), source, context))
    return StateIdentity(f"sglang {ENGINE.version}", tuple(dimensions))


def _kv_dtype(pool: Any, arguments: Any) -> Dimension:
    """Both kinds of 8-bit floats are stored as uint8: the device's pool says which it is."""
    device = getattr(getattr(pool, "device_pool", None), "dtype", None)
    if device is not None:
        return Dimension("kv dtype", str(device), "host_pool.device_pool.dtype", Part.QUANTISATION)
    stored = str(getattr(pool, "dtype", None))
    kind = getattr(arguments, "kv_cache_dtype", None)
    if "uint8" in stored and kind in (None, "auto"):
        return unrevealed(
            "kv dtype", "the pool stores uint8, of an unknown kind", Part.QUANTISATION
        )
    return Dimension("kv dtype", f"{stored} {kind}", "host_pool.dtype", Part.QUANTISATION)


def _name(name: Any) -> str:
    """The name of a pool or a policy, which may be a member of an enumeration of SGLang's."""
    return str(getattr(name, "value", name))


def _or(default: T, work: Callable[[], T]) -> T:
    """The result of `work`; `default` if it raises."""
    try:
        return work()
    except Exception:
        logger.exception("the cache failed, which is a miss")
        return default


# ---- the adapter


def _backend() -> type:
    """Make the class that SGLang constructs. Raises UnsupportedEngine."""
    names = ["HiCacheStorage", "PoolTransferResult"]
    base = ENGINE.require("sglang.srt.mem_cache.hicache_storage", names)

    class PrefixdStorage(base.HiCacheStorage):  # type: ignore[misc, name-defined]
        """Extra configuration: `interface_v1` (1, required), `address`, `tier`, `deadline_ms`,
        `salt`."""

        def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
            del kwargs
            extra = dict(getattr(storage_config, "extra_config", None) or {})
            if extra.get("interface_v1") != 1:
                raise ConfigError('the extra configuration of prefixd has "interface_v1": 1')
            self._config = storage_config
            self._extra = extra
            # No list of options: SGLang puts its own among them, and adds some in every version.
            self._client, self._tier = attach("sglang", extra)
            self._pools: dict[str, tuple[Any, Pages]] = {}
            self._identities: dict[str, StateIdentity] = {}

        # ---- pools

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host
            self.register_mem_host_pool_v2(mem_pool_host, _ANCHOR)

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
            name = _name(host_pool_name)
            arguments = server_arguments()
            identity = identity_of(self._config, self._extra, host_pool, name, arguments)
            if name == _ANCHOR:
                self._client.announce(identity)
            self._use(name, host_pool, identity)

        def _use(self, name: str, host_pool: Any, identity: StateIdentity) -> None:
            self._identities[name] = identity
            namespace = identity.foreign_namespace("sglang")
            # Only in one pool, because the others hold the same tokens.
            tokens = getattr(host_pool, "page_size", None) if name == _ANCHOR else None
            pages = Pages(self._client, namespace, self._tier, tokens)
            self._pools[name] = host_pool, pages

        def _pages(self, name: str = _ANCHOR) -> Pages | None:
            return self._pools[name][1] if name in self._pools else None

        def on_host_pools_registered(self) -> None:
            pass

        def _move(self, name: str, keys: Sequence[str], host_indices: Any, how: str) -> list[bool]:
            def work() -> list[bool]:
                pool, pages = self._pools[name]
                pointers, sizes = pool.get_page_buffer_meta(host_indices)
                moved: list[bool] = getattr(pages, how)(keys, pieces(pointers, sizes, len(keys)))
                return moved

            return _or([False] * len(keys), work) if keys else []

        # ---- version 1

        def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
            del extra_info
            pages = self._pages()
            return pages.leading_run(keys) if pages else 0

        def batch_get_v1(
            self, keys: Sequence[str], host_indices: Any, extra_info: object = None
        ) -> list[bool]:
            del extra_info
            return self._move(_ANCHOR, keys, host_indices, "get")

        def batch_set_v1(
            self, keys: Sequence[str], host_indices: Any, extra_info: object = None
        ) -> list[bool]:
            del extra_info
            return self._move(_ANCHOR, keys, host_indices, "set")

        # ---- version 2: several pools

        def batch_exists_v2(
            self,
            keys: Sequence[str],
            pool_transfers: Sequence[Any] | None = None,
            extra_info: object = None,
        ) -> Any:
            """A pool with another policy than `all_pages` or `trailing_pages` counts as absent. It
            does not shorten the run."""
            del extra_info
            nothing = base.PoolTransferResult(0, {}, [])
            return _or(nothing, lambda: self._exist_in_pools(keys, pool_transfers or ()))

        def _exist_in_pools(self, keys: Sequence[str], pool_transfers: Sequence[Any]) -> Any:
            run = self.batch_exists(keys)
            lengths = set(range(1, run + 1))
            pages: dict[str, int] = {}
            for each in pool_transfers:
                name, policy = _name(each.name), _name(getattr(each, "hit_policy", None))
                if policy not in ("all_pages", "trailing_pages"):
                    pages[name] = 0
                    continue
                pool = self._pages(name)
                known = pool.exist(keys[:run]) if pool else []
                trailing = max(1, len(each.keys or ())) if policy == "trailing_pages" else None
                allowed = restorable_lengths(known, trailing)
                pages[name] = max(allowed, default=0)
                lengths.intersection_update(allowed)
            return base.PoolTransferResult(max(lengths, default=0), pages, sorted(lengths))

        def batch_get_v2(
            self, transfers: Sequence[Any], extra_info: object = None
        ) -> dict[str, list[bool]]:
            del extra_info
            return self._move_all(transfers, "get")

        def batch_set_v2(
            self, transfers: Sequence[Any], extra_info: object = None
        ) -> dict[str, list[bool]]:
            del extra_info
            return self._move_all(transfers, "set")

        def _move_all(self, transfers: Sequence[Any], how: str) -> dict[str, list[bool]]:
            return {
                _name(each.name): self._move(
                    _name(each.name), each.keys or [], each.host_indices, how
                )
                for each in transfers
            }

        # ---- single pages: slow, but abstract in the base class

        def exists(self, key: str) -> bool:
            return self.batch_exists([key]) == 1

        def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
            del target_sizes
            pages = self._pages()
            if pages is None or target_location is None:
                return None
            return target_location if pages.get([key], [target_location])[0] else None

        def batch_get(
            self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
        ) -> list[Any]:
            del target_sizes
            targets = target_locations or [None] * len(keys)
            return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

        def set(
            self,
            key: str,
            value: Any = None,
            target_location: Any = None,
            target_sizes: Any = None,
        ) -> bool:
            del target_sizes
            page = value if value is not None else target_location
            pages = self._pages()
            return pages is not None and page is not None and pages.set([key], [page])[0]

        def batch_set(
            self,
            keys: Sequence[str],
            values: Any = None,
            target_locations: Any = None,
            target_sizes: Any = None,
        ) -> bool:
            del target_sizes
            pages = values if values is not None else target_locations
            if pages is None:
                return False
            return all(self.set(key, page) for key, page in zip(keys, pages, strict=True))

        def clear(self) -> None:
            """From now on, look for and save nothing under the keys that were used until now.

            SGLang clears its storage when what it holds is not right any more, after its weights
            were updated for example. The daemon is shared, so nothing is deleted there: this
            backend moves to keys that only this process has.
            """
            for name, (host_pool, _) in list(self._pools.items()):
                renewed = self._identities[name].renewed("its storage was cleared")
                self._use(name, host_pool, renewed)
            logger.warning("prefixd's pages from before are not used any more: storage cleared")

        def get_stats(self) -> None:
            return None

        def close(self) -> None:
            self._client.close()

    ENGINE.check_interface(PrefixdStorage)
    return PrefixdStorage


def __getattr__(name: str) -> Any:
    if name != "PrefixdStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["PrefixdStorage"] = _backend()
    return made
