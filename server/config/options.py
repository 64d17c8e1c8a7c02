"""Every option of the daemon: one model for the TOML file, the environment and the flags.

In the file an option has a plain name and a value as people write it (`budget = "8GiB"`,
`heartbeat = "2s"`); in code its name ends in its unit (`budget_bytes`, `heartbeat_ns`). What
its docstring here says is what `--help` and `--print-config` say.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ...proto import limits
from ...proto.endpoints import admin_address
from ...tiers.arena import DEFAULT_SLAB_BYTES
from ..core.tables import StateConfig
from .values import (
    AdminAddress,
    Budget,
    Count,
    DataAddress,
    Directory,
    Duration,
    EngineUrls,
    File,
    MemorySource,
    Mode,
    Policy,
    Share,
    Shares,
    Size,
    Slab,
    TcpAddress,
    Tiers,
    Tracing,
    UnixAddress,
)

_MS: Final = 1_000_000


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic would read `true` as 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("should not be true or false")
        return value


class Server(Section):
    address: UnixAddress
    """The Unix socket to listen on; `auto`: $PREFIXD_ADDRESS, else prefixd.sock in
    $RUNTIME_DIRECTORY (systemd), $XDG_RUNTIME_DIR/prefixd, /run/prefixd (root) or
    /tmp/prefixd-<uid>."""
    socket_mode: Mode = 0o600
    """Who may connect to it: 0600 this user, 0660 its group too, 0666 everybody who reaches its
    directory. Whoever connects can read and replace what others have saved."""
    admin_address: AdminAddress = "auto"
    """The Unix socket for operators (prefixctl): who lists and evicts everybody's entries is served
    here only, and it is always for this user alone. `auto`: `address` with .admin behind it."""
    tcp: TcpAddress = ""
    """Also listen on host:port; port 0 lets the kernel choose; empty: no TCP. Without `tls_cert`
    there is neither encryption nor a password."""
    data: DataAddress = "auto"
    """The data socket, on which clients that come over `tcp` move payloads at two to three times
    the speed of gRPC; they are told its port. `auto`: any port at the host of `tcp`; empty: none.
    TLS, certificates and tokens are those of `tcp`; nobody gets anything there without the secret
    of a session."""
    allow_remote: bool = False
    """Allow `tcp` and `data` on an address that other machines can reach without TLS, or without
    both tokens and `tls_client_ca`: whoever reaches these can then read and replace everything."""
    tls_cert: File = ""
    """The certificate for `tcp` and `data`, with its chain, as PEM; empty: no TLS. With `tls_key`.
    All files of TLS are read at the start and with each reload, and hold for new connections."""
    tls_key: File = ""
    """Its private key, as PEM. Nobody but its owner may be able to read it."""
    tls_client_ca: File = ""
    """Clients over TCP have to show a certificate that one of these signed, as PEM; empty: none."""
    tokens: File = ""
    """Who may call over TCP: a line `watch|read|write|admin NAME TOKEN [NAMESPACE]` each. `read`
    finds and restores, `write` saves and deletes too, `admin` is prefixctl's, `watch` learns which
    keys are there. Who has a token of a namespace reaches nothing outside of it, and watches
    nothing else. Empty: whoever connects reads and writes. With TLS only; read at the start and
    with each reload."""
    metrics: TcpAddress = ""
    """Serve Prometheus metrics over HTTP on host:port, and a page for browsers that shows what
    `prefixctl top` does; empty: don't. There is no password."""
    tracing: Tracing = "none"
    """`otel`: make OpenTelemetry spans of what is done for clients, below those that they say they
    are part of. OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and so on in
    the environment say which, and where they go. Needs `pip install 'prefixd[opentelemetry]'`."""
    worker_threads: int = Field(4, ge=1, le=256)
    """Threads that copy and commit beside the event loop."""
    staging_bytes: Size = Field(64 * 2**20, alias="staging", ge=2**20, le=2**40)
    """Memory through which one client on this host hands over its saves; each has its own."""
    staging_total_bytes: Size = Field(2**30, alias="staging_total", ge=2**20)
    """What all clients have of it together. Who gets none saves over gRPC; what was not used for a
    minute is given back."""
    max_read_bytes: Size = Field(256 * 2**20, alias="max_reads", ge=4 * 2**20)
    """Memory for reads over gRPC or the data socket that their clients have not taken yet, 4MiB
    each; one client has half of it at most."""
    max_save_bytes: Size = Field(2**30, alias="max_saves", ge=16 * 2**20)
    """Memory for saves that arrive over gRPC, 16MiB each (the largest message), or over the data
    socket, 4MiB each; one client has half of it at most."""
    max_local_bytes: Size = Field(256 * 2**20, alias="max_local", ge=16 * 2**20)
    """Memory for requests on the local socket that are not answered yet, and as much for those on
    the data socket."""
    max_connections: int = Field(1024, ge=1)
    """Connections to the local socket at most, and as many to the data socket; those of no session
    are closed when idle."""
    max_connections_per_session: int = Field(256, ge=1)
    """Connections to each of these sockets that one client may have."""
    max_rpcs: int = Field(512, ge=1)
    """Calls over gRPC at once, beside the streams of sessions."""
    stall_timeout_ns: Duration = Field(30_000 * _MS, alias="stall_timeout", ge=10 * _MS)
    """How long a client may leave a read untaken or a save without its next bytes before it is cut
    off, and how long a call waits for memory that others have."""
    curve_keys: int = Field(8192, ge=0, le=10**7)
    """Keys that each tier samples for `prefixctl curve-live`, about 400 bytes each; 0: none."""
    journal_bytes: Size = Field(4 * 2**20, alias="journal", ge=0, le=2**28)
    """Memory for what happened to entries, 44 bytes each, which `prefixctl why` asks; 0: nothing is
    remembered."""
    scrub_bytes_per_second: Size = Field(8 * 2**20, alias="scrub_rate", ge=0)
    """Bytes a second that are read back from the shm and the disk tier each, to find damage before
    a client does; an entry counts 16KiB beside its payload. 0: nothing is."""
    drain_timeout_ns: Duration = Field(10_000 * _MS, alias="drain_timeout", ge=0)
    """How long a stop waits for saves and reads in flight."""

    def data_address(self) -> str:
        """Where the data socket is; empty: there is none."""
        if self.data != "auto":
            return self.data
        return f"{self.tcp.rpartition(':')[0]}:0" if self.tcp else ""

    def operators(self) -> str:
        """Where operators are served."""
        derived = admin_address(self.address)
        assert derived is not None, "the configuration allows Unix sockets only"
        return derived if self.admin_address == "auto" else self.admin_address


