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
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, Final, TypeVar
from weakref import WeakSet

from ...proto.errors import ConfigError, InvalidNamespace
from ...proto.keys import ForeignNamespace
from ...proto.vocabulary import ClaimMode, Tier
from .. import Client
from ..config_values import plain
from ..identity import Dimension, Part, StateIdentity, unrevealed
from ..saves import SaveItem
from ..weights import weights_of
from .engine import GIVE_FINGERPRINT, Engine, attach, fingerprint_of, weights_dimension

ENGINE: Final = Engine("SGLang", "sglang", "0.5.16 to 0.5.23")

#: The pool that version 1 of the interface uses.
_ANCHOR: Final = "kv"
#: The pools whose pages are the same on all ranks of an MLA model. A draft's heads, windows and
#: recurrent states are split.
_REPLICATED: Final = frozenset({_ANCHOR, "indexer"})

T = TypeVar("T")
logger = logging.getLogger("prefixd.client.connectors")


class Pages:
    """Pages by the engine's hashes, each a list of pieces."""

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
        keys = self._namespace.keys(hashes)
        return self._client.leading_run(keys, prompt_tokens=self._tokens(hashes))

    def exist(self, hashes: Sequence[str]) -> list[bool]:
        """Which pages are there."""
        keys = self._namespace.keys(hashes)
        return self._client.exists(keys, prompt_tokens=self._tokens(hashes))

    def _tokens(self, hashes: Sequence[str]) -> int:
        return len(hashes) * (self._page_tokens or 0)

    def get(self, hashes: Sequence[str], targets: Sequence[Any]) -> list[bool]:
        """Restore pages into their pieces, each independently of the others. SGLang asks for pages
        that it has looked up."""
        keys = self._namespace.keys(hashes)
        result = self._client.restore_keys(keys, targets, mode=ClaimMode.ANY, counted=False)
        return list(result.restored)

    def set(self, hashes: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Save pages. A page that is there already, or is being saved, counts as saved."""
        keys = self._namespace.keys(hashes)
        items = [
            SaveItem(key, page, self._page_tokens) for key, page in zip(keys, pages, strict=True)
        ]
        return [each.ok for each in self._client.save_many(items, tier=self._tier)]


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


#: Of SGLang's configuration of a storage backend, what has a dimension of its own or no effect.
#: Every other field is in the key, also one that a later version adds.
CONFIG_ELSEWHERE: Final = frozenset(
    {"tp_rank", "tp_size", "dp_rank", "enable_storage_metrics", "extra_config"}
)
#: Of a host pool.
_POOL: Final = (
    *("layout", "page_size", "dtype", "layer_num", "head_num", "head_dim", "v_head_dim"),
    *("head_group_num", "storage_format_tag"),
)
#: The server's arguments that are not in the key, and why. Every other one is.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "in a dimension of its own, or in the storage configuration": """
        model_path revision served_model_name lora_paths page_size tp_size pp_size dp_size
        attn_dp_size hicache_mem_layout""",
    "how pages are kept beside the device": """
        hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy hicache_io_backend
        hicache_storage_backend hicache_storage_prefetch_policy hicache_host_memory_fraction
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts""",
    "token ids are in the keys": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode""",
    "where the server runs, and how it is reached": """
        host port nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank
        base_gpu_id gpu_id_step numa_node use_ray custom_sigquit_handler watchdog_timeout
        soft_watchdog_timeout sleep_on_idle gc_threshold gc_warning_threshold_secs fastapi_root_path
        smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar
        sidecar_args smg_http_sidecar_port enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size enable_http_worker_reuseport ssl_keyfile ssl_certfile
        ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key tool_server
        mooncake_ib_device disaggregation_ib_device disaggregation_bootstrap_port
        engine_info_bootstrap_port encoder_urls encoder_bootstrap_port encoder_register_urls
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints allowed_media_domains
        media_url_max_file_size_mb""",
    "which of the phases it does": """
        disaggregation_mode disaggregation_transfer_backend disaggregation_enable_kv_checksum
        enable_pd_role_switch disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
        num_reserved_decode_tokens optimistic_prefill_attempts""",
    "how files of weights are read": """
        download_dir startup_weight_load_mode weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load weight_cache_mode weight_cache_socket
        weight_cache_timeout""",
    "how many requests run at once, and in which order": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        max_prefill_tokens prefill_max_requests schedule_policy schedule_conservativeness
        schedule_low_priority_values_first enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled
        priority_scheduling_preemption_threshold retraction_policy swa_full_tokens_ratio
        _swa_full_tokens_ratio_explicitly_set radix_eviction_policy radix_eviction_policy_config
        _radix_eviction_policy_explicitly_set num_continuous_decode_steps scheduler_recv_interval
        pp_max_micro_batch_size pp_async_batch_depth load_balance_method batch_notify_size
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill max_mamba_cache_size mamba_full_memory_ratio mm_processor_worker_num
        mm_io_worker_num mm_preprocess_cache_size_mb enable_lora_overlap_loading max_loaded_loras
        max_loras_per_batch lora_eviction_policy lora_drain_wait_threshold enable_prefill_delayer
        prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
        prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay""",
    "logs, metrics and traces": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers extra_metric_labels
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
        load_snapshot_publish_interval load_publish_endpoint bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets decode_log_interval enable_request_time_stats_logging
        kv_events_config enable_forward_pass_metrics forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint
        otlp_service_name export_metrics_to_file export_metrics_to_file_dir stat_loggers
        spec_trace_dir expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode enable_layerwise_nvtx_marker file_storage_path
        enable_cache_report""",
    "sampling, templates and answers": """
        random_seed sampling_backend sampling_defaults sampling_mask_max_tokens mlx_enable_sampling
        preferred_sampling_params grammar_backend constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        disable_outlines_disk_cache enable_custom_logit_processor chat_template
        trust_request_chat_template hf_chat_template_name completion_template
        default_chat_template_kwargs reasoning_parser strip_thinking_cache enable_strict_thinking
        tool_call_parser allow_auto_truncate return_input_ids return_output_ids stream_interval
        stream_response_default_include_usage incremental_streaming_output enable_streaming_session
        enable_response_store asr_max_buffer_seconds asr_max_concurrent_sessions skip_server_warmup
        warmups enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all""",
}
_WITHOUT_EFFECT: Final = frozenset(" ".join(WITHOUT_EFFECT.values()).split())
#: Arguments that name files or code on which the bytes depend: unknown without a fingerprint.
_NAMES_OF_CONTENTS: Final = (
    *("quantization_param_path", "kt_weight_path", "custom_weight_loader", "forward_hooks"),
    *("uno_lora_path", "decrypted_config_file", "decrypted_draft_config_file"),
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
    fields = _without(config, CONFIG_ELSEWHERE)
    dimensions = [
        weights_dimension(given, path, revision),
        Dimension("pool", name, "the name of the pool", context),
        _kv_dtype(pool, arguments),
        _adapters(given, arguments),
        _draft(given, arguments, name),
        _contents(given, arguments),
        _plain_or_unrevealed("server arguments", _without(arguments, _WITHOUT_EFFECT)),
        Dimension("storage config", plain(fields), "SGLang's storage configuration", context),
        Dimension("tp rank", rank, "the same for all ranks of MLA", Part.SHARD),
        Dimension("tp size", size, "storage_config.tp_size", Part.SHARD),
        Dimension("salt", extra.get("salt"), "the option salt", Part.SALT),
        Dimension(
            "tokens, extra_key, cache_salt, LoRA's name", None, "SGLang's hashes", Part.BLOCKS
        ),
    ]
    for each in _POOL:
        value = plain(getattr(pool, each, None))
        dimensions.append(Dimension(f"host pool: {each}", value, "the host pool", context))
    return StateIdentity(f"sglang {ENGINE.version}", tuple(dimensions))


def _without(owner: Any, names: Collection[str]) -> dict[str, Any]:
    """The fields of a configuration, without some."""
    if owner is None:
        return {}
    kinds = ("__dataclass_fields__", "__struct_fields__")  # of dataclasses, and of msgspec
    declared = next((found for each in kinds if (found := getattr(owner, each, None))), None)
    fields = vars(owner) if declared is None else declared
    return {each: getattr(owner, each, None) for each in fields if each not in names}


def _plain_or_unrevealed(name: str, fields: Mapping[str, Any]) -> Dimension:
    try:
        return Dimension(name, plain(fields), "the server's arguments", Part.CONTEXT)
    except InvalidNamespace as problem:
        return unrevealed(name, str(problem), Part.CONTEXT)


def _adapters(given: str | None, arguments: Any) -> Dimension:
    """Adapters that the server starts with. SGLang's hashes have their names and paths; the ids of
    those that are loaded later are random."""
    name = "LoRA adapters"
    digests: dict[str, bytes | None] = {}
    for one, path in _lora_paths(getattr(arguments, "lora_paths", None)):
        found = None
        if path:
            with suppress(OSError):
                found = weights_of(path)
        if found is None and given is None:
            return unrevealed(name, f"{path!r} is no folder here: {GIVE_FINGERPRINT}", Part.CONTEXT)
        digests[one] = None if found is None else found.digest
    return Dimension(name, plain(digests), "files of lora_paths", Part.CONTEXT)


def _lora_paths(given: Any) -> Iterator[tuple[str, str]]:
    """Names and paths, in each of the forms that the argument may have."""
    if isinstance(given, Mapping):
        given = [{"lora_name": one, "lora_path": path} for one, path in given.items()]
    for each in given or ():
        if isinstance(each, str):
            one, _, path = each.partition("=")
            yield one, path or one
        elif isinstance(each, Mapping):
            yield str(each.get("lora_name")), str(each.get("lora_path") or "")
        else:
            named = getattr(each, "lora_name", each), getattr(each, "lora_path", None)
            yield str(named[0]), str(named[1] or "")


def _draft(given: str | None, arguments: Any, pool: str) -> Dimension:
    """The weights of a draft model, for its pool."""
    path = getattr(arguments, "speculative_draft_model_path", None)
    if "draft" not in pool or not path:
        return Dimension("draft weights", None, "no draft model in this pool", Part.FINGERPRINT)
    revision = getattr(arguments, "speculative_draft_model_revision", None)
    found = weights_dimension(given, path, revision)
    return replace(found, name="draft weights")


def _contents(given: str | None, arguments: Any) -> Dimension:
    named = [each for each in _NAMES_OF_CONTENTS if getattr(arguments, each, None)]
    if named and given is None:
        return unrevealed("other contents", f"{', '.join(named)}: {GIVE_FINGERPRINT}")
    return Dimension("other contents", ", ".join(named), "the option fingerprint", Part.FINGERPRINT)


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


# ---- updates of weights in place

_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_UPDATES: Final = (
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("update_weights_from_ipc", "end_weight_update"),
)
_SCHEDULER: Final = "sglang.srt.managers.scheduler"
#: The backends of this process.
_backends: Final[WeakSet[Any]] = WeakSet()
#: Whether SGLang tells of updates.
_watched = False


def watch_updates() -> bool:
    """Have SGLang tell when weights were updated in place. Called by its plugins' start, in each of
    its processes; False: this process updates none, or SGLang has no such hooks."""
    global _watched
    # Only in the scheduler's process, which has imported them.
    updater, scheduler = (sys.modules.get(each) for each in (_UPDATER, _SCHEDULER))
    manager = getattr(updater, "SchedulerWeightUpdaterManager", None)
    if _watched or manager is None:
        return _watched
    hooks = import_module("sglang.srt.plugins.hook_registry")
    for each in _UPDATES:
        if hasattr(manager, each):
            target = f"{_UPDATER}.{manager.__name__}.{each}"
            hooks.HookRegistry.register(target, _around_update, hooks.HookType.AROUND)
    if hasattr(getattr(scheduler, "Scheduler", None), "flush_cache"):
        target = f"{_SCHEDULER}.Scheduler.flush_cache"
        hooks.HookRegistry.register(target, _after_flush, hooks.HookType.AFTER)
    _watched = True
    return True


def _around_update(update: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return update(*args, **options)
    finally:  # also after a failure, which may have changed some of the weights
        for each in list(_backends):
            each.weights_updated()


def _after_flush(result: object, *_args: object, **_options: object) -> None:
    """An update may have left pages of the old weights, until its caches are flushed."""
    del result
    for each in list(_backends):
        each.cache_flushed()


def _hashes_name_requests() -> bool:
    """Whether SGLang's hashes of pages have adapters, `extra_key` and `cache_salt`. Those of older
    versions have tokens only."""
    with suppress(ImportError):
        utils = import_module("sglang.srt.mem_cache.utils")
        return hasattr(utils, "storage_namespace_seed")
    return False


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
    # That of SGLang 0.5.16 has no lengths.
    has_lengths = "restorable_prefix_pages" in signature(base.PoolTransferResult).parameters

    def found(run: int, pages: dict[str, int], lengths: list[int]) -> Any:
        return base.PoolTransferResult(run, pages, *([lengths] if has_lengths else []))

    class PrefixdStorage(base.HiCacheStorage):  # type: ignore[misc, name-defined]
        """Extra configuration: `interface_v1` (1, required), `address`, `tier`, `deadline_ms`,
        `max_pending_saves`, `salt`, `fingerprint` (see `identity_of`). What moves or looks for
        pages never raises."""

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
            self._updated = False
            _backends.add(self)

        # ---- pools

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            self.mem_pool_host = mem_pool_host
            self.register_mem_host_pool_v2(mem_pool_host, _ANCHOR)

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
            name = _name(host_pool_name)
            arguments = server_arguments()
            lora = [getattr(arguments, each, None) for each in ("enable_lora", "lora_paths")]
            if any(lora) and not _hashes_name_requests():
                raise ENGINE.unsupported("its hashes of pages do not tell adapters apart")
            if name == _ANCHOR and arguments is not None and not _watched:
                logger.warning(
                    "updates of weights in place will not be noticed, because prefixd's plugin of "
                    "SGLang is not loaded: clear the storage after each"
                )
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
            return _or(0, partial(pages.leading_run, keys)) if pages else 0

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
            return _or(found(0, {}, []), lambda: self._exist_in_pools(keys, pool_transfers or ()))

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
                known = _or([False] * run, partial(pool.exist, keys[:run])) if pool else []
                trailing = max(1, len(each.keys or ())) if policy == "trailing_pages" else None
                allowed = restorable_lengths(known, trailing)
                pages[name] = max(allowed, default=0)
                lengths.intersection_update(allowed)
            return found(max(lengths, default=0), pages, sorted(lengths))

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
            restored = _or([False], partial(pages.get, [key], [target_location]))
            return target_location if restored[0] else None

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
            if pages is None or page is None:
                return False
            return _or([False], partial(pages.set, [key], [page]))[0]

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

            SGLang clears its storage when what it holds is not right any more. The daemon is
            shared, so nothing is deleted there: this backend moves to keys that only this process
            has.
            """
            self._renew("its storage was cleared")

        def weights_updated(self) -> None:
            """Weights were updated in place."""
            self._updated = True
            self._renew("its weights were updated in place")

        def cache_flushed(self) -> None:
            if self._updated:
                self._renew("its weights were updated in place")

        def _renew(self, why: str) -> None:
            for name, (host_pool, _) in list(self._pools.items()):
                renewed = self._identities[name].renewed(why)
                self._use(name, host_pool, renewed)
                if name == _ANCHOR:
                    self._client.announce(renewed)
            logger.warning("prefixd's pages from before are not used any more: %s", why)

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
