"""Operations on a release: bring it, prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.errors import VerificationFailed
from tasks.inventory import launch_spec
from tasks.operations.words import changes, check_secrets, listed
from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

TELL_BYTES = 4 << 20
"""A person hears of an upload each time that so much has gone."""


@changes
def sync(host: Host, run: Run, link: Link) -> Effect:
    """Bring the release's files to the host; only contents that it lacks travel.

    Idempotent: a release that is there whole is left as it is.

    Raises:
        RemoteFailure: the disk is full, or a file did not arrive as it was sent.
    """
    release = run.shipped()

    def stream(wanted: list[str]) -> Iterator[bytes]:
        sent = told = 0
        for content in release.stream(wanted):
            yield content
            sent += len(content)
            if sent - told >= TELL_BYTES:
                told = sent
                link.progress(f"{host.name}: sync, {sent >> 20:,} MiB sent")

    reply = link.ask(
        "sync",
        {
            "root": host.root,
            "manifest": release.manifest(),
            "digest": release.digest,
            "dry": run.dry,
        },
        deadline=300,
        lease=run.lease,
        by=run.by.words(),
        blobs=stream,
    )
    name = release.digest[:12]
    if not reply.get("changed"):
        return Effect(changed=False, detail=f"release {name} is there", facts=reply)
    count = reply.get("sent_files", 0)
    files = f"{count} file{'' if count == 1 else 's'}, {reply.get('sent_bytes', 0):,} bytes"
    detail = f"release {name}: {files} {'to send' if run.dry else 'sent'}" + listed(reply)
    return Effect(changed=True, detail=detail, facts=reply)


def verify(host: Host, run: Run, link: Link) -> Effect:
    """Prove the release on the host: every file, the imports, paths, disk, devices.

    Without a release in `run`, that is the one which the host deployed last; with `run.back`, what
    `put_back` would start, and its own settings.

    Idempotent: it only looks.

    Raises:
        VerificationFailed: not deployed, or something differs, by name.
        ConfigError: with `run.back`, this desk does not have a secret that the old run needs.
    """
    reply = link.ask(
        "verify",
        {
            "root": host.root,
            "digest": run.digest,
            "python": host.python,
            "spec": launch_spec(host),
            "back": run.back and run.back.words(),
        },
        deadline=120,
        lease=run.lease,
        by=run.by.words(),
    )
    state = str(reply.get("state"))
    if state == "not deployed" and not run.dry:
        raise VerificationFailed(
            host.name,
            f"release {str(reply.get('digest'))[:12]} is not deployed",
            f"run `fab sync --host {host.name}`",
            facts=reply,
        )
    if run.back:
        check_secrets(host, run, reply, "the run that is to come back")
    which = "" if run.release else f"release {str(reply.get('digest'))[:12]}, "
    return Effect(changed=False, detail=f"{which}{state}{listed(reply)}", facts=reply)
