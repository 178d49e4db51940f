"""A finished run, opened again where a site's data are: its settings, its sites, their networks.

Nothing is sent, and nothing is written.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
    run_dir: Path, site: str, data_dir: Path | None, state_dir: Path | None, best: bool = False
) -> Lab:
    """Return what a site's method can use after a finished run, ready to open its network.

    Args:
        run_dir: the run directory.
        site: the site; its data must be here.
        data_dir: the data directory, or None for the run's own.
        state_dir: the folder of the site's private state, or None for the run directory's.
        best: of the best round, where the run has kept its model, not of the last one.

    Raises:
        FedsiloError: the run has not ended, or nothing of its model is here.
    """
    run, settings = FinishedRun(run_dir), finished_settings(run_dir, data_dir)
    common = settings.common
    folder = state_dir or run.path / "sites" / site
    _refuse_other_backbone(run, site, common)
    held = load_silo(site, common)
    _refuse_other_schema(run, held)
    content, instruction = _last_message(run, settings, folder, held, best)
    session = finished_session(common, settings.own, held)
    return Lab(session, content, instruction, SiteState(folder, session.digest))


def finished_settings(run_dir: Path, data_dir: Path | None) -> RunSettings:
    """Return the settings of a finished run, with the data where they are now.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    run = FinishedRun(run_dir)
    _ = run.summary  # only a whole run has one
    settings = run.settings
    if not data_dir:
        return settings
    # The run may have been another machine's, and so its folder of decoded data
    common = dataclasses.replace(settings.common, data_dir=str(data_dir), cache_dir="")
    return RunSettings(common, settings.own)


def _refuse_other_backbone(run: FinishedRun, site: str, common: CommonSettings) -> None:
    """Raise a SettingError where the weights of the backbone are no longer the run's."""
    if common.network != "vit" or site not in run.silos:
        return
    if backbone_digest(common) != run.silos[site].get("backbone", ""):
        raise SettingError(
            f"the weights that 'backbone-weights' names ('{common.backbone_weights}') are not "
            f"those of the run in {run.path}: bring those back"
        )


def _refuse_other_schema(run: FinishedRun, silo: Silo) -> None:
    """Raise a DataError for other features or classes than the model was trained on."""
    known = run.silos.get(silo.name, {})
    if silo.schema != known.get("schema", silo.schema):
        raise DataError(
            f"the data of site {silo.name} have another schema (columns, classes, size) than in "
            f"the run in {run.path}: bring that one back, or name its folder by --data-dir"
        )


def _last_message(
    run: FinishedRun, settings: RunSettings, folder: Path, held: Silo, best: bool
) -> tuple[RecordDict, Instruction]:
    """Return what the site was sent at the end of the run, or would be of its best round.

    It raises a SettingError where nothing of the site's model is here.
    """
    common, content = settings.common, RecordDict({CONFIG: ConfigRecord({})})
    path = run.path / (BEST if best else MODEL)
    if best and not path.is_file():
        raise SettingError(
            f"{path} is not there: a run keeps it with 'early-stopping-metric', where sites share "
            "a model; go without --best"
        )
    if not path.is_file():
        if not any(folder.glob("*.safetensors")):
            raise SettingError(
                f"{path} is not there: method '{common.method}' has no shared model, and "
                f"{folder} holds no site's own"
            )
        if held.features and common.standardise == "pooled":
            pooled = run.read_json(STANDARDISATION)
            content[FIGURES] = to_record(_arrays(pooled, run.path / STANDARDISATION))
        # A run may have been stopped before its last round
        return content, Instruction(round=int(run.summary["rounds"]) + 1, phase=EVALUATE)
    arrays, facts = load_state(path)
    forms.check(forms.STATE, facts, f"the metadata of {path}")
    cls = strategy_class(common.method)
    last = cls.state_class.restored(arrays, facts)
    method = cls(common, settings.own, _participants(run, held))
    asked = first_question(lambda ask: method.evaluate(last, ask), [held.name], last.stateful_sites)
    if sent := asked.send[held.name]:
        content[ARRAYS] = to_record(sent)
    if "figures" in facts:
        content[FIGURES] = to_record(_arrays(facts["figures"], path))
    instruction = Instruction(
        round=last.round + 1,
        phase=EVALUATE,
        expects_state=last.kept.get(held.name, 0),
        notes=asked.notes.get(held.name, Notes()).to_values(),
    )
    return content, instruction


def _arrays(figures: Mapping[str, Sequence[float]], path: Path) -> dict[str, NDArray]:
    forms.check(forms.FIGURES, figures, f"'figures' of {path}")
    return {part: np.array(values) for part, values in figures.items()}


def _participants(run: FinishedRun, held: Silo) -> Participants:
    """Return the sites of the run as the server knew them, ``held`` being one."""
    facts = {
        site: SiteFacts(
            site=site,
            distribution=silo["distribution"],
            input_shape=held.task.input_shape,
            classes=held.task.classes,
            label_counts=silo["label_counts"],
            fingerprints=silo["fingerprints"],
            features=held.features,
        )
        for site, silo in run.silos.items()
    }
    return Participants(facts, {})


def sites_of(run_dir: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return the sites of a run, or those of them that are ``wanted``.

    Raises:
        SettingError: one is not in the run.
    """
    sites = list(FinishedRun(run_dir).silos)
    for site in wanted:
        if site not in sites:
            raise SettingError(
                f"there is no site '{site}' in {run_dir}: its sites are {', '.join(sites)}"
            )
    return [site for site in sites if site in wanted] if wanted else sites


def opened(
    run_dir: Path, site: str, data_dir: Path | None, state_dir: Path | None
) -> tuple[Lab, SiteNetwork]:
    """Return what a site's method can use at the end of a run, and its network.

    Raises:
        FedsiloError: the run has not ended, or nothing of its model or the data is here.
    """
    lab = finished_site(run_dir, site, data_dir, state_dir)
    return lab, lab.open()


@contextmanager
def naming(run_dir: Path) -> Iterator[None]:
    """Put the run, of which there may be several, before what went wrong with it."""
    try:
        yield
    except FedsiloError as error:
        text = str(error)
        raise type(error)(text if str(run_dir) in text else f"{run_dir}: {text}") from None


def refuse_shared_state(state_dir: Path | None, runs: Sequence[Path], sites: int) -> None:
    """Refuse one folder of private state for several runs or sites, by a ``SettingError``."""
    if state_dir and (len(runs) > 1 or sites > 1):
        raise SettingError(
            f"--state-dir {state_dir} is the state of one site in one run: name one of each, or "
            "leave it out where the states are in the run directories"
        )
