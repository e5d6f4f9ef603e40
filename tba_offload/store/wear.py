"""How worn drives are, by their own count (SMART), where a tool is installed and may ask them."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tba_offload.store.drives import Drive

TOOL_SECONDS = 20
"""Seconds that a tool may take: a drive that sleeps answers within some."""

_DATA_UNIT = 512_000
"""Bytes of the unit in which NVMe drives count, by their specification."""

_WRITTEN = {
    "Total_LBAs_Written": None,
    "Host_Writes_32MiB": 32 << 20,
    "Host_Writes_GiB": 1 << 30,
    "Total_Writes_GiB": 1 << 30,
    "Lifetime_Writes_GiB": 1 << 30,
}
"""Attributes of SATA drives that count what was written, and bytes of the unit; ``None`` for a sector."""

_SENSELESS = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of reading what a tool prints where it is not what its documentation says."""

_LEAST_USED = 1
"""Per cent used from which it is told by what was written what a drive allows: less is rounded."""


class Wear(NamedTuple):
    """What a drive says of itself.

    Attributes:
        drive: Its name, such as ``"nvme0n1"``.
        asked: How it was asked; ``None`` if it could not be.
        used: Share of what its maker allows to be written that is used up, in per cent; it may be over 100.
        written_bytes: Bytes that hosts have written to it so far.
        media_errors: Errors that it could not correct.
        trouble: What it warns of, or why nothing is known.
        remedy: What to do about that.
    """

    drive: str
    asked: str | None = None
    used: float | None = None
    written_bytes: int | None = None
    media_errors: int | None = None
    trouble: str | None = None
    remedy: str | None = None

    @property
    def allowed_bytes(self) -> int | None:
        """What the drive allows to be written in its life, by how far its own count has come."""
        if self.used is None or self.used < _LEAST_USED or not self.written_bytes:
            return None
        return int(self.written_bytes / self.used * 100)

    def __str__(self) -> str:
        if self.asked is None or (self.used is None and self.written_bytes is None):
            return f"{self.drive} does not tell: {self.trouble}"
        known = []
        if self.used is not None:
            known.append(f"{self.used:g} % of its rated life used")
        if self.written_bytes is not None:
            known.append(f"{self.written_bytes / 1e12:.3g} TB written so far")
        if self.media_errors:
            known.append(f"{self.media_errors} media errors")
        if self.trouble is not None:
            known.append(self.trouble)
        return f"{self.drive}: {', '.join(known)} ({self.asked})"


def wear_of(drive: Drive) -> Wear:
    """Asks a drive how worn it is: by smartctl, else by nvme.

    Args:
        drive: One that is made of no others.
    """
    name = drive.name
    if drive.kind not in {"NVMe", "SSD", "hard disk"}:
        remedy = "ask the machine that has it" if drive.kind == "virtual" else "look at the drive below it"
        return Wear(name, trouble=f"a device of kind {drive.kind} has no count of its own", remedy=remedy)
    ways = [("smartctl", ["smartctl", "-j", "-a", f"/dev/{name}"], _by_smartctl)]
    if drive.kind == "NVMe":
        ways.append(("nvme", ["nvme", "smart-log", "-o", "json", f"/dev/{name}"], _by_nvme))
    refused: list[str] = []
    for tool, command, read in ways:
        if shutil.which(tool) is None:
            continue
        try:
            return read(name, " ".join(command), _told(command))
        except (*_SENSELESS, OSError, subprocess.SubprocessError) as error:
            refused.append(f"{' '.join(command)} says: {error}")
    if refused:
        return Wear(name, trouble="; ".join(refused), remedy=f"ask as root: sudo smartctl -a /dev/{name}")
    tools = " nor ".join(tool for tool, _, _ in ways)
    return Wear(
        name,
        trouble=f"{'neither ' if len(ways) > 1 else 'no '}{tools} is installed",
        remedy="install smartmontools, and run tba-offload doctor as root",
    )


def _told(command: list[str]) -> dict[str, Any]:
    """Return what a tool prints.

    Raises:
        ValueError: It is no JSON object, or an error.
        OSError: The tool cannot be run.
        subprocess.SubprocessError: It hangs.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TOOL_SECONDS)  # noqa: S603 - fixed words and a name of the kernel's
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = " ".join(f"{done.stderr} {done.stdout}".split()) or f"exit status {done.returncode}"
        raise ValueError(said[:200]) from None
    if not isinstance(found, dict):
        raise TypeError("no JSON object")
    return found


def _by_smartctl(name: str, asked: str, told: dict[str, Any]) -> Wear:
    log = told.get("nvme_smart_health_information_log", {})
    attributes = told.get("ata_smart_attributes", {}).get("table", ())
    used = told.get("endurance_used", {}).get("current_percent", log.get("percentage_used"))
    written = _units(log.get("data_units_written"))
    for attribute in attributes:
        if attribute.get("name") in _WRITTEN and written is None:
            unit = _WRITTEN[attribute["name"]] or told.get("logical_block_size", 512)
            written = int(attribute["raw"]["value"]) * int(unit)
    if used is None and written is None:
        messages = told.get("smartctl", {}).get("messages", ())
        raise ValueError("; ".join(str(each.get("string")) for each in messages) or "nothing of its wear")
    failing = told.get("smart_status", {}).get("passed") is False
    return _wear(name, asked, used, written, log.get("media_errors"), is_failing=failing)


def _by_nvme(name: str, asked: str, told: dict[str, Any]) -> Wear:
    used = told.get("percent_used", told.get("percentage_used"))
    warning = told.get("critical_warning")
    if isinstance(warning, dict):
        warning = warning.get("value")
    written = _units(told.get("data_units_written"))
    if used is None and written is None:
        raise ValueError(str(told.get("error", "nothing of its wear"))[:200])
    return _wear(name, asked, used, written, told.get("media_errors"), is_failing=bool(warning))


def _units(count: Any) -> int | None:
    return None if count is None else int(count) * _DATA_UNIT


def _wear(
    name: str, asked: str, used: Any, written: int | None, media_errors: Any, *, is_failing: bool
) -> Wear:
    return Wear(
        name,
        asked,
        used=None if used is None else float(used),
        written_bytes=written,
        media_errors=None if media_errors is None else int(media_errors),
        trouble="it warns of its own failure" if is_failing else None,
        remedy="replace the drive" if is_failing else None,
    )
