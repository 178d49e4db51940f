"""The base that all rooms share: settings, messages, the table of methods, errors, seeds, files.

Modules here import nothing else of the project. Functions that need torch import it themselves.
"""
