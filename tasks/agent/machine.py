"""What this host is: its identity, its clock, and how it treats processes."""

from __future__ import annotations

import os
import socket
import time
from typing import Dict, List, Optional


def first_line(path: str) -> Optional[str]:
    """The first line of a file, or None when it cannot be read or is empty."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip() or None
    except OSError:
        return None


def host_name() -> str:
    """What this host calls itself."""
    return socket.gethostname()


def machine_id() -> str:
    """A name that stays over reboots. Containers often have no machine-id, so their host name."""
    return (
        first_line("/etc/machine-id")
        or first_line("/var/lib/dbus/machine-id")
        or f"host-{host_name()}"
    )


def boot_id() -> str:
    """The id of this boot of the kernel; containers share their machine's."""
    return first_line("/proc/sys/kernel/random/boot_id") or "unknown"


def boottime() -> float:
    """Seconds since this boot, time asleep included; no clock setting moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def utc() -> str:
    """Now, for people."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def oom_kills() -> Optional[int]:
    """How often the kernel's out-of-memory killer struck in this process's cgroup.

    Falls back to the whole machine's counter; None where neither can be read.
    """
    for path in _memory_event_files():
        count = _counter(path, "oom_kill")
        if count is not None:
            return count
    return _counter("/proc/vmstat", "oom_kill")


def _memory_event_files() -> List[str]:
    files = []
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as groups:
            for line in groups:
                number, controllers, path = line.rstrip("\n").split(":", 2)
                if number == "0" and not controllers:
                    files.append(f"/sys/fs/cgroup{path}/memory.events")
                elif "memory" in controllers.split(","):
                    files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    except (OSError, ValueError):
        return []
    # In a container the path is often the outside's, while its own group is mounted at the top.
    return [*files, "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]


def _counter(path: str, name: str) -> Optional[int]:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                words = line.split()
                if len(words) == 2 and words[0] == name:
                    return int(words[1])
    except (OSError, ValueError):
        return None
    return None


REAPERS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "runit")
SLEEPERS = ("sleep", "tail", "cat")


def pid1_reaps() -> Optional[bool]:
    """Whether PID 1 collects dead orphans; None when nothing shows it.

    Told from its name and from old zombies, not tried: a trial would leave a zombie for ever on
    just those hosts where the answer is no.
    """
    name = first_line("/proc/1/comm") or ""
    if name in REAPERS:
        return True
    return False if name in SLEEPERS else None


def linger() -> Dict[str, Optional[bool]]:
    """Whether logging out may end this user's processes.

    Returns:
        {"systemd": PID 1 is systemd, "linger": lingering is on, "kills": logind is set to kill}.
        The last two are None without systemd.
    """
    if not os.path.isdir("/run/systemd/system"):
        return {"systemd": False, "linger": None, "kills": None}
    import pwd  # noqa: PLC0415  # only here, and only on such hosts

    user = pwd.getpwuid(os.getuid()).pw_name
    kills = False
    folder = "/etc/systemd/logind.conf.d"
    drops = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for path in ["/etc/systemd/logind.conf", *(f"{folder}/{drop}" for drop in drops)]:
        kills = _last_setting(path, "KillUserProcesses", kills)
    return {
        "systemd": True,
        "linger": os.path.exists(f"/var/lib/systemd/linger/{user}"),
        "kills": kills and os.getuid() != 0,  # KillExcludeUsers is root by default
    }


def _last_setting(path: str, name: str, before: bool) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.strip().partition("=")
                if key.strip() == name:
                    before = value.strip().lower() in ("yes", "true", "1", "on")
    except OSError:
        return before
    return before
