"""Calls a function on a thread that does not keep the process alive."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def on_daemon_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call a function on a daemon thread, and return its result or raise its error.

    If the caller is cancelled, the function goes on, but the process may end before it returns.
    The threads of ``anyio`` and ``concurrent.futures`` would make Ctrl-C wait for it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, error: BaseException | None) -> None:
        if result.done():  # the caller was cancelled
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]  # the function's own, None or not
        else:
            result.set_exception(error)

    def work() -> None:
        value = error = None
        try:
            value = function(*arguments, **options)
        except BaseException as raised:
            error = raised
        # Once the server has ended, nobody waits
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, value, error)

    Thread(target=work, daemon=True).start()
    return await result