class TierSection(Section):
    """What all tiers have in common."""

    budget_bytes: Budget = Field("auto", alias="budget")
    """What entries may take."""
    max_budget_bytes: Size = Field(0, alias="max_budget", ge=0)
    """Up to where `prefixctl tier resize` may raise the budget without a restart; 0: not above what
    it is at the start. Memory is taken as it grows, but for 104 bytes of index a slab."""
    policy: Policy = "lru"
    """The order in which entries are evicted."""
    max_entries: Count = 0
    """Entries at most; 0: as many as the budget takes."""
    slab_bytes: Slab = Field(DEFAULT_SLAB_BYTES, alias="slab")
    """The piece in which room is handed out: a power of two from 4KiB. An entry takes whole slabs,
    and survives no change of it."""
    shares: Shares = ""
    """What namespaces of tokens are sure of, slabs included: of one that takes no more than its
    share nothing leaves for another's save. What is left is divided between all that want it;
    clients without a namespace, and namespaces without a share, have that alone."""


class Ram(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """What entries may take, everything included; 0: no such tier; `auto`: a quarter of the
    available memory."""


class Shm(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """As for [ram]; `auto`: a quarter of all memory, at most half of /dev/shm; less where little
    of them is free."""
    directory: Directory
    """Where the arena and its records lie, on a tmpfs; `auto`: /dev/shm/prefixd-<uid>."""
    verify_at_start: bool = True
    """Read every entry that survived a restart and check its CRC32C before it is served."""


class Disk(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """As for [ram]; `auto`: a quarter of what the file system could hold, at most 64GiB."""
    max_entries: Count = 1_000_000
    """Entries at most; 0: as many as the budget takes. Each takes about 600 B of the daemon's
    memory, index included."""
    directory: Directory
    """Where the arena and its records lie; `auto`: $STATE_DIRECTORY (systemd), /var/lib/prefixd
    (root), $XDG_STATE_HOME/prefixd or ~/.local/state/prefixd."""
    max_in_flight_bytes: Size = Field(2**30, alias="max_in_flight", ge=2**20)
    """Bytes that saves on their way to the disk may have reserved at once; more are told to try
    again. A single entry may be larger, it is then saved alone."""
    sync: bool = True
    """fsync before a save is acknowledged. Without it a power loss takes the last saves."""
    probe_interval_ns: Duration = Field(5_000 * _MS, alias="probe_interval", ge=10 * _MS)
    """How often a small write of the daemon's own shows that the device answers."""
    hung_after_ns: Duration = Field(10_000 * _MS, alias="hung_after", ge=10 * _MS)
    """A device that has not answered a read, a write or a sync in this time hangs: the tier takes
    no saves and gives no claims until it answers. Not below what the largest commit takes."""


class Sessions(Section):
    heartbeat_ns: Duration = Field(
        limits.DEFAULT_HEARTBEAT_INTERVAL_MS * _MS, alias="heartbeat", ge=50 * _MS, le=60_000 * _MS
    )
    """How often a client says that it lives; after two silent intervals its session is lost."""
    claim_lease_ns: Duration = Field(
        limits.DEFAULT_CLAIM_LEASE_MS * _MS, alias="claim_lease", le=limits.MAX_LEASE_MS * _MS
    )
    """How long a claim holds without a heartbeat."""
    reservation_ttl_ns: Duration = Field(
        limits.DEFAULT_RESERVATION_TTL_MS * _MS,
        alias="reservation_ttl",
        ge=1 * _MS,
        le=limits.MAX_LEASE_MS * _MS,
    )
    """How long a save may take from its reservation to its last byte."""
    max_sessions: int = Field(limits.MAX_SESSIONS, ge=1)
    """Connected clients at most."""
    max_claims_per_session: int = Field(limits.MAX_CLAIMS_PER_SESSION, ge=1)
    """Claims that one client may hold at once."""
    max_reservations_per_session: int = Field(limits.MAX_RESERVATIONS_PER_SESSION, ge=1)
    """Reservations that one client may hold at once."""
    max_waiters: int = Field(limits.MAX_WAITERS, ge=0)
    """Requests that may wait for saves in flight at once; more are answered without waiting."""
    max_waited_keys: int = Field(limits.MAX_WAITED_KEYS, ge=0)
    """Saves in flight that all these requests wait for, about 200 bytes each; more are answered
    without waiting."""
    max_waited_keys_per_session: int = Field(limits.MAX_WAITED_KEYS_PER_SESSION, ge=0)
    """Saves in flight that the requests of one client wait for; more are answered without
    waiting."""
    max_pinned_share: Share = 0.75
    """The part of a tier that the claims of one client may hold at once; more are refused. What is
    left is enough for others to save into; a single engine that uses a whole node rarely holds
    more than it restores at the moment."""
    max_reserved_share: Share = 0.5
    """The part of a tier that the saves of one client may have reserved at once, which evicts what
    others use; more are told to try again. A single entry may be larger, unless it is reserved
    before its bytes are there."""
    unwritten_ttl_ns: Duration = Field(
        120_000 * _MS, alias="unwritten_ttl", ge=1 * _MS, le=limits.MAX_LEASE_MS * _MS
    )
    """How long a reservation stands without its first byte, whatever its client asked for: a
    prompt may be computed in between."""

    def state_config(self) -> StateConfig:
        """The part that `MetaState` needs: the options that it has under the same names."""
        return StateConfig(
            session_lost_after_ns=limits.SESSION_LOST_AFTER_INTERVALS * self.heartbeat_ns,
            **self.model_dump(include={field.name for field in fields(StateConfig)}),
        )


class Shared(Section):
    engine: EngineUrls = ""
    """Where nodes share entries: redis://[user@]host:port, or rediss:// for TLS, of some nodes of a
    Valkey or Redis, single or Cluster, with commas between; or s3://bucket[/prefix], with
    AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on in the environment. Empty: this node
    shares nothing. Needs `pip install 'prefixd[shared]'`, or `prefixd[s3]`."""
    password_file: str = ""
    """A file with the password of the engine's user, on one line; empty: there is none."""
    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")] = "1"
    """Nodes with another one share nothing with this one, in the same engine."""
    payloads: Literal["engine", "nodes"] = "engine"
    """Where payloads are: in the engine, a second copy that outlives its node, or at the nodes
    alone, which read from each other; the engine then has 130 bytes an entry, which say where."""
    address: TcpAddress = ""
    """Where other nodes reach this one, as they see it; with `payloads = "nodes"` only. It has to
    be served there: see `server.tcp`."""
    peer_ca: File = ""
    """The certificates that signed those of other nodes, as PEM: nodes read from each other over
    TLS only, and this one shows `server.tls_cert` where it is asked who it is. Empty: without
    TLS."""
    peer_token_file: File = ""
    """A file with the token that other nodes want of this one, with the role read; with `peer_ca`
    only."""
    tier: Literal["ram", "shm", "disk"] = "ram"
    """Where what other nodes have goes here."""
    write: Literal["none", "second-use", "all"] = "second-use"
    """What others are offered: nothing, what was read after it was saved, or everything. Everything
    is a lot: 128 KiB a token at 30,000 tokens a second are 4 GB/s."""
    life_ns: Duration = Field(86_400_000 * _MS, alias="life", ge=1_000 * _MS)
    """How long an entry stays in the engine after its last use, at most."""
    memory_bytes: Size = Field(256 * 2**20, alias="memory", ge=2**20)
    """The daemon's memory for what is on its way from and to the engine, at most; no
    entry that is larger is shared."""


class Watch(Section):
    max_watchers: int = Field(16, ge=0, le=1024)
    """Watchers at once (routers, `prefixctl watch`); 0: nobody may watch."""
    history_bytes: Size = Field(16 * 2**20, alias="history", ge=2**16, le=2**30)
    """Memory for what happened lately, 176 bytes an event, for all watchers together and only while
    somebody watches: one that is further behind is cut off and begins anew."""


class Pressure(Section):
    source: MemorySource = "none"
    """Who says how much memory is used: the kernel of all of it (`system`: MemAvailable, PSI), of
    the cgroup with the least room, or a function that returns used bytes, bytes in all, and the
    part of the time that somebody waits for memory. `none`: nobody is asked, nothing is evicted."""
    high_watermark: Share = 0.95
    """From this part of the memory on, sessions are told that it is short, and tiers evict."""
    low_watermark: Share = 0.90
    """Tiers evict what is used above this part, once. Pressure ends when use is back at it."""
    max_stalled: Share = 0.2
    """Memory is short as well where somebody waited for it for so large a part of 10 s."""
    tiers: Tiers = "ram,shm"
    """What evicts, in this order. The memory of the ram and shm tiers stays with the daemon; what
    they evict is room for what engines save and free. Empty: nothing, sessions are told only."""
    interval_ns: Duration = Field(1_000 * _MS, alias="interval", ge=10 * _MS)
    """How often the source is asked."""


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """What is written to stderr, and worse."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: for people on a terminal, else one JSON object a line."""


class Config(Section):
    """Everything that can be configured. Comes from `load_config`."""

    server: Server = Field(description="Where the daemon listens and how it works.")
    ram: Ram = Field(description="The RAM tier: fastest, gone with the daemon.")
    shm: Shm = Field(description="The /dev/shm tier: survives a restart of the daemon.")
    disk: Disk = Field(description="The disk tier: survives a restart of the machine.")
    sessions: Sessions = Field(description="Clients, and what they may hold for how long.")
    shared: Shared = Field(description="Entries of other nodes, through an engine that they share.")
    watch: Watch = Field(description="Who follows which keys are there.")
    pressure: Pressure = Field(description="What happens when memory is short.")
    log: Log = Field(description="What the daemon says on stderr.")
