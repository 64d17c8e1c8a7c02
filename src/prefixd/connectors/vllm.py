"""`prefixd.client.connectors.vllm`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import vllm

if TYPE_CHECKING:
    from ..client.connectors.vllm import *  # noqa: F403

sys.modules[__name__] = vllm
