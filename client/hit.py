"""A hit: entries found in the cache, pinned until the hit is released."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ..proto.errors import CallerError
from ..proto.keys import Key
from ..proto.record import layer_slice
from .link import Holding
from .results import Entry, MissReason, RestoreResult

if TYPE_CHECKING:
    from .buffers import Payload
    from .reading import Reader


class Hit:
    """What a search or a claim found, in the order of the keys asked for. False when empty.

    A claimed hit keeps its entries readable until `release()`, which the end of a `with` block
    does; the client's heartbeats renew its lease meanwhile. If the claim is lost all the same
    (the daemon was restarted, the lease ran out), `lost` turns True and reads fail. A hit that
    was only probed is claimed for as long as each read of it takes.

    A hit that is dropped without being released is given back all the same, with a
    ResourceWarning.
    """

    def __init__(
        self,
        reader: Reader,
        entries: Sequence[Entry] = (),
        token_counts: Sequence[int] = (),
        *,
        holding: Holding | None = None,
        miss: MissReason | None = None,
    ) -> None:
        """Made by the client. `holding` None: nothing is pinned."""
        self._reader = reader
        self._lock = threading.Lock()
        self._given_back = False
        #: The claim; its first entries are these.
        self.holding = holding
        self.entries = tuple(entries)
        #: Tokens that each entry stands for, as the walk that found it counted them.
        self.token_counts = tuple(token_counts)
        #: Why there is not more; None when everything asked for is there.
        self.miss = miss
        self._lost_before_release = False

    @property
    def keys(self) -> list[Key]:
        return [entry.key for entry in self.entries]

    @property
    def token_count(self) -> int:
        """Tokens that need not be computed: all entries together."""
        return sum(self.token_counts)

    @property
    def payload_bytes(self) -> int:
        """All entries together."""
        return sum(entry.payload_bytes for entry in self.entries)

    @property
    def claimed(self) -> bool:
        """Is it pinned, as far as this client knows?"""
        return self.holding is not None and not self._given_back and not self.lost

    @property
    def lost(self) -> bool:
        """Was the claim taken away before it was released? What was read under it is then only
        good if its checksum was verified; views never are."""
        if self._given_back:
            return self._lost_before_release
        return self.holding is not None and self.holding.why_lost is not None

    @property
    def released(self) -> bool:
        return self._given_back

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def __repr__(self) -> str:
        if not self:
            return f"<Hit: none, {self.miss}>"
        state = (
            "probed"
            if self.holding is None
            else "lost"
            if self.lost
            else "released"
            if self.released
            else "claimed"
        )
        return f"<Hit: {len(self)} entries, {self.token_count} tokens, {state}>"

    # ---- bytes

    def restore_into(
        self, buffers: Sequence[Payload], *, deadline_ms: int | None = None
    ) -> RestoreResult:
        """Copy the payloads into `buffers`, one for each entry, or for the first ones.

        Buffers are writable, contiguous, in CPU memory and exactly as long as their payload
        (else InvalidSize). One Read stream for all. CRC32C is verified as the client was told
        to; what does not match is a miss, and the daemon is told. The result is true when every
        buffer holds what was saved; `result.run` says how many do from the first on.
        """
        return self._reader.restore(self, range(len(buffers)), buffers, deadline_ms)

    def read(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """The payload of entry `index`, verified as a restore is; None: a miss."""
        buffer = bytearray(self.entries[index].payload_bytes)
        restored = self._reader.restore(self, [index], [buffer], deadline_ms)
        return bytes(buffer) if restored else None

    def views(self, index: int) -> list[memoryview] | None:
        """The payload of claimed entry `index` where it lies, read-only and without a copy; None:
        it can't be reached (another host, the disk tier), restore it.

        One view as a rule, several where the tier was fragmented. Good until the hit is
        released, if `release()` then says that the claim was held until now. Not verified.
        Raises CallerError for a hit that is not claimed.
        """
        found = self._reader.views(self, [self.entries[index]])
        return None if found is None else found[0]

    @property
    def buffers(self) -> list[memoryview] | None:
        """The views of all entries in their order; None: some can't be reached. See `views`."""
        found = self._reader.views(self, self.entries)
        return None if found is None else [view for views in found for view in views]

    def layer(self, index: int, layer: int, *, deadline_ms: int | None = None) -> bytes | None:
        """One layer of entry `index`, without moving the others; None: a miss.

        Not verified: the checksum is of the whole payload. Raises InvalidSize if the entry has
        no such layer.
        """
        entry = self.entries[index]
        region = layer_slice(entry.payload_bytes, entry.layer_count, layer)
        length_bytes = region.stop - region.start
        return self._reader.read_range(self, index, region.start, length_bytes, deadline_ms)

    def token_ids(self, index: int, *, deadline_ms: int | None = None) -> bytes | None:
        """The token ids that were saved with entry `index` (u32 little-endian, maybe none), from
        which `record.verify_token_ids` recomputes its key; None: a miss."""
        length_bytes = self.entries[index].token_ids_bytes
        if not length_bytes:
            return b""
        return self._reader.read_range(self, index, 0, length_bytes, deadline_ms, token_ids=True)

    # ---- the end

    def release(self, *, deadline_ms: int | None = None) -> bool:
        """Give the claim back. Idempotent. False: it was lost before, see `lost`.

        When the daemon can't be asked the claim counts as lost; it ends with its session.
        """
        return self._reader.release([self], deadline_ms)[0]

    def take_holding(self) -> Holding | None:
        """The claim, for whoever gives it back; None if there is none or somebody did.

        For the client's own use, as is `close_out`.
        """
        with self._lock:
            if self._given_back:
                return None
            self._lost_before_release = self.lost
            self._given_back = True
            return self.holding

    def close_out(self, held: bool) -> None:
        """How giving it back went."""
        self._lost_before_release = not held

    def check_readable(self) -> None:
        """Raises CallerError once the hit was released."""
        if self._given_back:
            raise CallerError("this hit was released: its entries may be gone")

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        holding = self.holding
        if holding is None or self._given_back or holding.why_lost is not None:
            return
        if not self._reader.owner.is_here:
            return  # a copy in a fork: the claim is that of the original
        self._reader.forget(holding)
        warnings.warn(f"{self!r} was never released", ResourceWarning, source=self, stacklevel=1)
