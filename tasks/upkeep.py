"""Tasks of the seldom kind, around hosts rather than runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invoke.tasks import task

from tasks import cli, plans

if TYPE_CHECKING:
    from invoke.context import Context


@task(auto_shortflags=False, help={"host": cli.HOST, "json": cli.JSON})
def lease(c: Context, *, host: str = "", json: bool = False) -> None:  # noqa: ARG001  # Invoke's
    """Show who may change the hosts now, why, and for how long.

    Tasks that change a host take its lease first and give it back in every
    ending; one that was left by a desk that died expires by itself.

    Example: fab lease --host gpu1
    """
    cli.carry_out(plans.LEASE, cli.Words(task="lease", host=host, json=json))
