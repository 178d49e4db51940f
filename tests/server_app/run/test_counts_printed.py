"""The counts that a run prints of a site are those of pandas and of the files, or an error."""

import csv
import re
import unicodedata
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsilo.core.errors import DataError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.server_app.run.checks import own_silos
from fedsilo.strategies.meeting.participants import Participants

COUNTS = re.compile(r"site (.+): classes (.+); samples: (\d+) train, (\d+) val, (\d+) test")
SCHEMA = """\
columns:
  - {name: age}
  - {name: ward, kind: categorical, levels: ["s\u00fcd", "10", "1E1"]}
label: {column: ill, classes: {"no": [0], "yes": [1]}}
sites: {north: north.csv}
policy: drop
"""
# Texts as exports have them; the second of each pair is None if the text is no value of the column
AGES = {"50": 50.0, " 51 ": 51.0, "5e1": 50.0, "50.0": 50.0, "": None, "fifty": "refused"}
WARDS = {
    "s\u00fcd": "s\u00fcd",
    "su\u0308d": "s\u00fcd",  # as a Mac writes it
    " 10 ": "10",
    "10.0": "10",
    "1E1": "1E1",
    "": None,
    "west": "refused",
}
LABELS = {"0": 0, "1.0": 1, " 1": 1, "": None, "2": "refused"}


def _printed(silos: list[Silo], common: CommonSettings) -> dict[str, list[int]]:
    """Return the numbers of the line that a run prints of each site: train, val and test."""
    facts = {}
    for silo in silos:
        task = silo.shape
        counts, names = silo.label_counts(), silo.class_names()
        facts[silo.name] = SiteFacts(
            silo.name,
            silo.name,
            task.input_shape,
            task.outputs,
            counts,
            {},
            True,
            class_names=names,
        )
    nodes = {site: number for number, site in enumerate(facts)}
    found = {}
    for line in own_silos(Participants(facts, nodes), common):
        match = COUNTS.fullmatch(line)
        assert match, line
        found[match[1]] = [int(number) for number in match.groups()[2:]]
    return found


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[str, str, str]]:
    """Draw the rows of a table; in every fourth table some cells are no values."""
    columns = []
    for values in (AGES, WARDS, LABELS):
        texts = [text for text, value in values.items() if value not in ("refused", None)]
        columns.append(st.sampled_from(texts * 6 + [""]))
    if draw(st.integers(0, 3)) == 0:
        columns[draw(st.integers(0, 2))] = st.sampled_from(["fifty", "50", "10", "1"])
    return draw(st.lists(st.tuples(*columns), min_size=16, max_size=40))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables())
def test_the_rows_of_a_table_are_those_of_pandas_or_the_table_is_refused(
    rows: list[tuple[str, str, str]],
) -> None:
    with TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        (data / "schema.yaml").write_text(SCHEMA, encoding="utf-8")
        with (data / "north.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("age", "ward", "ill"), *rows])
        common = CommonSettings(dataset="table", data_dir=str(data), cache_dir=name)
        try:
            silo = load_silo("north", common)
        except DataError:
            return
        frame = pd.read_csv(data / "north.csv", dtype=str, keep_default_na=False)
    read = pd.DataFrame(
        {"age": frame["age"].map(AGES), "ward": frame["ward"].map(WARDS)}, dtype=object
    )
    read["ill"] = frame["ill"].map(LABELS).astype(object)
    # Of a row without a label no other cell is looked at
    judged = read[read["ill"].notna()]
    assert not (judged == "refused").any(axis=None), "a cell that is no value was taken for one"
    kept = judged.dropna()
    ((site, printed),) = _printed([silo], common).items()
    assert (site, sum(printed)) == ("north", len(kept))
    by_class = Counter[int]()
    places: dict[tuple[float, ...], set[str]] = {}
    for part, split in silo.splits().items():
        by_class.update(split.labels.tolist())
        for values, label in zip(split.inputs.tolist(), split.labels.tolist(), strict=True):
            places.setdefault((*values, label), set()).add(part)
    assert by_class == Counter(kept["ill"].tolist())
    assert len(places) == len(kept.drop_duplicates())
    assert all(len(parts) == 1 for parts in places.values()), "equal rows are in one part"


SITES = st.sampled_from(["north", "Klinik-2"])
CLASSES = st.sampled_from(["benign", "b\u00f6sartig"] * 8 + ["bo\u0308sartig"])
INNER = st.sampled_from(["", "", "", "", "second series"])
FILES = st.sampled_from(["1.png", "1 (1).png", "\u00e4.PNG", "2.png", "notes.txt", "3.png"])
LEVELS = st.integers(0, 5)  # few, so that many files are copies


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate],  # shrinking the files of a failure takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    files=st.lists(
        st.tuples(SITES, CLASSES, INNER, FILES, LEVELS),
        min_size=14,
        max_size=30,
        unique_by=lambda f: f[:4],
    )
)
def test_the_images_of_folders_are_those_of_the_file_system_or_the_folder_is_refused(
    files: list[tuple[str, str, str, str, int]],
) -> None:
    with TemporaryDirectory() as name:
        data = Path(name) / "data"
        for site, label, inner, file, level in files:
            path = data / site / label / inner / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith(".txt"):
                path.write_text("not an image")
            else:
                Image.new("L", (16, 16), level).save(path)
        common = CommonSettings(dataset="folder", data_dir=str(data), cache_dir=name, image_size=16)
        try:
            silos = [load_silo(site, common) for site in silo_names(common)]
            unread = data_set("folder").notices(common)
        except DataError:
            return
    printed = _printed(silos, common)
    read = sum(map(sum, printed.values()))
    counted = sum(int(re.findall(r": (\d+) (?:file|image)", line)[0]) for line in unread)
    assert read + counted == len(files)
    for silo in silos:
        own = [file for file in files if file[0] == silo.name and not file[2]]
        images = [file for file in own if not file[3].endswith(".txt")]
        assert sum(printed[silo.name]) == len(images)
        places: dict[int, set[str]] = {}
        for part, split in silo.splits().items():
            for image in split.inputs:
                places.setdefault(int(image.flatten()[0]), set()).add(part)
        assert places.keys() == {file[4] for file in images}
        assert all(len(parts) == 1 for parts in places.values()), "copies are in one part"
    # A class in two Unicode forms, as from a Mac and from another machine, is one class
    names = {unicodedata.normalize("NFC", file[1]) for file in files}
    assert {silo.shape.outputs for silo in silos} == {len(names)}
