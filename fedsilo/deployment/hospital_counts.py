"""``fedsilo hospital counts``: shows a hospital's noisy sample counts and pays for a new draw."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, RecordDict

from fedsilo.client_app.privacy.ledger import LEDGER, Ledger
from fedsilo.client_app.privacy.noisy_counts import NoisyCounts, draw_again, kept_counts
from fedsilo.client_app.site.node import own_folder, owner_only
from fedsilo.core.errors import SettingError
from fedsilo.deployment.doctor.hospital_checks import build_setup
from fedsilo.deployment.kit import read_kit
from fedsilo.deployment.rules import effective_rules
from fedsilo.deployment.worker.hospital import parse_node_config


@dataclass(frozen=True)
class HospitalCounts:
    """The noisy counts of a hospital, and the privacy ledger that records the epsilon they cost."""

    site: str
    ledger: Ledger  # over all runs
    counts_noise: float  # 'counts-noise' of the rules, in patients; 0 for the default noise

    def describe(self) -> Iterator[str]:
        """Yield a line about each set of noisy counts that this hospital has reported.

        There is a set for each state of the data, so changed data add a set. A line begins with
        the site's name. It has the total of each split, the amount of noise, and whether the
        next run reports counts with new noise. If no counts were reported, the only line says
        so. Nothing is charged to the ledger.
        """
        kept = kept_counts(self.ledger)
        if not kept:
            yield f"{self.site}: no run has asked for counts yet"
        for counts in kept.values():
            yield f"{self.site}: {_describe(counts)}"

    def charge_another_draw(self) -> Iterator[str]:
        """Let the next run add new noise to the sample counts, and charge the epsilon for this.

        The hospital's ledger is charged. One line is yielded, with the new sum of epsilon over all
        runs. In two cases nothing is charged:

        - No counts were reported yet. Then no line is yielded.
        - All counts already get new noise at the next run. Then the line says so.

        This is a generator, so nothing happens before the first line is requested.

        Raises:
            EpsilonSpentError: epsilon would rise above the hospital's cap. Nothing changes then.
            SettingError: the rules do not set the noise, and none can be chosen that fits the cap.
            CheckpointError: the ledger or the stored counts are damaged, or cannot be written.
        """
        kept = kept_counts(self.ledger)
        if not kept:
            return
        if all(counts.again for counts in kept.values()):
            yield f"{self.site}: the next run already draws the counts again; nothing was charged"
            return
        before = self.ledger.epsilon()
        with owner_only():
            noise = draw_again(self.counts_noise, self.ledger)
        yield (
            f"{self.site}: the next run draws the counts again with noise {noise:.3g}; epsilon "
            f"over all runs rises from {before:.4g} to {self.ledger.epsilon():.4g}, of at most "
            f"{self.ledger.cap:g}"
        )


def _describe(counts: NoisyCounts) -> str:
    totals = []
    for split, by_class in counts.counts.items():
        totals.append(f"{split} {sum(by_class)}")
    noise = "noise of a run of an older version"
    if counts.noise:
        noise = f"noise {counts.noise:.3g}"
    if counts.again:
        noise += "; drawn again at the next run"
    return f"{', '.join(totals)} ({noise})"


def open_counts(kit: Path | None, node_config: Sequence[str]) -> HospitalCounts:
    """Build the object that describes a hospital's noisy sample counts and pays for new ones.

    It has the hospital's name, the ledger of epsilon spent, and the noise of the counts. The cap on
    epsilon, its delta and the noise come from the site file and the node config, and the stricter
    value applies. Neither the counts nor the ledger is read here.

    Args:
        kit: the folder of the hospital's opened kit. None means to use only ``node_config``.
        node_config: entries key=value. They override those of the kit.

    Raises:
        SettingError: the hospital's name, its 'state-dir' or a cap on epsilon is missing, or the
            node config cannot be read.
        RefusedError: the site file cannot be used, or the level of trust is ``nobody`` without a
            cap on epsilon.
        KitError: the folder does not contain a kit, or the kit was altered.
    """
    if kit is None:
        node = parse_node_config(node_config)
    else:
        home = kit.expanduser().resolve()
        node = dict(build_setup(read_kit(home), home, node_config).node_config)
    # The rules are read as at a message of Flower, whose other fields they do not need
    context = Context(0, 0, dict(node), RecordDict(), {})
    site = str(node.get("site", ""))
    folder, rules = own_folder(context, site), effective_rules(context)
    if not site or folder is None or not rules.max_epsilon:
        raise SettingError(
            "only a hospital with 'site', 'state-dir' and 'max-epsilon' has noisy counts: name its "
            "opened kit by --kit, or give all three by --node-config"
        )
    ledger = Ledger(folder / LEDGER, rules.max_epsilon, rules.delta, of_all_runs=True)
    return HospitalCounts(site, ledger, rules.counts_noise)
