"""FedAvg whose server goes only a part of the way to the mean of the sites' models."""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.strategies.methods.fedavg import FedAvg


@dataclass(frozen=True)
class MineSettings(OwnSettings):
    """The setting ``mine.step``."""

    step: float = setting(0.5, "share of the way to the mean", gt=0.0, le=1.0)


class Mine(FedAvg):
    """The server's side; a site's side is FedAvg's."""

    def average(self, replies, before, equal=False):
        """Return the arrays between those before the round and the mean."""
        mean, step = super().average(replies, before, equal), self.settings.step
        return {name: before[name] + step * (mean[name] - before[name]) for name in mean}
