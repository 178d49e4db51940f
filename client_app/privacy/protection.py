"""Differential privacy at a site: no array leaves without clipping, noise and a line in the ledger.

The ledger is the site's own file beside its states of the run. It counts every noisy message, also
one that a server lost and asks for again, and it is written before the message leaves. A hospital
with a cap of its own has another one, of all its runs: a server chooses a run's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsilo.client_app.privacy.noise_source import noise_source
from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.models.contract.errors import (
    CheckpointError,
    EpsilonSpentError,
    RefusedError,
    SiteError,
)
from fedsilo.models.contract.messages import DP_RELEASES, Instruction
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.privacy.accountant import SPENT, combined_multiplier, epsilon
from fedsilo.models.privacy.gaussian_mechanism import clip_and_noise

LEDGER = "privacy-ledger.json"


@dataclass(frozen=True)
class OwnCap:
    """A hospital's own cap: what all its runs together may reveal, whatever servers ask.

    Attributes:
        ledger: counts the noisy messages of all runs, by their noise multiplier.
        most: the cap on epsilon.
        delta: at which it holds.
    """

    ledger: Path
    most: float
    delta: float


def protect(
    arrays: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    settings: CommonSettings,
    ledger: Path,
    *,
    site: str,
    instruction: Instruction,
    simulated: bool,
    cap: OwnCap | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the arrays of a reply as they may leave the site, and what the server is told of it.

    Without 'clip-norm' they leave as they are, but not from a hospital that has a cap of its own;
    with it but without noise (secure aggregation) clipped.

    Args:
        arrays: what the method would send, by name.
        reference: what clipping measures them from, by name.
        settings: of the run, with the hospital's own limits over them.
        ledger: counts the noisy messages of this run.
        site: the site's name.
        instruction: the message that is answered.
        simulated: whether noise comes from the run's seed.
        cap: the hospital's own over all its runs.

    Raises:
        SiteError: epsilon is spent, the cap means nothing without clipping, or training diverged.
        CheckpointError: a ledger is damaged, or of other noise.
    """
    summed = settings.secure_aggregation != "none"
    if not settings.noise_multiplier:
        if arrays and settings.max_epsilon:
            raise RefusedError(
                f"site {site} has a cap on epsilon and the run's 'clip-norm' is 0: without "
                "clipping there is no epsilon; set 'clip-norm' and 'noise-multiplier', or leave "
                "the site out"
            )
        if settings.clip_norm:
            return clip_and_noise(arrays, reference, settings.clip_norm, 0.0, None, summed), {}
        return dict(arrays), {}
    if not arrays:
        return {}, {DP_RELEASES: read_ledger(ledger, settings)}
    refuse_diverged(arrays)
    releases = spend(ledger, settings, cap)
    key = ("privacy", instruction.round, instruction.step, site)
    rng = noise_source(simulated, settings.seed, *key)
    noisy = clip_and_noise(arrays, reference, settings.clip_norm, settings.noise_multiplier, rng)
    return noisy, {DP_RELEASES: releases}


def spend(path: Path, common: CommonSettings, own: OwnCap | None) -> int:
    """Enter one more noisy message in the run's ledger and the hospital's own; return the count.

    Messages that are answered side by side wait for each other here.

    Raises:
        SiteError: it would bring epsilon above a cap; nothing is entered.
        CheckpointError: a ledger is damaged, or of other noise.
    """
    with (own_ledger(own.ledger) if own else run_ledger(path)).locked():
        releases = read_ledger(path, common)
        refuse_spent(releases, common)
        if own:
            _enter(own, common.noise_multiplier)
        content = {"releases": releases + 1, **_kind(common), "delta": common.delta}
        run_ledger(path).write(content)
    return releases + 1


def spend_measurements(own: OwnCap, noise_multiplier: float) -> None:
    """Enter the noisy measurements of one message in the hospital's ledger of all runs.

    Raises:
        SiteError: it would bring the hospital's epsilon above its cap; nothing is entered.
        CheckpointError: the ledger is damaged.
    """
    with own_ledger(own.ledger).locked():
        _enter(own, noise_multiplier)


