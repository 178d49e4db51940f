"""Each method as a ``flwr.serverapp.strategy.Strategy``, for use in any ServerApp.

A round of fedsilo may ask sites several times, but Flower asks once, between ``configure_train``
and ``aggregate_train``. So ``configure_train`` runs the whole round over the given grid and leaves
Flower nothing to send. Flower's own ``start`` is unchanged. fedsilo's runs do not use this class.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsilo.core.errors import unknown_key
from fedsilo.core.messages import EVALUATE, INCOMING, TRAINED
from fedsilo.core.methods import class_name, known_defaults, settings_class
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import current_settings, tell_renamed
from fedsilo.core.settings_schema import Value, build, values_of
from fedsilo.datasets.registry import data_set
from fedsilo.models.privacy.promises import check_privacy_settings
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import meet_sites
from fedsilo.strategies.meeting.simulated_sites import with_all_sites
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.records import from_record, to_record
from fedsilo.strategies.wire.reply import Reply


class FlowerStrategy(Strategy):
    """A method of fedsilo behind Flower's Strategy interface.

    Args:
        run_config: the run's settings, the same as the ClientApp receives (``context.run_config``).
            None for the defaults.

    Attributes:
        rounds: the number of rounds in the settings, for ``start(..., num_rounds=)``.

    Raises:
        SettingError: a setting has the wrong type, is out of range, or does not suit the method.
    """

    method: ClassVar[str] = ""

    def __init__(self, run_config: Mapping[str, Value] | None = None) -> None:
        values = {**current_settings(run_config or {}), "method": self.method}
        tell_renamed()
        known = known_defaults()
        for key in values:
            if key not in known:
                raise unknown_key(key, known)
        own_class = settings_class(self.method)
        # Flower's run config has the settings of every method
        self._common = build(CommonSettings, values_of(CommonSettings, values))
        self._own: Any = build(own_class, values_of(own_class, values))
        is_table = data_set(self._common.dataset).is_table
        strategy_class(self.method).capabilities.refuse_more(self._common, is_table)
        self._own.check(self._common, is_table)
        check_privacy_settings(self._common, is_table)
        self._metrics = _MeanMetrics()
        # simulated sites keep their private state here
        self._folder = TemporaryDirectory(prefix="fedsilo-")
        self._loop: RoundLoop | None = None
        self.rounds = self._common.rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run one whole round over ``grid``, from the first message to the new model.

        No messages are returned, because Flower has nothing left to send. The first call starts
        from ``arrays`` if they are not empty, and later calls ignore them. If the method ends the
        run early (``why_finished``), no round is run. ``server_round`` and ``config`` are ignored.

        Raises:
            SiteError: too few sites can take part, or too few gave a usable reply.
        """
        loop = self._open_loop(grid, arrays)
        if not loop.method.why_finished(loop.state):
            loop.run_round()
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the newest round, and the sites' metrics.

        The metrics are the newest that sites have measured, possibly in an earlier round. Each is
        the mean over the sites, weighted by their training samples. Before the first round both
        results are None. The arguments are ignored.
        """
        if self._loop is None:
            return None, None
        model = self._loop.method.model(self._loop.state)
        return to_record(model), self._metrics.record()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let all sites measure the final model if ``server_round`` is 'server.rounds'.

        In any other round nothing happens, even if the method has ended early. Nothing happens
        either if ``configure_train`` was never called. No messages are returned, because the
        measuring is over when this call returns. ``arrays`` and ``config`` are ignored.

        Raises:
            SiteError: too few sites gave a usable reply.
        """
        if server_round == self.rounds and self._loop:
            self._loop.evaluate()
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the final model's metrics if ``server_round`` is 'server.rounds', otherwise None.

        Each metric is the mean over the sites, weighted by their training samples. The record is
        empty if no site has measured a model. ``replies`` is not used, because
        ``configure_evaluate`` has already read the replies.
        """
        if server_round != self.rounds:
            return None
        return self._metrics.record()

    def summary(self) -> None:
        """Print nothing, because the settings are already in the run config."""

    def _open_loop(self, grid: Grid, arrays: ArrayRecord) -> RoundLoop:
        """Return the round loop, which the first call creates.

        The first call asks each connected site to describe itself. If ``arrays`` are not empty,
        they become the starting model. Later calls ignore both arguments.

        Raises:
            SiteError: too few sites can take part.
        """
        if self._loop is None:
            name = self._common.run_name or f"flower-{grid.run.run_id}"
            self._common = replace(self._common, run_name=name)
            grid = with_all_sites(grid, self._common)
            participants = meet_sites(grid, self._common)
            method = strategy_class(self.method)(self._common, self._own, participants)
            self._loop = RoundLoop(method, [self._metrics], self._folder.name)
            if len(arrays):
                self._loop.state = replace(self._loop.state, arrays=from_record(arrays))
            self._loop.connect(grid, self._common.reply_timeout)
        return self._loop


_MEASURED = (f"{INCOMING}.", f"{TRAINED}.")  # the prefixes of measurements


class _MeanMetrics(Hook):
    """Stores the replies of the last phase that has measurements."""

    def __init__(self) -> None:
        self._replies: Mapping[str, Reply] = {}

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Store ``replies`` in place of the earlier ones, if they have a measurement of a model.

        A measurement is a metric of the received model ("incoming.") or of the trained model
        ("trained."). In the phase "evaluate" only metrics of the received model count. Without a
        measurement the earlier replies stay. ``round_`` is not used.
        """
        # Metrics of training do not count in an evaluation, because the trained weights are older
        prefixes: tuple[str, ...] = _MEASURED
        if phase == EVALUATE:
            prefixes = (f"{INCOMING}.",)
        for reply in replies.values():
            if any(key.startswith(prefixes) for key in reply.metrics):
                self._replies = replies

    def record(self) -> MetricRecord:
        """Return the mean of each stored metric over the sites, weighted by their training samples.

        Only metrics whose key starts with "incoming." or "trained." count. The mean is over the
        sites that sent the metric. If these sites together have no samples, the metric is left out.
        The keys are sorted. The record is empty if no replies are stored.
        """
        totals: dict[str, float] = {}
        examples: dict[str, int] = {}
        for reply in self._replies.values():
            for key, value in reply.metrics.items():
                if key.startswith(_MEASURED):
                    totals[key] = totals.get(key, 0.0) + value * reply.examples
                    examples[key] = examples.get(key, 0) + reply.examples
        means: dict[str, Any] = {}
        for key in sorted(totals):
            if examples[key]:  # a mean over no samples has no value
                means[key] = totals[key] / examples[key]
        return MetricRecord(means)


def flower_strategy(name: str) -> type[FlowerStrategy]:
    """Create the Flower Strategy class for a federated-learning method, such as "uefl".

    The class is a subclass of ``FlowerStrategy``. It has the method's docstring as help text, and
    behaves the same otherwise. Each call makes a new class.

    Raises:
        SettingError: no method is called ``name``.
    """
    doc = strategy_class(name).__doc__
    return type(class_name(name), (FlowerStrategy,), {"method": name, "__doc__": doc})
