"""Runs a function as another user. Only root can do that."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, Final

import pytest

#: Users that are nobody's here.
VICTIM: Final = 424_243
STRANGER: Final = 424_242

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can run a process as another user"
)


def run_as(uid: int, function: Callable[[], Any]) -> Any:
    """What the function returns in a forked process of this user. Fails if it raises."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            outcome = (True, function())
        except BaseException:
            outcome = (False, traceback.format_exc())
        try:
            os.write(writer, pickle.dumps(outcome))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        returned, result = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    assert returned, result
    return result
