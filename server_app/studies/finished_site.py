"""Opens a finished run on the machine that has a site's data: settings, sites and networks.

Nothing is sent or written.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import finished_session
from fedsilo.client_app.site.private_state import SiteState
from fedsilo.datasets.io.state_files import load_state
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.weights.backbones import backbone_digest
from fedsilo.models.contract.errors import DataError, FedsiloError, SettingError
from fedsilo.models.contract.messages import ARRAYS, CONFIG, EVALUATE, FIGURES, Instruction, Notes
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records import forms
from fedsilo.server_app.records.run_directory import BEST, MODEL, STANDARDISATION
from fedsilo.server_app.studies.finished_run import FinishedRun
from fedsilo.strategies.loop.ask import first_question
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.records import NDArray, to_record


def finished_site(
    run_dir: Path,
    site: str,
    data_dir: Path | None,
    state_dir: Path | None,
    best: bool = False,
    split: str = "",
) -> Lab:
    """Open a site of a finished run as its method's ``Lab``, which can open the network.

    Args:
        run_dir: the run directory.
        site: the site's name.
        data_dir: the folder of the site's data; None for the run's folder.
        state_dir: the folder of the site's private state; None for that in the run directory.
        best: whether to use the model of the best round, if the run kept it.
        split: the split whose samples will be shown, which must be unchanged since the run. Empty
            if no samples will be shown.

    Raises:
        FedsiloError: the run has not ended, no part of its model is on this machine, or the split
            has changed.
    """
    run, settings = FinishedRun(run_dir), finished_settings(run_dir, data_dir)
    common = settings.common
    folder = state_dir or run.path / "sites" / site
    if common.network == "vit" and site in run.silos:
        digest = run.silos[site].get("backbone", "")
        refuse_other_backbone(run.path, common, {digest}, "bring those back")
    silo = load_silo(site, common)
    _refuse_other_schema(run, silo)
    if split:
        check_same_samples(run, silo, split)
    content, instruction = _last_message(run, settings, folder, silo, best)
    session = finished_session(common, settings.own, silo)
    return Lab(session, content, instruction, SiteState(folder, session.digest))


def finished_settings(run_dir: Path, data_dir: Path | None) -> RunSettings:
    """Return the settings of a finished run, with ``data_dir`` in place of its data folder.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    run = FinishedRun(run_dir)
    _ = run.summary  # raises an error if the run has not ended
    settings = run.settings
    if not data_dir:
        return settings
    # The run may come from another machine, whose cache folder means nothing here
    common = dataclasses.replace(settings.common, data_dir=str(data_dir), cache_dir="")
    return RunSettings(common, settings.own)


def refuse_other_backbone(
    run_dir: Path, common: CommonSettings, digests: Collection[str], fix: str
) -> None:
    """Raise a SettingError if the digest of the local backbone weights is none of the run's.

    ``fix`` is the advice at the end of the message.
    """
    if backbone_digest(common) not in digests:
        raise SettingError(
            f"the weights that 'vit.backbone-weights' names ('{common.backbone_weights}') are not "
            f"those of the run in {run_dir}: {fix}"
        )


def check_same_samples(run: FinishedRun, silo: Silo, split: str) -> None:
    """Check that a split has the same samples, in the same order, as in the run.

    A site that did not send fingerprints cannot be checked, so it passes.

    Raises:
        DataError: a sample was changed, moved, added or left out since the run.
    """
    then = run.silos.get(silo.name, {}).get("fingerprints", {})
    if split in then and silo.fingerprints[split] != then[split]:
        raise DataError(
            f"the {split} rows of site {silo.name} are not those of the run in {run.path}: "
            "restore its data, or name them by --data-dir"
        )


def _refuse_other_schema(run: FinishedRun, silo: Silo) -> None:
    """Raise a DataError if the silo's features or classes differ from those in the run."""
    known = run.silos.get(silo.name, {})
    if silo.schema != known.get("schema", silo.schema):
        raise DataError(
            f"the data of site {silo.name} have another schema (columns, classes, size) than in "
            f"the run in {run.path}: restore those data, or name their folder by --data-dir"
        )


