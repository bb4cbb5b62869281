"""The recipes: what each task does, in order. The order is the design: verify before kill."""

from __future__ import annotations

from tasks.operations import (
    await_progress,
    health,
    kill,
    launch,
    lease,
    probe,
    status,
    sync,
    verify,
    verify_features,
)

CHECK = (verify, verify_features)
RUN = (kill, launch, await_progress)

DEPLOY = (probe, sync, *CHECK, *RUN)
RESTART = (probe, *CHECK, *RUN)

SYNC = (sync,)
KILL = (kill,)
LAUNCH = (verify, launch, await_progress)

VERIFY = (verify,)
VERIFY_FEATURES = (verify_features,)
HEALTH = (health,)
STATUS = (status,)
LEASE = (lease,)
