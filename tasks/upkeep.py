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
    host: str = "",
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
