"""Loading: which source wins, and that a bad configuration is refused with all errors at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.server.config.loading import default_paths, load_config, print_config
from prefixd.server.config.options import Config

REPOSITORY = Path(__file__).resolve().parents[3]


def load(*argv: str, env: Mapping[str, str] | None = None) -> Config:
    return load_config(argv, env or {})


def refusal(*argv: str, env: Mapping[str, str] | None = None) -> list[str]:
    """The lines of the refusal, without the first."""
    with pytest.raises(ConfigError) as refused:
        load(*argv, env=env)
    first, *lines = str(refused.value).splitlines()
    count = first.split()[0]
    assert count == ("one" if len(lines) == 1 else str(len(lines)))
    return [line.strip() for line in lines]


# ---- sources


def test_nothing_configured_is_a_good_configuration() -> None:
    config = load()
    assert config.ram.budget_bytes == config.shm.budget_bytes == config.disk.budget_bytes == "auto"
    assert config.server.address.startswith("unix:/")
    assert config.sessions.heartbeat_ns == 2_000_000_000
    assert config.disk.sync is True


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text('[ram]\nbudget = "1GiB"\npolicy = "fifo"\nmax_entries = 1\n')
    env = {"PREFIXD_RAM__BUDGET": "2GiB", "PREFIXD_RAM__POLICY": "lfu"}
    config = load("--config", str(file), "--ram.budget", "3GiB", env=env)
    assert config.ram.budget_bytes == 3 * 2**30
    assert config.ram.policy == "lfu"
    assert config.ram.max_entries == 1


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text("[disk]\nmax_entries = 7\n")
    assert load(env={"PREFIXD_CONFIG": str(file)}).disk.max_entries == 7


def test_the_processs_own_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXD_SESSIONS__MAX_SESSIONS", "5")
    assert load_config([]).sessions.max_sessions == 5


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--ram", "1MiB"], "ram.budget_bytes", 2**20),
        (["--shm=1MiB"], "shm.budget_bytes", 2**20),
        (["--disk", "0"], "disk.budget_bytes", 0),
        (["--ram.budget", "auto"], "ram.budget_bytes", "auto"),
        (["--address", "/x/y"], "server.address", "unix:/x/y"),
        (["--server.socket_mode", "0660"], "server.socket_mode", 0o660),
        (["--tcp", "127.0.0.1:0"], "server.tcp", "127.0.0.1:0"),
        (["--tcp", "[::1]:70"], "server.tcp", "[::1]:70"),
        (["--tcp", "localhost:70"], "server.tcp", "localhost:70"),
        (["--metrics", "0.0.0.0:9464"], "server.metrics", "0.0.0.0:9464"),
        (["--log-level", "debug"], "log.level", "debug"),
        (["--log-format", "json"], "log.format", "json"),
        (["--disk.sync", "false"], "disk.sync", False),
        (["--server.allow_remote"], "server.allow_remote", True),
        (["--sessions.claim_lease", "1m30s"], "sessions.claim_lease_ns", 90 * 10**9),
        (["--ram.slab", "4096"], "ram.slab_bytes", 4096),
        (["--ram", "1MiB", "--ram", "2MiB"], "ram.budget_bytes", 2 * 2**20),
    ],
)
def test_flags(argv: list[str], path: str, value: object) -> None:
    section, _, name = path.partition(".")
    assert getattr(getattr(load(*argv), section), name) == value


@pytest.mark.parametrize("there", ["/a/b", "/a/b.local"])
def test_operators_need_a_socket_apart(there: str) -> None:
    (line,) = refusal("--address=/a/b", f"--server.admin_address={there}")
    assert f"workers are served at unix:{there}; operators need a socket of their own" in line


def test_staging_memory_of_one_client_fits_into_that_of_all() -> None:
    (line,) = refusal("--server.staging=2MiB", "--server.staging_total=1MiB")
    assert "2MiB for one client are more than the 1MiB for all" in line


def test_operators_are_served_beside_the_workers_unless_told_otherwise() -> None:
    longest = "/" + "x" * 99
    assert load("--address", longest).server.operators() == f"unix:{longest}.admin"
    elsewhere = load("--address", longest, "--server.admin_address=/a/b").server
    assert elsewhere.operators() == "unix:/a/b"


def test_remote_tcp_needs_no_consent_with_tls_and_somebody_to_ask() -> None:
    tls = ("--tcp", "0.0.0.0:7070", "--server.tls_cert=c", "--server.tls_key=k")
    for asked in ("--server.tokens=t", "--server.tls_client_ca=ca"):
        assert load(*tls, asked).server.tcp == "0.0.0.0:7070"


def test_the_data_socket_is_secured_like_tcp() -> None:
    tls = ("--tcp=0.0.0.0:70", "--server.tls_cert=c", "--server.tls_key=k", "--server.tokens=t")
    assert load(*tls).server.data_address() == "0.0.0.0:0"
    assert load(*tls, "--server.data=0.0.0.0:71").server.data_address() == "0.0.0.0:71"


def test_remote_tcp_is_possible_on_purpose() -> None:
    config = load("--tcp", "0.0.0.0:7070", "--server.allow_remote")
    assert config.server.tcp == "0.0.0.0:7070"


def test_the_data_socket_is_where_tcp_is_unless_told_otherwise() -> None:
    assert load().server.data_address() == ""
    assert load("--tcp", "127.0.0.1:7070").server.data_address() == "127.0.0.1:0"
    assert load("--tcp", "[::1]:7070").server.data_address() == "[::1]:0"
    assert load("--tcp", "127.0.0.1:7070", "--server.data=").server.data_address() == ""
    config = load("--tcp=0.0.0.0:7070", "--server.data=0.0.0.0:7071", "--server.allow_remote")
    assert config.server.data_address() == "0.0.0.0:7071"


def test_the_address_variable_of_the_clients_is_the_daemons_too() -> None:
    env = {"PREFIXD_ADDRESS": "/a/b.sock"}
    assert load(env=env).server.address == "unix:/a/b.sock"
    env["PREFIXD_SERVER__ADDRESS"] = "unix:/c/d.sock"
    assert load(env=env).server.address == "unix:/c/d.sock"


def test_variables_that_are_no_options_are_left_alone() -> None:
    # Kubernetes sets these in every container next to a service called prefixd.
    load(env={"PREFIXD_SERVICE_HOST": "10.0.0.1", "PREFIXD_PORT": "tcp://10.0.0.1:7070"})


def test_default_paths(tmp_path: Path) -> None:
    own = default_paths({}, 7)
    assert own["shm.directory"] == "/dev/shm/prefixd-7"
    assert own["disk.directory"].startswith("~/")
    assert default_paths({}, 0)["disk.directory"] == "/var/lib/prefixd"
    env = {"XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": str(tmp_path), "PREFIXD_ADDRESS": "no"}
    assert default_paths(env, 7) == {
        "server.address": f"unix:{tmp_path}/prefixd/prefixd.sock",
        "shm.directory": "/dev/shm/prefixd-7",
        "disk.directory": "/state/prefixd",
    }
    env |= {"RUNTIME_DIRECTORY": "/run/unit", "STATE_DIRECTORY": "/var/lib/unit"}
    assert default_paths(env, 7) == {
        "server.address": "unix:/run/unit/prefixd.sock",
        "shm.directory": "/dev/shm/prefixd-7",
        "disk.directory": "/var/lib/unit",
    }
    assert default_paths({"XDG_STATE_HOME": "relative"}, 7)["disk.directory"].startswith("~/")


def test_a_default_place_that_can_not_be_used_is_passed_over(tmp_path: Path) -> None:
    """One that is a file, that every user can write to, or whose parent is not there."""

    def chosen(directory: Path) -> str:
        return default_paths({"XDG_RUNTIME_DIR": str(directory)}, 424_242)["server.address"]

    (tmp_path / "file" / "prefixd").parent.mkdir()
    (tmp_path / "file" / "prefixd").touch()
    open_to_all = tmp_path / "open" / "prefixd"
    open_to_all.mkdir(parents=True)
    good = chosen(tmp_path / "open")
    open_to_all.chmod(0o777)
    assert good == f"unix:{open_to_all}/prefixd.sock"
    for directory in ("file", "open", "missing", "x" * 90):
        assert chosen(tmp_path / directory) == "unix:/tmp/prefixd-424242/prefixd.sock"


@pytest.mark.parametrize("option", ["shared.password_file", "shared.peer_ca"])
def test_names_of_files_are_made_absolute(option: str) -> None:
    section, name = option.split(".")
    config = load(f"--{option}=~/secret")
    assert getattr(getattr(config, section), name) == str(Path.home() / "secret")


def test_auto_directories_are_found_out_and_others_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load("--disk.directory", "cache", "--shm.directory", "auto")
    assert config.disk.directory == tmp_path / "cache"
    assert config.shm.directory == Path(f"/dev/shm/prefixd-{os.getuid()}")


# ---- what is refused


def test_everything_wrong_is_said_at_once_and_where_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text(
        'typo = 1\n[server]\nworker_threads = 0\n[disk]\nmax_entries = -1\nsync = "perhaps"\n'
    )
    lines = refusal(
        f"--config={file}",
        "--ram=8GB",
        "--shm",
        "--sessions.heartbeat=1ms",
        "--log.level=loud",
        "--rma.budget",
        "7",
        "--tcp=0.0.0.0:7070",
        "stray",
        env={"PREFIXD_SHM__SLAB": "5000", "PREFIXD_DISC__BUDGET": "1GiB"},
    )
    assert lines == [
        "command line: 'stray' belongs to no flag (commands are those of prefixctl)",
        "shm.budget (--shm): the value is missing",
        f"typo = 1 (from {file}): there is no such option",
        "disc.budget = '1GiB' (from PREFIXD_DISC__BUDGET): there is no such option; "
        "did you mean disk.budget?",
        "rma.budget = '7' (from --rma.budget): there is no such option; did you mean ram.budget?",
        f"server.worker_threads = 0 (from {file}): should be at least 1",
        "ram.budget = '8GB' (from --ram): '8GB' has an unknown unit 'GB': "
        "use B, KiB, MiB, GiB or TiB",
        "shm.slab = '5000' (from PREFIXD_SHM__SLAB): "
        "a slab is a power of two from 4096 bytes, not 5000",
        f"disk.max_entries = -1 (from {file}): should be at least 0",
        f"disk.sync = 'perhaps' (from {file}): should be a valid boolean, "
        "unable to interpret input",
        "sessions.heartbeat = '1ms' (from --sessions.heartbeat): should be at least 50ms",
        "log.level = 'loud' (from --log.level): should be 'debug', 'info', 'warning' or 'error'",
        "server.tcp and server.allow_remote: 0.0.0.0:7070 can be reached from other machines, and "
        "nothing is encrypted; listen on 127.0.0.1, set tls_cert, tls_key and tokens, or say "
        "allow_remote = true",
    ]


#: With TLS and tokens.
SECURED = (
    "--tcp=127.0.0.1:1",
    "--server.tls_cert=/c",
    "--server.tls_key=/k",
    "--server.tokens=/t",
)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--ram.policy", "mru"], "should be one of lru, lfu, fifo, s3fifo, arc"),
        (["--ram", "-1"], "'-1' is not a size"),
        (["--address", "127.0.0.1:1"], "should be a Unix socket"),
        (["--address", "unix:/" + "x" * 120], "longer than the 107 bytes"),
        (
            ["--address", "unix:/" + "x" * 101],
            "a path of at most 100 bytes: with .local and .admin",
        ),
        (["--server.admin_address", "localhost:70"], "operators are served on this host only"),
        (["--server.socket_mode", "rw"], "should be an octal mode"),
        (["--server.socket_mode", "0060"], "denies the daemon's own user the socket"),
        (["--tcp", "/a/socket"], "should be host:port"),
        (["--metrics", "nowhere"], "is no address"),
        (["--disk.directory", ""], "should be the name of a directory"),
        (["--sessions.claim_lease", "2h"], "should be at most 1h"),
        (["--sessions.heartbeat", "5"], "is not a duration"),
        (["--server.worker_threads", "many"], "should be a valid integer"),
        (["--ram.shares", "a"], "should be NAMESPACE=SIZE, with commas between; 'a' is not"),
        (["--ram.shares", "a/b=1GiB"], "'a/b=1GiB' is not"),
        (["--shm.shares", "a=1GiB,,b=1GiB"], "'' is not"),
        (["--disk.shares", "a=1GB"], "unknown unit"),
        (["--ram.shares", "a=0"], "'a' has an empty share"),
        (["--ram.shares", "a=1GiB, a=2GiB"], "'a' has two shares"),
        (["--ram.shares", ",".join(f"n{n}=1MiB" for n in range(33))], "33 namespaces, at most 32"),
    ],
)
def test_values_out_of_range(argv: list[str], why: str) -> None:
    (line,) = refusal(*argv)
    assert f"(from {argv[0]})" in line
    assert why in line


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ("[ram]\nbudget = true", "ram.budget = True (from FILE): should not be true or false"),
        ("[ram]\npolicy = ['lru']", "should be one of lru"),
        ("[sessions]\nheartbeat = 2", "a duration is text with a unit"),
        ("[disk]\nsync = {}", "disk.sync = {} (from FILE): should be a valid boolean"),
        ("ram = 5", "ram = 5 (from FILE): there is no such option"),
        ("[ram]\nbudget_bytes = 5", "did you mean ram.budget?"),
        ("[ram.budget]\nsize = 5", "ram.budget = {'size': 5} (from FILE): should be a valid int"),
        ("[ram", "FILE: is no TOML"),
    ],
)
def test_files_with_mistakes(tmp_path: Path, toml: str, why: str) -> None:
    file = tmp_path / "prefixd.toml"
    file.write_text(toml)
    (line,) = refusal("--config", str(file))
    assert why.replace("FILE", str(file)) in line


def test_a_file_that_cannot_be_read() -> None:
    assert refusal("--config", "/does/not/exist.toml") == [
        "/does/not/exist.toml: can't be read: No such file or directory"
    ]
    assert refusal("--config") == ["--config: the name of the file is missing"]


def test_a_flag_that_takes_no_value() -> None:
    assert "--print-config" in refusal("--print-config=1")[0]


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (["--ram=64KiB", "--ram.slab=128KiB"], "ram.budget and ram.slab"),
        (["--shm=4096"], "shm.budget and shm.slab"),
        (["--disk=5"], "disk.budget"),
        (["--shm.shares=a=1MiB"], "shm.shares and server.tokens"),
        ([*SECURED, "--ram=4MiB", "--ram.shares=a=3MiB,b=2MiB"], "ram.shares and ram.budget"),
        ([*SECURED, "--disk=0", "--disk.shares=a=1MiB"], "disk.shares and disk.budget"),
        (["--ram=0", "--shm=0", "--disk=0"], "ram.budget and shm.budget and disk.budget"),
        (["--shm.directory=/x/y", "--disk.directory=/x/./y"], "shm.directory and disk.directory"),
        (
            ["--sessions.heartbeat=10s", "--sessions.claim_lease=19s"],
            "sessions.claim_lease and sessions.heartbeat",
        ),
        (["--tcp=127.0.0.1:7", "--metrics=127.0.0.1:7"], "server.tcp and server.metrics"),
        (["--tcp=cache.example:7"], "server.tcp and server.allow_remote"),
        (["--tcp=[::1]:7", "--server.data=0.0.0.0:8"], "server.data and server.allow_remote"),
        (["--server.data=127.0.0.1:8"], "server.data and server.tcp"),
        (["--tcp=127.0.0.1:7", "--server.data=127.0.0.1:7"], "server.tcp and server.data"),
        (
            ["--tcp=0.0.0.0:7", "--server.tls_cert=c", "--server.tls_key=k"],
            "server.tcp and server.allow_remote",
        ),
        (["--tcp=127.0.0.1:7", "--server.tls_cert=c"], "server.tls_cert and server.tls_key"),
        (["--tcp=127.0.0.1:7", "--server.tokens=t"], "server.tokens and server.tls_cert"),
        (
            ["--tcp=127.0.0.1:7", "--server.tls_client_ca=t"],
            "server.tls_client_ca and server.tls_cert",
        ),
        (["--server.tls_cert=c", "--server.tls_key=k"], "server.tls_cert and server.tcp"),
        (
            ["--shared.payloads=nodes", "--shared.peer_ca=c"],
            "shared.peer_ca and server.tls_cert",
        ),
        (
            [
                *("--tcp=127.0.0.1:7", "--server.tls_cert=c", "--server.tls_key=k"),
                "--shared.payloads=nodes",
            ],
            "shared.peer_ca and server.tls_cert",
        ),
        (["--shared.peer_token_file=t"], "shared.peer_token_file and shared.peer_ca"),
        (["--shared.capacity=s3://bucket"], "shared.capacity and shared.engine"),
        (
            ["--shared.capacity=s3://bucket/behind", "--shared.engine=s3://bucket"],
            "shared.capacity and shared.engine",
        ),
    ],
)
def test_options_that_contradict_each_other(argv: list[str], keys: str) -> None:
    (line,) = refusal(*argv)
    assert line.startswith(f"{keys}: ")


def test_a_contradiction_with_a_wrong_key_is_not_reported_twice() -> None:
    (line,) = refusal("--shm=4096", "--shm.slab=5000")
    assert line.startswith("shm.slab = '5000'")


def test_the_same_directory_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (line,) = refusal("--shm.directory", str(tmp_path), "--disk.directory", str(tmp_path / "link"))
    assert line.startswith("shm.directory and disk.directory")


# ---- what is printed


def test_the_example_file_is_what_is_printed_and_says_the_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        load("--print-config")
    assert left.value.code == 0
    assert capsys.readouterr().out == print_config()
    example = REPOSITORY / "deploy" / "prefixd.toml"
    assert example.read_text() == print_config(), (
        "run `prefixd --print-config >deploy/prefixd.toml`"
    )
    assert load("--config", str(example)) == load()


def test_help_names_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load("--help", "--nonsense")
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, section in Config.model_fields.items():
        assert section.annotation is not None
        for field, info in section.annotation.model_fields.items():
            # From Python 3.13 on, a comma and another name of the option may follow.
            assert re.search(rf"--{re.escape(f'{name}.{info.alias or field}')}[ ,]", shown)
            assert " ".join(str(info.description).split()) in shown
    assert "--ram.slab SIZE" in shown
    assert "[64KiB]" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load("--version")
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("prefixd ")


def test_check_config_says_what_it_comes_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--shm.directory", f"{tmp_path}/s", "--disk.directory", f"{tmp_path}/d"]
    with pytest.raises(SystemExit) as left:
        load("--check-config", "--ram", "1MiB", "--shm", "0", "--disk", "1MiB", *argv)
    assert left.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        "The configuration is good.",
        "ram: 1MiB (configured)",
        "shm: off (switched off)",
        f"disk: 1MiB in {tmp_path}/d (configured)",
        "memory: at most 3.12GiB, of which server.staging_total 1GiB, server.max_saves 1GiB, "
        "server.max_reads 256MiB",
    ]
    assert list(tmp_path.iterdir()) == []


def test_check_config_refuses_like_a_start() -> None:
    assert refusal("--check-config", "--ram", "1") == [
        "ram.budget and ram.slab: a budget of 1B does not hold one slab of 64KiB"
    ]


def test_check_config_refuses_tiers_that_hold_nothing() -> None:
    slabs = ("--shm.slab", "4KiB", "--disk.slab", "4KiB")
    least = ("--shm", "12KiB", "--disk", "1MiB")
    assert refusal("--check-config", *slabs, "--shm", "4KiB", "--disk", "256KiB") == [
        "shm.budget: 4KiB (configured) have no room for a slab of 4KiB and its record: "
        "at least 8.31KiB",
        "disk.budget: 256KiB (configured) have no room for a slab of 4KiB and its record: "
        "at least 274.06KiB",
    ]
    with pytest.raises(SystemExit) as left:
        load("--check-config", "--ram", "1MiB", *slabs, *least)
    assert left.value.code == 0


def test_a_variable_with_one_underscore_is_refused_with_its_right_name() -> None:
    env = {"PREFIXD_RAM_BUDGET": "1GiB", "PREFIXD_SERVICE_HOST": "10.0.0.1", "PREFIXD_PORT": "x"}
    assert refusal(env=env) == [
        "PREFIXD_RAM_BUDGET: two underscores are between section and key: PREFIXD_RAM__BUDGET"
    ]


@pytest.mark.parametrize(("default", "mode"), [(True, 0o755), (False, 0o777), (True, 0o777)])
def test_a_default_place_that_clients_pass_over_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, default: bool, mode: int
) -> None:
    """A daemon there would serve, and be found by nobody."""
    place = tmp_path / "prefixd"
    place.mkdir()
    place.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path if default else tmp_path / "other"))
    flags = "--check-config", f"--address=unix:{place}/prefixd.sock"
    if default and mode == 0o777:
        why = f"every user can write to {place}, so that no client looks for a daemon there"
        assert refusal(*flags) == [f"server.address: {why}"]
        return
    with pytest.raises(SystemExit) as left:
        load(*flags)
    assert left.value.code == 0


@pytest.mark.parametrize("what", ["a file", "not writable"])
def test_check_config_refuses_a_directory_that_can_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place = tmp_path / "here"
    if what == "a file":
        place.write_text("")
        why = f"{place} is no directory"
    else:
        place.mkdir()
        real = os.access
        # Root may write anywhere, so the kernel's refusal is simulated.
        monkeypatch.setattr(os, "access", lambda path, mode: path != place and real(path, mode))
        why = f"{place} can't be written to by the user {os.geteuid()}"
    argv = ["--shm.directory", f"{place}/s", "--disk.directory", f"{tmp_path}/d"]
    argv += ["--ram", "1MiB", "--shm", "1MiB", "--disk", "1MiB"]
    address = ["--address", f"{place}/d.sock"]
    assert refusal("--check-config", *argv) == [f"shm.directory: {why}"]
    assert refusal("--check-config", *argv, *address, "--shm", "0") == [f"server.address: {why}"]


def test_check_config_warns_of_more_than_the_machine_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--shm.directory", f"{tmp_path}/s", "--disk.directory", f"{tmp_path}/d"]
    with pytest.raises(SystemExit):
        load("--check-config", "--ram", "500TiB", "--shm", "0", "--disk", "1MiB", *argv)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "The configuration is possible, but likely not meant:"
    assert second.startswith("warning: ram.budget and shm.budget together are 500TiB, more than")


def test_files_that_are_not_there_are_found_before_a_start(tmp_path: Path) -> None:
    tls = [
        "--tcp=127.0.0.1:0",
        *(f"--server.tls_{name}={tmp_path / name}" for name in ("cert", "key")),
    ]
    places = [f"--server.address=unix:{tmp_path}/s", f"--disk.directory={tmp_path}/disk"]
    with pytest.raises(ConfigError, match=r"server\.tls_cert: .*/cert is no file") as refused:
        load("--check-config", *places, *tls)
    assert "server.tls_key: " in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "address", "good"),
    [
        ("redis://10.0.0.1:6379", "10.0.0.2:7070", True),
        ("redis://user@10.0.0.1:6379", "node-7.example:7070", True),
        ("redis://127.0.0.1:6379,redis://localhost:1?a=b", "127.0.0.1:7070", True),
        ("redis://10.0.0.1:6379", "127.0.0.1:7070", False),
        ("redis://10.0.0.1:6379", "localhost:7070", False),
        ("redis://10.0.0.1:6379,redis://127.0.0.1:1", "[::1]:7070", False),
        ("redis://127.0.0.1:6379", "0.0.0.0:7070", False),
        ("redis://127.0.0.1:6379", "[::]:7070", False),
        ("redis://10.0.0.1:6379", "10.0.0.2:0", False),
    ],
)
def test_other_nodes_are_told_an_address_at_which_they_find_this_one(
    engine: str, address: str, good: bool
) -> None:
    flags = ("--shared.payloads=nodes", f"--shared.engine={engine}", f"--shared.address={address}")
    if good:
        load(*flags)
    else:
        (line,) = refusal(*flags)
        assert line.startswith(f"shared.address: {address} ") or "themselves" in line


@pytest.mark.parametrize(("low", "high"), [("0.9", "0.9"), ("0.95", "0.5")])
def test_watermarks_that_contradict_each_other_are_refused(low: str, high: str) -> None:
    (line,) = refusal(f"--pressure.low_watermark={low}", f"--pressure.high_watermark={high}")
    assert line.startswith("pressure.low_watermark and pressure.high_watermark: pressure begins")


@pytest.mark.parametrize(
    "flag",
    [
        "--pressure.source=swap",
        "--pressure.source=os:system()",
        "--pressure.tiers=ram,ram",
        "--pressure.tiers=vram",
        "--pressure.high_watermark=0",
        "--pressure.max_stalled=2",
        "--pressure.interval=1ms",
    ],
)
def test_what_pressure_can_not_be_is_refused_by_its_option(flag: str) -> None:
    (line,) = refusal(flag)
    assert line.startswith(flag[2:].partition("=")[0])
