"""`prefixd.client.connectors.llama_cpp`, the same object."""

import sys
from typing import TYPE_CHECKING

from ..client.connectors import llama_cpp

if TYPE_CHECKING:
    from ..client.connectors.llama_cpp import *  # noqa: F403

sys.modules[__name__] = llama_cpp
