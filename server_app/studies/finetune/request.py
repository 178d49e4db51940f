"""What is asked of fine-tuning, and what can be refused before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.models.contract.errors import SettingError

CLASSIFICATION, SEGMENTATION = "classification", "segmentation"


@dataclass(frozen=True)
class FinetuneRequest:
    """One call of fine-tuning.

    Attributes:
        task: ``classification`` or ``segmentation``.
        weights: what to start from: run directories, files, ``timm:NAME`` or ``scratch``.
        out: the folder to write, not there yet.
        dataset: its name; None: the first run's.
        sites: whose images are pooled; none: all sites'.
        network: its name among those of the task; None: the one that takes the weights.
        epochs: passes over the training images.
        seeds: how many, from 0.
        changes: settings as ``key=value``, instead of the run's or the default.
        device: auto, cpu, cuda or cuda:N; None: auto.
        data_dir: the data directory; None: the run's.
        from_site: the site whose own model of a run is meant; None: the shared one.
        state_dir: that site's private state; None: the run's.
        images: how many test images are drawn.
        distil_epochs: passes by which a network learns the tokens of a run's ViT, where it takes
            none of its arrays; 0: such a run is refused.
    """

    task: str
    weights: Sequence[str]
    out: Path
    dataset: str | None = None
    sites: Sequence[str] = ()
    network: str | None = None
    epochs: int = 20
    seeds: int = 3
    changes: Sequence[str] = ()
    device: str | None = None
    data_dir: Path | None = None
    from_site: str | None = None
    state_dir: Path | None = None
    images: int = 4
    distil_epochs: int = 0

    def check(self) -> None:
        """Refuse what is out of range, and to train for a folder that could not be written.

        Raises:
            SettingError: so it is.
        """
        for name, number in (
            ("seeds", self.seeds),
            ("epochs", self.epochs),
            ("images", self.images),
        ):
            if number < 1:
                raise SettingError(f"--{name} is {number}; it must be at least 1")
        if self.distil_epochs < 0:
            raise SettingError(
                f"--distil-epochs is {self.distil_epochs}; it must be 0 or more: give 5, or leave "
                "it out"
            )
        if twice := {weights for weights in self.weights if self.weights.count(weights) > 1}:
            raise SettingError(f"--weights names {', '.join(sorted(twice))} twice: name each once")
        if self.from_site and not any(
            Path(weights).expanduser().is_dir() for weights in self.weights
        ):
            raise SettingError("--from-site is a site of a run, and --weights names none")
        refuse_target(self.out, "another --out")


def refuse_target(target: Path, instead: str) -> None:
    """Refuse to train for a file or folder that is there already or could not be written.

    Args:
        target: what is to be written.
        instead: the option that names another.

    Raises:
        SettingError: so it is.
    """
    if target.exists():
        raise SettingError(f"{target} is there already: remove it, or give {instead}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise SettingError(f"{target.parent} cannot be written to: give {instead}")
