"""Vessel trees of three anatomies (aortic arch, carotid, left coronary), and ways through them.

Lengths are in halves of a picture's side: the picture is 2 wide and high, and its centre is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Line = npt.NDArray[Any]  # (points, 3): x to the right, y down, radius

_STEP = 0.06  # between the points of a line
_CATHETER, _WIRE = 0.019, 0.011  # radii


@dataclass(frozen=True)
class Tree:
    """Vessels as lines, and the ways that a catheter may take through them."""

    vessels: tuple[Line, ...]
    ways: tuple[Line, ...]

    @classmethod
    def random(cls, rng: np.random.Generator, anatomy: str) -> Tree:
        """Make up a tree, and turn, scale, shift and perhaps mirror it."""
        vessels, ways = _TREES[anatomy](rng)
        turn, zoom = rng.normal(0, 0.25), rng.lognormal(0, 0.13)
        side, shift = rng.choice([-1, 1]), rng.normal(0, 0.1, 2)
        cosine, sine = zoom * np.cos(turn), zoom * np.sin(turn)
        pose = np.array([[side * cosine, side * sine, 0], [-sine, cosine, 0], [0, 0, zoom]])
        placed = [tuple(line @ pose + [*shift, 0] for line in lines) for lines in (vessels, ways)]
        return cls(*placed)

    def path(self, rng: np.random.Generator) -> Line:
        """Return a line along a vessel, as stiff things lie in it: now at this wall, now at that.

        Its radius is a catheter's, with a marker at its end, and beyond that a wire's.
        """
        way = self.ways[rng.integers(len(self.ways))]
        ahead = max(6, round(len(way) * rng.uniform(0.45, 1)))
        tip = round(ahead * rng.uniform(0.6, 1))
        way, places = way[:ahead].copy(), np.arange(ahead)
        aside = np.interp(places / 7, np.arange(24), rng.uniform(-0.6, 0.6, 24)) * way[:, 2]
        course = np.gradient(way[:, :2], axis=0)
        course /= np.hypot(*course.T)[:, None].clip(1e-6)
        way[:, :2] += aside[:, None] * course[:, ::-1] * [-1, 1]
        for _ in range(3):  # no stiff thing turns as sharply as a fork
            way[1:-1, :2] = (way[:-2, :2] + 2 * way[1:-1, :2] + way[2:, :2]) / 4
        way[:, 2] = np.where(places < tip, _CATHETER, _WIRE)
        way[tip - 1 : tip, 2] *= 1.4
        return way


def smooth_line(points: npt.ArrayLike, start: float, end: float) -> Line:
    """Return a smooth line near ``points`` (x, y), its radius from ``start`` to ``end``."""
    curve = np.array(points, dtype=np.float64)
    for _ in range(3):  # corners are cut (Chaikin)
        first, second = curve[:-1], curve[1:]
        cut = np.stack([0.75 * first + 0.25 * second, 0.25 * first + 0.75 * second], axis=1)
        curve = np.concatenate([curve[:1], cut.reshape(-1, 2), curve[-1:]])
    lengths = np.concatenate([[0], np.hypot(*np.diff(curve, axis=0).T).cumsum()])
    count = max(3, round(lengths[-1] / _STEP) + 1)
    even = np.linspace(0, lengths[-1], count)
    x, y = (np.interp(even, lengths, values) for values in curve.T)
    return np.stack([x, y, np.linspace(start, end, count)], axis=1)


def _near(rng: np.random.Generator, points: npt.ArrayLike, spread: float = 0.06) -> Line:
    """Return points near ``points``; the first stays, since a vessel may begin there."""
    moved = np.array(points, dtype=np.float64)
    moved[1:] += rng.normal(0, spread, moved[1:].shape)
    return moved


def _arch(rng: np.random.Generator) -> tuple[list[Line], list[Line]]:
    """Return an aortic arch with its three vessels upwards; catheters come from below."""
    cane = [(-0.3, 0.75), (-0.42, 0.2), (-0.35, -0.25), (0, -0.5), (0.32, -0.2), (0.36, 0.4)]
    wide = rng.uniform(0.11, 0.16)
    aorta = smooth_line(_near(rng, [*cane, (0.34, 1.6)]), wide, 0.75 * wide)
    vessels, backwards = [aorta], aorta[::-1]
    ways = [backwards]
    for share, lean in ((0.34, -0.35), (0.42, 0.0), (0.5, 0.3)):
        place = round(share * (len(aorta) - 1))
        x, y, _ = aorta[place]
        stem = [(x, y), (x + lean * 0.3, y - 0.35), (x + lean * 0.7, y - 0.7), (x + lean, y - 1.4)]
        radius = rng.uniform(0.04, 0.06)
        vessels.append(smooth_line(_near(rng, stem), radius, 0.8 * radius))
        ways.append(np.concatenate([backwards[: len(aorta) - place], vessels[-1]]))
    x, y, radius = vessels[1][len(vessels[1]) // 2]
    fork = _near(rng, [(x, y), (x - 0.25, y - 0.15), (x - 0.7, y - 0.1)])
    return [*vessels, smooth_line(fork, 0.8 * radius, 0.6 * radius)], ways


def _carotid(rng: np.random.Generator) -> tuple[list[Line], list[Line]]:
    """Return a carotid artery that forks, the inner one bent like an S at the skull's base."""
    wide = rng.uniform(0.07, 0.095)
    fork = rng.uniform(0.1, 0.35)
    common = smooth_line(_near(rng, [(0.05, 1.7), (0.02, 0.9), (0, fork)], 0.05), wide, wide)
    x, y, _ = common[-1]
    inner = [(x, y), (x + 0.16, y - 0.25), (x + 0.14, -0.35), (x - 0.1, -0.5), (x + 0.08, -0.68)]
    inner += [(x + 0.2, -0.75), (x + 0.1, -0.95)]
    outer = [(x, y), (x - 0.18, y - 0.2), (x - 0.24, -0.3), (x - 0.3, -0.8), (x - 0.32, -1.4)]
    main = smooth_line(_near(rng, inner, 0.04), 0.8 * wide, 0.5 * wide)
    side = smooth_line(_near(rng, outer, 0.05), 0.6 * wide, 0.3 * wide)
    vessels = [common, main, side]
    for lean in (-0.7, 0.7):  # those of the brain
        vessels.append(_twig(rng, main[-1], (lean, -0.2), 0.035))
    for share in rng.uniform(0.2, 0.9, 4):
        lean = rng.choice([-0.55, 0.3])
        vessels.append(_twig(rng, side[int(share * len(side))], (lean, -0.15), 0.022))
    return vessels, [np.concatenate([common, branch]) for branch in (main, side, main)]


