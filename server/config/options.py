"""Every option of the daemon: one model for the TOML file, the environment and the flags.

In the file an option has a plain name and a value as people write it (`budget = "8GiB"`,
`heartbeat = "2s"`); in code its name ends in its unit (`budget_bytes`, `heartbeat_ns`).
`--help` and `--print-config` print the docstrings below.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ...proto import limits
from ...proto.endpoints import LOCAL_SUFFIX, admin_address, socket_path
from ...tiers.arena import DEFAULT_SLAB_BYTES
from ..core.tables import StateConfig
from .values import (
    AdminAddress,
    BucketUrl,
    Budget,
    Count,
    DataAddress,
    Directory,
    Duration,
    EngineUrls,
    File,
    MemorySource,
    Mode,
    Mount,
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
    """The base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic would read `true` as 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("should not be true or false")
        return value


class ServerSection(Section):
    address: UnixAddress
    """The Unix socket to listen on; `auto`: $PREFIXD_ADDRESS, else prefixd.sock in
    $RUNTIME_DIRECTORY (systemd), else in the first of these that can be used: /run/prefixd (root),
    $XDG_RUNTIME_DIR/prefixd, /run/user/<uid>/prefixd, /tmp/prefixd-<uid>. Clients and prefixctl
    look in the same places, and in /run/prefixd after them."""
    socket_mode: Mode = 0o600
    """Who may connect to it: 0600 this user, 0660 its group too, 0666 every user who can reach its
    directory. A process that connects can read and replace what others have saved."""
    admin_address: AdminAddress = "auto"
    """The Unix socket for operators (prefixctl), who can list and evict all entries. Only this user
    can connect to it. `auto`: `address` followed by .admin."""
    tcp: TcpAddress = ""
    """Also listen on host:port; port 0 lets the kernel choose; empty: no TCP. Without `tls_cert`
    there is no encryption and no authentication."""
    data: DataAddress = "auto"
    """The data socket, on which clients that connect over `tcp` move payloads 2.8 times as fast as
    over gRPC (blocks of 5 MiB); the daemon tells them its port. `auto`: any port at the host of
    `tcp`; empty: no data socket. It uses the TLS, certificates and tokens of `tcp`, and each
    connection has to present the secret of a session."""
    reflection: bool = False
    """Describe the services over `tcp` to every client that asks (gRPC reflection). On Unix sockets
    they are always described."""
    allow_remote: bool = False
    """Allow `tcp` and `data` on an address that other machines can reach even without TLS, or with
    neither tokens nor `tls_client_ca`. Anyone who can reach them can then read and replace
    everything."""
    tls_cert: File = ""
    """The certificate for `tcp` and `data`, with its chain, as PEM; empty: no TLS. Needs `tls_key`.
    The TLS files are read at the start and at each reload, and apply to new connections."""
    tls_key: File = ""
    """Its private key, as PEM. The file must be readable by its owner only."""
    tls_client_ca: File = ""
    """CA certificates as PEM. Clients over TCP have to present a certificate that one of them
    signed; empty: clients need no certificate."""
    tokens: File = ""
    """A file with the tokens that clients over TCP need, one per line:
    `watch|read|write|admin NAME TOKEN [NAMESPACE]`. `read` finds and restores, `write` also saves
    and deletes, `admin` is for prefixctl, `watch` follows which keys are cached. A token with a
    namespace gives access to that namespace only. Empty: every client reads and writes. Needs TLS;
    read at the start and at each reload."""
    metrics: TcpAddress = ""
    """Serve Prometheus metrics over HTTP on host:port, and a page for browsers that shows the same
    as `prefixctl top`; empty: off. There is no password."""
    tracing: Tracing = "none"
    """`otel`: record OpenTelemetry spans of calls, as children of the client's span if it sends
    one. OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and so on in the
    environment select which spans and where they go. Needs
    `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`."""
    worker_threads: int = Field(4, ge=1, le=256)
    """Threads beside the event loop that copy and commit."""
    staging_bytes: Size = Field(64 * 2**20, alias="staging", ge=2**20, le=2**40)
    """Shared memory in which a client on this host hands over saves; each client has its own."""
    staging_total_bytes: Size = Field(2**30, alias="staging_total", ge=2**20)
    """The limit of this memory for all clients together. A client that gets none saves over gRPC.
    What was unused for a minute is given back."""
    max_read_bytes: Size = Field(256 * 2**20, alias="max_reads", ge=4 * 2**20)
    """Memory for reads over gRPC or the data socket that clients have not received yet, 4MiB each,
    in fair shares (SECURITY.md)."""
    max_save_bytes: Size = Field(2**30, alias="max_saves", ge=16 * 2**20)
    """Memory for saves that arrive over gRPC, 16MiB each (the largest message), or over the data
    socket, 4MiB each, in fair shares."""
    max_local_bytes: Size = Field(256 * 2**20, alias="max_local", ge=16 * 2**20)
    """Memory for requests above 16KiB on the local socket, and the same amount for those on the
    data socket."""
    max_connections: int = Field(1024, ge=1)
    """Most connections to the local socket, to the data socket, and to `tcp`; those that prove no
    session, or no token, are closed."""
    max_connections_per_session: int = Field(256, ge=1)
    """Most connections of one client to each of these sockets."""
    max_rpcs: int = Field(512, ge=1)
    """Most concurrent gRPC calls, not counting the streams of sessions and watchers."""
    stall_timeout_ns: Duration = Field(30_000 * _MS, alias="stall_timeout", ge=10 * _MS)
    """How long a client may leave a read unreceived, or a save without its next bytes (16KiB for
    each second), before it is disconnected; and how long a call waits for memory that others
    hold."""
    curve_keys: int = Field(8192, ge=0, le=10**7)
    """Keys that each tier samples for `prefixctl curve-live`, about 400 bytes each; 0: off."""
    journal_bytes: Size = Field(4 * 2**20, alias="journal", ge=0, le=2**28)
    """Memory for the history of entries that `prefixctl why` reads, 44 bytes per event; 0: no
    history."""
    scrub_bytes_per_second: Size = Field(8 * 2**20, alias="scrub_rate", ge=0)
    """Bytes a second that are read back from the shm tier and from the disk tier, to find damage
    before a client does; an entry counts as its payload and 16KiB. A pass over a tier takes 10 min
    at least. 0: off."""
    drain_timeout_ns: Duration = Field(10_000 * _MS, alias="drain_timeout", ge=0)
    """How long a stop waits for saves and reads in flight."""

    @property
    def stall_timeout_s(self) -> float:
        """`stall_timeout_ns` in seconds."""
        return self.stall_timeout_ns / 1e9

    @property
    def local_socket(self) -> str:
        """Path of the local socket."""
        path = socket_path(self.address)
        assert path is not None, "the configuration allows Unix sockets only"
        return f"{path}{LOCAL_SUFFIX}"

    def data_address(self) -> str:
        """Address of the data socket; empty if there is none."""
        if self.data != "auto":
            return self.data
        return f"{self.tcp.rpartition(':')[0]}:0" if self.tcp else ""

    def operators(self) -> str:
        """Address of the operators' socket."""
        derived = admin_address(self.address)
        assert derived is not None, "the configuration allows Unix sockets only"
        return derived if self.admin_address == "auto" else self.admin_address


