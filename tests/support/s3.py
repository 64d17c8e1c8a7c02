"""S3 servers: moto's in this process, and Ceph's in processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Final
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from .ports import free_ports

#: The environment variable with a bucket for tests, `s3://bucket[/prefix]`, which they empty. The
#: endpoint and the credentials are in the variables that AWS' own tools read.
S3_URL: Final = "PREFIXD_TEST_S3_URL"
START_S: Final = 60.0
CEPH: Final = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")


def aws(endpoint: str, key: str, secret: str) -> dict[str, str]:
    """The environment variables that give an S3 client its endpoint and credentials."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
    }


@contextmanager
def moto_s3() -> Iterator[tuple[str, Mapping[str, str]]]:
    """moto's S3. Yields an empty bucket, and the environment variables of its clients."""
    server = pytest.importorskip("moto.server", reason="needs moto: pip install '.[test]'")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urlopen(Request(f"{endpoint}/tests", method="PUT"), timeout=START_S).close()
        yield "s3://tests/prefix", aws(endpoint, "anybody", "anything")
        # All servers of a process share one account, so the next would find what this one had.
        urlopen(Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=START_S).close()
    finally:
        running.stop()


def missing_ceph() -> list[str]:
    """The programs of Ceph that are not installed."""
    return [program for program in CEPH if shutil.which(program) is None]


@contextmanager
def ceph_s3(directory: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Ceph's S3 with one monitor and one object server in memory, which do not authenticate each
    other. Yields a bucket, and the environment variables of its clients."""
    monitor_port, port = free_ports(2)
    cluster = directory / "ceph.conf"
    fsid = str(uuid4())
    cluster.write_text(
        f"""[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor_port}/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {directory}
log file = {directory}/$name.log
admin socket = {directory}/$name.asok
keyring = {directory}/keyring
mon data = {directory}/mon
mon allow pool size one = true
mon warn on pool no redundancy = false
mon allow pool delete = true
osd data = {directory}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
"""
    )
    environment = os.environ | {"CEPH_CONF": str(cluster)}

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_S,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    with ExitStack() as stack:

        def start(name: str, *command: str) -> None:
            output = stack.enter_context((directory / f"{name}.out").open("wb"))
            process = subprocess.Popen(
                [*command, "--foreground"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

            def end() -> None:
                process.kill()
                process.wait()

            stack.callback(end)

        (directory / "mon").mkdir()
        (directory / "osd").mkdir()
        (directory / "keyring").touch()
        monmap = str(directory / "monmap")
        address = f"[v2:127.0.0.1:{monitor_port}]"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        run("ceph-mon", "--id", "a", "--mkfs", "--monmap", monmap)
        start("mon", "ceph-mon", "--id", "a")
        osd = str(uuid4())
        run("ceph", "osd", "new", osd)
        run("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", osd)
        start("osd", "ceph-osd", "--id", "0")
        user = ("--uid", "tests", "--access-key", "tests", "--secret-key", "secret")
        run("radosgw-admin", "user", "create", "--display-name", "tests", *user)
        start("rgw", "radosgw", "--name", "client.admin")
        endpoint = f"http://127.0.0.1:{port}"
        deadline_s = monotonic() + START_S
        while True:
            with suppress(OSError):
                urlopen(endpoint, timeout=1).close()
                break
            assert monotonic() < deadline_s, (directory / "rgw.out").read_text()
        variables = aws(endpoint, "tests", "secret")
        _make_bucket(variables, "tests")
        yield "s3://tests/prefix", variables


def _make_bucket(variables: Mapping[str, str], bucket: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        region_name=variables["AWS_REGION"],
        aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=bucket)
