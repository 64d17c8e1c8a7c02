"""How a cache of transformers was filled: seen in each pass of the model, by a hook.

A cache does not say what its tokens were evaluated with. The ids alone do not say it either if a
pass had an image, embeddings, a mask or positions of its own, or other adapters. The state is named
by its ids up to there, and not further.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from ...proto.errors import CallerError
from .transformers_identity import bare, media_tokens, stamp

logger = logging.getLogger("prefixd.client.connectors")

#: Arguments of a pass that say nothing beyond the ids, or what is given back.
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("input_ids", "attention_mask", "position_ids", "past_key_values", "cache"),
        *("cache_position", "use_cache", "labels", "logits_to_keep", "num_logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
#: Arguments that take effect at the ids that stand for media, and behind.
_MEDIA: Final = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw"),
        *("video_grid_thw", "second_per_grid_ts", "input_features", "feature_attention_mask"),
        *("token_type_ids", "mm_token_type_ids"),
    }
)


@dataclass(slots=True)
class Filled:
    """What is known of a cache. `stamp`: of the model when it was filled."""

    stamp: Any
    #: How many tokens of it are named by their ids; None: all.
    named: int | None = None

    def ends_at(self, tokens: int) -> None:
        """From this token on the ids do not say everything."""
        self.named = tokens if self.named is None else min(self.named, tokens)


class Passes:
    """The passes of one model."""

    def __init__(self, model: Any) -> None:
        self._caches: WeakKeyDictionary[Any, Filled] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._media = media_tokens(model.config)
        #: peft calls the model inside without its hooks, and `generate` of it with them.
        for each in {id(owner): owner for owner in (model, bare(model))}.values():
            each.register_forward_pre_hook(self._before, with_kwargs=True)

    def loaded(self, cache: Any, state: Any) -> None:
        """A cache was filled by prefixd for a model in this state."""
        with self._lock:
            self._caches[cache] = Filled(state)

    def filled(self, cache: Any) -> Filled:
        """How a cache was filled. Raises CallerError if no pass was seen."""
        with self._lock:
            found = self._caches.get(cache)
        if found is None:
            raise CallerError(
                "this model has not filled the cache since namespace_of: make the namespace first, "
                "and call the model itself, not a part of it"
            )
        return found

    def _before(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        cache = options.get("past_key_values", options.get("cache"))
        if cache is None or not hasattr(cache, "get_seq_length"):
            return
        try:
            self._note(model, args, options, cache)
        except Exception:
            # A pass must never fail because of the cache.
            logger.exception("a pass was not understood; its cache is not saved")
            with self._lock:
                self._caches[cache] = Filled(None, 0)

    def _note(self, model: Any, args: tuple[Any, ...], options: dict[str, Any], cache: Any) -> None:
        ids = options.get("input_ids", args[0] if args else None)
        held = int(cache.get_seq_length())
        with self._lock:
            filled = self._caches.get(cache)
            if filled is None:
                filled = self._caches[cache] = Filled(stamp(model))
                if held:
                    filled.ends_at(0)
            elif not held:
                filled.stamp, filled.named = stamp(model), None
            elif (ids is None or ids.shape[-1] > 1) and stamp(model) != filled.stamp:
                filled.ends_at(held)
        end = self._named_in_pass(ids, args, options, held)
        if end is not None:
            filled.ends_at(held + end)

    def _named_in_pass(
        self, ids: Any, args: tuple[Any, ...], options: dict[str, Any], held: int
    ) -> int | None:
        """How many tokens of a pass are named by their ids; None: all."""
        given = {
            name for name, value in options.items() if value is not None and value is not False
        }
        unknown = given - _WITHOUT_EFFECT
        if ids is None or ids.ndim != 2 or len(args) > 1 or unknown - _MEDIA:
            return 0
        count = ids.shape[1]
        if held and count == 1 and not unknown:
            return None  # a generated token: its mask and position continue those of the prompt
        mask, positions = options.get("attention_mask"), options.get("position_ids")
        if mask is not None and not _is_plain_mask(mask):
            return 0
        if positions is not None and not _are_plain_positions(positions, held, count):
            return 0
        return first_of(self._media, ids[0].tolist()) if unknown or self._media else None


def first_of(some: frozenset[int], ids: Iterable[int]) -> int | None:
    """Where the first of `some` is among `ids`."""
    return next((index for index, token in enumerate(ids) if token in some), None)


def _is_plain_mask(mask: Any) -> bool:
    """Whether a mask hides nothing."""
    return bool(getattr(mask, "ndim", 0) == 2 and mask.all())


def _are_plain_positions(positions: Any, held: int, count: int) -> bool:
    """Whether the positions are those of the tokens; there may be several rows of them."""
    rows = positions.reshape(-1, positions.shape[-1])
    first = rows[:, :1]
    return bool(
        rows.shape[-1] == count
        and (first == held).all()
        and (rows[:, 1:] - rows[:, :-1] == 1).all()
    )
