"""The settings of the data: how samples are read, and how they are divided."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from fedsilo.core.plugins import PLUGIN, plugin_name
from fedsilo.core.settings_schema import setting

_count = partial(setting, ge=0)
_positive = partial(setting, ge=1)
_pixels = partial(setting, roles="pixels")
# Folders of this machine: a hospital names its own, and a resumed run may have others
_folder = partial(setting, roles=("files", "own"))
_CUT = ("partition", "sampling")

PartitionPlugin = Annotated[str, AfterValidator(partial(plugin_name, "partition"))]


@dataclass(frozen=True)
class DataSettings:
    """How a site's data are found, read and standardised."""

    group: ClassVar[str] = "data"

    data_dir: str = _folder("", "folder of the data files, or empty for $FEDSILO_DATA")
    cache_dir: str = _folder(
        "", "folder of decoded data, or empty for $FEDSILO_CACHE, ~/.cache/fedsilo"
    )
    target: Literal["nevus", "diagnosis"] = setting(
        "nevus", "classes of dermoscopic images: nevus or not, or diagnoses"
    )
    image_size: int = _pixels(
        0, "side of an image in pixels (0: the data set's own)", ge=0, le=4096
    )
    colour_constancy: bool = _pixels(False, "shades-of-grey colour constancy")
    broken_images: Literal["refuse", "skip"] = _pixels(
        "refuse", "missing or damaged images: stop, or report them"
    )
    intensity_profiles: bool = _pixels(
        True, "give each site's images a tone curve of their own, as of a vendor"
    )
    pixel_scale: Literal["standard", "raw"] = _pixels(
        "standard", "standardised pixels, or raw ones from 0 to 255"
    )
    standardise: Literal["pooled", "site", "declared"] = setting(
        "pooled",
        "a table's features by the mean and deviation of all sites, each site, or the schema",
    )


@dataclass(frozen=True)
class SplitSettings:
    """How samples become silos, and each silo's rows training, validation and test data."""

    group: ClassVar[str] = "split"

    silos: int = _positive(
        9, "silos that images are divided into", roles=("partition", "silo"), le=100_000
    )
    sample_share: float = setting(
        1.0, "share of each site's samples that is used", roles="sampling", gt=0.0, le=1.0
    )
    public_share: float = _count(
        0.0,
        "share of each site's lesions set apart for pre-training, not used by any site",
        roles="sampling",
        lt=1.0,
    )
    partition: Literal["own", "unseen", "dirichlet", "labels"] | PartitionPlugin = setting(
        "own",
        "how samples are divided into silos: as the data set has them; by labels that other "
        "silos lack (images); each label by a Dirichlet distribution; by few labels per silo",
        roles=_CUT,
        wording=PLUGIN,
    )
    unseen: float = _count(
        1.0, "partition unseen: share of a silo's labels that no other has", roles=_CUT, le=1.0
    )
    concentration: float = setting(
        0.5, "partition dirichlet: alpha; smaller: fewer labels per silo", roles=_CUT, gt=0.0
    )
    labels_per_silo: int = _positive(2, "partition labels: labels of each silo", roles=_CUT)
    silo_set: str = setting(
        "", "silos by name with their links: gaia, or a CSV file of edges", roles="partition"
    )
    silo_train_size: int = _count(0, "training images per silo (0: the set's own)", roles="silo")
    silo_test_size: int = _count(0, "test images per silo (0: the set's own)", roles="silo")
    test_folds: int = _count(
        0, "folds of a site's rows, one of them test data (0: no folds)", roles=("rows", "folds")
    )
    test_fold: int = _count(0, "number of the test fold, from 0", roles="rows")
    val_folds: int = _count(
        0,
        "folds of the training rows, one of them validation data (0: none)",
        roles=("rows", "folds", "validation"),
    )
    val_fold: int = _count(0, "number of the validation fold, from 0", roles=("rows", "validation"))
    fold_seed: int = _count(0, "seed of the division into folds and silos", roles=("rows", "folds"))
    use_test: bool = setting(
        True, "read test rows; false while choosing settings", roles=("rows", "validation")
    )
