"""FedBABU (Oh, Kim and Yun 2022): the head stays as it began until the silos fine-tune at the end.

Equations (arXiv:2106.06042):
  (algorithm 1, body update) head's rate 0 -> client_app.methods.fedbabu.FedBABUSite.train
  (section 5, fine-tuning) at the end -> strategies.methods.fedavg_ft.FedAvgFT.round
"""

from __future__ import annotations

from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings as FedBABUSettings

__all__ = ["FedBABUSettings"]
