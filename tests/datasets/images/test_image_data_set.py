import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.decoding import Decoded
from fedsilo.datasets.images.image_data_set import Classes, ImageDataSet
from fedsilo.datasets.images.index import ImageIndex, in_public, join_indices, take_share
from fedsilo.datasets.registry import check_data_settings
from fedsilo.datasets.silo.silos import Silo, Split, fingerprint
from fedsilo.datasets.synthetic.phantoms import DERMOSCOPY_PHANTOM
from tests.support.errors import refuses

PLAIN = CommonSettings(dataset="images")


@dataclasses.dataclass(frozen=True)
class Flat(ImageDataSet):
    """Two sites of grey files: image i has the level i; three images are of one patient."""

    count: int = 24
    parts: tuple[str, ...] = ()
    alone: bool = False

    name = "flat"

    def classes(self, settings: CommonSettings, places: Places) -> Classes:
        return {"even": ("0",), "odd": ("1",)}

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        return ["a", "b"]

    def index(self, site: str, settings: CommonSettings, places: Places) -> ImageIndex:
        assert places.data is not None
        numbers = range(self.count) if site == "a" else range(self.count, 2 * self.count)
        whole = ImageIndex(
            where=f"flat, {site}",
            folder=places.data,
            names=tuple(f"{number}.png" for number in numbers),
            labels=np.array([number // 3 % 2 for number in numbers], dtype=np.int64),
            groups=tuple(f"p{number if self.alone else number // 3}" for number in numbers),
            safe_names=tuple(f"{number}.png" for number in numbers),
            parts=self.parts,
        )
        return take_share(whole, settings.sample_share)


FLAT = Flat()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(48):
        Image.new("L", (20, 20), number).save(folder / f"{number}.png")
    return Places(folder, tmp_path / "cache")


def load(places: Places, site: str = "a", data: ImageDataSet = FLAT, **changes: Any) -> Silo:
    return data.load(site, dataclasses.replace(PLAIN, image_size=16, **changes), places)


def numbers(split: Split) -> list[int]:
    """Return which images a part holds."""
    return [int(level) for level in split.inputs[:, 0, 0, 0]]


def held(silo: Silo) -> list[list[int]]:
    return [numbers(split) for split in silo.splits().values()]


def test_a_silo_holds_its_images_as_bytes_with_their_labels(places: Places) -> None:
    silo = load(places, "b")
    assert (silo.name, silo.distribution, silo.classes) == ("b", "b", ("even", "odd"))
    assert (silo.shape.input_shape, silo.shape.outputs) == ((3, 16, 16), 2)
    assert silo.dropped == 0
    train, val, test = held(silo)
    assert (len(train), val, len(test)) == (18, [], 6)
    assert sorted(train + test) == list(range(24, 48))
    for split in silo.splits().values():
        assert (split.inputs.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
        assert split.inputs.shape[1:] == (3, 16, 16)
        assert split.labels.tolist() == [number // 3 % 2 for number in numbers(split)]


def test_a_quarter_of_each_class_is_test_data_by_patient(places: Places) -> None:
    silo = load(places)
    assert silo.label_counts() == {"train": [9, 9], "val": [0, 0], "test": [3, 3]}
    train, _, test = held(silo)
    assert {number // 3 for number in train}.isdisjoint({number // 3 for number in test})


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 99),
    sample=st.floats(0.4, 1),
    public=st.sampled_from([0, 0.2, 0.5]),
    folds=st.sampled_from([{}, {"val_folds": 2}, {"test_folds": 2, "val_folds": 2}]),
)
def test_no_patient_is_in_two_parts_or_public_for_any_seed_and_share(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    sample: float,
    public: float,
    folds: dict[str, int],
) -> None:
    phantom = dataclasses.replace(
        CommonSettings(dataset="dermoscopy-phantom", image_size=16, target="nevus", **folds),  # type: ignore[arg-type]
        fold_seed=seed,
        sample_share=sample / 80,
        public_share=public,
    )
    places = Places(None, tmp_path_factory.mktemp("cache"))
    pictures = [] if public == 0 else list(DERMOSCOPY_PHANTOM.public(phantom, places).inputs)
    for site in ("bcn", "rosendahl"):
        index = DERMOSCOPY_PHANTOM.index(site, phantom, places)
        drawn = DERMOSCOPY_PHANTOM.decode(index, 16, phantom).images
        lesion = {image.tobytes(): g for image, g in zip(drawn, index.groups, strict=True)}
        try:
            silo = DERMOSCOPY_PHANTOM.load(site, phantom, places)
        except DataError:  # so small a share can leave fewer than 2: then there is no silo
            assume(False)
        own = [{lesion[i.numpy().tobytes()] for i in s.inputs} for s in silo.splits().values()]
        own.append({lesion.get(i.numpy().tobytes(), "elsewhere") for i in pictures})
        assert set().union(*own) - {"elsewhere"} == set(index.groups)
        assert all(a.isdisjoint(b) for a in own for b in own if a is not b)


def test_the_public_part_is_of_all_sites_and_in_none(places: Places) -> None:
    shared = dataclasses.replace(PLAIN, image_size=16, public_share=0.4)
    public = FLAT.public(shared, places)
    silos = [load(places, site, public_share=0.4) for site in "ab"]
    inside = [number for silo in silos for part in held(silo) for number in part]
    assert sorted(inside + numbers(public)) == list(range(48))
    assert {number // 3 for number in inside}.isdisjoint(n // 3 for n in numbers(public))
    assert public.inputs.dtype == torch.uint8
    assert public.labels.tolist() == [number // 3 % 2 for number in numbers(public)]
    assert len({number // 24 for number in numbers(public)}) == 2
    # Neither folds nor the seed of a run change it, and it is made once
    other = dataclasses.replace(shared, test_folds=2, fold_seed=5, seed=9)
    files = sorted(path.name for path in (places.cache / "flat-silos").glob("all-*"))
    assert numbers(FLAT.public(other, places)) == numbers(public)
    assert sorted(path.name for path in (places.cache / "flat-silos").glob("all-*")) == files


def test_a_larger_public_share_holds_the_smaller_and_has_about_its_size() -> None:
    groups = [f"g{number}" for number in range(4000)]
    drawn = [in_public(groups, share) for share in (0, 0.1, 0.3)]
    assert not drawn[0].any()
    assert not (drawn[1] & ~drawn[2]).any()
    assert [part.mean() for part in drawn[1:]] == pytest.approx([0.1, 0.3], abs=0.02)
    assert (in_public(groups[::-1], 0.3) == drawn[2][::-1]).all()


def test_without_a_public_share_there_is_no_public_part(places: Places) -> None:
    with refuses(SettingError, "split.public-share", "0"):
        FLAT.public(PLAIN, places)
    with pytest.raises(DataError, match=r"flat, public part: it has no image: raise 'split.pub"):
        FLAT.public(dataclasses.replace(PLAIN, public_share=1e-6), places)


def test_a_sample_is_a_share_of_the_patients_and_of_a_larger_sample(places: Places) -> None:
    found = {
        share: FLAT.index("a", dataclasses.replace(PLAIN, sample_share=share), places)
        for share in (0.01, 0.25, 0.5, 1.0)
    }
    assert [len(index) for index in found.values()] == [3, 6, 12, 24]  # 1, 2, 4, 8 patients
    small, large = (set(found[share].names) for share in (0.25, 0.5))
    assert small < large
    alone = Flat(alone=True).index("a", dataclasses.replace(PLAIN, sample_share=0.01), places)
    assert len(alone) == 2  # however small the share


def test_other_settings_cut_or_decode_otherwise_and_a_second_load_reads_the_cache(
    places: Places,
) -> None:
    first = load(places, test_folds=2, val_folds=2)
    changes: list[dict[str, Any]] = [
        {"test_fold": 1},
        {"val_fold": 1},
        {"fold_seed": 3},
        {"use_test": False},
        {"public_share": 0.2},
        {"sample_share": 0.5},
    ]
    for change in changes:
        other = load(places, **{"test_folds": 2, "val_folds": 2, **change})
        assert held(other) != held(first)
    made = {path: path.stat().st_mtime_ns for path in places.cache.rglob("*.*")}
    again = load(places, test_folds=2, val_folds=2, seed=99)
    assert again.fingerprints == first.fingerprints
    assert {path: path.stat().st_mtime_ns for path in places.cache.rglob("*.*")} == made


def test_without_test_data_the_others_are_the_same_and_broken_test_images_do_not_matter(
    places: Places,
) -> None:
    whole = load(places)
    assert places.data is not None
    (places.data / f"{numbers(whole.test)[0]}.png").write_bytes(b"no")
    chosen = load(places, use_test=False)
    assert held(chosen) == [numbers(whole.train), [], []]
    assert chosen.test.inputs.shape == (0, 3, 16, 16)
    with refuses(DataError, 1, 24):
        load(places)


def test_a_changed_file_is_decoded_again(places: Places) -> None:
    assert places.data is not None
    first = load(places)
    Image.new("L", (20, 20), 200).save(places.data / "3.png")
    second = [number for part in held(load(places)) for number in part]
    assert sorted(second) == [n for n in range(24) if n != 3] + [200]
    assert 3 in [number for part in held(first) for number in part]


def test_broken_images_are_refused_with_their_names_and_nothing_is_cached(places: Places) -> None:
    assert places.data is not None
    (places.data / "2.png").unlink()
    (places.data / "7.png").write_bytes((places.data / "7.png").read_bytes()[:46])
    with pytest.raises(DataError) as caught:
        load(places)
    said = str(caught.value)
    assert said.startswith("flat, a: 2 of 24 images cannot be used: ")
    assert "2.png is missing" in said
    assert "7.png is truncated or damaged" in said
    assert said.endswith(": fix them, or set 'data.broken-images' to 'skip'")
    assert str(places.data) not in said
    assert not [path for path in places.cache.rglob("*") if path.is_file()]
    assert load(places, "b").dropped == 0


def test_broken_images_are_left_out_and_counted_where_that_is_wanted(places: Places) -> None:
    assert places.data is not None
    for number in (0, 7, 20):
        (places.data / f"{number}.png").unlink()
    for _ in range(2):  # as made, and as cached
        silo = load(places, broken_images="skip")
        assert silo.dropped == 3
        assert sorted(n for part in held(silo) for n in part) == [
            number for number in range(24) if number not in (0, 7, 20)
        ]
        for split in silo.splits().values():
            assert split.labels.tolist() == [number // 3 % 2 for number in numbers(split)]
    shared = dataclasses.replace(
        PLAIN, image_size=16, public_share=0.4, broken_images="skip", sample_share=0.9
    )
    assert not {0, 7, 20} & set(numbers(FLAT.public(shared, places)))


def test_too_few_training_images_are_refused_with_those_left_out(places: Places) -> None:
    assert places.data is not None
    data = Flat(count=3, alone=True)
    assert [len(part) for part in held(load(places, data=data))] == [2, 0, 1]
    (places.data / f"{held(load(places, data=data))[0][0]}.png").unlink()
    with pytest.raises(DataError, match=r"flat, a: 1 training images are left \(1 were left out"):
        load(places, data=data, broken_images="skip")


def test_a_site_of_one_patient_cannot_be_split_by_patient(places: Places) -> None:
    with refuses(DataError, 3, 1):
        load(places, data=Flat(count=3))


def test_a_site_of_one_class_is_a_silo(places: Places) -> None:
    @dataclasses.dataclass(frozen=True)
    class OneClass(Flat):
        def index(self, *args: Any) -> ImageIndex:
            index = super().index(*args)
            return dataclasses.replace(index, labels=np.ones_like(index.labels))

    counts = load(places, data=OneClass()).label_counts()
    assert counts == {"train": [0, 18], "val": [0, 0], "test": [0, 6]}


GIVEN = ("train",) * 12 + ("val",) * 6 + ("test",) * 6


def test_a_given_split_is_followed_whatever_the_seed(places: Places) -> None:
    for seed in (0, 1):
        silo = load(places, data=Flat(parts=GIVEN), fold_seed=seed)
        assert held(silo) == [list(range(12)), list(range(12, 18)), list(range(18, 24))]
    silo = load(places, data=Flat(parts=GIVEN), use_test=False)
    assert held(silo) == [list(range(12)), list(range(12, 18)), []]


@pytest.mark.parametrize("kind", ["test", "val"])
def test_a_given_part_and_its_folds_contradict_each_other(places: Places, kind: str) -> None:
    said = f"flat, a gives {kind} images itself: set 'split.{kind}-folds' to 0"
    with pytest.raises(DataError, match=said):
        load(places, data=Flat(parts=GIVEN), **{f"{kind}_folds": 2})


@pytest.mark.parametrize("kind", ["test", "val"])
def test_a_part_that_a_given_split_lacks_is_cut_from_its_training_images(
    places: Places, kind: str
) -> None:
    without = tuple("train" if part == kind else part for part in GIVEN)
    whole = load(places, data=Flat(parts=without))
    assert held(whole)[1 if kind == "val" else 2] == []
    cut = load(places, data=Flat(parts=without), **{f"{kind}_folds": 3})
    other = 2 if kind == "val" else 1
    assert held(cut)[other] == held(whole)[other], "the given part stays as it is"
    made = held(cut)[1 if kind == "val" else 2]
    assert len(made) == 6
    assert sorted(held(cut)[0] + made) == held(whole)[0]


def test_images_of_several_sites_are_told_apart_by_their_sites() -> None:
    labels = np.zeros(2, dtype=np.int64)
    parts = [
        ImageIndex(where, Path("data"), (f"{where}-0", f"{where}-1"), labels, ("p", "q"), told)
        for where, told in (("a", ("line 2", "line 3")), ("b", ("line 2", "line 3")))
    ]
    lines = ("line 2 of a", "line 3 of a", "line 2 of b", "line 3 of b")
    assert join_indices("all", parts).safe_names == lines
    assert join_indices("all", parts).take(np.array([3, 0])).safe_names == (
        "line 3 of b",
        "line 2 of a",
    )
    public = [dataclasses.replace(part, safe_names=part.names) for part in parts]
    assert join_indices("all", public).safe_names == join_indices("all", public).names


def test_a_given_split_with_one_content_on_two_sides_is_refused(places: Places) -> None:
    assert places.data is not None
    (places.data / "3.png").write_bytes((places.data / "20.png").read_bytes())
    (places.data / "4.png").write_bytes((places.data / "5.png").read_bytes())  # on one side
    said = r"equal content are in two parts: 3\.png \(train\) and 20\.png \(test\): keep one"
    with pytest.raises(DataError, match=said):
        load(places, data=Flat(parts=GIVEN))
    assert load(places).dropped == 0  # where we split, nothing was promised


def test_a_damaged_cache_is_made_anew_or_told_by_its_folder(places: Places) -> None:
    before = load(places)
    target = next(places.cache.rglob("train-inputs.npy"))
    target.write_bytes(target.read_bytes()[:50])

    class Gone(Flat):
        def decode(self, index: ImageIndex, size: int, settings: CommonSettings) -> Decoded:
            raise DataError("the images are gone")

    said = r"cached data in .*/flat-silos/a-silo-\w* were altered and cannot be made again \(the i"
    with pytest.raises(DataError, match=said):
        load(places, data=Gone())
    silo = load(places)
    assert silo.fingerprints == before.fingerprints
    assert fingerprint(silo.train) == before.fingerprints["train"]


def test_sites_of_other_classes_or_sizes_have_another_schema(places: Places) -> None:
    class Turned(Flat):
        def classes(self, settings: CommonSettings, places: Places) -> Classes:
            return {"odd": ("1",), "even": ("0",)}

    first = load(places).schema
    assert len(first) == 64
    assert load(places, "b").schema == first
    assert load(places, data=Turned()).schema != first
    larger = FLAT.load("a", dataclasses.replace(PLAIN, image_size=17), places)
    assert larger.schema != first
    assert larger.shape.input_shape == (3, 17, 17)


@pytest.mark.parametrize("name", ["isic2019", "dermoscopy-phantom", "images"])
def test_images_too_small_and_folds_that_are_not_there_are_refused(name: str) -> None:
    settings = CommonSettings(dataset=name)
    for size in (0, 16):
        check_data_settings(dataclasses.replace(settings, image_size=size))
    with refuses(SettingError, "data.image-size", "15", "0", "16"):
        check_data_settings(dataclasses.replace(settings, image_size=15))
    with refuses(SettingError, "split.test-folds", "1", "0", "2"):
        check_data_settings(dataclasses.replace(settings, test_folds=1))
