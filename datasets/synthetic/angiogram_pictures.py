"""Pictures that look like angiograms, painted by formulas: vessels, a catheter, an X-ray machine.

A sequence shows one vessel tree in front of one background, each of its frames the catheter at
another place and another amount of contrast medium. A source (human, animal, silicone model,
simulation) has a look of its own. Lengths are in halves of the picture's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedsilo.datasets.images.decoding import Pixels
from fedsilo.datasets.synthetic.primitives import Field, falling, grid, noise
from fedsilo.datasets.synthetic.vessel_trees import Line, Tree, smooth_line

Range = tuple[float, float]

_PIECE = 6  # segments of a line painted at once: more would have too large a box
_WITH_CATHETER = 0.88  # share of frames
_WHOLE = 0.5  # share of the light at which a pixel is within the field of view


@dataclass(frozen=True)
class Subject:
    """What lies in the beam; amounts are attenuations, 0 is none.

    Attributes:
        tissue: amount of smooth shades.
        bones: amounts of spine and ribs.
        rib_period: distance of ribs.
        organ: amount of a large soft shadow, as of the heart.
        floor: amount of squares, as under a simulated model.
        lumen: range of the amount of contrast medium.
        wall: amount of a vessel's wall.
        device: amount of a catheter.
        clutter: mean number of leads, clips or screws.
    """

    tissue: float
    bones: Range
    rib_period: float
    organ: float
    floor: float
    lumen: Range
    wall: float
    device: float
    clutter: float


@dataclass(frozen=True)
class Machine:
    """How a picture is taken.

    Attributes:
        field: form of the field of view: "round", "blades" or "whole".
        negative: whether what attenuates is bright.
        light: brightness without anything in the way.
        gamma: exponent of the tone curve.
        vignette: loss of light towards the corners, 0 to 1.
        blur: standard deviation of the blur.
        noise: standard deviation of the noise on white.
    """

    field: str
    negative: bool
    light: float
    gamma: float
    vignette: float
    blur: float
    noise: float


LOOKS = {
    "human": (
        Subject(0.12, (0.32, 0.17), 0.52, 0.3, 0.0, (0.12, 0.7), 0.0, 0.85, 0.7),
        Machine("round", False, 0.95, 1.0, 0.3, 0.018, 0.035),
    ),
    "animal": (
        Subject(0.2, (0.45, 0.26), 0.27, 0.15, 0.0, (0.1, 0.55), 0.0, 0.65, 0.3),
        Machine("blades", False, 1.0, 0.65, 0.1, 0.026, 0.07),
    ),
    "silicone": (
        Subject(0.03, (0.0, 0.0), 1.0, 0.0, 0.0, (0.0, 0.25), 0.55, 0.9, 1.5),
        Machine("whole", False, 0.92, 0.8, 0.35, 0.02, 0.018),
    ),
    "simulation": (
        Subject(0.0, (0.0, 0.0), 1.0, 0.0, 0.05, (0.25, 0.5), 0.25, 1.1, 0.0),
        Machine("whole", True, 0.85, 1.0, 0.2, 0.014, 0.004),
    ),
}


def render(
    source: str,
    anatomy: str,
    sequence_rng: np.random.Generator,
    frame_rng: np.random.Generator,
    size: int,
) -> tuple[Pixels, Pixels]:
    """Return a frame (size, size), 0..255, and its mask (size, size), 1 on the catheter.

    Args:
        source: a key of ``LOOKS``.
        anatomy: one of ``fedsilo.datasets.synthetic.vessel_trees.ANATOMIES``.
        sequence_rng: draws tree, pose, background and field of view; equal generators, equal ones.
        frame_rng: draws the catheter's place, contrast medium, clutter, light and noise.
        size: pixels of a side; it only decides how finely the picture is sampled.
    """
    subject, machine = LOOKS[source]
    tree = Tree.random(sequence_rng, anatomy)
    shadow = _background(subject, sequence_rng, size)
    field = _field(machine, sequence_rng, size)
    moved = np.append(frame_rng.normal(0, 0.03, 2), 0)  # by breath and pulse
    shadow += _vessels(subject, [line + moved for line in tree.vessels], frame_rng, size)
    catheter, mask = _catheter(tree.path(frame_rng) + moved, frame_rng, size)
    shadow += np.float32(subject.device) * (
        catheter + np.float32(0.7) * _clutter(subject, frame_rng, size)
    )
    mask[field < _WHOLE] = 0
    return _exposed(machine, shadow, field, frame_rng), mask


def _background(subject: Subject, rng: np.random.Generator, size: int) -> Field:
    """Return how much tissue, bones and an organ attenuate (size, size)."""
    x, y, _ = grid(size)
    shades = 0.7 * noise(rng, size, 2) + 0.4 * noise(rng, size, 5) + 0.15 * noise(rng, size, 14)
    shadow = np.float32(subject.tissue) * shades
    middle, tilt, phase = rng.uniform(-0.55, 0.55), rng.normal(0, 0.1), rng.uniform(0, 1)
    across = x - np.float32(middle) - np.float32(tilt) * y
    spine, ribs = subject.bones
    if spine:
        wide = np.float32(0.7 * subject.rib_period**0.5 * 0.36)
        along = (y + phase) / np.float32(subject.rib_period)
        disc = 0.72 + 0.28 * np.tanh(4 * np.cos(2 * np.pi * along) + 2)
        roots = np.exp(-(((np.abs(across) / wide - 0.6) / 0.2) ** 2)) * (disc > 0.9)
        shadow += np.float32(spine) * falling(np.abs(across) - wide, 30) * (disc + 0.25 * roots)
        shadow += np.float32(ribs) * _ribs(subject, across, y + np.float32(phase), rng)
    if subject.organ:
        right, down = rng.uniform(-0.4, 0.4), rng.uniform(0.3, 0.9)
        away = ((x - right) / rng.uniform(0.5, 0.9)) ** 2 + ((y - down) / 0.6) ** 2
        shadow += np.float32(subject.organ) * falling(away - 1, 3)
    if subject.floor:
        turn = np.exp(1j * rng.uniform(0, np.pi)) * 9
        floor = np.sin(x * turn.real + y * turn.imag) * np.sin(y * turn.real - x * turn.imag)
        shadow += np.float32(subject.floor) * np.tanh(8 * floor) + 0.12 * (y + 1)
    return shadow.astype(np.float32)


def _ribs(subject: Subject, across: Field, y: Field, rng: np.random.Generator) -> Field:
    """Return ribs on both sides of the spine, each with its edges darker than its middle."""
    slope, bend = rng.uniform(0.2, 0.6), rng.uniform(-0.25, 0.1)
    lateral = np.abs(across)
    place = (y - np.float32(slope) * lateral - np.float32(bend) * lateral**2) / subject.rib_period
    away = np.abs(place % 1 - 0.5) * 2  # 0 in the middle of a rib, 1 between two
    edges = np.exp(-(((away - 0.42) / 0.12) ** 2))
    ribs: Field = (0.7 * falling(away - 0.45, 18) + 0.5 * edges) * falling(0.12 - lateral, 20)
    return ribs


def _vessels(subject: Subject, lines: Sequence[Line], rng: np.random.Generator, size: int) -> Field:
    """Return how much the contrast medium and the walls of vessels attenuate."""
    amount = np.float32(rng.uniform(*subject.lumen))
    away, radius = _nearest(lines, size)
    inside = np.sqrt((1 - away**2).clip(0))
    shadow: Field = amount * inside * (radius / np.float32(0.08)) ** np.float32(0.4)
    if subject.wall:
        faint = (radius * np.float32(size / 3)).clip(0, 1)  # else a wall is thinner than a pixel
        shadow += np.float32(subject.wall) * np.exp(-(((away - 0.85) / 0.2) ** 2)) * faint
    return shadow


def _nearest(lines: Iterable[Line], size: int) -> tuple[Field, Field]:
    """Return each pixel's distance from the nearest line, in its radii, and that radius.

    A line thinner than a pixel is painted as wide as that; its radius tells how faint it is.
    """
    away = np.full((size, size), 9, dtype=np.float32)
    radius = np.zeros_like(away)
    for rows, columns, distance, wide in _pieces(lines, size):
        part, ratio = away[rows, columns], distance / wide.clip(1.2 / size)
        nearer = ratio < part
        part[nearer] = ratio[nearer]
        radius[rows, columns][nearer] = (wide * (wide * np.float32(size)).clip(0, 1))[nearer]
    return away, radius


def _pieces(lines: Iterable[Line], size: int) -> Iterator[tuple[slice, slice, Field, Field]]:
    """Yield boxes of pixels near pieces of lines, each pixel's distance, and the radius there."""
    x, y, _ = grid(size)
    for line in lines:
        for start in range(0, len(line) - 1, _PIECE):
            piece = line[start : start + _PIECE + 1].astype(np.float32)
            reach = 1.4 * piece[:, 2].max() + 3 / size
            low = ((piece[:, :2].min(axis=0) - reach + 1) * size / 2).clip(0, size).astype(int)
            high = ((piece[:, :2].max(axis=0) + reach + 1) * size / 2 + 1).clip(0, size).astype(int)
            if (high <= low).any():
                continue  # beyond the picture
            rows, columns = slice(low[1], high[1]), slice(low[0], high[0])
            yield rows, columns, *_to_piece(piece, x[rows, columns], y[rows, columns])


