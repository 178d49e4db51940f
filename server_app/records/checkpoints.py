"""Writes a run's checkpoints, and the models of its best and its last round.

A resumed run continues from the newest intact checkpoint. The best round is the one with the best
validation metric, and training may stop early because of it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.core.metric_names import best_direction
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import current_settings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.server_app.config.settings import differences
from fedsilo.server_app.records.recorder import ALL, Recorder
from fedsilo.server_app.records.run_directory import BEST, RunDirectory
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import Method, State
from fedsilo.strategies.meeting.participants import Participants

KEPT = 2  # checkpoints; sites keep the same number of states, so any kept round can be resumed


class CheckpointHook(Hook):
    """Writes one file per round with the states of the run and its hooks, and keeps the newest two.

    A resumed run must have the same ``settings``. Only hooks that have a name are stored.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Value],
        hooks: Sequence[Hook],
        state_class: type[State] = State,
    ) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.hooks = {hook.name: hook for hook in hooks if hook.name}
        self.state_class = state_class

    def round_ended(self, state: State) -> None:
        """Write this round's checkpoint, then delete all checkpoints except the newest two.

        The checkpoint has the method's state and the settings that decide the result. It also has
        the state of each hook (observer of the run) that has a name. The file is
        ``round-NNNNNN.safetensors``, with the round as six digits. If the process is killed while
        it writes, the older checkpoints stay intact.
        """
        of_hooks = {}
        for name, hook in self.hooks.items():
            of_hooks[name] = hook.state()
        facts = {**state.facts(), "settings": self.settings, "hooks": of_hooks}
        save_state(self.folder / f"round-{state.round:06d}.safetensors", state.arrays, facts)
        # Removed only after the new one is written, so that one intact checkpoint always exists
        for old in sorted(self.folder.glob("round-*.safetensors"))[:-KEPT]:
            old.unlink()

    def resume(self) -> State | None:
        """Load the newest intact checkpoint, and restore the states of the run's hooks from it.

        Hooks are observers of the run that keep records. A damaged file is skipped with a warning
        in the log, and the next older file is tried. An intact file that does not fit this run is
        an error, even if an older file would fit.

        Returns:
            The method's state in the checkpoint, or None if the folder has no checkpoint.

        Raises:
            CheckpointError: the checkpoint has other settings or another round than its name,
                another version wrote it, a CSV file of the run was altered, or no checkpoint is
                intact.
            SettingError: the checkpoint has a removed setting without its former default, or a
                setting has a value that fedsilo has removed.
        """
        files = sorted(self.folder.glob("round-*.safetensors"))
        for path in reversed(files):
            # Only a damaged file is skipped: other settings must not lead to an older state
            try:
                arrays, facts = load_state(path)
            except CheckpointError as error:
                logging.getLogger("flwr").warning("%s: trying the one before it", error)
                continue
            try:
                self._refuse_other_settings(facts["settings"], path)
                for name, hook in self.hooks.items():
                    hook.restore(facts["hooks"][name])
                state = self.state_class.restored(arrays, facts)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{path} was written by another version of fedsilo ({type(error).__name__}: "
                    f"{one_line(error, 100)}): start a new run"
                ) from None
            # A renamed file would make the run repeat or skip rounds
            if path.stem != f"round-{state.round:06d}":
                raise CheckpointError(f"{path} holds round {state.round}: start a new run")
            return state
        if files:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} is intact "
                f"({', '.join(path.name for path in files)}): start a new run"
            )
        return None

    def _refuse_other_settings(self, recorded: Mapping[str, Value], path: Path) -> None:
        """Check that a checkpoint was written with this run's settings.

        Args:
            recorded: the settings in the checkpoint, by key.
            path: the checkpoint, for errors.

        Raises:
            CheckpointError: a setting differs. The removed setting 'wire-feedback' counts as
                different if it was on and 'server.wire-precision' is "bf16". Otherwise it had no
                effect.
            SettingError: a removed setting does not have its former default, or a setting has a
                value that fedsilo has removed.
        """
        before = current_settings(recorded, str(path), quietly=True)
        fault = ""
        # The removed setting made sites add rounding errors to their next update
        if recorded.get("wire-feedback") and before["server.wire-precision"] == "bf16":
            fault = (
                "belongs to a run with 'wire-feedback', but this version has no such setting: "
                "start a new run"
            )
        other = differences(before, self.settings)
        if other and not fault:
            fault = (
                f"belongs to a run with other settings: {other}; resume with the same settings, or "
                "choose another 'run.name'"
            )
        if fault:
            raise CheckpointError(f"{path} {fault}")


def statistics_as_lists(pooled: FeatureStatistics) -> dict[str, Any]:
    """Convert the pooled means and standard deviations of a table's columns to lists for JSON.

    fedsilo standardises the table's columns with these numbers. The keys are "mean" and "std", and
    each list has one number per column.
    """
    statistics = {}
    for name, values in vars(pooled).items():
        statistics[name] = values.tolist()
    return statistics


