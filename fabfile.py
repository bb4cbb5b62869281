"""Every task by its name: what deploys a trainer to GPU hosts, and tells what became of it."""

from invoke.collection import Collection

from tasks import executor, inspection, lifecycle, upkeep

PAGES = (
    ("Every day", ("deploy", "status", "logs", "restart", "kill", "rollback")),
    ("Look, change nothing", ("health", "doctor", "verify", "verify-features")),
    ("One operation of a deploy", ("sync", "launch")),
    ("Seldom", ("lease", "trust")),
)

ns = Collection(
    lifecycle.deploy,
    lifecycle.restart,
    lifecycle.sync,
    lifecycle.kill,
    lifecycle.launch,
    lifecycle.rollback,
    inspection.verify,
    inspection.verify_features,
    inspection.health,
    inspection.doctor,
    inspection.status,
    inspection.logs,
    upkeep.lease,
    upkeep.trust,
)

executor.list_in_order(PAGES)
