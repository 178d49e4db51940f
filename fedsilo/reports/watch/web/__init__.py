"""The web server of ``fedsilo watch --port``, on Starlette and uvicorn, which Flower brings."""
