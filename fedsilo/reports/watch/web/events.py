"""Server-sent events: the sections of a page that have changed since the last event."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from anyio import sleep

from fedsilo.reports.watch.live_page import split_sections

_EVERY = 1.0  # seconds between two looks at the state
_SHARE = 5.0  # a look that took s seconds is followed by a pause of at least this times s
_SILENCE = 15.0  # seconds without an event after which a comment keeps the connection open
_STEP = 0.2  # seconds after which a pause looks whether the server ends


async def follow_page(
    render: Callable[[], Awaitable[str]], is_over: Callable[[], bool], every: float = _EVERY
) -> AsyncIterator[str]:
    """Yield an event whenever a page has changed, until the server ends.

    The data of an event are JSON: ``order``, the ids of all sections of the page, and ``sections``,
    id -> HTML of those that have changed. The first event has all sections.

    Args:
        render: renders the page.
        is_over: tells whether the server ends.
        every: seconds between two looks at the state.
    """
    yield "retry: 2000\n\n"
    shown: dict[str, str] = {}
    last_event = time.monotonic()
    while not is_over():
        begun = time.monotonic()
        sections = split_sections(await render())
        now = time.monotonic()
        changed = {}
        for anchor, html in sections.items():
            if shown.get(anchor) != html:
                changed[anchor] = html
        if changed or list(sections) != list(shown):
            data = json.dumps({"order": list(sections), "sections": changed})
            yield f"data: {data}\n\n"
            shown, last_event = sections, now
        elif now - last_event > _SILENCE:
            yield ": nothing has changed\n\n"
            last_event = now
        await _pause(max(every, _SHARE * (now - begun)), is_over)


async def _pause(seconds: float, is_over: Callable[[], bool]) -> None:
    """Sleep, and return early when the server ends."""
    until = time.monotonic() + seconds
    while not is_over() and time.monotonic() < until:
        await sleep(min(_STEP, seconds))
