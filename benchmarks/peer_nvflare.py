"""NVFlare's rival of `benchmarks/peers.py`: its FedAvg recipe in its own simulator.

Run by the Python of NVFlare's own environment; fedsilo's packages come after NVFlare's own there.
As ``--client`` it is the script that NVFlare starts for each site.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peer_job import accuracy, first_weights, read_settings, silo, trained

from fedsilo.datasets.registry import silo_names


def client(settings_file: Path, moments: Path) -> None:
    """Train what NVFlare sends until it sends no more."""
    import nvflare.client as flare
    import torch

    settings = read_settings(settings_file).common
    flare.init()
    names = list(first_weights(settings))
    number = int(str(flare.get_site_name()).removeprefix("site-")) - 1
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        began = time.time()
        weights = {name: torch.as_tensor(model.params[name]) for name in names}
        after = trained(weights, number, int(model.current_round) + 1, settings)
        with (moments / f"{number}.txt").open("a") as file:
            file.write(f"{began} {time.time()}\n")
        meta = {"NUM_STEPS_CURRENT_ROUND": len(silo(number, settings).train)}
        flare.send(flare.FLModel(params=model.params | after, meta=meta))


def simulate(settings_file: Path) -> dict[str, float]:
    """Run the recipe in the simulator, two clients at once."""
    import torch
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    settings = read_settings(settings_file).common
    clients = len(silo_names(settings))
    with tempfile.TemporaryDirectory() as folder:
        moments = Path(folder) / "moments"
        moments.mkdir()
        recipe = FedAvgRecipe(
            name="peers",
            model={"path": "peer_nvflare.StartModel", "args": {"file": str(settings_file)}},
            min_clients=clients,
            num_rounds=settings.rounds,
            train_script=str(Path(__file__).resolve()),
            train_args=f"--client --settings {settings_file} --moments {moments}",
        )
        environment = SimEnv(
            num_clients=clients, num_threads=2, workspace_root=str(Path(folder) / "work")
        )
        run = recipe.execute(environment)
        result = Path(str(run.get_result()))
        lines = [line.split() for file in moments.iterdir() for line in file.open()]
        (final,) = result.rglob("FL_global_model.pt")
        saved = torch.load(final, weights_only=True)
        weights = {name: saved["model"][name] for name in first_weights(settings)}
        began = time.time()
        found = accuracy(weights, settings)
        measured = time.time() - began
        rounds = max(float(end) for _, end in lines) - min(float(begin) for begin, _ in lines)
    return {"rounds": rounds + measured, "accuracy": found}


class StartModel:
    """The network that all start from: NVFlare makes it by a class's name."""

    def __new__(cls, file: str) -> Any:
        """Return the network."""
        from fedsilo.models.networks.build import build_classifier

        settings = read_settings(Path(file)).common
        return build_classifier(settings, silo(0, settings).shape)


def main() -> None:
    """Be the client, or run the simulator and print its metrics as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--moments", type=Path)
    options = parser.parse_args()
    if options.client:
        client(options.settings, options.moments)
    else:
        print(json.dumps(simulate(options.settings)), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
