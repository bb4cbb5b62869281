"""GPUs, as far as nvidia-smi and /proc tell."""

from __future__ import annotations

import os
import subprocess
from typing import Any, Dict, List, Optional

from .processes import owner

QUERY = "index,name,uuid,memory.total,memory.free"
NVIDIA_SMI_S = 15.0
"""It takes a second on a healthy host with eight GPUs, and for ever on a hung driver."""


def ask() -> Optional[subprocess.Popen[bytes]]:
    """Start nvidia-smi, so that other things can be asked meanwhile; None where there is none."""
    try:
        return subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (FileNotFoundError, PermissionError):
        return None


def answer(asked: Optional[subprocess.Popen[bytes]], warnings: List[str]) -> List[Dict[str, Any]]:
    """What `ask` found: {index, name, uuid, total_mib, free_mib, holders} for each GPU."""
    if asked is None:
        return []
    try:
        text, _ = asked.communicate(timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        asked.kill()  # not waited for: one that hangs in the driver does not die
        warnings.append(f"nvidia-smi: no answer after {NVIDIA_SMI_S:g} s; the driver may hang")
        return []
    if asked.returncode != 0:
        warnings.append(f"nvidia-smi: exit {asked.returncode}; the driver may be broken")
    return parse(text.decode("utf-8", "replace"))


def parse(text: str) -> List[Dict[str, Any]]:
    """GPUs from nvidia-smi's lines; others are left out."""
    found: List[Dict[str, Any]] = []
    held = holders()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit():
            index = int(cells[0])
            found.append(
                {
                    "index": index,
                    "name": cells[1],
                    "uuid": cells[2],
                    "total_mib": int(cells[3]) if cells[3].isdigit() else None,
                    "free_mib": int(cells[4]) if cells[4].isdigit() else None,
                    "holders": held.get(f"/dev/nvidia{index}", []),
                }
            )
    return found


def holders() -> Dict[str, List[Dict[str, Any]]]:
    """Who has which /dev/nvidia* open: {device: [{pid, uid}]}.

    nvidia-smi names no processes inside containers, and none that is about to die; file
    descriptors show both, of those processes that this user may look at.
    """
    found: Dict[str, List[Dict[str, Any]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            for device in open_devices(int(name)):
                found.setdefault(device, []).append({"pid": int(name), "uid": owner(int(name))})
    return found


def open_devices(pid: int) -> List[str]:
    """The /dev/nvidia* that a process has open; none when it may not be looked at."""
    folder = f"/proc/{pid}/fd"
    found = set()
    try:
        for name in os.listdir(folder):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("/dev/nvidia"):
                found.add(target)
    except OSError:  # gone meanwhile, or another user's
        return sorted(found)
    return sorted(found)


def present() -> bool:
    """Whether this host has NVIDIA devices at all; without them no file needs to be looked at."""
    return os.path.exists("/dev/nvidiactl")
