import dataclasses
import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set, load_silo
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.tables.heart import HEART, synthetic_text
from fedsilo.datasets.tables.new_rows import parse_new_rows
from fedsilo.datasets.tables.parsing import parse_table
from tests.support.errors import refuses

SITES = ("cleveland", "hungary", "switzerland", "va")
REAL = CommonSettings(dataset="heart")
MADE_UP = CommonSettings(dataset="heart-synthetic")
# FLamby's columns: what is left of the file's first ten, then the dummies of cp and restecg
FEATURES = (
    *("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"),
    *("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2"),
)


@pytest.fixture
def places(real_data: Path, tmp_path: Path) -> Places:
    """Return the real files and a cache of this test's own."""
    return Places(real_data, tmp_path / "cache")


def rows_of(silo: Silo) -> torch.Tensor:
    return torch.cat([split.inputs for split in silo.splits().values()])


@pytest.mark.parametrize(
    ("site", "train", "test", "dropped"),
    [  # patients, and those of them with disease
        ("cleveland", (199, 91), (104, 48), 0),
        ("hungary", (172, 65), (89, 33), 33),
        ("switzerland", (30, 30), (16, 15), 77),
        ("va", (85, 66), (45, 35), 70),
    ],
)
def test_the_real_hospitals_have_the_sizes_and_label_counts_of_flamby(
    places: Places, site: str, train: tuple[int, int], test: tuple[int, int], dropped: int
) -> None:
    silo = load_silo(site, REAL, places)
    counts = {part: (sum(found), found[1]) for part, found in silo.label_counts().items()}
    assert counts == {"train": train, "val": (0, 0), "test": test}
    assert silo.dropped == dropped
    assert silo.features == FEATURES
    assert silo.classes == ("healthy", "disease")
    assert (silo.shape.input_shape, silo.shape.outputs) == ((13,), 2)
    assert not rows_of(silo).isnan().any()


def test_the_four_hospitals_hold_740_patients(places: Places) -> None:
    assert sum(len(rows_of(load_silo(site, REAL, places))) for site in SITES) == 740


def test_a_real_patient_is_read_by_hand(places: Places) -> None:
    # The first line of Cleveland: 63,1,1,145,233,1,2,150,0,2.3,...,0 and of Hungary: 28,1,2,130,...
    first = {
        "cleveland": [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1],
        "hungary": [28, 1, 130, 132, 0, 185, 0, 0, 1, 0, 0, 0, 1],
    }
    for site, row in first.items():
        silo = load_silo(site, REAL, places)
        labels = torch.cat([split.labels for split in silo.splits().values()])
        same = (rows_of(silo) - torch.tensor(row)).abs().max(dim=1).values < 1e-5
        assert labels[same].tolist() == [0]


def test_the_schema_declares_statistics_for_the_real_and_the_made_up_hospitals(
    tmp_path: Path,
) -> None:
    statistics = HEART.schema(Places(None, tmp_path)).declared_statistics()
    assert statistics is not None
    assert statistics.mean.shape == statistics.std.shape == (13,)
    assert statistics.mean[:2].tolist() == [55, 0.5]
    assert statistics.mean[8:].tolist() == [1 / 4] * 3 + [1 / 3] * 2
    assert statistics.std[8:].tolist() == [1] * 5


@pytest.mark.parametrize(
    ("site", "unmeasured"), [("cleveland", 0), ("hungary", 0), ("switzerland", 46)]
)
def test_cholesterol_that_was_not_measured_is_imputed_and_all_else_stays(
    places: Places, site: str, unmeasured: int
) -> None:
    plain, imputed, told = (
        rows_of(load_silo(site, dataclasses.replace(REAL, dataset=name), places))
        for name in ("heart", "heart-imputed", "heart-indicator")
    )
    chol = FEATURES.index("chol")
    gone = plain[:, chol] == 0
    assert int(gone.sum()) == unmeasured
    assert imputed[:, chol].isnan().equal(gone)
    others = [place for place in range(13) if place != chol]
    assert imputed[:, others].equal(plain[:, others])
    assert imputed[~gone].equal(plain[~gone])
    assert told.shape[1] == 14
    assert told[:, :13].nan_to_num(-1).equal(imputed.nan_to_num(-1))
    assert told[:, 13].equal(gone.float())


