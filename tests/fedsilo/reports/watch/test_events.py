"""Server-sent events: what they carry, and when they end."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fedsilo.reports.watch.web.events import follow_page


def page(**sections: str) -> str:
    """Return a page with sections."""
    return "".join(f'<section id="{key}">\n{text}</section>' for key, text in sections.items())


def events(pages: list[str]) -> list[dict[str, Any]]:
    """Return the data of all events while a page takes these states, one after the other."""
    left = list(pages)

    async def render() -> str:
        return left.pop(0)

    is_over: Callable[[], bool] = lambda: not left  # noqa: E731

    async def collect() -> list[str]:
        return [text async for text in follow_page(render, is_over, every=0.0)]

    first, *rest = asyncio.run(collect())
    assert first.startswith("retry:")
    return [json.loads(text.removeprefix("data: ")) for text in rest]


def test_an_event_has_the_sections_that_changed() -> None:
    first, second, third = events(
        [page(a="1", b="1"), page(a="1", b="1"), page(a="1", b="2"), page(b="2")]
    )
    assert first["order"] == ["a", "b"]
    assert set(first["sections"]) == {"a", "b"}
    assert list(second["sections"]) == ["b"]
    assert third == {"order": ["b"], "sections": {}}
