"""What a run shows of the papers: their numbers, by its settings and sites; and its pictures."""

from pathlib import Path
from typing import Any

import tomli_w

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.config.settings import RUN_FORMAT, group_settings, read_run_config, resolve
from fedsilo.server_app.records.published.numbers import Published, published_numbers
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.studies.figures.learning_curves import draw_documents
from tests.support.errors import refuses
from tests.support.run_files import silo

HOSPITALS = ("cleveland", "hungary", "switzerland", "va")


def _run(folder: Path, *sites: str, **changes: Any) -> RunDirectory:
    settings = resolve({"method": "picsr", "dataset": "heart"} | changes).as_mapping()
    content = {"format": RUN_FORMAT, **group_settings(settings)}
    (folder / "config.toml").write_text(tomli_w.dumps(content))
    directory = RunDirectory(folder)
    silos = {site: silo(label_counts={"train": [3, 1]}, classes=[]) for site in sites}
    directory.write_json("silos.json", silos)
    return directory


def _published(directory: RunDirectory) -> Published:
    settings = read_run_config(directory.path / "config.toml").settings
    return published_numbers(settings, directory.read_json("silos.json"))


def test_summary_of_the_papers_setting_has_its_numbers(tmp_path: Path) -> None:
    found = _published(_run(tmp_path, *HOSPITALS))
    assert found.numbers["va"] == {"accuracy": 0.8267, "accuracy-sd": 0.0166}
    assert not found.unlike


def test_summary_of_another_setting_says_what_differs(tmp_path: Path) -> None:
    found = _published(_run(tmp_path, *HOSPITALS[:3]))
    assert found == Published({}, "the sites are without va")


def test_summary_of_other_data_has_neither_numbers_nor_a_reason(tmp_path: Path) -> None:
    assert _published(_run(tmp_path, *HOSPITALS, dataset="heart-synthetic")) == Published()


def test_documents_are_drawn_by_their_file_names(tmp_path: Path) -> None:
    directory = _run(tmp_path, "a", "b")
    matrix = {"trained": ["a", "b"], "tested": ["a", "b"], "values": [[0.5, None], [0.25, 1.0]]}
    directory.write_json("cross.json", {"accuracy": matrix})
    directory.write_json("of-no-picture.json", {})
    drawn = draw_documents(directory)
    assert [path.name for path in drawn] == ["distribution.png", "cross.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_document_of_another_form_is_named(tmp_path: Path) -> None:
    directory = _run(tmp_path, "a", "b")
    directory.write_json("cross.json", {"accuracy": {}})
    with refuses(RunDirectoryError, "cross.json"):
        draw_documents(directory)