def _last_message(
    run: FinishedRun, settings: RunSettings, folder: Path, silo: Silo, best: bool
) -> tuple[RecordDict, Instruction]:
    """Rebuild the last message to a site, or the message with the model of the best round."""
    common, content = settings.common, RecordDict({CONFIG: ConfigRecord({})})
    path = run.path / (BEST if best else MODEL)
    if best and not path.is_file():
        raise SettingError(
            f"{path} is missing: a run keeps it only with 'server.early-stopping-metric' and a "
            "shared model; remove --best"
        )
    if not path.is_file():
        if not any(folder.glob("*.safetensors")):
            raise SettingError(
                f"{path} is missing, because method '{common.method}' has no shared model, and "
                f"{folder} holds no model of the site: name its folder by --state-dir"
            )
        if silo.features and common.standardise == "pooled":
            pooled = run.read_json(STANDARDISATION)
            content[FIGURES] = to_record(_arrays(pooled, run.path / STANDARDISATION))
        # A run may have been stopped before its last round
        return content, Instruction(round=int(run.summary["rounds"]) + 1, phase=EVALUATE)
    arrays, facts = load_state(path)
    forms.check(forms.State, facts, f"the metadata of {path}")
    cls = strategy_class(common.method)
    last = cls.state_class.restored(arrays, facts)
    method = cls(common, settings.own, _participants(run, silo))
    query = first_question(lambda ask: method.evaluate(last, ask), [silo.name], last.stateful_sites)
    if sent := query.send[silo.name]:
        content[ARRAYS] = to_record(sent)
    if "figures" in facts:
        content[FIGURES] = to_record(_arrays(facts["figures"], path))
    instruction = Instruction(
        round=last.round + 1,
        phase=EVALUATE,
        expects_state=last.kept.get(silo.name, 0),
        notes=query.notes.get(silo.name, Notes()).to_values(),
    )
    return content, instruction


def _arrays(figures: Mapping[str, Sequence[float]], path: Path) -> dict[str, NDArray]:
    forms.check(forms.Standardisation, figures, f"'figures' of {path}")
    return {part: np.array(values) for part, values in figures.items()}


def _participants(run: FinishedRun, silo: Silo) -> Participants:
    """Rebuild the participants of the run from silos.json; the task is that of ``silo``."""
    facts = {
        site: SiteFacts(
            site=site,
            distribution=known["distribution"],
            input_shape=silo.task.input_shape,
            classes=silo.task.classes,
            label_counts=known["label_counts"],
            fingerprints=known["fingerprints"],
            features=silo.features,
        )
        for site, known in run.silos.items()
    }
    return Participants(facts, {})


def sites_of(run_dir: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return the sites of a run, or only those in ``wanted``, in the run's order.

    Raises:
        SettingError: a wanted site is not in the run.
    """
    return chosen_of(list(FinishedRun(run_dir).silos), wanted, str(run_dir))


def chosen_of(sites: list[str], wanted: Sequence[str], where: str) -> list[str]:
    """Return all sites, or only those in ``wanted``; SettingError if a wanted site is unknown.

    ``where`` names the run in the message.
    """
    for site in wanted:
        if site not in sites:
            raise SettingError(f"{where} has no site '{site}': choose one of {', '.join(sites)}")
    return [site for site in sites if site in wanted] if wanted else sites


def open_site(
    run_dir: Path, site: str, data_dir: Path | None, state_dir: Path | None, split: str = ""
) -> tuple[Lab, SiteNetwork]:
    """Open a site as ``finished_site`` does, at the last round, and open its network."""
    lab = finished_site(run_dir, site, data_dir, state_dir, split=split)
    return lab, lab.open()


@contextmanager
def naming(run_dir: Path) -> Iterator[None]:
    """Put the run directory before the text of an error, because a command may read several."""
    try:
        yield
    except FedsiloError as error:
        text = str(error)
        raise type(error)(text if str(run_dir) in text else f"{run_dir}: {text}") from None


def refuse_shared_state(state_dir: Path | None, runs: Sequence[Path], sites: int) -> None:
    """Raise a SettingError if one folder of private state is given for several runs or sites."""
    if state_dir and (len(runs) > 1 or sites > 1):
        raise SettingError(
            f"--state-dir {state_dir} holds the state of one site in one run: name one run and one "
            "site, or remove it if the run directories have the states"
        )
