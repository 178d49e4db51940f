"""Command lines as fedsilo's own parser reads them, without running anything."""

import functools
from collections.abc import Sequence

import click
import typer.main

from fedsilo.cli.main import make_app


@functools.cache
def _parser() -> click.Command:
    """Return the real parser; to make it for each of the hundreds of commands takes seconds."""
    return typer.main.get_command(make_app())


def parsed(words: Sequence[str]) -> click.Context:
    """Return the context of a command line, given without ``fedsilo``, that the parser accepts."""
    command = _parser()
    context = command.make_context("fedsilo", list(words))
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found
        command = found
        context = command.make_context(name, rest, parent=context)
    return context
