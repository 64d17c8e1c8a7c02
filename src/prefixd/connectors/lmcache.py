"""`prefixd.client.connectors.lmcache`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import lmcache

if TYPE_CHECKING:
    from ..client.connectors.lmcache import *  # noqa: F403

sys.modules[__name__] = lmcache
