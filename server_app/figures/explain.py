"""``fedsilo explain``: why a finished run's model answers as it does for one patient of a site.

It runs where the patient's data lie; nothing is sent and nothing written but what is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from client_app.methods.base import SiteContext, SiteMethod
from client_app.methods.registry import method_class
from client_app.site.private_state import SiteState, settings_digest_of
from client_app.site.request import Request
from client_app.site.standardised import ready_silo
from client_app.training.compute import choose_compute
from datasets.io.atomic_files import write_atomically
from datasets.io.state_files import load_state
from datasets.registry import load_silo
from datasets.silo.silos import Silo
from datasets.weights.backbones import backbone_digest
from models.contract.errors import SettingError
from models.contract.messages import ARRAYS, CONFIG, EVALUATE, FIGURES, Instruction, SiteFacts
from models.contract.settings import CommonSettings
from server_app.config.settings import RunSettings, resolve, run_values
from server_app.figures.learning_curves import write_picture
from server_app.records.run_directory import RunDirectory
from strategies.loop.roster import Roster
from strategies.loop.state import RoundState
from strategies.methods.registry import strategy_class
from strategies.wire.records import to_record

if TYPE_CHECKING:
    from models.networks.prompted_vit import PromptedViT


def explain(options: argparse.Namespace) -> None:
    """Print the explanation, and write it as JSON or picture where that is asked for.

    Raises:
        FedsiloError: the run has not ended, its method explains nothing, or there is no such row.
    """
    method = finished_site(options.run_dir, options.site, options.data_dir, options.state_dir)
    explanation = method.explain(options.split, options.row)
    print("\n".join(explanation.lines()))
    if options.json:
        write_atomically(options.json, json.dumps(explanation.document(), indent=2) + "\n")
    if options.picture:
        write_picture(options.picture, explanation.figure())


def draw_attention(options: argparse.Namespace) -> None:
    """Draw, per site, where the model looked on its most certain images of each class.

    Raises:
        FedsiloError: the run has not ended, or its network is no ViT.
    """
    from client_app.explain.attention import draw_sheet

    if options.images < 1:
        raise SettingError(f"--images is {options.images}; it must be at least 1")
    sites = [options.site] if options.site else list(_silos(options.run_dir))
    for site in sites:
        method = finished_site(options.run_dir, site, options.data_dir, options.state_dir)
        if method.common.network != "vit":
            raise SettingError(
                f"{options.run_dir} is a run of network '{method.common.network}', which has no "
                "attention to draw"
            )
        network = cast("PromptedViT", method.open_network())
        title = f"{site}: most certain {options.split} images of each class, and where it looked"
        split, names = method.silo.splits()[options.split], method.silo.class_names()
        if not len(split):
            print(f"site {site} has no {options.split} images")
            continue
        figure = draw_sheet(network, split, method.compute, names, title, options.images)
        path = (options.out or options.run_dir) / f"attention-{site}.png"
        write_picture(path, figure)
        print(path)


def _silos(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = RunDirectory(run_dir).read_json("silos.json")
    return found


def finished_site(
    run_dir: Path, site: str, data_dir: Path | None, state_dir: Path | None
) -> SiteMethod:
    """Return a site's method as it stands after a finished run, ready to open its network.

    Args:
        run_dir: the run directory.
        site: the site; its data must be here.
        data_dir: the data directory; None: the run's own.
        state_dir: the folder of the site's private state; None: the run directory's.

    Raises:
        FedsiloError: the run has not ended, or nothing of its model is here.
    """
    directory, settings = RunDirectory(run_dir), finished_settings(run_dir, data_dir)
    common = settings.common
    folder = state_dir or directory.path / "sites" / site
    state = SiteState(folder, settings_digest_of(common, settings.own))
    _refuse_other_backbone(directory, site, common)
    held = load_silo(site, common)
    request = _last_request(directory, settings, state, held)
    silo = ready_silo(held, common, request.content)
    compute = choose_compute(common.device, common.precision, common.threads)
    site_context = SiteContext(request, silo, common, settings.own, state, compute)
    return method_class(common.method)(site_context)


def finished_settings(run_dir: Path, data_dir: Path | None) -> RunSettings:
    """Return the settings of a finished run, with the data where they lie now.

    Raises:
        RunDirectoryError: the run has not ended.
    """
    directory = RunDirectory(run_dir)
    directory.read_json("summary.json")  # only a whole run has one
    settings = resolve(run_values(directory.path / "config.toml"))
    if not data_dir:
        return settings
    # The run may have been another machine's, and so its folder of decoded data
    common = dataclasses.replace(settings.common, data_dir=str(data_dir), cache_dir="")
    return RunSettings(common, settings.own)


def _refuse_other_backbone(directory: RunDirectory, site: str, common: CommonSettings) -> None:
    """Refuse to explain by another backbone than the run's.

    Raises:
        SettingError: the weights are others by now.
    """
    silos = directory.read_json("silos.json")
    if common.network != "vit" or site not in silos:
        return
    if backbone_digest(common) != silos[site].get("backbone", ""):
        raise SettingError(
            f"the weights that 'backbone-weights' names ('{common.backbone_weights}') are not "
            f"those of the run in {directory.path}: bring those back"
        )


def _last_request(
    directory: RunDirectory, settings: RunSettings, state: SiteState, held: Silo
) -> Request:
    """Return what the site was sent at the end of the run.

    Raises:
        SettingError: nothing of its model is here.
    """
    common, content = settings.common, RecordDict({CONFIG: ConfigRecord({})})
    path = directory.path / "model.safetensors"
    if not path.is_file():
        # A table's figures lie with the shared model; an image's network needs the site's state
        if held.features or not any(state.folder.glob("*.safetensors")):
            raise SettingError(
                f"{path} is not there: method '{common.method}' has no shared model, and "
                f"{state.folder} holds no site's own"
            )
        return Request(Instruction(round=common.rounds + 1, phase=EVALUATE), content)
    arrays, facts = load_state(path)
    extras, keepers = facts.get("extras", {}), tuple(facts.get("keepers", ()))
    last = RoundState(facts["round"], arrays, extras, keepers)
    strategy = strategy_class(common.method)(common, settings.own, _roster(directory, held))
    if sent := strategy.outgoing(EVALUATE, held.name, last):
        content[ARRAYS] = to_record(sent)
    if "figures" in facts:
        figures = {part: np.array(values) for part, values in facts["figures"].items()}
        content[FIGURES] = to_record(figures)
    instruction = Instruction(
        round=last.round + 1,
        phase=EVALUATE,
        expects_state=held.name in keepers,
        notes=strategy.notes(EVALUATE, held.name, last),
    )
    return Request(instruction, content)


def _roster(directory: RunDirectory, held: Silo) -> Roster:
    """Return the sites of the run as the server knew them, ``held`` being one."""
    facts = {
        site: SiteFacts(
            site=site,
            distribution=told["distribution"],
            input_shape=held.task.input_shape,
            classes=held.task.classes,
            label_counts=told["label_counts"],
            fingerprints=told["fingerprints"],
            features=held.features,
        )
        for site, told in directory.read_json("silos.json").items()
    }
    return Roster(facts, {})
