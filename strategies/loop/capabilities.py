"""The common settings that a method supports."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import AUTO, CommonSettings


@dataclass(frozen=True)
class Capabilities:
    """The common settings that a method supports; any other setting is refused before training."""

    vit: bool = True  # the network can be a ViT, whose frozen backbone the server does not know
    tables: bool = True  # the data can be a table
    evidence: bool = True  # the network can be evidential
    late_join: bool = False  # a site may join a run that has begun
    paced_epochs: bool = False  # an epoch may span rounds
    initial_weights: bool = False  # the server sends the weights that sites start from
    # A round may ask only some of the sites, because the others can use the model of an older round
    some_sites: bool = False
    # The allowed values of 'server.aggregation'. Only "mean" if the method does not average, or if
    # another aggregation would protect only a part of the arrays that sites send
    aggregations: tuple[str, ...] = ("mean",)
    # Sites return arrays with the names of those they received, and the server averages them, so
    # they can travel as updates with fewer bytes
    updates: bool = False

    def refuse_more(self, common: CommonSettings, is_table: bool) -> None:
        """Check a run's settings against those that its federated-learning method supports.

        The settings are checked in this order:

        - 'train.epoch-steps', 'train.initial-weights', 'server.sites-per-round' and
          'server.aggregation',
        - 'server.wire-precision' and 'server.wire-down', which compress weights,
        - the network "vit", a data set that is a table, and the loss "evidential".

        Args:
            common: the run's settings.
            is_table: whether the data set is a table.

        Raises:
            SettingError: a setting is not supported. The text says what to set instead.
        """
        refusals = (
            *self._round_faults(common),
            *self._message_faults(common),
            *self._data_faults(common, is_table),
        )
        if refusals:
            raise SettingError(refusals[0])

    def _round_faults(self, common: CommonSettings) -> Iterator[str]:
        """Yield an error text for each setting about rounds that the method does not support.

        The settings are 'train.epoch-steps', 'train.initial-weights', 'server.sites-per-round' and
        'server.aggregation', in this order. Every method supports the aggregation "auto". No method
        supports 'server.sites-per-round' together with 'train.epoch-steps'.
        """
        method = f"method '{common.method}'"
        if common.epoch_steps and not self.paced_epochs:
            yield (
                f"{method} does not take 'train.epoch-steps', epochs that span rounds: set it to 0"
            )
        if common.initial_weights and not self.initial_weights:
            yield f"{method} does not take 'train.initial-weights': leave it empty"
        if common.sites_per_round and not self.some_sites:
            yield f"{method} asks all sites in each round: set 'server.sites-per-round' to 0"
        if common.sites_per_round and common.epoch_steps:
            yield (
                "an epoch that spans rounds, 'train.epoch-steps', asks all sites in each: set "
                "'server.sites-per-round' to 0"
            )
        if common.aggregation not in (AUTO, *self.aggregations):
            yield (
                f"{method} does not take 'server.aggregation' '{common.aggregation}': choose one "
                f"of {', '.join(self.aggregations)}"
            )

    def _message_faults(self, common: CommonSettings) -> Iterator[str]:
        """Yield one error text if updates are compressed but the method does not average updates.

        Updates are compressed unless 'server.wire-precision' and 'server.wire-down' are both
        'fp32'. The field ``updates`` is true for a method that averages updates.
        """
        method = f"method '{common.method}'"
        if common.compresses() and not self.updates:
            yield (
                f"{method} does not average updates of what sites were sent: leave "
                "'server.wire-precision' and 'server.wire-down' at 'fp32'"
            )

    def _data_faults(self, common: CommonSettings, is_table: bool) -> Iterator[str]:
        """Yield an error text for each kind of network, data or loss that the method cannot use.

        The order is: the network "vit", a table as the data set, and the loss "evidential". The
        fields ``vit``, ``tables`` and ``evidence`` say whether the method can use them.

        Args:
            common: the run's settings.
            is_table: whether the data set is a table.
        """
        method = f"method '{common.method}'"
        if common.network == "vit" and not self.vit:
            yield f"{method} does not take network 'vit': choose another"
        if is_table and not self.tables:
            yield (
                f"{method} is of images, and data set '{common.dataset}' is a table: choose another"
            )
        if common.loss == "evidential" and not self.evidence:
            yield (
                f"{method} mixes probabilities, which are not evidence: leave 'train.loss' at "
                "'auto'"
            )
