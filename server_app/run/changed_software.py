"""Software that changed between a run's start and its resumption, at the server or at a site."""

from collections.abc import Iterator, Mapping
from typing import Any

from fedsilo.core.one_line import by_reason
from fedsilo.server_app.config import settings as run_settings
from fedsilo.server_app.records import run_directory
from fedsilo.server_app.records.run_directory import SILOS, RunDirectory
from fedsilo.strategies.meeting.participants import Participants

# The keys of config.toml's environment that have a version, and their names in a message
_OWN_VERSIONS = {
    "fedsilo-version": "fedsilo",
    "fedsilo-revision": "fedsilo's revision",
    "python": "Python",
}


def changed_software(directory: RunDirectory) -> str:
    """Describe in one line the changes of software and processor since the run began.

    Such changes may alter the rounding, and with it the results. The run's config.toml is compared
    with this machine. The line is empty if nothing has changed.

    Raises:
        RunDirectoryError: config.toml is malformed or of another version.
        SettingError: config.toml cannot be read, or has a removed setting.
    """
    path = directory.path / run_directory.CONFIG
    if not path.is_file():
        return ""
    before = _read_versions(run_settings.read_run_config(path).environment)
    now = _read_versions(run_directory.this_environment())
    # A package that was installed or removed since then is not a change of version
    changes = _describe_changes(before, now)
    if not changes:
        return ""
    return (
        "this run began with other software or on another processor, so its numbers may differ "
        f"from those of a run without a break: {changes}"
    )


def _read_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Read the versions and the processor from an environment in the form of config.toml.

    The result maps names, such as "Python" and "the processor", to texts. A missing entry is left
    out.
    """
    versions = {}
    for name, version in environment.get("packages", {}).items():
        versions[name] = str(version)[:20]
    for key, name in _OWN_VERSIONS.items():
        if environment.get(key):
            versions[name] = str(environment[key])[:20]
    if environment.get("processor"):
        versions["the processor"] = str(environment["processor"])[:80]
    return versions


def changed_site_software(directory: RunDirectory, participants: Participants) -> Iterator[str]:
    """Yield lines on software that has changed at sites since a run wrote silos.json.

    Sites with the same changes share a line. Only sites that have answered before and now, and that
    state their software, are compared.

    Raises:
        RunDirectoryError: silos.json cannot be read.
    """
    if not (directory.path / SILOS).is_file():
        return
    changed = []
    for site, before in directory.read_json(SILOS).items():
        if site in participants.facts:
            now = participants.facts[site].software
            changes = _describe_changes(before.get("software") or {}, now)
            if changes:
                changed.append((site, changes))
    for changes, sites in by_reason(changed).items():
        yield f"other software than before at {sites}: {changes}"


def _describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the versions that differ, such as "torch 2.6 is now 2.7", sorted by name.

    ``before`` and ``now`` map names of software to versions. A name that only one of them has is
    left out. The text may be empty.
    """
    parts = []
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            was, is_now = str(before[name])[:80], str(now[name])[:80]
            parts.append(f"{name} {was} is now {is_now}")
    return ", ".join(parts)
