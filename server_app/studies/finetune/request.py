"""What ``fedsilo finetune`` is asked to do, and what it refuses before it opens anything."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.run.arguments import refuse_below

CLASSIFICATION, SEGMENTATION = "classification", "segmentation"


@dataclass(frozen=True)
class FinetuneRequest:
    """One call of fine-tuning."""

    task: str  # classification or segmentation
    weights: Sequence[str]  # what to start from: run directories, files, timm:NAME or scratch
    out: Path  # the folder to write; it must not exist
    dataset: str | None = None  # None: the first run's
    sites: Sequence[str] = ()  # whose images are pooled, or empty for all sites
    network: str | None = None  # None: the first of the task that takes the weights
    epochs: int = 20
    seeds: int = 3  # how many, from 0
    changes: Sequence[str] = ()  # settings as key=value, over the run's or the default
    device: str | None = None  # auto, cpu, cuda or cuda:N, or None for auto
    data_dir: Path | None = None  # None: the run's
    from_site: str | None = None  # use this site's own model of a run, or None for the shared one
    state_dir: Path | None = None  # that site's private state, or None for the run's
    images: int = 4  # how many test images are painted
    # Passes in which a network without an array of a run's ViT learns its tokens, or 0 to refuse it
    distil_epochs: int = 0

    def check(self) -> None:
        """Raise a SettingError for what is out of range or could not be written."""
        for name in ("seeds", "epochs", "images"):
            refuse_below(1, name, getattr(self, name))
        if self.distil_epochs < 0:
            raise SettingError(
                f"--distil-epochs is {self.distil_epochs}; it must be 0 or more: give 5, or leave "
                "it out"
            )
        if twice := {weights for weights in self.weights if self.weights.count(weights) > 1}:
            raise SettingError(f"--weights names {', '.join(sorted(twice))} twice: name each once")
        if self.from_site and not any(Path(name).expanduser().is_dir() for name in self.weights):
            raise SettingError("--from-site is a site of a run, and --weights names none")
        refuse_target(self.out, "another --out")


def refuse_target(target: Path, instead: str) -> None:
    """Raise a SettingError for a file or folder that exists or could not be written.

    ``instead`` names the option that gives another.
    """
    if target.exists():
        raise SettingError(f"{target} exists already: remove it, or give {instead}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise SettingError(f"{target.parent} cannot be written to: give {instead}")
