"""What the commands for a GPU print is written to a file too; the measuring itself is faked."""

import argparse
import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import attention, radiographs


def test_throughput_writes_a_row_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(attention, "training_step", lambda *_: (None, compute))
    monkeypatch.setattr(attention, "seconds_of", lambda *_: 0.25)
    path = tmp_path / "attention.csv"
    given = argparse.Namespace(batches=[2], repeats=1, device="cpu", small=True, csv=path)
    attention.throughput(Console(quiet=True), given)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["precision"], row["step"]) for row in rows] == [
        (precision, kind)
        for precision in ("fp32", "bf16")
        for kind in ("plain", "rollout", "distillation", "maps apart")
    ]
    assert {row["images/s"] for row in rows} == {"8"}


def test_radiographs_on_a_gpu_write_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    cells = ["2048 x 2048", "4", "4", "no", "0.06", "3,842", "3,842"]
    monkeypatch.setattr(radiographs, "measured", lambda *_: cells)
    path = tmp_path / "radiographs.csv"
    radiographs.gpu(argparse.Namespace(size=2048, batch=4, device="cuda", csv=path))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["precision"] for row in rows] == ["fp32", "fp32", "bf16", "bf16"]
    assert {row["peak MiB"] for row in rows} == {"3842"}
