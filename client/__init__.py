"""What an engine imports: the client, its results, its errors, and the words they use."""

from ..proto import errors as errors
from ..proto.keys import Adapter as Adapter
from ..proto.keys import Key as Key
from ..proto.keys import Namespace as Namespace
from ..proto.keys import context_hash as context_hash
from ..proto.vocabulary import SaveReason as SaveReason
from ..proto.vocabulary import Tier as Tier
from .client import Client as Client
from .hit import Hit as Hit
from .policy import SavePolicy as SavePolicy
from .results import ClaimMode as ClaimMode
from .results import Entry as Entry
from .results import Found as Found
from .results import MissReason as MissReason
from .results import Presence as Presence
from .results import ReserveStatus as ReserveStatus
from .results import RestoreResult as RestoreResult
from .results import SaveOutcome as SaveOutcome
from .results import SaveStatus as SaveStatus
from .transport import ReserveItem as ReserveItem
from .walk import BlockChain as BlockChain
from .writing import Reservation as Reservation
from .writing import SaveItem as SaveItem
