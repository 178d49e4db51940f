"""``fedsilo histograms``: densities by hand, what is background, the picture, what is refused."""

from pathlib import Path

import pytest
import torch

from fedsilo.cli.main import main
from fedsilo.core.errors import DataError
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.intensity_histograms import (
    Histograms,
    SiteHistograms,
    draw_histograms,
    measure_pixels,
)
from fedsilo.models.networks.encoders import float_inputs


def split_of(images: torch.Tensor) -> Split:
    return Split(images, torch.zeros(len(images), dtype=torch.int64))


def whole(found: Histograms) -> list[float]:
    widths = found.edges.diff()
    return [(density * widths).sum().item() for density in found.densities.values()]


def share(found: Histograms, site: str, value: float) -> float:
    """Return the share of a site's pixels in the bin of ``value``."""
    place = int(torch.bucketize(torch.tensor(value, dtype=torch.float64), found.edges)) - 1
    return (found.densities[site][place] * (found.edges[1] - found.edges[0])).item()


def test_8_bit_pixels_are_scaled_and_an_images_least_value_is_background() -> None:
    # The second image's least value is 10: background there, and a pixel in the first
    images = torch.tensor([[[[0, 0, 10, 255]]], [[[10, 10, 10, 40]]]], dtype=torch.uint8)
    stored, seen = measure_pixels({"a": split_of(images), "b": split_of(images[:1])})
    assert whole(stored) == pytest.approx([1, 1])
    assert whole(seen) == pytest.approx([1, 1])
    for value in (10, 40, 255):
        assert share(stored, "a", value / 255) == pytest.approx(1 / 3)
        assert share(seen, "a", value / 127.5 - 1) == pytest.approx(1 / 3)
    assert share(stored, "b", 10 / 255) == pytest.approx(0.5)
    assert stored.edges[0] == pytest.approx(9.5 / 255, abs=1e-6)
    assert 1 < stored.edges[-1] * 255 / 255 < 1.02


def test_every_bin_holds_as_many_levels() -> None:
    images = torch.arange(253, dtype=torch.uint8).reshape(1, 1, 1, 253)
    for found in measure_pixels({"a": split_of(images)}):
        assert len(found.edges) == 64, "252 levels, four a bin"
        assert found.densities["a"].max() == pytest.approx(found.densities["a"].min().item())


def test_int16_pixels_are_scaled_and_seen_standardised_image_by_image() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(-20000, 20000, (4, 1, 32, 32), generator=draw).to(torch.int16)
    images[:, :, :8] = -32768
    stored, seen = measure_pixels({"a": split_of(images)})
    assert stored.edges[0] == pytest.approx(12768 / 65535, abs=0.001)
    assert stored.edges[-1] == pytest.approx(52768 / 65535, abs=0.02)
    tissue = float_inputs(images)[:, :, 8:]
    centres = (seen.edges[:-1] + seen.edges[1:]) / 2
    mean = (centres * seen.densities["a"] * seen.edges.diff()).sum()
    assert mean == pytest.approx(tissue.mean().item(), abs=0.02)
    assert seen.edges[0] == pytest.approx(tissue.min().item(), abs=1e-4)
    assert whole(stored) + whole(seen) == pytest.approx([1, 1])


def test_floats_are_as_they_are_and_both_alike() -> None:
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    stored, seen = measure_pixels({"a": split_of(images)})
    assert torch.equal(stored.edges, seen.edges)
    assert torch.equal(stored.densities["a"], seen.densities["a"])
    assert stored.edges[-1] == pytest.approx(images.max().item(), abs=1e-4)


def test_no_images_and_nothing_but_background_are_told_of() -> None:
    with pytest.raises(DataError, match="no site has images of that split"):
        measure_pixels({})
    with pytest.raises(DataError, match="counts as background"):
        measure_pixels({"a": split_of(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))})


def test_a_line_per_site_and_a_peak_that_would_flatten_all_is_cut_off() -> None:
    edges = torch.linspace(0, 1, 65, dtype=torch.float64)
    flat = torch.ones(64, dtype=torch.float64)
    peaked = flat.clone()
    peaked[1] = 50
    plain = Histograms(edges, {"a": flat, "b": flat})
    stored = Histograms(edges, {"a": flat, "b": peaked})
    figure = draw_histograms(SiteHistograms("title", stored, plain, {"a": "A", "b": "B"}))
    left, right = figure.axes
    assert left.get_title() == "As stored (peaks up to 50 are cut off)"
    assert left.get_ylim() == pytest.approx((0, 1.5))
    assert right.get_title() == "As the network is given them"
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["A", "B"]
    first, second = left.lines
    assert first.get_color() != second.get_color()


def test_the_command_draws_the_training_images_of_all_sites(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in (finished / "fedavg").iterdir())
    pictures = [tmp_path / "all.png", tmp_path / "one.png", tmp_path / "test.png"]
    more: list[list[str]] = [[], ["--site", "s1a"], ["--split", "test"]]
    for picture, options in zip(pictures, more, strict=True):
        told = ["histograms", str(finished / "fedavg"), "--picture", str(picture)]
        assert main(told + options) == 0
        assert capsys.readouterr().out == f"{picture}\n"
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert len({picture.read_bytes() for picture in pictures}) == 3
    assert sorted(path.name for path in (finished / "fedavg").iterdir()) == before


@pytest.mark.parametrize(
    ("run", "more", "told"),
    [
        ("table", [], "is a table, which has no pixels to draw histograms of"),
        ("fedavg", ["--site", "basel"], " has no site 'basel': choose one of "),
        ("nowhere", [], "nowhere does not exist: name one that does"),
    ],
)
def test_what_has_no_histogram_is_told_in_one_line(
    run: str,
    more: list[str],
    told: str,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "none.png"
    assert main(["histograms", str(finished / run), "--picture", str(picture), *more]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not picture.exists()
