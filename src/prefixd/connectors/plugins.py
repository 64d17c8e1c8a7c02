"""`prefixd.client.connectors.plugins`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import plugins

if TYPE_CHECKING:
    from ..client.connectors.plugins import *  # noqa: F403

sys.modules[__name__] = plugins
