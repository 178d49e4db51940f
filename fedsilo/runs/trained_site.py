"""Opens a site of a finished run as it was after the last round, where its data are.

The site gets its last message again, rebuilt from the run directory. Nothing is sent or written.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import finished_session
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.site_names import folder_name
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import (
    ARRAYS,
    CONFIG,
    EVALUATE,
    STANDARDISED,
    Instruction,
    Notes,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records import forms
from fedsilo.server_app.records.run_directory import BEST, MODEL, STANDARDISATION, RunDirectory
from fedsilo.strategies.loop.ask import first_question
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.records import NDArray, to_record

Silos = Mapping[str, Mapping[str, Any]]  # silos.json: site -> its sizes, labels, fingerprints


def open_site(
    run_dir: Path,
    settings: RunSettings,
    silos: Silos,
    rounds: int,
    site: str,
    state_dir: Path | None = None,
    best: bool = False,
    split: str = "",
) -> Lab:
    """Open a site of a finished run as a ``Lab``, with which the run's method opens the network.

    If the run has no file of a shared model, the model comes from the site's private state.

    Args:
        run_dir: the run directory.
        settings: the run's settings, with this machine's data folder.
        silos: site -> its facts in silos.json.
        rounds: the number of rounds in the run.
        site: the site's name.
        state_dir: the folder of the site's private state. None means the state in the run
            directory.
        best: whether to open the model of the best round instead of that of the last.
        split: a split that must be unchanged since the run, because its samples will be shown. If
            empty, no split is checked.

    Raises:
        FedsiloError: the wanted model is not on this machine, or the schema of the data, the
            samples of ``split`` or the weights of a pretrained ViT differ from those in the run.
    """
    common = settings.common
    if common.network == "vit" and site in silos:
        refuse_other_backbone(
            run_dir, common, {silos[site].get("backbone", "")}, "bring those back"
        )
    silo = load_silo(site, common)
    known = silos.get(site, {})
    # A run whose silos.json lacks a schema passes
    if silo.schema != known.get("schema", silo.schema):
        raise DataError(
            f"the data of site {site} have another schema (columns, classes, size) than in the run "
            f"in {run_dir}: restore those data, or name their folder by --data-dir"
        )
    if split:
        check_same_samples(run_dir, known, silo, split)
    # A method without a shared model leaves no model file: then the site's own state is its model
    folder = state_dir or run_dir / "sites" / folder_name(site)
    path = run_dir / MODEL
    if best:
        path = run_dir / BEST
    if path.is_file():
        content, instruction = _rebuild_last_message(path, settings, silos, silo)
    else:
        content, instruction = _message_without_model(path, common, folder, rounds, silo, best)
    session = finished_session(common, settings.own, silo)
    return Lab(session, content, instruction, SiteState(folder, session.digest))


def refuse_other_backbone(
    run_dir: Path, common: CommonSettings, digests: Collection[str], fix: str
) -> None:
    """Check that the local weights of the backbone (the pretrained ViT) are those of a run.

    Args:
        run_dir: the run directory, which the error names.
        common: the settings that name the file of the weights.
        digests: the digests that the run recorded. The local weights must have one of them.
        fix: the advice at the end of the error.

    Raises:
        SettingError: the digest of the local weights is not in ``digests``.
    """
    if backbone_digest(common) not in digests:
        raise SettingError(
            f"the weights that 'vit.backbone-weights' names ('{common.backbone_weights}') are not "
            f"those of the run in {run_dir}: {fix}"
        )


def check_same_samples(run_dir: Path, known: Mapping[str, Any], silo: Silo, split: str) -> None:
    """Check that a split has the same samples in the same order as in the run.

    ``known`` is the site's entry in silos.json. It has a fingerprint (a digest of the samples) for
    each split. A split without a fingerprint is not checked.

    Raises:
        DataError: a sample was changed, moved, added or left out since the run.
    """
    then = known.get("fingerprints", {})
    if split in then and silo.fingerprints[split] != then[split]:
        raise DataError(
            f"the {split} rows of site {silo.name} are not those of the run in {run_dir}: "
            "restore its data, or name them by --data-dir"
        )


def _message_without_model(
    path: Path, common: CommonSettings, folder: Path, rounds: int, silo: Silo, best: bool
) -> tuple[RecordDict, Instruction]:
    """Build an evaluation message without weights, with which a site opens its private model.

    This is for a method without a shared model, where the model is in the site's private state. If
    the run standardised a table over all sites, the message has that standardisation.

    Args:
        path: the path that a shared model file would have, for the errors.
        common: the run's settings.
        folder: the folder of the site's private state.
        rounds: the number of rounds in the run. The message is numbered as the round after them.
        silo: the site's data.
        best: whether the model of the best round is wanted, which only exists as a shared model.

    Returns:
        The content of the message, and the instruction in it.

    Raises:
        SettingError: ``best`` is true, or ``folder`` does not contain a state.
    """
    if best:
        raise SettingError(
            f"{path} is missing: a run keeps it only with 'server.early-stopping-metric' and a "
            "shared model; remove --best"
        )
    if not any(folder.glob("*.safetensors")):
        raise SettingError(
            f"{path} is missing, because method '{common.method}' has no shared model, and "
            f"{folder} does not contain a model of the site: name its folder by --state-dir"
        )
    content = RecordDict({CONFIG: ConfigRecord({})})
    if silo.features and common.standardise == "pooled":
        pooled = RunDirectory(path.parent).read_json(STANDARDISATION)
        content[STANDARDISED] = to_record(
            _read_standardisation(pooled, path.parent / STANDARDISATION)
        )
    # A run may have been stopped before the round that its settings name as the last
    return content, Instruction(round=rounds + 1, phase=EVALUATE)


def _rebuild_last_message(
    path: Path, settings: RunSettings, silos: Silos, silo: Silo
) -> tuple[RecordDict, Instruction]:
    """Rebuild the run's last evaluation message to a site, from which the site loads the model.

    The server's side of the method builds the message from the run's model file, as at the end of
    the run. The message has the weights, and anything else that the server sends with them. If the
    model file has the means and deviations that standardise a table's columns, the message has them
    too.

    Args:
        path: the model file.
        settings: the settings of the run.
        silos: site -> its facts in silos.json.
        silo: the site's data.

    Returns:
        The content of the message, and the instruction in it.

    Raises:
        FedsiloError: the model file is damaged.
    """
    common, content = settings.common, RecordDict({CONFIG: ConfigRecord({})})
    arrays, facts = load_state(path)
    forms.check(forms.StateFacts, facts, f"the metadata of {path}")
    cls = strategy_class(common.method)
    last = cls.state_class.restored(arrays, facts)
    method = cls(common, settings.own, _rebuild_participants(silos, silo))
    # The evaluation is run only up to its first request, which is the message that is wanted
    query = first_question(lambda ask: method.evaluate(last, ask), [silo.name], last.stateful_sites)
    sent = query.send[silo.name]
    if sent:
        content[ARRAYS] = to_record(sent)
    if "figures" in facts:
        content[STANDARDISED] = to_record(_read_standardisation(facts["figures"], path))
    instruction = Instruction(
        round=last.round + 1,
        phase=EVALUATE,
        expects_state=last.kept.get(silo.name, 0),
        notes=query.notes.get(silo.name, Notes()).to_values(),
    )
    return content, instruction


def _read_standardisation(
    standardisation: Mapping[str, Sequence[float]], path: Path
) -> dict[str, NDArray]:
    """Convert a table's standardisation from JSON to arrays: mean and std, (features,) each."""
    forms.check(forms.Standardisation, standardisation, f"'figures' of {path}")
    return {part: np.array(values) for part, values in standardisation.items()}


def _rebuild_participants(silos: Silos, silo: Silo) -> Participants:
    """Rebuild the facts about each site that the server's side of a method needs.

    Most facts come from silos.json. The input shape, the number of classes and the features are not
    in this file. They are equal at all sites, so they are taken from ``silo``, the site that is
    opened.
    """
    facts = {}
    for site, known in silos.items():
        facts[site] = SiteFacts(
            site=site,
            distribution=known["distribution"],
            input_shape=silo.shape.input_shape,
            classes=silo.shape.outputs,
            label_counts=known["label_counts"],
            fingerprints=known["fingerprints"],
            features=silo.features,
        )
    return Participants(facts, {})
