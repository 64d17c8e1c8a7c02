"""`prefixd.client.connectors.sglang`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import sglang

if TYPE_CHECKING:
    from ..client.connectors.sglang import *  # noqa: F403

sys.modules[__name__] = sglang
