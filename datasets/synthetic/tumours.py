"""Synthetic images of tumours, for a time to an event and for a number.

``tumours-synthetic`` has the time until a tumour grows again, which is shorter for large and lobed
tumours. ``tumours-synthetic-size`` has the same images with the tumour's diameter. Each of three
sites has its own look and its own baseline hazard. They contain no patient's data and do not
replace real images.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedsilo.core.seeding import derive_seed
from fedsilo.core.tasks import REGRESSION, SURVIVAL
from fedsilo.datasets.synthetic import made_up_pictures as pictures
from fedsilo.datasets.synthetic.drawn_images import SIZE, Drawn, DrawnImages
from fedsilo.datasets.synthetic.made_up_pictures import Blob, Look

_SIDE = 100.0  # millimetres that an image shows from edge to edge


@dataclass(frozen=True)
class _Clinic:
    """A synthetic site.

    Attributes:
        images: its number of images, each of another patient.
        hazard: events per month of a tumour with a diameter of 30 mm and a round outline.
        longest: the longest follow-up in months.
        look: how its machine renders an image.
    """

    images: int
    hazard: float
    longest: float
    look: Look


_CLINICS: Mapping[str, _Clinic] = {
    "bay": _Clinic(280, 0.015, 60.0, Look((0.25,), grain=0.04)),
    "cape": _Clinic(220, 0.02, 48.0, Look((0.35,), contrast=0.8, grain=0.06)),
    "isle": _Clinic(160, 0.01, 72.0, Look((0.2,), contrast=1.1, grain=0.05)),
}


@dataclass(frozen=True)
class _Patients:
    """The patients of a site, an entry for each in every list; images are (1, 32, 32)."""

    images: list[npt.NDArray[np.uint8]]
    diameters: list[float]  # millimetres
    times: list[int]  # months to the event or to the end of follow-up
    events: list[bool]  # whether the event happened then


def _draw_patients(site: str) -> _Patients:
    """Draw a site's patients, the same in every run, each with a tumour image and a follow-up time.

    A tumour has a random diameter of 15 to 50 mm, and a round or lobed outline. The time to
    regrowth is exponential, and shorter on average for large and for lobed tumours. Follow-up ends
    at a random time of at least 6 months. A patient's time is the earlier of these two, rounded up
    to whole months. The event is True if regrowth comes first.
    """
    clinic, patients = _CLINICS[site], _Patients([], [], [], [])
    for number in range(clinic.images):
        rng = np.random.default_rng(derive_seed(0, "tumours-synthetic", site, number))
        radius, depth = rng.uniform(0.15, 0.5), rng.choice((0.0, 0.3))
        x, y = rng.uniform(-0.3, 0.3, 2)
        tumour = Blob(x, y, radius, 5, depth)
        content = 0.45 * tumour.soft_mask(SIZE) + 0.04 * pictures.texture(rng, SIZE, 4)
        patients.images.append(clinic.look.show(content[None], rng))
        # The radius is in halves of the image's side
        diameter = float(radius) * _SIDE
        # Ten millimetres more, or a lobed outline, roughly triple or double the hazard
        risk = 0.12 * (diameter - 30.0) + 2.5 * depth
        event = rng.exponential(1 / (clinic.hazard * np.exp(risk)))
        end = rng.uniform(6.0, clinic.longest)
        patients.diameters.append(diameter)
        patients.times.append(int(np.ceil(min(event, end))))
        patients.events.append(bool(event <= end))
    return patients


class Tumours(DrawnImages):
    """The data set ``tumours-synthetic``: months until a tumour grows again."""

    name = "tumours-synthetic"
    tasks = (SURVIVAL,)
    sites, names = tuple(_CLINICS), ("regrowth",)

    def draw(self, site: str) -> Drawn:
        """Draw a site's images, with labels (n, 2) float32: time in months, and event (0 or 1)."""
        patients = _draw_patients(site)
        labels = np.array([patients.times, patients.events], dtype=np.float32).T
        return np.stack(patients.images), labels


class TumourSizes(DrawnImages):
    """The data set ``tumours-synthetic-size``: the same images, with diameters."""

    name = "tumours-synthetic-size"
    tasks = (REGRESSION,)
    settings = DrawnImages.settings | {"data.standardise"}
    sites, names = tuple(_CLINICS), ("diameter (mm)",)

    def draw(self, site: str) -> Drawn:
        """Draw a site's images, with the tumours' diameters in millimetres, (n,)."""
        patients = _draw_patients(site)
        return np.stack(patients.images), np.array(patients.diameters, dtype=np.float32)


TUMOURS, TUMOUR_SIZES = Tumours(), TumourSizes()
