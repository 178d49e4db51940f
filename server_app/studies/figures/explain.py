"""``fedsilo explain``: why a finished run's model answers as it does for one patient of a site.

It runs where the patient's data are. Nothing is sent, and only files that are named are written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.server_app.studies.figures.learning_curves import write_picture
from fedsilo.server_app.studies.finished_site import finished_site

if TYPE_CHECKING:
    from fedsilo.client_app.explain.sample import Explanation


def explain(
    run_dir: Path,
    site: str,
    row: int,
    split: str = "test",
    data_dir: Path | None = None,
    state_dir: Path | None = None,
) -> Explanation:
    """Return why the model of a finished run answers as it does for one patient.

    Args:
        run_dir: the run directory.
        site: the patient's site; its data must be here.
        row: the patient's row of the split, from 0.
        split: train, val or test.
        data_dir: the data directory, or None for the run's own.
        state_dir: the folder of the site's private state, or None for the run directory's.

    Raises:
        FedsiloError: the run has not ended, its method explains nothing, or there is no such row.
    """
    from fedsilo.client_app.explain.sample import explain_sample  # PyTorch, which takes seconds

    return explain_sample(finished_site(run_dir, site, data_dir, state_dir), split, row)


def save_explanation(
    explanation: Explanation, document: Path | None = None, picture: Path | None = None
) -> None:
    """Write an explanation as JSON, as PNG, or as both, where a file is named."""
    if document:
        write_atomically(document, json.dumps(explanation.document(), indent=2) + "\n")
    if picture:
        write_picture(picture, explanation.figure())
