"""The errors that fedsilo raises on purpose: one line each, what was wrong, where, what to do."""


class FedsiloError(Exception):
    """Base of every error whose message is meant for the user and needs no traceback."""


class SettingError(FedsiloError):
    """A run setting is unknown, of the wrong type, out of range or contradicts another."""


class DataError(FedsiloError):
    """A data file or a silo's content cannot be used."""


class SiteError(FedsiloError):
    """A site failed, answered something unusable, or too few sites are left."""


class CheckpointError(FedsiloError):
    """A stored state is cut short, altered, or belongs to another run."""


class RunDirectoryError(FedsiloError):
    """A run directory exists already, is missing, or holds no finished run."""
