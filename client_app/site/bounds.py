"""A guard for a real site's own bounds: paths, floors, quotas and its own seed.

They hold with or without a site file, before the method sees the message.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flwr.app import Context

from fedsilo.client_app.site.identity import own_name, refusing_as
from fedsilo.client_app.site.limits import MEGABYTE, limits_of
from fedsilo.client_app.site.node import Answering, built, own_cache, own_folder
from fedsilo.client_app.site.private_state import drop_old_states
from fedsilo.client_app.site.run_book import RunBook
from fedsilo.client_app.site.trust import refuse_distrusted
from fedsilo.client_app.site.watch import watch_usage
from fedsilo.core.files.locations import find_places
from fedsilo.core.messages import CONFIG, EVALUATE, HELLO, SURVEY, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.retention import prune_cache

# A web address has ':' or a word before its '/'
_PATH = re.compile(r"(?<![\w.~:/)])~?/[^\s'\":;,)]+")
_PLACES = ("data-dir", "cache-dir", "state-dir", "site-file")


@contextmanager
def within_bounds(answering: Answering) -> Iterator[None]:
    """Answer the message only within the hospital's floors and quotas.

    Raises:
        RefusedError: they do not allow it; names the key, and what to do.
    """
    message, context = answering.message, answering.context
    site = own_name(context)
    with refusing_as(site):
        limits = limits_of(context)
        settings = built(CommonSettings, context.run_config)
        refuse_distrusted(context.node_config, settings)
        limits.refuse_settings(settings)
    folder = own_folder(context, site)
    if folder is None:
        yield  # the answer refuses this case before anything is trained
        return
    book = RunBook(folder)
    if message.metadata.message_type in (HELLO, SURVEY):
        with refusing_as(site):
            book.hello(limits)
        prune_cache(find_places("", own_cache(context)).cache, limits.max_cache * MEGABYTE)
        with watch_usage(limits.max_seconds, limits.max_memory):
            yield
        return
    instruction = Instruction.from_config(message.content.config_records.get(CONFIG, {}))
    # The answer to an evaluation does not depend on the phase
    if message.metadata.message_type == EVALUATE:
        instruction = replace(instruction, phase=EVALUATE)
    with refusing_as(site):
        seconds = book.enter(instruction, settings.rounds, limits)
    drop_old_states(folder.parent.parent, site, instruction.run_name, limits.max_state * MEGABYTE)
    began = time.monotonic()
    try:
        with watch_usage(seconds, limits.max_memory):
            yield
    finally:
        book.add_seconds(instruction.run_name, time.monotonic() - began)


def without_paths(text: str, context: Context) -> str:
    """Remove paths from an error's text, which a server must not learn.

    A path below a folder of the node config becomes the folder's key and the rest.
    """
    for key in _PLACES:
        folder = str(context.node_config.get(key, "")).rstrip("/")
        if folder:
            text = text.replace(folder, f"({key})")
    return _PATH.sub("(a path of the site)", text)
