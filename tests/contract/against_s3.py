"""The contract of shared stores on a real S3: Ceph's, from Debian's packages.

    python -m tests.contract.against_s3      # needs radosgw, ceph-mon, ceph-osd and ceph-common

With PREFIXD_TEST_S3_URL=s3://bucket/prefix, and AWS_ENDPOINT_URL and so on, it runs against this
bucket instead, and leaves the bucket empty.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from ..support.s3 import CEPH, S3_URL, ceph_s3, missing_ceph

TESTS: Final = (
    "tests/contract/test_shared_store_contract.py",
    "tests/server/sharing/test_object_store.py",
    "tests/server/sharing/test_behind_nodes.py",
)


def main() -> int:
    with ExitStack() as stack:
        if S3_URL not in os.environ:
            if missing := missing_ceph():
                print(
                    f"{', '.join(missing)} of {', '.join(CEPH)} is not installed", file=sys.stderr
                )
                return 2
            directory = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))
            url, variables = stack.enter_context(ceph_s3(directory))
            os.environ |= variables
            os.environ[S3_URL] = url
        return int(pytest.main(["-q", "-rs", "-k", "s3", *TESTS]))


if __name__ == "__main__":
    sys.exit(main())
