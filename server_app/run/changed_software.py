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

    Such changes may alter the rounding, and so the results. The run's config.toml is compared with
    this machine: packages, Python, fedsilo, fedsilo's git revision and the processor. A package is
    compared only if it was installed at the start and still is. Changes are sorted by name.

    Returns:
        The line, or "" if nothing has changed or if the directory has no config.toml.

    Raises:
        RunDirectoryError: config.toml is malformed, or another version of fedsilo wrote it.
        SettingError: config.toml cannot be read, or the run uses a setting that fedsilo has
            removed.
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

    The result maps names to texts. The names are those of packages, "fedsilo", "fedsilo's
    revision", "Python" and "the processor". A missing entry is left out. A version is cut to 20
    characters, and the processor to 80.
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

    Sites with exactly the same changes share one line, which names the sites. These sites are in no
    line:

    - a site without changes, or a new site,
    - a site that has not answered in the resumed run,
    - a site that states no software, such as a simulated site.

    If there is no silos.json, nothing is yielded.

    Args:
        directory: the directory of a resumed run, before silos.json is written anew.
        participants: the sites that have answered in the resumed run.

    Raises:
        RunDirectoryError: silos.json cannot be read, or is malformed.
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

    ``before`` and ``now`` map names of software to versions. A name that is in only one of them is
    left out. The descriptions are joined by commas. The text is empty if no version differs. Each
    version is cut to 80 characters.
    """
    parts = []
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            was, is_now = str(before[name])[:80], str(now[name])[:80]
            parts.append(f"{name} {was} is now {is_now}")
    return ", ".join(parts)
