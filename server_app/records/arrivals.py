"""``arrivals.csv``: who answered in which round of a run with a quorum, and how late.

It is written before a round combines its replies: a resumed run has the same sites count in the
round that it lost.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedsilo.server_app.records.recorder import GrowingCsv
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.hooks import Hook

HEADER = ("round", "site", "asked", "seconds")


class Arrivals(Hook):
    """Writes a row for each reply, in the order of the virtual clock, then of names.

    Args:
        directory: the run's.
        say: prints a line.
    """

    name = "arrivals"

    def __init__(self, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self.file = GrowingCsv(directory.path / "arrivals.csv", HEADER)
        self.say = say

    def sites_answered(self, round_: int, answered: Mapping[str, tuple[int, float]]) -> None:
        """Write the rows of a round, and say who is late."""
        order = sorted(answered.items(), key=lambda one: (one[1][1], one[0]))
        self.file.write([(round_, site, asked, second) for site, (asked, second) in order])
        late = {site: round_ - asked for site, (asked, _) in order if asked < round_}
        for site, rounds in late.items():
            self.say(f"round {round_}: site {site} answers the question of {rounds} rounds ago")

    def order(self) -> dict[int, list[str]]:
        """Return the sites of each round as the file has them; a line that is cut short is none."""
        order: dict[int, list[str]] = {}
        text = self.file.path.read_text(encoding="utf-8") if self.file.path.is_file() else ""
        for line in text.splitlines(keepends=True)[1:]:
            if line.endswith("\n"):
                round_, site, *_ = line.split(",")
                order.setdefault(int(round_), []).append(site)
        return order

    def state(self) -> Any:
        """Return which bytes of the file are final."""
        return self.file.final

    def restore(self, state: Any) -> None:
        """Continue after them."""
        self.file.restore(state)
