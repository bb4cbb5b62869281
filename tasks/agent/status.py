"""All that a person wants to see of a host at one glance."""

from __future__ import annotations

from typing import Any, Dict, List

from . import gpus, lease, machine, runs
from .current import on_host
from .desk import Desk
from .root import root_of


def status(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Health, the trainer's own words, what is deployed, who may change it, and the GPUs."""
    del desk
    root = root_of(arguments)
    warnings: List[str] = []
    smi = gpus.ask()
    run = runs.chosen(root, arguments)
    current, count = on_host(root)
    held = lease.present(root)
    return {
        **runs.describe(run),
        "status": run.status if run else None,
        "current": current,
        "releases": count,
        "lease": None if held is None else lease.public(held),
        "host": machine.host_name(),
        "boot_id": machine.boot_id(),
        "gpus": gpus.answer(smi, warnings),
        "warnings": warnings,
    }
