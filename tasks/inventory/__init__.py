"""hosts.yaml as frozen values, checked whole before any host is touched."""

from tasks.inventory.reading import parse, read
from tasks.inventory.values import (
    ALL,
    DEFAULT,
    Flag,
    Host,
    Inventory,
    RunSettings,
    launch_spec,
    spec_digest,
)

__all__ = [
    "ALL",
    "DEFAULT",
    "Flag",
    "Host",
    "Inventory",
    "RunSettings",
    "launch_spec",
    "parse",
    "read",
    "spec_digest",
]
