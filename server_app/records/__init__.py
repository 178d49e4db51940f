"""The files of a run: writing them, and reading them again.

Modules here import only ``server_app/config`` from the rest of ``server_app``.
"""