def _enter(own: OwnCap, noise_multiplier: float) -> None:
    after = affordable(own, noise_multiplier)
    own_ledger(own.ledger).write({"releases": {repr(z): n for z, n in sorted(after.items())}})


def affordable(own: OwnCap, noise_multiplier: float) -> dict[float, int]:
    """Return the hospital's ledger with one more noisy message, which is not entered.

    Raises:
        SiteError: it would bring the hospital's epsilon above its cap.
        CheckpointError: the ledger is damaged.
    """
    releases = read_own_ledger(own.ledger)
    releases_after = {**releases, noise_multiplier: releases.get(noise_multiplier, 0) + 1}
    epsilon_before = epsilon(combined_multiplier(releases), 1, own.delta)
    epsilon_after = epsilon(combined_multiplier(releases_after), 1, own.delta)
    if epsilon_after > own.most:
        raise EpsilonSpentError(
            f"{SPENT}: {sum(releases.values())} noisy messages of all runs are "
            f"{epsilon_before:.4g} at delta {own.delta:g}, one more would make it "
            f"{epsilon_after:.4g}, above the hospital's own 'max-epsilon' {own.most:g}; "
            "nothing left the site"
        )
    return releases_after


def own_ledger(path: Path) -> OwnFile:
    """Return the hospital's ledger of all runs."""
    lost = "bring it back; what was spent in all runs is known by nothing else"
    return OwnFile(path, f"the hospital's privacy ledger {path.name}", lost)


def run_ledger(path: Path) -> OwnFile:
    """Return the ledger of one run."""
    lost = (
        "bring it back, or choose another 'run-name'; what was spent in this run is known by "
        "nothing else"
    )
    return OwnFile(path, f"the privacy ledger {path}", lost)


def read_own_ledger(path: Path) -> dict[float, int]:
    """Return the noisy messages of all runs by noise multiplier; empty if there is no ledger yet.

    Raises:
        CheckpointError: it is damaged.
    """

    def parse(content: Any) -> dict[float, int]:
        releases = {float(z): int(count) for z, count in content["releases"].items()}
        if any(z <= 0 or count < 0 for z, count in releases.items()):
            raise ValueError("releases")
        return releases

    return own_ledger(path).read(parse, {})


def read_ledger(path: Path, common: CommonSettings) -> int:
    """Return how many noisy messages the ledger counts; 0 if there is none yet.

    Raises:
        CheckpointError: it is damaged, or counts messages of other noise.
    """
    wanted = _kind(common)

    def parse(content: Any) -> tuple[int, dict[str, float]]:
        releases = content["releases"]
        if type(releases) is not int or releases < 0:
            raise ValueError(f"releases {releases!r}")
        return releases, {key: float(content[key]) for key in wanted}

    releases, kinds = run_ledger(path).read(parse, (0, wanted))
    if kinds != wanted:
        raise CheckpointError(
            f"the privacy ledger {path} counts messages of {kinds}, and the run asks for "
            f"{wanted}: choose another 'run-name'"
        )
    return releases


def _kind(common: CommonSettings) -> dict[str, float]:
    return {"clip-norm": common.clip_norm, "noise-multiplier": common.noise_multiplier}


def refuse_diverged(arrays: Mapping[str, Tensor]) -> None:
    """Refuse values that are not finite: noise would hide that training diverged.

    Raises:
        SiteError: it names the array.
    """
    for name, array in arrays.items():
        if not array.isfinite().all():
            raise SiteError(
                f"training diverged, '{name}' holds values that are not finite: lower "
                "'learning-rate'; nothing left the site"
            )


def refuse_spent(releases: int, common: CommonSettings) -> None:
    """Refuse one more message where it would bring epsilon above 'max-epsilon'; 0: no limit.

    Raises:
        SiteError: it gives epsilon before and after.
    """
    z, delta, cap = common.noise_multiplier, common.delta, common.max_epsilon
    if not cap or (after := epsilon(z, releases + 1, delta)) <= cap:
        return
    raise EpsilonSpentError(
        f"{SPENT}: {releases} noisy messages of this run are {epsilon(z, releases, delta):.4g} at "
        f"delta {delta:g}, one more would make it {after:.4g}, above the site's 'max-epsilon' "
        f"{cap:g}; nothing left the site"
    )