@pytest.mark.parametrize("chol", ["0", "6.1"])
def test_an_impossible_cholesterol_is_no_case_for_a_model_but_stays_in_training(
    places: Places, chol: str
) -> None:
    schema = HEART.schema(places)
    values = {"age": "55", "sex": "1", "cp": "4", "trestbps": "130", "fbs": "0", "restecg": "0"}
    values |= {"thalach": "140", "exang": "0", "oldpeak": "1.0", "chol": chol}
    lines = [(1, [*values]), (2, [*values.values()])]
    assert "50 to 1500 mg/dl" in parse_new_rows(lines, schema, "new.csv").faults[2]
    imputed = parse_new_rows(lines, data_set("heart-imputed").schema(places), "new.csv")
    assert imputed.imputed == ({"chol": 1} if chol == "0" else {})
    silo = load_silo("switzerland", REAL, places)
    assert (rows_of(silo)[:, FEATURES.index("chol")] == 0).all()
    assert silo.dropped == parsed_without_ranges(places)


def parsed_without_ranges(places: Places) -> int:
    """Count the Swiss rows that are left out if no column has a range."""
    schema = HEART.schema(places)
    columns = [column.model_copy(update={"range": []}) for column in schema.columns]
    lines, where = HEART.lines_of("switzerland", schema, places)
    bare = schema.model_copy(update={"columns": columns})
    return parse_table(lines, bare, where).left_out.count


def copied(real_data: Path, folder: Path, *names: str) -> Path:
    """Return a data folder with these files of the real one."""
    target = folder / "heart_disease"
    target.mkdir(parents=True)
    for name in names:
        shutil.copyfile(real_data / "heart_disease" / name, target / name)
    return folder


def test_a_hospital_needs_its_own_file_alone(real_data: Path, tmp_path: Path) -> None:
    data = copied(real_data, tmp_path / "data", "processed.va.data")
    places = Places(data, tmp_path / "cache")
    assert len(load_silo("va", REAL, places).train) == 85
    with refuses(DataError, "processed.hungarian.data"):
        load_silo("hungary", REAL, places)


def test_without_a_data_folder_the_user_is_told_how_to_fetch_the_files(tmp_path: Path) -> None:
    places = Places(None, tmp_path)
    with refuses(DataError, "heart"):
        load_silo("va", REAL, places)


def test_a_file_that_was_altered_is_refused_and_nothing_is_cached(
    real_data: Path, tmp_path: Path
) -> None:
    data = copied(real_data, tmp_path / "data", "processed.va.data")
    path = data / "heart_disease" / "processed.va.data"
    path.write_text(path.read_text().replace("63,1,4,140", "64,1,4,140", 1))
    places = Places(data, tmp_path / "cache")
    said = (
        r"processed\.va\.data must have MD5 4249d03ca7711e84f4444768c9426170, but has [0-9a-f]{32}"
    )
    with pytest.raises(DataError, match=said):
        load_silo("va", REAL, places)
    assert not (tmp_path / "cache").exists()


def test_an_altered_file_that_is_no_text_is_refused_as_an_altered_one(tmp_path: Path) -> None:
    path = tmp_path / "data" / "heart_disease" / "processed.va.data"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe63,1,4,140")
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    said = rf"processed\.va\.data must have MD5 4249d.*, but has {md5}"
    with pytest.raises(DataError, match=said):
        load_silo("va", REAL, Places(tmp_path / "data", tmp_path / "cache"))


def test_a_file_that_was_altered_after_it_was_cached_is_refused_all_the_same(
    real_data: Path, tmp_path: Path
) -> None:
    data = copied(real_data, tmp_path / "data", "processed.switzerland.data")
    places = Places(data, tmp_path / "cache")
    load_silo("switzerland", REAL, places)
    with (data / "heart_disease" / "processed.switzerland.data").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="it was altered or truncated"):
        load_silo("switzerland", REAL, places)


def test_an_unknown_hospital_is_answered_with_the_four(tmp_path: Path) -> None:
    for settings in (REAL, MADE_UP):
        with pytest.raises(DataError, match=f"no silo 'basel': 4 silos are {', '.join(SITES)}"):
            load_silo("basel", settings, Places(None, tmp_path))


