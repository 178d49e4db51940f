"""The settings that every method shares: what to run, on which silos, with which budget."""

from __future__ import annotations

from dataclasses import dataclass

from models.schema import setting


@dataclass(frozen=True)
class CommonSettings:
    """Run settings common to all methods; a method's own are in ``models/<method>.py``."""

    method: str = setting("uefl", "federated method")
    dataset: str = setting("digits", "data set that the silos are cut from")
    seed: int = setting(42, "seed of every random number", minimum=0)
    rounds: int = setting(30, "communication rounds in all", minimum=1)
    silos: int = setting(9, "silos that the data set is cut into", minimum=1)
    min_sites: int = setting(0, "sites that must answer a round; 0: all that joined", minimum=0)

    local_epochs: int = setting(2, "passes over a site's training data per round", minimum=1)
    batch_size: int = setting(32, "images per optimiser step", minimum=2)
    learning_rate: float = setting(1e-3, "Adam step size", above=0.0)

    network: str = setting("conv", "image network", choices=("conv", "vgg16-bn"))
    width: int = setting(16, "channels of the first stage; 128 is the paper's", minimum=1)
    dropout: float = setting(0.1, "dropout rate of the head", above=0.0, below=1.0)
    mc_passes: int = setting(20, "Monte Carlo dropout passes for the entropy", minimum=1)

    pixel_scale: str = setting(
        "standard", "standardised pixels, or raw 0..255", choices=("standard", "raw")
    )
    silo_train_size: int = setting(0, "training images a silo; 0: the data set's own", minimum=0)
    silo_test_size: int = setting(0, "test images a silo; 0: the data set's own", minimum=0)

    device: str = setting(
        "auto",
        "where a site computes; auto takes a GPU where there is one",
        pattern=r"auto|cpu|cuda(:[0-9]+)?",
        wording="auto, cpu, cuda or cuda:N",
    )
    precision: str = setting(
        "auto", "auto: bf16 on a GPU, else fp32", choices=("auto", "fp32", "bf16")
    )
    threads: int = setting(1, "CPU threads of one client", minimum=1)
    evaluate_every: int = setting(
        1, "rounds between evaluations of the global model; 0: only at the end", minimum=0
    )

    data_dir: str = setting("", "folder of the data files; empty: $FEDSILO_DATA")
    cache_dir: str = setting("", "folder of decoded data; empty: $FEDSILO_CACHE, ~/.cache/fedsilo")
    out: str = setting("", "folder of run directories; empty: $FEDSILO_RUNS, ~/.fedsilo/runs")
    run_name: str = setting("", "name of the run directory; empty: made from method and time")
    resume: bool = setting(False, "go on from the newest whole checkpoint of run-name")
    reply_timeout: float = setting(3600.0, "seconds to wait for the replies of a phase", above=0.0)
    join_timeout: float = setting(60.0, "seconds to wait for sites to connect", minimum=0.0)


@dataclass(frozen=True)
class NoSettings:
    """The settings of a method that has none of its own."""
