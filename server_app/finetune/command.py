"""``fedsilo finetune``: a finished run's model put to use, beside the same network from scratch.

All weights are trained on the pooled training images of the sites here; validation images choose
the epoch, and test images are read once, for the figures of that epoch.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from client_app.training.compute import choose_compute
from datasets.io.atomic_files import build_folder
from models.contract.errors import SettingError
from server_app.finetune.data import chosen_sites
from server_app.finetune.results import Line, result_table, write_results
from server_app.finetune.settings import SEGMENTATION, network_of, settings_of
from server_app.finetune.tasks import Classification, Segmentation
from server_app.finetune.training import Study, start, train
from server_app.finetune.weights import SCRATCH, Given, Theta, open_start
from server_app.run.progress_bars import make_console


def finetune(options: argparse.Namespace) -> None:
    """Train each start over the seeds, print a table, and write a folder, whole or not at all.

    Raises:
        FedsiloError: a run has not ended or does not fit, settings or data cannot be used, the
            folder is there already, or training diverged.
    """
    _check(options)
    starts = [open_start(options, weights) for weights in options.weights]
    given = [one for one in starts if one]
    _refuse_twins([one.label for one in given])
    network = network_of(options, given)
    settings = settings_of(options, network, [one for one in given if isinstance(one, Theta)])
    downstream = (Segmentation if options.task == SEGMENTATION else Classification)(network)
    data = downstream.data(settings, chosen_sites(settings, options.site))
    compute = choose_compute(settings.device, settings.precision, settings.threads)
    study = Study(downstream, settings, data, compute, options.seeds, options.epochs)
    console = make_console()
    sizes = ", ".join(f"{count} {name}" for name, count in data.sizes().items())
    _say(console, f"{settings.dataset}, {', '.join(data.sites)}: {sizes} images")
    lines = [_line(study, source, console) for source in starts]
    build_folder(options.out, lambda folder: write_results(folder, study, lines, options.images))
    console.print(result_table(study, lines))
    _say(console, str(options.out))


def _check(options: argparse.Namespace) -> None:
    """Refuse options out of range, and to train for a folder that could not be written."""
    for name in ("seeds", "epochs", "images"):
        if getattr(options, name) < 1:
            raise SettingError(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if twice := {one for one in options.weights if options.weights.count(one) > 1}:
        raise SettingError(f"--weights names {', '.join(sorted(twice))} twice: name each once")
    if options.from_site and not any(Path(one).expanduser().is_dir() for one in options.weights):
        raise SettingError("--from-site is a site of a run, and --weights names none")
    out: Path = options.out
    if out.exists():
        raise SettingError(f"{out} is there already: remove it, or give another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise SettingError(f"{out.parent} cannot be written to: give another --out")


def _refuse_twins(labels: Sequence[str]) -> None:
    """Refuse two starts of one name: their lines could not be told apart."""
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise SettingError(
            f"two of --weights are named '{twice[0]}': rename the folder of one, so that their "
            "lines can be told apart"
        )


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _line(study: Study, source: Theta | Given | None, console: Console) -> Line:
    """Train one start over the seeds."""
    label, taken, found = source.label if source else SCRATCH, None, []
    for seed in range(study.seeds):
        network, taken = start(study, source, seed)
        if taken and seed == 0:
            _say(console, f"{label}: {taken.told()}")
        found.append(one := train(study, network, seed))
        headline = study.downstream.headline
        told = f"val {headline} {one.val.get(headline, math.nan):.3f}"
        _say(
            console,
            f"{label}, seed {seed}: epoch {one.epoch} of {study.epochs} is best, {told}; "
            f"{one.seconds:.0f} s",
        )
    return Line(label, getattr(source, "method", ""), taken, tuple(found))
