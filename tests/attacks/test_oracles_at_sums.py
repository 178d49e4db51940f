"""What one hospital alone could be made to tell at ``trust: sums``, each as it succeeded once.

A loss of nan, a refusal, a count in a text: each was an answer about one hospital's patients. By
131 of them a whole row was read, by 12 an exact number of patients.
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.messages import SECURE_KEYS, SECURE_SHARES
from fedsilo.server_app.config.settings import resolve
from tests.support.hospital import Hospital
from tests.support.two_worlds import RUN, SITES, VICTIM, Federation, table

WITHHELD = "this site could not answer; its own log says why"
LOGISTIC = {"head.1.weight": np.zeros((2, 2)), "head.1.bias": np.zeros(2)}


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Return three hospitals that have declared their data."""
    made = Federation(tmp_path / "home")
    for site in SITES:
        made.send(site, "query.hello", resolve(RUN).as_mapping())
    return made


def one_round(
    federation: Federation,
    config: dict[str, Any],
    arrays: dict[str, Any],
    metrics: tuple[str, ...] = (),
    **instruction: Any,
) -> dict[str, Any]:
    """Play a round; each hospital must answer each message of it."""
    left = federation.sum(config, single(arrays), metrics, **instruction)
    assert left is not None, federation.seen[-1]
    return left


