"""What ``fedsilo predict`` costs, compared with a bare PyTorch loop over the same image files.

Both read each file by Pillow (its central square at 224 pixels), scale it and give it to the same
small ViT in eval mode, with the same threads. The loop does that one batch after the other, and
keeps the class probabilities; predict also decodes ahead in a thread, runs the head once for each
dropout pass, and makes the table that it writes. They take turns. The loop is run with batches of
32 and with those of predict, which are a run's own when it measures, as dropout draws depend on
them.

    python benchmarks/predict.py [--images 1000] [--turns 3]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedsilo import predict
from fedsilo.client_app.training.evaluation import batch_size
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.images.decoding import decode_image
from fedsilo.engines.inline_engine import run_inline
from fedsilo.inference.predict.inputs import CaseSource, files_of
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.runs.trained_model import TrainedModel
from fedsilo.server_app.config.settings import resolve

_BATCHES = (32, batch_size(3 * 224 * 224))
_RUN: dict[str, Value] = {
    "method": "local",
    "dataset": "dermoscopy-phantom",
    "split.sample-share": 0.0001,
    "data.image-size": 224,
    "network.name": "vit",
    "vit.backbone": "vit_tiny_patch16_224",
    "vit.backbone-weights": "random",
    "vit.backbone-depth": 4,
    "vit.prompt-sets": "none",
    "rounds": 1,
    "train.local-steps": 1,
    "train.batch-size": 4,
    "train.mc-passes": 20,
    "machine.device": "cpu",
}


def write_images(folder: Path, count: int) -> None:
    """Write JPEG photographs of 450 x 400 pixels: a smooth ground and noise."""
    rng = np.random.default_rng(0)
    for number in range(count):
        ground = rng.random((8, 9, 3)) * 255
        large = Image.fromarray(ground.astype(np.uint8)).resize((450, 400))
        noisy = np.asarray(large) + rng.normal(0, 8, (400, 450, 3))
        picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        picture.save(folder / f"{number:04}.jpg", quality=90)


def bare_seconds(model: TrainedModel, paths: list[Path], size: int) -> float:
    """Return the seconds of the loop with batches of a size."""
    network, probabilities = model.network.eval(), []
    began = time.perf_counter()
    with torch.no_grad():
        for start in range(0, len(paths), size):
            images = [decode_image(path, 224) for path in paths[start : start + size]]
            batch = float_inputs(torch.from_numpy(np.stack(images)))
            probabilities.append(torch.softmax(network(batch), dim=1))
    torch.cat(probabilities)
    return time.perf_counter() - began


def predict_seconds(run: Path, images: Path) -> float:
    """Return the seconds of the whole command but its imports: opening, predicting, the table."""
    began = time.perf_counter()
    predict(run, site="bcn", images=images).text()
    return time.perf_counter() - began


def main() -> None:
    """Print images a second of all, and the quotients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "images").mkdir()
        write_images(folder / "images", arguments.images)
        values = {
            **_RUN,
            "run.out": str(folder),
            "run.name": "run",
            "data.cache-dir": str(folder / "cache"),
        }
        run = run_inline(resolve(values), 6).path
        images = folder / "images"
        paths = list(files_of(CaseSource("images", images)).values())
        model = FinishedRun.open(run).model("bcn")
        times = [
            [*(bare_seconds(model, paths, size) for size in _BATCHES), predict_seconds(run, images)]
            for _ in range(arguments.turns)
        ]
    print(f"{arguments.images} images, {torch.get_num_threads()} threads, median of {len(times)}")
    own = statistics.median(turn[-1] for turn in times)
    for place, size in enumerate(_BATCHES):
        loop = statistics.median(turn[place] for turn in times)
        quotient = statistics.median(turn[place] / turn[-1] for turn in times)
        print(f"bare loop, batches of {size}: {arguments.images / loop:.1f} images / s")
        print(f"predict: {arguments.images / own:.1f} images / s, {quotient:.2f} times that")


if __name__ == "__main__":
    main()
