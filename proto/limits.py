"""Bounds and defaults that the daemon and its clients share.

Sizes end in `_BYTES`, times in `_MS` or `_NS`. Values above a `MAX_` are refused. A `DEFAULT_` can
be changed in the configuration or per call.
"""

from __future__ import annotations

from typing import Final

KEY_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 32
QUANT_BYTES: Final = 8

# ---- wire

#: Keys, items, tokens or ranges in one request.
MAX_BATCH_KEYS: Final = 4096
#: One gRPC message. The transport itself answers a larger one with RESOURCE_EXHAUSTED.
MAX_MESSAGE_BYTES: Final = 16 * 2**20
#: A request with neither payloads nor token ids: several times what a batch of keys needs.
MAX_PLAIN_MESSAGE_BYTES: Final = 1 * 2**20
#: The chunks of a payload on a stream.
CHUNK_BYTES: Final = 1 * 2**20
#: The bytes in staging memory that one message of a client announces, unless a payload is larger.
#: To copy them takes the daemon a millisecond.
STAGED_MESSAGE_BYTES: Final = 4 * 2**20
#: Pieces of all payloads that one call lends.
MAX_LENT_PIECES: Final = 16_384
#: The token in lent memory that tells that it is still lent.
LENT_TOKEN_BYTES: Final = 16
#: The token ids of an entry, 4 bytes each.
MAX_TOKEN_IDS_BYTES: Final = 4 * 2**20
MAX_PAYLOAD_BYTES: Final = 2**40
MAX_LAYERS: Final = 2**16 - 1
MAX_CLIENT_NAME_CHARS: Final = 120
#: Namespaces with tokens, and namespaces with shares of a tier: each save looks at all of these.
MAX_NAMESPACES: Final = 32
#: A label, under which the daemon adds up what clients count.
MAX_LABEL_CHARS: Final = 64
#: A number in a client's report. Sums of such numbers stay exact in the metrics for long.
MAX_REPORTED: Final = 2**48

#: Buckets for the times of calls, commits and restores, in nanoseconds: 50 us to 10 s. A report has
#: a number for each bucket, and one for longer times.
LATENCY_BOUNDS_NS: Final = tuple(
    round(1e3 * us)
    for us in (50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7)
)

#: Misses whose keys a report has, the keys of each, and of all together.
MAX_TOLD_MISSES: Final = 512
MAX_TOLD_KEYS: Final = 256
MAX_TOLD_KEYS_IN_ALL: Final = 1024

#: Look-ups that a client records for the daemon: in one message, the ids of all of these, and the
#: secret that ids are made with.
MAX_RECORDED_LOOKUPS: Final = 4_096
MAX_RECORDED_IDS: Final = 65_536
RECORD_SECRET_BYTES: Final = 32

# ---- time

DEFAULT_HEARTBEAT_INTERVAL_MS: Final = 2_000
#: A session that is silent for this many heartbeat intervals is lost.
SESSION_LOST_AFTER_INTERVALS: Final = 2
#: The same for one that holds nothing: no claim, no reservation and no waiting request.
IDLE_SESSION_LOST_AFTER_INTERVALS: Final = 10
DEFAULT_CLAIM_LEASE_MS: Final = 300_000
DEFAULT_RESERVATION_TTL_MS: Final = 60_000
MAX_LEASE_MS: Final = 3_600_000
#: How long a reader waits for a save in flight by default.
DEFAULT_WAIT_MS: Final = 500
#: How long a search waits for entries of other nodes by default.
DEFAULT_SHARED_WAIT_MS: Final = 1_000
MAX_WAIT_MS: Final = 60_000
#: The daemon sends a watcher a message at least this often.
WATCH_BEAT_MS: Final = 5_000
#: How long a client waits for an `evict` or `shutdown` save.
DEFAULT_SAVE_TIMEOUT_MS: Final = 30_000
DEFAULT_DEADLINE_MS: Final = 5_000
#: How long connecting may take before the daemon counts as down.
DEFAULT_CONNECT_TIMEOUT_MS: Final = 1_000

# ---- tables of the daemon

MAX_SESSIONS: Final = 4_096
#: Labels that the daemon counts separately. Later ones count as "other".
MAX_LABELS: Final = 64
#: Identities that the daemon keeps of one session, and the words of one, in printable ASCII.
MAX_IDENTITIES_PER_SESSION: Final = 4
MAX_IDENTITY_WORDS_BYTES: Final = 16 * 2**10
#: The name and version of an engine in an identity.
MAX_ENGINE_CHARS: Final = 120
MAX_CLAIMS_PER_SESSION: Final = 65_536
MAX_RESERVATIONS_PER_SESSION: Final = 65_536
MAX_WAITERS: Final = 65_536
#: Saves in flight that requests wait for, counted once per request. Each takes about 200 bytes.
MAX_WAITED_KEYS: Final = 262_144
MAX_WAITED_KEYS_PER_SESSION: Final = 65_536
#: Entries of claims, and keys of unfinished saves with their chains, over all sessions. Each takes
#: about 100 bytes.
MAX_HELD_KEYS: Final = 2_097_152
MAX_PAGE_ENTRIES: Final = 10_000

# ---- save policy (the gates of `client.policy`)

DEFAULT_MIN_TOKENS: Final = 512
DEFAULT_COLD_MIN_TOKENS: Final = 512
DEFAULT_COLD_MAX_TOKENS: Final = 30_000
DEFAULT_CONTINUED_INTERVAL_TOKENS: Final = 2_048
DEFAULT_BOUNDARY_TRIM_TOKENS: Final = 32
DEFAULT_BOUNDARY_ALIGN_TOKENS: Final = 2_048
DEFAULT_BLOCK_TOKENS: Final = 512
