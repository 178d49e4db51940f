"""``fedsilo deploy service`` and ``fedsilo hospital service``: print, install or uninstall."""

from pathlib import Path

from fedsilo.core.errors import SettingError
from fedsilo.deployment.deployment import read_deployment
from fedsilo.deployment.options import ServiceOptions
from fedsilo.deployment.service import installing
from fedsilo.deployment.service.units import (
    Unit,
    build_hospital_unit,
    build_server_unit,
    hospital_unit_name,
    server_unit_name,
)


def change_server_service(
    folder: Path, options: ServiceOptions, *, install: bool, uninstall: bool
) -> str:
    """Install or uninstall a deployment's server as a systemd service, or show its unit file.

    Args:
        folder: the deployment's folder.
        options: the options of the unit, such as its user. ``uninstall`` ignores them.
        install: whether to install and start the service.
        uninstall: whether to stop the service and remove its unit. The deployment itself is not
            read, and may be gone.

    Returns:
        A sentence about the change. If neither is requested, the text of the unit file.

    Raises:
        SettingError: both ``install`` and ``uninstall`` are given.
        FedsiloError: there is no usable deployment, or systemd or this user's rights do not allow
            the change.
    """
    _refuse_both(install, uninstall)
    if uninstall:
        return installing.uninstall(server_unit_name(folder.expanduser().resolve()))
    return _show_or_install(build_server_unit(read_deployment(folder), options), install)


def change_hospital_service(
    kit: Path, options: ServiceOptions, *, install: bool, uninstall: bool
) -> str:
    """Install or uninstall a hospital's node as a systemd service, or show its unit file.

    Args:
        kit: the folder of the hospital's opened kit. For ``uninstall`` it may be gone.
        options: the options of the unit, such as its user. ``uninstall`` ignores them.
        install: whether to install and start the service.
        uninstall: whether to stop the service and remove its unit.

    Returns:
        A sentence about the change. If neither is requested, the text of the unit file.

    Raises:
        SettingError: both ``install`` and ``uninstall`` are given.
        FedsiloError: the kit was not opened and confirmed, or is not complete. Also raised if
            systemd or this user's rights do not allow the change.
    """
    _refuse_both(install, uninstall)
    if uninstall:
        return installing.uninstall(hospital_unit_name(kit))
    return _show_or_install(build_hospital_unit(kit, options), install)


def _refuse_both(install: bool, uninstall: bool) -> None:
    if install and uninstall:
        raise SettingError("--install and --uninstall contradict each other: give one of them")


def _show_or_install(unit: Unit, install: bool) -> str:
    if install:
        return installing.install(unit)
    return unit.text()