def _to_piece(piece: Line, x: Field, y: Field) -> tuple[Field, Field]:
    """Return the distance of pixels from a piece of a line, and the radius at the foot."""
    (left, up, first), (right, down, last) = (part[:, :, None, None] for part in _ends(piece))
    forth, below = right - left, down - up
    long = (forth**2 + below**2).clip(1e-9)
    share = (((x - left) * forth + (y - up) * below) / long).clip(0, 1)
    away = (x - left - share * forth) ** 2 + (y - up - share * below) ** 2
    best = away.argmin(axis=0)[None]
    wide = np.take_along_axis(first + share * (last - first), best, axis=0)[0]
    return np.sqrt(np.take_along_axis(away, best, axis=0)[0]), wide


def _ends(piece: Line) -> tuple[Line, Line]:
    return piece[:-1].T, piece[1:].T


def _catheter(path: Line, rng: np.random.Generator, size: int) -> tuple[Field, Pixels]:
    """Return a catheter (size, size), 0..1, and its mask; both are empty in some frames."""
    lines = [path] if rng.random() < _WITH_CATHETER else []
    mask = np.zeros((size, size), dtype=np.uint8)
    for rows, columns, distance, wide in _pieces(lines, size):
        mask[rows, columns] |= distance <= wide.clip(1.4 / size)
    return _strokes(lines, size), mask