def write_model(directory: RunDirectory, name: str, method: Method, state: State) -> bool:
    """Write the global model after a round to a file of the run directory.

    The file also has the method's name and the state's facts, such as the round. If the run has
    pooled means and standard deviations for standardising inputs, the file has these too.

    Args:
        directory: the run directory.
        name: the file's name in that directory. An existing file is replaced.
        method: the run's method, which picks the model out of the state.
        state: the state after a round.

    Returns:
        Whether the file was written. It is not written if the method has no global model.
    """
    pooled, model = method.participants.standardisation(), method.model(state)
    if not model:
        return False
    facts: dict[str, Any] = {"method": method.common.method, **state.facts()}
    if pooled:
        facts["figures"] = statistics_as_lists(pooled)
    save_state(directory.path / name, model, facts)
    return True


class BestRound(Hook):
    """Keeps the model of the round with the best validation metric, and stops training early.

    Sites measure a round's model in the next round, so the run stops one round after
    'server.patience' has run out. A round without a measurement does not use up patience. The
    recorder must come before this hook in the list of hooks.
    """

    name = "best-round"

    def __init__(
        self, common: CommonSettings, directory: RunDirectory, recorder: Recorder, method: Method
    ) -> None:
        self.common, self.directory = common, directory
        self.recorder, self.method = recorder, method
        # The best round: its number, metric and value, and whether its model is kept
        self.best: dict[str, Any] = {}
        # The number of measured rounds since the best one
        self.waited = 0
        # The state that the sites measure in the next round
        self.unjudged: State | None = None

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Keep the state that the run starts from, so that its model can be judged one round later.

        A model is judged only after the next round, in which the sites measure it. A resumed run
        starts from the state after a finished round, so that round's model is still to be judged. A
        new run starts from round 0. That model is never judged, because no round has trained it.
        """
        self.unjudged = state

    def round_ended(self, state: State) -> None:
        """Judge the model of the previous round, and keep the new state to be judged next.

        The sites have measured the previous round's model during this round. The mean over sites of
        'server.early-stopping-metric' is compared with the best mean so far. A better model is
        written to the file of the best round.
        """
        self._judge_round()
        self.unjudged = state

    def run_ended(self, state: State) -> None:
        """Judge the model of the last round, which the final evaluation has measured."""
        self._judge_round()

    def why_finished(self, state: State) -> str | None:
        """Return the reason to stop training early, or None to continue.

        Only rounds whose model the sites have measured on validation samples count. Training stops
        if at least 'server.patience' such rounds have followed the best one. An equal metric is not
        better.

        Args:
            state: the state after the newest finished round, whose number is in the reason.
        """
        if self.waited < self.common.patience:
            return None
        return (
            f"stopped early after round {state.round} of {self.common.rounds}: validation "
            f"{self.best['metric']} was best after round {self.best['round']} "
            f"({self.best['value']:.4f}) and no better in {self.waited} measured rounds"
        )

    def state(self) -> Any:
        """Return the best round so far, and the number of rounds measured since then."""
        return {"best": self.best, "waited": self.waited}

    def restore(self, state: Any) -> None:
        """Restore the values that ``state`` returned."""
        self.best, self.waited = dict(state["best"]), int(state["waited"])

    def _judge_round(self) -> None:
        state = self.unjudged
        if state is None or not state.round:
            return
        value = self._mean_over_sites(self.recorder.values(state.round, "val"))
        # NaN means that this round was not measured
        if not math.isfinite(value):
            return
        # Rounds without a measurement do not use up the patience
        self.waited += 1
        if not self._is_better(value):
            return
        self.waited = 0
        self.best = {
            "round": state.round,
            "metric": self.common.early_stopping_metric,
            "value": value,
            "model": write_model(self.directory, BEST, self.method, state),
        }

    def _is_better(self, value: float) -> bool:
        if not self.best:
            return True
        gain = value - float(self.best["value"])
        # Entropy is good neither high nor low, but a run that stops by it wants it low
        if best_direction(self.common.early_stopping_metric) < 1:
            gain = -gain
        return gain > 0

    def _mean_over_sites(self, values: Mapping[str, Mapping[str, float]]) -> float:
        """Return the mean over sites of 'server.early-stopping-metric' on validation samples.

        A site's weight is the number of its validation samples. Sites that did not report the
        metric are left out. If no site with validation samples reported it, the result is NaN. With
        secure aggregation, only the mean over all samples is known, under the name "all". That mean
        is returned unchanged.

        Args:
            values: site -> metric -> value.
        """
        metric, facts = self.common.early_stopping_metric, self.method.participants.facts
        reported = {site: row[metric] for site, row in values.items() if metric in row}
        # Sites weigh by their samples, so that a hospital of ten patients does not decide
        # Secure sums are over all samples already
        if ALL in reported:
            return reported[ALL]
        samples, total = 0, 0.0
        for site, value in reported.items():
            size = facts[site].sizes.get("val", 0)
            samples += size
            total += size * value
        if not samples:
            return math.nan
        return total / samples
