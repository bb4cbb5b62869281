"""The recipes: what each task does, in order. The order is the design: verify before kill."""

from __future__ import annotations

from tasks.operations import (
    Doctor,
    FreeLease,
    Operation,
    await_progress,
    health,
    kill,
    launch,
    lease,
    probe,
    put_back,
    status,
    sync,
    verify,
    verify_features,
)

CHECK = (verify, verify_features)
RUN = (kill, launch, await_progress)
BACK = (kill, put_back, await_progress)
"""What is done on a host where RUN stopped the old run and the new one makes no step."""

DEPLOY = (probe, sync, *CHECK, *RUN)
RESTART = (probe, *CHECK, *RUN)
ROLLBACK = (verify, *BACK)
"""By hand. Without the features of hosts.yaml: an older release need not have what is new."""

SYNC = (sync,)
KILL = (kill,)
LAUNCH = (verify, launch, await_progress)

VERIFY = (verify,)
VERIFY_FEATURES = (verify_features,)
HEALTH = (health,)
STATUS = (status,)
DOCTOR = (Doctor(),)
LEASE = (lease,)


def free_lease(of: str | None) -> tuple[Operation]:
    """End a lease that was left behind: our own, or that of the person named."""
    return (FreeLease(of=of),)
