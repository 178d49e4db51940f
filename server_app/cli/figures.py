"""The commands that draw finished runs where their data lie: options only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

from client_app.explain.embeddings import EMBEDDING, LAYERS
from datasets.silo.silos import SPLITS

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_pictures(commands: Commands) -> None:
    """Add ``histograms``, ``embeddings`` and ``gradcam``."""
    pixels = commands.add_parser("histograms", help="draw how sites' images differ in brightness")
    pixels.add_argument("run_dir", type=Path)
    _add_options(pixels, "train", "RUN-DIR/histograms.png")
    pixels.add_argument("--site", action="append", default=[], help="a site (default: all)")
    pixels.set_defaults(handler=_histograms)

    cloud = commands.add_parser("embeddings", help="draw what models make of all sites' samples")
    cloud.add_argument("run_dirs", nargs="+", type=Path, metavar="run_dir")
    _add_options(cloud, "test", "embeddings.png of the first run")
    cloud.add_argument("--site", action="append", default=[], help="a site (default: all)")
    cloud.add_argument("--layer", choices=LAYERS, default=EMBEDDING, help="(default %(default)s)")
    cloud.add_argument("--limit", type=int, metavar="N", help="samples a site (default: all)")
    cloud.add_argument("--seed", type=int, default=0, help="of t-SNE and folds (default 0)")
    cloud.set_defaults(handler=_embeddings)

    cams = commands.add_parser("gradcam", help="draw where convolutional networks find a class")
    cams.add_argument("run_dirs", nargs="+", type=Path, metavar="run_dir")
    cams.add_argument("--site", required=True, help="the images' site")
    cams.add_argument("--rows", required=True, help="rows of the split, from 0, as 0,3,7")
    _add_options(cams, "test", "gradcam-SITE.png of the first run")
    cams.add_argument(
        "--class", dest="label", metavar="NAME", help="(default: what each network says)"
    )
    cams.set_defaults(handler=_gradcam)
    for parser in (cloud, cams):
        parser.add_argument("--state-dir", type=Path, help="the site's state (default: the run's)")


def _add_options(parser: argparse.ArgumentParser, split: str, picture: str) -> None:
    parser.add_argument("--split", choices=SPLITS, default=split, help="(default %(default)s)")
    parser.add_argument("--picture", type=Path, help=f"PNG to write (default: {picture})")
    parser.add_argument("--data-dir", type=Path, help="the data directory (default: the run's)")


def _histograms(options: argparse.Namespace) -> None:
    from server_app.figures.intensity_histograms import histograms

    histograms(options)


def _embeddings(options: argparse.Namespace) -> None:
    from server_app.figures.embeddings import embeddings

    embeddings(options)


def _gradcam(options: argparse.Namespace) -> None:
    from server_app.figures.gradcam import gradcam

    gradcam(options)