def single(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def plane(threshold: float) -> dict[str, Any]:
    """Return weights of an mlp that overflow for patients whose age is beyond a plane alone."""
    first = np.zeros((4, 2))
    first[0] = [1e4, 0]
    return {
        "encoder.layers.0.weight": first,
        "encoder.layers.0.bias": np.array([-1e4 * threshold, 0, 0, 0]),
        "head.1.weight": np.array([[0.0, 0, 0, 0], [3e38, 0, 0, 0]]),
        "head.1.bias": np.zeros(2),
    }


MLP = resolve(
    RUN | {"network.name": "mlp", "network.width": 4, "train.learning-rate": 1e-30}
).as_mapping()


@pytest.mark.parametrize(("threshold", "failed"), [(9.0, 0), (1.5, 1)])
def test_whether_a_patient_is_beyond_a_plane_is_inside_of_the_sum(
    threshold: float, failed: int, federation: Federation
) -> None:
    """The nan of one patient was an error of the site alone; now it is a number of the sum."""
    text = table().splitlines()
    text[5] = "70,10,1"  # two deviations; all others are below 1.9
    federation.patients(VICTIM, "\n".join([*text, ""]))
    others = "\n".join(["age,dose,ill", *[f"{30 + i % 19},9,{i % 2}" for i in range(61)], ""])
    for site in SITES:
        if site != VICTIM:
            federation.patients(site, others)
    left = one_round(federation, MLP, plane(threshold))
    assert left["secure/counts"][1] == failed
    if failed:
        assert "its loss is nan" in log_of(federation), "the hospital's own log says why"
    kinds = {kind for kind, *_ in federation.seen if kind == "error"}
    assert not kinds


def log_of(federation: Federation) -> str:
    return (federation.home / VICTIM / "state" / ".own" / VICTIM / "audit.jsonl").read_text()


def test_the_mean_is_over_the_sites_that_could_answer(federation: Federation) -> None:
    whole = one_round(federation, resolve(RUN).as_mapping(), LOGISTIC)
    federation.patients(VICTIM, None)
    shifted = {name: array + 0.25 for name, array in LOGISTIC.items()}
    metrics = ("trained.train.loss",)
    left = one_round(federation, resolve(RUN).as_mapping(), shifted, metrics, run_name="two")
    samples, failed = left["secure/counts"]
    assert (failed, whole["secure/counts"][1]) == (1, 0)
    assert samples == pytest.approx(whole["secure/counts"][0] * 2 / 3, abs=1)
    assert left["secure/measured"] == [samples], "the metric's mean is over the same sites"


def test_twelve_batch_sizes_tell_what_the_hospital_has_declared_and_no_more(
    federation: Federation,
) -> None:
    def refused(size: int) -> bool:
        config = resolve(RUN).as_mapping() | {"train.batch-size": size, "train.local-epochs": 1}
        federation.send(VICTIM, "query.hello", config)
        return bool(federation.seen[-1][0] == "error")

    def smallest() -> int:
        low, high = 8, 4096
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if refused(middle) else (middle, high)
        return high

    before = smallest()
    federation.patients(VICTIM, table(66))
    assert smallest() == before, "five patients more"


def test_a_patient_more_between_two_rounds_is_in_no_text(federation: Federation) -> None:
    paced = RUN | {"train.epoch-steps": 4, "train.pace": 2}
    del paced["train.batch-size"], paced["train.local-epochs"]
    config = resolve(paced).as_mapping()
    one_round(federation, config, LOGISTIC)
    federation.patients(VICTIM, table(64))
    moved = {name: array + 1 for name, array in LOGISTIC.items()}
    left = one_round(federation, config, moved, round=2, expects_state=1_000_000)
    assert left["secure/counts"][1] == 1
    assert "samples before" in log_of(federation)
    assert not [answer for answer in federation.seen if answer[0] == "error"]


@pytest.mark.parametrize("changes", [{"secure.clip-norm": 1.0}, {"secure.clip-norm": 1e-45}])
def test_a_run_cannot_scale_a_site_s_part(changes: Any, federation: Federation) -> None:
    """With another clip each time, as with another bound on samples, 15 runs gave every update."""
    federation.send(VICTIM, "query.hello", resolve(RUN).as_mapping() | changes)
    _, _, reason = federation.seen[-1]
    assert "adds its part to sums only with 5" in reason


def test_the_bound_on_samples_is_no_setting_of_a_run(federation: Federation) -> None:
    sums = []
    for number, bound in enumerate((10, 16384)):
        config = resolve(RUN).as_mapping() | {"secure-samples": bound}
        sums.append(one_round(federation, config, LOGISTIC, run_name=f"r{number}"))
    assert (sums[0]["head.1.weight"] == sums[1]["head.1.weight"]).all()


def test_hospitals_of_different_bounds_do_not_sum(federation: Federation) -> None:
    path = federation.home / VICTIM / "site.yaml"
    path.write_text(path.read_text() + "secure-samples: 50\n")
    federation.secure(SECURE_KEYS, resolve(RUN).as_mapping(), round=1, run_name="r")
    federation.secure(SECURE_SHARES, resolve(RUN).as_mapping(), round=1, run_name="r")
    assert "does not match its keys" in federation.seen[-1][2]


def refused_again(federation: Federation, config: dict[str, Any], *, without: str = "") -> str:
    """Return why the victim does not sum the same arrays again in another run."""
    asked = {"round": 1, "run_name": "again"}
    federation.secure(SECURE_KEYS, config, **asked)
    federation.keys.pop(without, None)
    federation.secure(SECURE_SHARES, config, **asked)
    secure = {"round": 1, "sites": sorted(federation.keys), "metrics": [], "arrays": [*LOGISTIC]}
    assert federation.send(VICTIM, "train", config, single(LOGISTIC), secure, **asked) is None
    return str(federation.seen[-1][2])


def test_the_same_arrays_are_not_summed_again_under_other_settings(federation: Federation) -> None:
    one_round(federation, resolve(RUN).as_mapping(), LOGISTIC)
    reason = refused_again(federation, resolve(RUN | {"train.learning-rate": 0.2}).as_mapping())
    assert "summed here before under other settings" in reason
    one_round(federation, resolve(RUN).as_mapping(), LOGISTIC, run_name="the-same")


def test_the_same_arrays_are_not_summed_again_in_another_company(tmp_path: Path) -> None:
    """Two runs from one start, with and without a site, gave its update."""
    federation = Federation(tmp_path / "home", sites=(*SITES, "east"))
    for site in federation.sites:
        federation.send(site, "query.hello", resolve(RUN).as_mapping())
    config = resolve(RUN).as_mapping()
    one_round(federation, config, LOGISTIC)
    reason = refused_again(federation, config, without="west")
    assert "summed here before by east, north, south, west" in reason


def test_a_site_that_failed_adds_nothing_to_the_same_arrays_later(federation: Federation) -> None:
    """The difference of a sum without and a sum with its part would be its part."""
    federation.patients(VICTIM, None)
    config = resolve(RUN).as_mapping()
    assert one_round(federation, config, LOGISTIC)["secure/counts"][1] == 1
    federation.patients(VICTIM, table())
    assert one_round(federation, config, LOGISTIC, run_name="b")["secure/counts"][1] == 1
    moved = {name: array + 1 for name, array in LOGISTIC.items()}
    assert one_round(federation, config, moved, run_name="c")["secure/counts"][1] == 0


def mask_a_part(federation: Federation, config: dict[str, Any]) -> None:
    """Let the victim mask its part, or zeros; it is never asked to unmask the sum."""
    asked = {"round": 1, "run_name": "r"}
    federation.secure(SECURE_KEYS, config, **asked)
    federation.secure(SECURE_SHARES, config, **asked)
    secure = {"round": 1, "sites": sorted(SITES), "metrics": [], "arrays": sorted(LOGISTIC)}
    assert federation.send(VICTIM, "train", config, single(LOGISTIC), secure, **asked) is not None


def test_a_site_that_answered_adds_no_zeros_to_the_same_arrays_later(
    federation: Federation,
) -> None:
    """A sum with its part and one with its zeros gave its part; an unmasked sum is not needed."""
    config = resolve(RUN).as_mapping()
    mask_a_part(federation, config)
    federation.patients(VICTIM, None)
    reason = refused_again(federation, config)
    assert reason.endswith("this site could not answer; its own log says why")
    assert "answered for the same weights before" in log_of(federation)
    federation.patients(VICTIM, table())
    assert one_round(federation, config, LOGISTIC, run_name="b")["secure/counts"][1] == 0


def test_fewer_patients_than_declared_fail_until_they_are_counted_again(
    federation: Federation,
) -> None:
    federation.patients(VICTIM, table(40))
    config = resolve(RUN).as_mapping()
    assert one_round(federation, config, LOGISTIC)["secure/counts"][1] == 1
    assert "remove 'declared-data.json' in its 'state-dir'" in log_of(federation)
    own = federation.home / VICTIM / "state" / ".own" / VICTIM
    (own / "declared-data.json").unlink()  # the fix
    federation.send(VICTIM, "query.hello", config)
    moved = {name: array + 1 for name, array in LOGISTIC.items()}
    assert one_round(federation, config, moved, run_name="b")["secure/counts"][1] == 0


def test_a_failure_is_remembered_before_the_sum_is_opened(federation: Federation) -> None:
    """A server can open a sum by the shares of others, and never ask the site that failed."""
    federation.patients(VICTIM, None)
    config = resolve(RUN).as_mapping()
    mask_a_part(federation, config)
    federation.patients(VICTIM, table())
    assert one_round(federation, config, LOGISTIC, run_name="b")["secure/counts"][1] == 1


# What a hospital says of data that cannot be used, at both levels that trust no single answers
LEVELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nobody": (
        {
            "trust": "nobody",
            "sample_clip_norm": 1.0,
            "noise_multiplier": 4.0,
            "dropout": 0.0,
            "batch_size": 64,
            "local_steps": 2,
        },
        {"trust": "nobody", "max-epsilon": 50.0},
    ),
    "sums": (
        {"trust": "sums", "secure_aggregation": "secagg", "clip_norm": 5.0, "rounds": 10},
        {"trust": "sums"},
    ),
}
SCHEMA = """columns:
  - {name: age, mean: 50, std: 10}
  - {name: dose, mean: 10, std: 2}
label: {column: ill, classes: {well: ['0'], sick: ['1']}}
policy: impute
sites: {cleveland: own.csv}
"""


