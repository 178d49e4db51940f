"""The contract between server and sites: messages, settings, errors, seeds and versions.

This package imports nothing else of the project. Functions that need torch import it themselves.
"""
