"""What can be done to ONE host: (Host, Run, Link) -> Effect, each one idempotent.

Where a new one goes: beside those that act on the same thing, and into this list.
"""

from tasks.operations.doctor import Doctor
from tasks.operations.environment import probe, verify_features
from tasks.operations.leasing import (
    LEASE_SECONDS,
    FreeLease,
    give_back_lease,
    lease,
    new_lease,
    renew_lease,
    take_lease,
)
from tasks.operations.reading import ReadLogs, status
from tasks.operations.release import sync, verify
from tasks.operations.run import await_progress, describe, health, kill, launch, put_back
from tasks.operations.words import Back, By, Operation, Run, changing, new_run_id

__all__ = [
    "LEASE_SECONDS",
    "Back",
    "By",
    "Doctor",
    "FreeLease",
    "Operation",
    "ReadLogs",
    "Run",
    "await_progress",
    "changing",
    "describe",
    "give_back_lease",
    "health",
    "kill",
    "launch",
    "lease",
    "new_lease",
    "new_run_id",
    "probe",
    "put_back",
    "renew_lease",
    "status",
    "sync",
    "take_lease",
    "verify",
    "verify_features",
]