def _strokes(lines: Iterable[Line], size: int) -> Field:
    """Return how much of each pixel lines cover; one thinner than a pixel is fainter."""
    strokes = np.zeros((size, size), dtype=np.float32)
    for rows, columns, distance, wide in _pieces(lines, size):
        painted = wide.clip(1 / size)
        covered = (0.5 + (painted - distance) * np.float32(size / 2)).clip(0, 1)
        part = strokes[rows, columns]
        np.maximum(part, covered * wide / painted, out=part)
    return strokes


def _clutter(subject: Subject, rng: np.random.Generator, size: int) -> Field:
    """Return leads and clips, or a model's screws, which no mask marks."""
    lines = []
    for _ in range(min(rng.poisson(subject.clutter), 4)):
        lead, thick = rng.random() < 0.4, rng.uniform(0.02, 0.05)
        ways = rng.normal(0, 0.8 if lead else 0.04, (2, 2))
        points = rng.uniform(-1, 1, 2) + np.cumsum([[0, 0], *ways], axis=0)
        lines.append(smooth_line(points, 0.009 if lead else thick, 0.009 if lead else thick))
    return _strokes(lines, size)


def _exposed(machine: Machine, shadow: Field, field: Field, rng: np.random.Generator) -> Pixels:
    """Return the picture as the source's machine shows it."""
    _, _, away = grid(len(shadow))
    passed = np.exp(-shadow)
    light = np.float32(machine.light) * (1.12 - passed if machine.negative else passed)
    light *= field * (1 - np.float32(machine.vignette / 2) * away)
    blur = _blurring(len(shadow), machine.blur)
    light = blur @ light @ blur.T * np.float32(rng.lognormal(0, 0.06))
    grain = rng.standard_normal(shadow.shape, dtype=np.float32)
    seen = light + np.float32(machine.noise) * np.sqrt(light.clip(0)) * grain
    shown: Pixels = (seen.clip(0, 1) ** np.float32(machine.gamma) * 255 + 0.5).astype(np.uint8)
    return shown


def _field(machine: Machine, rng: np.random.Generator, size: int) -> Field:
    """Return what the collimator lets through, 0..1."""
    x, y, away = grid(size)
    if machine.field == "round":
        return falling(np.sqrt(away) - np.float32(rng.normal(1.12, 0.05)), 70)
    if machine.field == "blades":
        wide, high = rng.uniform(0.78, 1.1, 2).astype(np.float32)
        return falling(np.maximum(np.abs(x) - wide, np.abs(y) - high), 40)
    return np.ones_like(x)


@lru_cache(maxsize=16)
def _blurring(size: int, spread: float) -> Field:
    """Return what blurs (size, size) columns: a Gaussian's weights, each row's sum 1."""
    line = (np.arange(size) + 0.5) * 2 / size
    weights = np.exp(-(((line[:, None] - line) / spread) ** 2) / 2)
    blurring: Field = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return blurring
