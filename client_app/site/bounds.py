"""The guard of a real site's own bounds: floors, quotas, and limits on time and memory.

They hold with or without a site file: before the method sees the message, and while it works.
"""

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
from flwr.app import ConfigRecord, Context

from fedsilo.client_app.site.identity import own_name, prefix_refusals
from fedsilo.client_app.site.limits import MEGABYTE, limits_of
from fedsilo.client_app.site.node import Answering, build_settings, own_cache, own_folder
from fedsilo.client_app.site.private_state import drop_old_states
from fedsilo.client_app.site.run_book import RunBook
from fedsilo.client_app.site.trust import refuse_distrusted
from fedsilo.core.errors import RefusedError
from fedsilo.core.files.locations import find_places
from fedsilo.core.messages import CONFIG, EVALUATE, HELLO, SURVEY, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.retention import prune_cache

_WORD = r"[^\s'\":;,)]+"
# '/', '~/', '~name/' or 'file:/'. In a web address '//' follows the ':', and other words with '/',
# such as 'and/or', have a letter before it
_ROOT = r"(?:file:/|(?<![\w.~:/)])(?:~[\w.-]*)?/|(?<=:)/(?!/))"
# Names of folders and files may have spaces: up to three words, and then a word that has a '/'
# inside or an extension, go on with the path
_END = rf"(?:[^\s'\":;,)/]+/{_WORD}|{_WORD}\.[A-Za-z]\w{{1,4}}(?![\w/]))"
_PATH = re.compile(rf"{_ROOT}{_WORD}(?:(?: (?!/){_WORD}){{0,3}}? (?!/){_END})*")
_PLACES = ("data-dir", "cache-dir", "state-dir", "site-file")
_CHECK_PERIOD = 0.5  # seconds between checks of time and memory
_SHARE = 0.9  # the share of the machine's memory that is allowed by default


@contextmanager
def enforce_bounds(answering: Answering) -> Iterator[None]:
    """Check a message against the hospital's limits, and run the block that answers the message.

    The hospital's 'trust' and its limits on settings are checked first. A site without a
    'state-dir' makes no further checks. Any other site counts the message in the run book, its
    record of answers. The block is stopped when its time or memory is used up.

    The messages before a run, hellos and surveys, share a daily quota, and old cached data are
    deleted first. For any other message, old runs' states are deleted first. Afterwards the
    message's working time is added to its run.

    Raises:
        RefusedError: the message or the run breaks a limit, or a setting is invalid. The error
            names the key and says how to proceed.
        SiteError: the message lacks an entry, such as the round, or its name of the run is not
            allowed.
        CheckpointError: the run book is damaged, or cannot be written.
    """
    message, context = answering.message, answering.context
    site = own_name(context)
    with prefix_refusals(site):
        limits = limits_of(context)
        settings = build_settings(CommonSettings, context.run_config)
        refuse_distrusted(context.node_config, settings)
        limits.refuse_settings(settings)
    folder = own_folder(context, site)
    if folder is None:
        yield  # the answer refuses this case before anything is trained
        return
    book = RunBook(folder)
    if message.metadata.message_type in (HELLO, SURVEY):
        with prefix_refusals(site):
            book.count_hello(limits)
        # A hello decodes the data into the cache, so room is made before it
        prune_cache(find_places("", own_cache(context)).cache, limits.max_cache * MEGABYTE)
        with watch_usage(limits.max_seconds, limits.max_memory):
            yield
        return
    # The answer to an evaluation does not depend on the phase, so the phase must not split a quota
    final = message.metadata.message_type == EVALUATE
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    instruction = Instruction.from_config(config, final)
    with prefix_refusals(site):
        seconds = book.enter(instruction, settings.rounds, limits)
    drop_old_states(folder.parent.parent, site, instruction.run_name, limits.max_state * MEGABYTE)
    began = time.monotonic()
    try:
        with watch_usage(seconds, limits.max_memory):
            yield
    finally:
        book.add_seconds(instruction.run_name, time.monotonic() - began)


def without_paths(text: str, context: Context) -> str:
    """Return an error's text without its paths, because the server must not learn them.

    A path that the node config names, such as its 'data-dir', becomes its key in round brackets, as
    in "(data-dir)/a.csv". Any other path, such as "/a/b" or "file:/a", becomes "(a path of the
    site)". A web address such as "https://a.org/b" stays.

    A path ends at a space, quotation mark, comma, semicolon, colon or closing bracket. If one of
    the next four words has a "/" inside or ends with a file extension, the path continues to that
    word's end.
    """
    for key in _PLACES:
        folder = str(context.node_config.get(key, "")).rstrip("/")
        if folder:
            text = text.replace(folder, f"({key})")
    return _PATH.sub("(a path of the site)", text)


@contextmanager
def watch_usage(seconds: float, megabytes: int) -> Iterator[None]:
    """Run a block, and raise an error in it once its time or the process's memory is used up.

    A timer checks both limits every half second, and they are checked again after the block. The
    switch of PyTorch's gradient recording is restored in the end. In any thread but the main thread
    nothing is checked, because timers interrupt only the main thread.

    Args:
        seconds: the time limit for the block.
        megabytes: the memory limit for the process; 0 for nine tenths of the machine's memory.

    Raises:
        RefusedError: a limit is exceeded. The error names 'max-seconds' or 'max-memory'.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.monotonic() + seconds
    most = megabytes * MEGABYTE or int(_SHARE * psutil.virtual_memory().total)
    process = psutil.Process()

    def check(number: int = 0, frame: FrameType | None = None) -> None:
        excess = ""
        if time.monotonic() > until:
            excess = (
                "the run has taken the time that the hospital gives it ('max-seconds'): ask for "
                "less work, or leave the site out"
            )
        elif process.memory_info().rss > most:
            excess = (
                f"the message takes more than the {most // MEGABYTE} megabytes that the hospital "
                "gives it ('max-memory'): ask for smaller images, batches or networks"
            )
        if excess:
            raise RefusedError(excess)

    # Stored here, because the signal can interrupt code that would have restored it
    gradients = _gradients_are_on()
    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, min(_CHECK_PERIOD, max(seconds, 0.001)), _CHECK_PERIOD)
    try:
        yield
        check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        _turn_gradients(gradients)


def _gradients_are_on() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _turn_gradients(on: bool) -> None:
    """Turn PyTorch's gradient recording on or off in this thread, if PyTorch is imported.

    The timer of ``watch_usage`` may interrupt the exit of ``torch.no_grad``. Recording would then
    stay off, and later runs in the thread could not train.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(on)