def _coronary(rng: np.random.Generator) -> tuple[list[Line], list[Line]]:
    """Return a left coronary artery: a stem, two winding vessels and their twigs."""
    wide = rng.uniform(0.04, 0.055)
    stem = smooth_line(_near(rng, [(-0.5, -0.5), (-0.35, -0.48), (-0.22, -0.4)], 0.03), wide, wide)
    x, y, _ = stem[-1]
    first = [(x, y), (0.1, -0.42), (0.35, -0.2), (0.4, 0.1), (0.6, 0.35), (0.58, 0.75)]
    second = [(x, y), (-0.35, -0.15), (-0.25, 0.1), (-0.35, 0.35), (-0.1, 0.55), (-0.05, 0.85)]
    mains = [
        smooth_line(_near(rng, points, 0.07), 0.85 * wide, 0.35 * wide)
        for points in (first, second)
    ]
    twigs = []
    for main, lean in zip(mains, ((-0.3, 0.55), (0.45, 0.3)), strict=True):
        for share in rng.uniform(0.2, 0.85, rng.integers(2, 5)):
            twigs.append(_twig(rng, main[int(share * len(main))], lean, 0.7 * wide))
    guide = smooth_line(_near(rng, [(-0.9, -1.7), (-0.75, -1.0), (-0.72, -0.6)]), 0.1, 0.08)
    bend = smooth_line(np.stack([guide[-1, :2], [-0.68, -0.45], stem[0, :2]]), 0.05, 0.04)
    return [stem, *mains, *twigs], [np.concatenate([guide, bend, stem, main]) for main in mains]


def _twig(rng: np.random.Generator, root: Line, lean: tuple[float, float], radius: float) -> Line:
    """Return a thin, winding vessel from a point (3,) of another one, about as far as ``lean``."""
    far = np.array(lean) * rng.uniform(0.6, 1.2)
    points = [root[:2] + share * far for share in (0, 0.3, 0.6, 1)]
    thick = min(radius, 0.8 * float(root[2]))
    return smooth_line(_near(rng, points, 0.07), thick, 0.35 * thick)


_Lines = list[Line]
_TREES: dict[str, Callable[[np.random.Generator], tuple[_Lines, _Lines]]] = {
    "arch": _arch,
    "carotid": _carotid,
    "coronary": _coronary,
}
ANATOMIES = tuple(_TREES)
