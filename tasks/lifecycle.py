"""Tasks that change hosts. Each takes the host's lease, and gives it back in every ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invoke.tasks import task

from tasks import cli, plans

if TYPE_CHECKING:
    from invoke.context import Context

_CHANGE = {"host": cli.HOST, "dry_run": cli.DRY_RUN, "json": cli.JSON}


@task(
    auto_shortflags=False,
    help={
        **_CHANGE,
        "restart": "make a new run even where a healthy one already is this release and settings",
        "trainer": cli.TRAINER,
        "run_id": cli.RUN_ID,
    },
)
def deploy(
    c: Context,
    *,
    host: str = "",
    restart: bool = False,
    trainer: str = "",
    run_id: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Bring this trainer to the hosts, prove it there, and train.

    Sends the files that a host lacks, verifies the release and runs its
    features beside the old run, and only then asks the old run to checkpoint
    and stop. The new run resumes from that checkpoint; the task ends when it
    has made its first step. A host whose healthy run already is this release
    with these settings is left alone, and says `unchanged`.

    Example: fab deploy --host gpu1,gpu2
    """
    words = cli.Words(
        task="deploy",
        host=host,
        fresh=restart,
        trainer=trainer,
        run_id=run_id,
        json=json,
        dry=dry_run or c.config.run.dry,
    )
    cli.carry_out(plans.DEPLOY, words)


@task(auto_shortflags=False, help={**_CHANGE, "run_id": cli.RUN_ID})
def restart(
    c: Context,
    *,
    host: str = "",
    run_id: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Stop the run and start a new one of the same release.

    The release is the one that the host deployed last, whatever the trainer
    at the desk looks like now; the settings are those of hosts.yaml. Verifies
    before it stops anything. The old run checkpoints, and the new one resumes
    there. After an edit, use `fab deploy`.

    Example: fab restart --host gpu1
    """
    words = cli.Words(
        task="restart",
        host=host,
        fresh=True,
        run_id=run_id,
        json=json,
        dry=dry_run or c.config.run.dry,
    )
    cli.carry_out(plans.RESTART, words)


@task(auto_shortflags=False, help={**_CHANGE, "trainer": cli.TRAINER})
def sync(
    c: Context, *, host: str = "", trainer: str = "", dry_run: bool = False, json: bool = False
) -> None:
    """Send the release, and leave the run alone.

    Only files that the host lacks travel. Every one is checked there by its
    sha256 before the release appears, whole, under its digest.

    Example: fab sync --host 'gpu*'
    """
    words = cli.Words(
        task="sync", host=host, trainer=trainer, dry=dry_run or c.config.run.dry, json=json
    )
    cli.carry_out(plans.SYNC, words)


@task(auto_shortflags=False, help=_CHANGE)
def kill(c: Context, *, host: str = "", dry_run: bool = False, json: bool = False) -> None:
    """Let the run checkpoint and stop, until nothing of it is left.

    What does not stop within the run's grace time is ended by SIGKILL.
    Processes are known by their recorded pid and start time, never by their
    command line.

    Example: fab kill --host gpu1
    """
    words = cli.Words(
        task="kill", host=host, fresh=True, dry=dry_run or c.config.run.dry, json=json
    )
    cli.carry_out(plans.KILL, words)


@task(auto_shortflags=False, help={**_CHANGE, "run_id": cli.RUN_ID})
def launch(
    c: Context,
    *,
    host: str = "",
    run_id: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Start the deployed release, and await its first step.

    Refuses while another run is alive in the same root; `fab restart`
    replaces one.

    Example: fab launch --host gpu1
    """
    words = cli.Words(
        task="launch",
        host=host,
        run_id=run_id,
        dry=dry_run or c.config.run.dry,
        json=json,
    )
    cli.carry_out(plans.LAUNCH, words)
