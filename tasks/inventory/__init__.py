"""hosts.yaml as frozen values, checked whole before any host is touched."""

from tasks.inventory.reading import parse, read
from tasks.inventory.secrets import Secrets, Source, resolve_secrets, secret_values
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
    "Secrets",
    "Source",
    "launch_spec",
    "parse",
    "read",
    "resolve_secrets",
    "secret_values",
    "spec_digest",
]
