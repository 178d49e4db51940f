"""FedRep at the server: FedPer's rounds; what differs are the silos' steps."""

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import AGGREGATIONS, CommonSettings
from fedsilo.models.methods.fedrep import FedRepSettings
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.methods.fedper import FedPer


class FedRep(FedPer):
    """Averages the representation."""

    title = "FedRep"
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS, secure=True)

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: FedRepSettings) -> None:
        """Refuse a single step, which cannot train one after the other."""
        if common.local_steps == 1:
            raise SettingError(
                "setting 'local-steps' is 1, and fedrep trains the head first, then the rest: set "
                "it to 2 or more, or choose 'fedper'"
            )
