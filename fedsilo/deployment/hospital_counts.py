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

        Changed data add a set. A line has the total of each split, the amount of noise, and whether
        the next run adds new noise. If no counts were reported, the only line says so.
        """
        kept = kept_counts(self.ledger)
        if not kept:
            yield f"{self.site}: no run has asked for counts yet"
        for counts in kept.values():
            yield f"{self.site}: {_describe(counts)}"

    def charge_another_draw(self) -> Iterator[str]:
        """Let the next run add new noise to the sample counts, and charge the epsilon for this.

        The only line has the new sum of epsilon. Nothing is charged if no counts were reported, or
        if all get new noise anyway. The work begins when the line is requested.

        Raises:
            EpsilonSpentError: epsilon would rise above the hospital's cap. Nothing changes then.
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

    Limits and noise come from the site file and the node's settings. The stricter value applies.
    Entries key=value in ``node_config`` override the kit's. Without ``kit``, they decide alone.

    Raises:
        FedsiloError: the kit or a setting cannot be used, or there is no cap on epsilon.
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
