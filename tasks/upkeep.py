"""Tasks of the seldom kind, around hosts rather than runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invoke.tasks import task

from tasks import cli, plans

if TYPE_CHECKING:
    from invoke.context import Context


@task(
    auto_shortflags=False,
    help={
        "host": cli.HOST,
        "release": "end a lease of yours that a task on this desk left behind",
        "of": "with --release: the name of the one whose lease is ended, when it is not yours",
        "json": cli.JSON,
    },
)
def lease(
    c: Context,  # noqa: ARG001  # Invoke's
    *,
    host: str | None = None,
    release: bool = False,
    of: str = "",
    json: bool = False,
) -> None:
    """Show who may change the hosts now, why, and for how long.

    Tasks that change a host take its lease first and give it back in every
    ending; one that was left by a desk that died expires by itself. With
    --release it ends at once. The task that held it, should it live, then
    stops before its next change. The history of the host tells who did that.

    Example: fab lease --host gpu1
    """
    words = cli.Words(task="lease", host=host, json=json)
    if of and not release:
        cli.refuse("--of: names whose lease is to be ended; give --release too")
    cli.carry_out(plans.free_lease(of or None) if release else plans.LEASE, words)


@task(
    auto_shortflags=False,
    help={
        "host": cli.HOST,
        "fingerprint": "what the host must show, such as SHA256:..., as ssh-keygen -l prints it",
        "yes": "store what is shown without asking",
        "json": cli.JSON,
    },
)
def trust(
    c: Context,  # noqa: ARG001  # Invoke's
    *,
    host: str | None = None,
    fingerprint: str = "",
    yes: bool = False,
    json: bool = False,
) -> None:
    """Show the key of a host met for the first time; remember it.

    Prints its SHA256 and asks, on a terminal; elsewhere it wants
    --fingerprint or --yes. The key goes into the first known_hosts file that
    is read for the host, where ssh finds it too. A host whose key changed is
    refused, with the line that forgets the old one.

    Example: fab trust --host gpu1
    """
    words = cli.Words(task="trust", host=host, json=json)
    cli.show_trust(words, fingerprint=fingerprint, yes=yes)
