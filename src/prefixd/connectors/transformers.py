"""`prefixd.client.connectors.transformers`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import transformers

if TYPE_CHECKING:
    from ..client.connectors.transformers import *  # noqa: F403

sys.modules[__name__] = transformers