def a_table(folder: Path, lines: dict[int, str], rows: int = 137) -> None:
    text = table(rows).splitlines()
    for number, line in lines.items():
        text[number] = line
    (folder / "schema.yaml").write_text(SCHEMA)
    (folder / "own.csv").write_text("\n".join([*text, ""]))


def png(seed: int) -> bytes:
    pixels = b"".join(
        b"\0" + bytes((seed * 7 + row * 3 + c) % 256 for c in range(16)) for row in range(16)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def images(folder: Path, broken: int, label: str = "") -> None:
    lines = ["path,label,split,patient"]
    for number in range(61):
        (folder / f"i{number}.png").write_bytes(b"no" if number == broken else png(number))
        lines.append(f"i{number}.png,{'ab'[number % 2]},,p{number}")
    if label:
        lines[5] = f"i4.png,{label},,p4"
    (folder / "cleveland.csv").write_text("\n".join([*lines, ""]))
    (folder / "images.yaml").write_text(
        "sites: {cleveland: cleveland.csv}\nclasses: [a, b]\nimage-size: 16\n"
    )


BROKEN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a number that is none": ("table", lambda d: a_table(d, {66: "4x2 years,9,1"})),
    "a label of nobody else": ("table", lambda d: a_table(d, {66: "42,9,Smith"})),
    "columns of a patient": ("table", lambda d: a_table(d, {0: "age,Mueller Hans,ill"})),
    "a number beyond": ("table", lambda d: a_table(d, {66: "1e400,9,1"})),
    "two rows": ("table", lambda d: a_table(d, {}, 2)),
    "a label of an image": ("images", lambda d: images(d, -1, "Smith")),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", ["refuse", "skip"])
def test_whether_an_image_is_broken_decides_no_answer(
    policy: str, level: str, hospital: Callable[..., Hospital], tmp_path: Path
) -> None:
    """By 'refuse' a run asked whether there is one: then there was no answer."""
    answers = []
    for broken in (33, -1):
        folder = tmp_path / str(broken)
        folder.mkdir()
        images(folder, broken)
        run, node = LEVELS[level]
        more = {"image_size": 16, "width": 4, "broken_images": policy}
        site = hospital(node={**node, "data-dir": str(folder)}, **run, dataset="images", **more)
        answers.append(site.send("query.hello"))
        assert not site.refusals
    assert None not in answers


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", BROKEN)
def test_an_error_about_the_data_is_a_constant_text(
    what: str, level: str, hospital: Callable[..., Hospital], tmp_path: Path
) -> None:
    """'1 of 61 images cannot be used: the image of line 35' left, at both levels."""
    dataset, make = BROKEN[what]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    run, node = LEVELS[level]
    more = {"standardise": "declared"} if dataset == "table" else {"image_size": 16, "width": 4}
    site = hospital(node={**node, "data-dir": str(folder)}, **run, dataset=dataset, **more)
    assert site.send("query.hello") is None
    assert site.refusals == [f"site cleveland, round 0: {WITHHELD}"]


def test_training_that_names_the_phase_of_the_end_is_refused_before_data_are_opened(
    federation: Federation,
) -> None:
    """It opened the data, failed for want of such a phase, and cost the hospital its part."""
    config = resolve(RUN).as_mapping()
    asked: dict[str, Any] = {"round": 1, "run_name": "r", "evaluate": False}
    for phase in (SECURE_KEYS, SECURE_SHARES):
        federation.secure(phase, config, **asked)
    secure: dict[str, Any] = {
        "round": 1,
        "sites": sorted(federation.keys),
        "arrays": sorted(LOGISTIC),
    }
    secure["metrics"] = []
    left = federation.send(
        VICTIM, "train", config, single(LOGISTIC), secure, phase="evaluate", **asked
    )
    assert left is None
    assert "has no phase 'evaluate'" in federation.last_error
    one_round(federation, config, LOGISTIC)