@pytest.mark.parametrize(
    ("site", "patients", "sick", "train", "test"),
    [
        ("cleveland", 303, 139, 199, 104),
        ("hungary", 261, 98, 172, 89),
        ("switzerland", 46, 45, 30, 16),
        ("va", 130, 101, 85, 45),
    ],
)
def test_made_up_hospitals_have_the_real_sizes_label_rates_and_features(
    tmp_path: Path, site: str, patients: int, sick: int, train: int, test: int
) -> None:
    lines = [line.split(",") for line in synthetic_text(site).splitlines()]
    assert {len(line) for line in lines} == {14}
    assert Counter(line[-1] != "0" for line in lines) == {True: sick, False: patients - sick}
    assert {line[-1] for line in lines} <= set("01234")
    silo = load_silo(site, MADE_UP, Places(None, tmp_path))
    assert (len(silo.train), len(silo.val), len(silo.test)) == (train, 0, test)
    assert (silo.features, silo.dropped) == (FEATURES, 0)
    assert sum(counts[1] for counts in silo.label_counts().values()) == sick


@pytest.mark.parametrize("site", SITES)
def test_a_made_up_patient_is_within_what_a_patient_can_be(tmp_path: Path, site: str) -> None:
    rows = rows_of(load_silo(site, MADE_UP, Places(None, tmp_path)))
    columns = {name: rows[:, index] for index, name in enumerate(FEATURES)}
    assert 28 <= columns["age"].min() <= columns["age"].max() <= 77
    assert 70 <= columns["thalach"].min() <= columns["thalach"].max() <= 200
    assert columns["oldpeak"].min() >= 0
    for name in ("sex", "fbs", "exang", *FEATURES[8:]):
        assert set(columns[name].tolist()) <= {0.0, 1.0}
    assert (columns["chol"] == 0).all() == (site == "switzerland")  # as where it was not measured
    for kind in ("cp", "restecg"):
        dummies = rows[:, [i for i, name in enumerate(FEATURES) if name.startswith(f"{kind}=")]]
        assert dummies.sum(dim=1).max() <= 1


def test_made_up_disease_shows_in_the_features_that_it_shifts(tmp_path: Path) -> None:
    silo = load_silo("cleveland", MADE_UP, Places(None, tmp_path))
    rows, labels = silo.train.inputs, silo.train.labels.bool()
    for name, sign in (("oldpeak", 1), ("exang", 1), ("cp=4", 1), ("age", 1), ("thalach", -1)):
        column = rows[:, FEATURES.index(name)]
        gap = (column[labels].mean() - column[~labels].mean()) / column.std()
        assert sign * gap.item() > 0.2


def test_the_made_up_text_of_a_hospital_is_the_same_each_time_and_its_own() -> None:
    torch.manual_seed(3)
    texts = {site: synthetic_text(site) for site in SITES}
    synthetic_text.cache_clear()
    assert texts == {site: synthetic_text(site) for site in SITES}
    firsts = [text.splitlines()[:20] for text in texts.values()]
    assert all(set(a).isdisjoint(b) for a in firsts for b in firsts if a is not b)


def test_made_up_hospitals_do_not_depend_on_the_seed_of_the_run(tmp_path: Path) -> None:
    first = load_silo("va", MADE_UP, Places(None, tmp_path / "a"))
    second = load_silo("va", dataclasses.replace(MADE_UP, seed=9), Places(None, tmp_path / "b"))
    assert first.fingerprints == second.fingerprints


def test_rows_with_a_cholesterol_of_0_are_kept_and_a_run_says_how_many(places: Places) -> None:
    real = CommonSettings(dataset="heart", data_dir=str(places.data), cache_dir=str(places.cache))
    (line,) = data_set("heart").notices(real)
    zeros = sum(int((rows_of(load_silo(site, REAL, places))[:, 3] == 0).sum()) for site in SITES)
    assert zeros > 46, "all of Switzerland's 46, and some of the Veterans'"
    for said in ("kept", "out-of-range: keep", f"{zeros} of serum cholesterol (chol, mg/dl)"):
        assert said in line


def test_a_cholesterol_that_is_imputed_is_not_said_to_be_kept(places: Places) -> None:
    settings = CommonSettings(
        dataset="heart-imputed", data_dir=str(places.data), cache_dir=str(places.cache)
    )
    assert "chol" not in "".join(data_set("heart-imputed").notices(settings))


def test_without_files_there_is_no_notice_and_the_words_of_the_columns_are_known(
    tmp_path: Path,
) -> None:
    settings = CommonSettings(dataset="heart", data_dir=str(tmp_path))
    assert data_set("heart").notices(settings) == []
    words = data_set("heart").column_words(settings)
    assert words["chol"].title == "serum cholesterol (chol, mg/dl)"
    assert words["age"].title == "age (years)"
    assert words["cp"].level("4") == "no pain (4)"
    assert words["sex"].level("1") == "1"
    assert data_set("table").column_words(settings) == {}, "only hospitals have the schema"
