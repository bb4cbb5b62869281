"""Operations that look at a machine and at what a release can do there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.operations.words import check_secrets, listed
from tasks.outcome import Effect

if TYPE_CHECKING:
    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run


def probe(host: Host, run: Run, link: Link) -> Effect:
    """Ask what the host is: interpreter, GPUs, disks, lease, release, run.

    Idempotent: it only looks.

    Raises:
        NotOurRoot: the root belongs to another machine or user.
        RemoteFailure: the trainer's interpreter is not there.
        ConfigError: this desk does not have a secret of the run that would be put back.
    """
    flags = host.run.trainer
    reply = link.ask(
        "probe",
        {
            "root": host.root,
            "python": host.python,
            "target": flags.get("target-model"),
            "data": flags.get("data-dir"),
            "output": flags.get("output-dir"),
            "new_run": run.id if run.falls_back else None,
        },
        deadline=40,
        by=run.by.words(),
    )
    check_secrets(host, run, reply.get("fallback") or {}, "what would be put back")
    gpus = reply.get("gpus") or []
    python = reply.get("python") or {}
    parts = [
        f"python {python.get('version', 'unknown')}",
        f"{len(gpus)} GPU" + ("" if len(gpus) == 1 else "s"),
    ]
    found = reply.get("run") or {}
    parts.append(
        f"run {found['id']} {found.get('state', '')}".strip() if found.get("id") else "no run"
    )
    return Effect(changed=False, detail=", ".join(parts) + listed(reply), facts=reply)


def verify_features(host: Host, run: Run, link: Link) -> Effect:
    """Run the release's own feature checks on the host, with the trainer's interpreter.

    Idempotent: it only looks; the checks run niced, beside the old run.

    Raises:
        VerificationFailed: a required feature is missing or its check fails, by name.
    """
    if run.dry:
        return Effect(changed=False, detail="would run the checks of the release's features")
    reply = link.ask(
        "features",
        {
            "root": host.root,
            "digest": run.digest,
            "python": host.python,
            "env": dict(host.run.env),
            "devices": list(host.devices),
            "required": list(host.run.features),
        },
        deadline=300,
        lease=run.lease,
        by=run.by.words(),
    )
    features = reply.get("features") or []
    return Effect(changed=False, detail=f"{len(features)} features" + listed(reply), facts=reply)