class TierSection(Section):
    """The options that all tiers have."""

    budget_bytes: Budget = Field("auto", alias="budget")
    """Memory or disk space for entries."""
    max_budget_bytes: Size = Field(0, alias="max_budget", ge=0)
    """The largest budget that `prefixctl tier resize` can set without a restart; 0: the budget at
    the start. Memory is allocated as the tier grows, except for 104 bytes of index per slab."""
    policy: Policy = "lru"
    """The order in which entries are evicted."""
    max_entries: Count = 0
    """Most entries; 0: as many as fit the budget."""
    slab_bytes: Slab = Field(DEFAULT_SLAB_BYTES, alias="slab")
    """The unit of allocation: a power of two from 4KiB. An entry takes whole slabs. Changing it
    loses all entries of the tier."""
    shares: Shares = ""
    """Guaranteed bytes per namespace of tokens, in whole slabs: while a namespace uses no more than
    its share, none of its entries is evicted for another's save. All clients compete for the rest,
    which is all that clients without a namespace, and namespaces without a share, can use."""


class RamSection(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """Memory for entries, overhead included; 0: no such tier; `auto`: a quarter of the available
    memory."""


class ShmSection(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """As for [ram]; `auto`: a quarter of all memory, at most half of /dev/shm; less if little of
    either is free."""
    directory: Directory
    """Directory of the arena and its records, on a tmpfs; `auto`: /dev/shm/prefixd-<uid>."""
    verify_at_start: bool = True
    """Read every entry that survived a restart and check its CRC32C before serving it."""


class DiskSection(TierSection):
    budget_bytes: Budget = Field("auto", alias="budget")
    """As for [ram]; `auto`: a quarter of the room on the file system, at most 64GiB."""
    max_entries: Count = 1_000_000
    """Most entries; 0: as many as fit the budget. Each takes about 600 B of the daemon's memory,
    index included."""
    directory: Directory
    """Directory of the arena and its records; `auto`: $STATE_DIRECTORY (systemd), /var/lib/prefixd
    (root), $XDG_STATE_HOME/prefixd or ~/.local/state/prefixd."""
    mount: Mount = ""
    """A directory at which a file system has to be mounted before the tier is used, for example the
    one that holds `directory`; empty: any file system will do. A disk that is not mounted is then
    waited for. Without this option the tier begins anew wherever the directory lies."""
    max_in_flight_bytes: Size = Field(2**30, alias="max_in_flight", ge=2**20)
    """Most bytes that saves to the disk tier may reserve at once; further saves are told to try
    again. An entry that is larger is saved alone."""
    sync: bool = True
    """fsync before a save is acknowledged. Without it a power loss loses the last saves."""
    probe_interval_ns: Duration = Field(5_000 * _MS, alias="probe_interval", ge=10 * _MS)
    """How often the daemon checks with a small write and read that the device responds."""
    hung_after_ns: Duration = Field(10_000 * _MS, alias="hung_after", ge=10 * _MS)
    """A device that has not completed a read, a write or a sync within this time counts as hung:
    the tier accepts no saves and grants no claims until it responds. Keep it above the time of the
    largest commit."""


class SessionsSection(Section):
    heartbeat_ns: Duration = Field(
        limits.DEFAULT_HEARTBEAT_INTERVAL_MS * _MS, alias="heartbeat", ge=50 * _MS, le=60_000 * _MS
    )
    """How often a client sends a heartbeat; after two intervals without one its session is lost. A
    client that holds nothing sends a fifth of them, and has five times as long."""
    claim_lease_ns: Duration = Field(
        limits.DEFAULT_CLAIM_LEASE_MS * _MS, alias="claim_lease", le=limits.MAX_LEASE_MS * _MS
    )
    """How long a claim lasts without a heartbeat."""
    reservation_ttl_ns: Duration = Field(
        limits.DEFAULT_RESERVATION_TTL_MS * _MS,
        alias="reservation_ttl",
        ge=1 * _MS,
        le=limits.MAX_LEASE_MS * _MS,
    )
    """The longest time from a save's reservation to its last byte."""
    max_sessions: int = Field(limits.MAX_SESSIONS, ge=1)
    """Most connected clients."""
    max_claims_per_session: int = Field(limits.MAX_CLAIMS_PER_SESSION, ge=1)
    """Most claims that one client may hold at once."""
    max_reservations_per_session: int = Field(limits.MAX_RESERVATIONS_PER_SESSION, ge=1)
    """Most reservations that one client may hold at once."""
    max_waiters: int = Field(limits.MAX_WAITERS, ge=0)
    """Most requests that wait for saves in flight; further ones are answered without waiting."""
    max_waited_keys: int = Field(limits.MAX_WAITED_KEYS, ge=0)
    """Most saves in flight that all these requests together wait for, about 200 bytes each;
    requests beyond that are answered without waiting."""
    max_waited_keys_per_session: int = Field(limits.MAX_WAITED_KEYS_PER_SESSION, ge=0)
    """Most saves in flight that the requests of one client wait for; requests beyond that are
    answered without waiting."""
    max_held_keys: int = Field(limits.MAX_HELD_KEYS, ge=1)
    """Most entries of claims, and keys of unfinished saves with the chains before them, of all
    clients together, about 100 bytes each; further claims and saves are refused."""
    max_pinned_share: Share = 0.75
    """The largest part of a tier that the claims of one client, or of all clients of one tenant
    over TCP, may pin; further claims are refused. The rest is left for other clients to save into.
    A single engine that uses a whole node rarely pins more than it is restoring. Beside other
    clients that hold something, a tenant holds no more of a tier than it leaves free."""
    max_reserved_share: Share = 0.5
    """The same for what saves may reserve at once, because
    reservations evict the entries of others; further saves are told to try again. A single entry
    may be larger, unless it is reserved before its bytes arrive."""
    unwritten_ttl_ns: Duration = Field(
        120_000 * _MS, alias="unwritten_ttl", ge=1 * _MS, le=limits.MAX_LEASE_MS * _MS
    )
    """How long a reservation lasts without its first byte, whatever time its client requested. The
    client may compute the prompt in between."""

    @property
    def idle_heartbeat_ns(self) -> int:
        """How often a client sends a heartbeat whose session holds nothing."""
        factor = limits.IDLE_SESSION_LOST_AFTER_INTERVALS // limits.SESSION_LOST_AFTER_INTERVALS
        return factor * self.heartbeat_ns

    def state_config(self) -> StateConfig:
        """The part that `MetaState` needs: the options that have the same names there."""
        return StateConfig(
            session_lost_after_ns=limits.SESSION_LOST_AFTER_INTERVALS * self.heartbeat_ns,
            **self.model_dump(include={field.name for field in fields(StateConfig)}),
        )


class SharedSection(Section):
    engine: EngineUrls = ""
    """Through what nodes share entries: redis://[user@]host:port, or rediss:// for TLS, of some
    nodes of a Valkey or Redis, separated by commas: a Cluster, or a primary and its replicas;
    redis+sentinel://host:port/service of Sentinels that know the primary; or s3://bucket[/prefix],
    with AWS_REGION, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on in the environment. Empty: this
    node shares nothing. Needs `pip install redis`, or `pip install obstore` for S3."""
    password_file: File = ""
    """A file with the password of the engine's user, on one line; empty: no password."""
    fleet: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")] = "1"
    """Name of the fleet. Nodes with another name share nothing with this one."""
    payloads: Literal["engine", "nodes"] = "engine"
    """Where shared payloads are kept. `engine`: a second copy in the engine, which outlives its
    node. `nodes`: on the nodes only, which read from each other; the engine then holds 130 bytes
    per entry, which say where the payload is."""
    capacity: BucketUrl = ""
    """A bucket behind the engine, s3://bucket[/prefix]: it also gets what this node shares, and is
    read for what neither the engine nor any node has any more. The engine has to be a Valkey or
    Redis. For credentials, see `engine`; needs `pip install obstore`. Empty: none."""
    address: TcpAddress = ""
    """The address at which other nodes reach this one; for `payloads = "nodes"` only. The daemon
    has to listen there: see `server.tcp`."""
    peer_ca: File = ""
    """CA certificates that signed those of the other nodes, as PEM: nodes then read from each other
    over TLS only, and this node presents `server.tls_cert` where a client certificate is required.
    Empty: no TLS."""
    peer_token_file: File = ""
    """A file with the token that other nodes require of this one, with the role read; needs
    `peer_ca`."""
    tier: Literal["ram", "shm", "disk"] = "ram"
    """The tier for entries that are fetched from other nodes."""
    write: Literal["none", "second-use", "all"] = "second-use"
    """What this node shares: nothing, entries that were read after they were saved, or everything.
    Everything is a lot: 128 KiB a token at 30,000 tokens a second are 4 GB/s."""
    life_ns: Duration = Field(86_400_000 * _MS, alias="life", ge=1_000 * _MS)
    """The longest time that an entry stays in the engine after its last use."""
    memory_bytes: Size = Field(256 * 2**20, alias="memory", ge=2**20)
    """Most memory for entries on their way from and to the engine; larger entries are not
    shared."""


class WatchSection(Section):
    max_watchers: int = Field(16, ge=0, le=1024)
    """Most concurrent watchers (routers, `prefixctl watch`); 0: watching is off."""
    history_bytes: Size = Field(16 * 2**20, alias="history", ge=2**16, le=2**30)
    """Memory for recent events, 176 bytes each, shared by all watchers and used only while there is
    one. A watcher that falls further behind is disconnected and has to start over."""


class PressureSection(Section):
    source: MemorySource = "none"
    """Where memory use is read. `system`: the kernel's figures for the machine (MemAvailable, PSI).
    `cgroup`: the cgroup with the least room. Or a function that returns used bytes, total bytes,
    and the share of time that tasks wait for memory. `none`: memory is not watched."""
    high_watermark: Share = 0.95
    """From this share of memory on, sessions are told that memory is short, and tiers evict."""
    low_watermark: Share = 0.90
    """Tiers evict, once, what is used above this share. Pressure ends when use is back at it."""
    max_stalled: Share = 0.2
    """Memory also counts as short when tasks waited for it for this share of the last 10 s."""
    tiers: Tiers = "ram,shm"
    """The tiers that evict, in this order. The daemon keeps the memory of the ram and shm tiers;
    evicting makes room in them for what engines save and then free. Empty: sessions are only
    told."""
    interval_ns: Duration = Field(1_000 * _MS, alias="interval", ge=10 * _MS)
    """How often the source is read."""


class LogSection(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written to stderr."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: readable lines on a terminal, else one JSON object per line."""


class Config(Section):
    """The whole configuration, as `load_config` returns it."""

    server: ServerSection = Field(description="Where the daemon listens and how it works.")
    ram: RamSection = Field(description="The RAM tier: fastest, lost when the daemon stops.")
    shm: ShmSection = Field(description="The /dev/shm tier: survives a restart of the daemon.")
    disk: DiskSection = Field(description="The disk tier: survives a restart of the machine.")
    sessions: SessionsSection = Field(description="Clients, what they may hold, and for how long.")
    shared: SharedSection = Field(
        description="Sharing entries with other nodes, through an engine."
    )
    watch: WatchSection = Field(description="Clients that follow which keys are cached.")
    pressure: PressureSection = Field(description="What the daemon does when memory is short.")
    log: LogSection = Field(description="What the daemon logs on stderr.")
