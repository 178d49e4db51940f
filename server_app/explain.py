"""``fedsilo explain``: why a finished run's model answers as it does for one patient of a site.

It runs where the patient's data lie; nothing is sent and nothing written but what is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from client_app.base import Request
from client_app.registry import method_class
from client_app.site import ready_silo
from client_app.state import SiteState
from datasets.registry import load_silo
from datasets.storage import load_state, write_atomically
from models.contract import ARRAYS, CONFIG, EVALUATE, FIGURES, Instruction
from models.errors import SettingError
from server_app.config import resolve, run_values
from server_app.curves import write_picture
from server_app.run_directory import RunDirectory
from strategies.state import to_record


def explain(options: argparse.Namespace) -> None:
    """Print the explanation, and write it as JSON or picture where that is asked for.

    Raises:
        FedsiloError: the run has not ended, its method explains nothing, or there is no such row.
    """
    directory = RunDirectory(options.run_dir)
    directory.read_json("summary.json")  # only a whole run has one
    settings = resolve(run_values(directory.path / "config.toml"))
    common = settings.common
    if options.data_dir:
        # The run may have been another machine's, and so its folder of decoded data
        common = dataclasses.replace(common, data_dir=str(options.data_dir), cache_dir="")
    path = directory.path / "model.safetensors"
    if not path.is_file():
        raise SettingError(f"{path} is not there: method '{common.method}' has no shared model")
    arrays, facts = load_state(path)
    instruction = Instruction(round=facts["round"], phase=EVALUATE)
    content = RecordDict({CONFIG: ConfigRecord(dict(instruction.to_config()))})
    content[ARRAYS] = to_record(arrays)
    if "figures" in facts:
        figures = {part: np.array(values) for part, values in facts["figures"].items()}
        content[FIGURES] = to_record(figures)
    silo = ready_silo(load_silo(options.site, common), common, content)
    with tempfile.TemporaryDirectory() as nowhere:
        method = method_class(common.method)(
            Request(instruction, content), silo, common, settings.own, SiteState(Path(nowhere))
        )
        explanation = method.explain(options.split, options.row)
    print("\n".join(explanation.lines()))
    if options.json:
        write_atomically(options.json, json.dumps(explanation.document(), indent=2) + "\n")
    if options.picture:
        write_picture(options.picture, explanation.figure())
