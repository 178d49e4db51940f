"""A run whose process dies: a grid that stops after some messages."""

from collections.abc import Iterable

from flwr.app import Message

from fedsilo.engines.inline_engine import InlineGrid


class DyingGrid(InlineGrid):
    """An in-process grid that ends the process, as it were, after ``lives`` answered messages."""

    lives = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if type(self).lives == 0:
            raise KeyboardInterrupt
        type(self).lives -= 1
        return super().pull_messages(message_ids)
