"""Tasks that change hosts. Each takes the host's lease, and gives it back in every ending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invoke.tasks import task

from tasks import cli, plans

if TYPE_CHECKING:
    from invoke.context import Context

_CHANGE = {
    "host": cli.HOST,
    "wait_lease": cli.WAIT_LEASE,
    "dry_run": cli.DRY_RUN,
    "json": cli.JSON,
}
_ROLLBACK = (
    "put the old run back when the new one makes no step; --no-rollback leaves the new one as it "
    "is, to be looked at, and exits 10"
)


@task(
    auto_shortflags=False,
    help={
        **_CHANGE,
        "restart": "make a new run even where a healthy one already is this release and settings",
        "trainer": cli.TRAINER,
        "run_id": cli.RUN_ID,
        "rollback": _ROLLBACK,
    },
)
def deploy(
    c: Context,
    *,
    host: str | None = None,
    restart: bool = False,
    trainer: str = "",
    run_id: str = "",
    rollback: bool = True,
    wait_lease: str = "0",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Bring this trainer to the hosts, prove it there, and train.

    Sends the files that a host lacks, verifies the release and runs its
    features beside the old run, and only then asks the old run to checkpoint
    and stop. The new run resumes from that checkpoint; the task ends when it
    has made its first step. If that step does not come, the new run is ended
    and the old release is put back, with its settings, on the checkpoint of
    the stop (exit 6). A host whose healthy run already is this release with
    these settings is left alone, and says `unchanged`.

    Example: fab deploy --host gpu1,gpu2
    """
    words = cli.Words(
        task="deploy",
        host=host,
        fresh=restart,
        trainer=trainer,
        run_id=run_id,
        wait_lease=wait_lease,
        json=json,
        dry=dry_run or c.config.run.dry,
    )
    cli.carry_out(plans.DEPLOY, words, fallback=plans.BACK if rollback else ())


@task(auto_shortflags=False, help={**_CHANGE, "run_id": cli.RUN_ID, "rollback": _ROLLBACK})
def restart(
    c: Context,
    *,
    host: str | None = None,
    run_id: str = "",
    rollback: bool = True,
    wait_lease: str = "0",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Stop the run and start a new one of the same release.

    The release is the one that the host deployed last, whatever the trainer
    at the desk looks like now; the settings are those of hosts.yaml. Verifies
    before it stops anything. The old run checkpoints, and the new one resumes
    there; if it makes no step, what ran before is put back, as by `deploy`.
    After an edit, use `fab deploy`.

    Example: fab restart --host gpu1
    """
    words = cli.Words(
        task="restart",
        host=host,
        fresh=True,
        run_id=run_id,
        wait_lease=wait_lease,
        json=json,
        dry=dry_run or c.config.run.dry,
    )
    cli.carry_out(plans.RESTART, words, fallback=plans.BACK if rollback else ())


@task(
    auto_shortflags=False,
    help={
        **_CHANGE,
        "to": "digest of a release that is kept there, or how it begins; named, also one that "
        "failed is taken",
        "run_id": cli.RUN_ID,
    },
)
def rollback(
    c: Context,
    *,
    host: str | None = None,
    to: str = "",
    run_id: str = "",
    wait_lease: str = "0",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Put back the release that trained before, and its settings.

    Verifies it before it stops anything. It goes on from the newest
    checkpoint; where the run that is left never made a step, from the one
    that was kept for it, and what is newer is moved aside and named. A
    release that made no step is taken only when it is named. A second
    time, it is back already and nothing changes; --to goes further.

    Example: fab rollback --host gpu1
    """
    words = cli.Words(
        task="rollback",
        host=host,
        back=True,
        to=to,
        run_id=run_id,
        wait_lease=wait_lease,
        json=json,
        dry=dry_run or c.config.run.dry,
    )
    cli.carry_out(plans.ROLLBACK, words)


@task(auto_shortflags=False, help={**_CHANGE, "trainer": cli.TRAINER})
def sync(
    c: Context,
    *,
    host: str | None = None,
    trainer: str = "",
    wait_lease: str = "0",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Send the release, and leave the run alone.

    Only files that the host lacks travel. Every one is checked there by its
    sha256 before the release appears, whole, under its digest.

    Example: fab sync --host 'gpu*'
    """
    words = cli.Words(
        task="sync",
        host=host,
        trainer=trainer,
        wait_lease=wait_lease,
        dry=dry_run or c.config.run.dry,
        json=json,
    )
    cli.carry_out(plans.SYNC, words)


@task(auto_shortflags=False, help=_CHANGE)
def kill(
    c: Context,
    *,
    host: str | None = None,
    wait_lease: str = "0",
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Let the run checkpoint and stop, until nothing of it is left.

    What does not stop within the run's grace time is ended by SIGKILL.
    Processes are known by their recorded pid and start time, never by their
    command line.

    Example: fab kill --host gpu1
    """
    words = cli.Words(
        task="kill",
        host=host,
        fresh=True,
        wait_lease=wait_lease,
        dry=dry_run or c.config.run.dry,
        json=json,
    )
    cli.carry_out(plans.KILL, words)


@task(auto_shortflags=False, help={**_CHANGE, "run_id": cli.RUN_ID})
def launch(
    c: Context,
    *,
    host: str | None = None,
    run_id: str = "",
    wait_lease: str = "0",
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
        wait_lease=wait_lease,
        dry=dry_run or c.config.run.dry,
        json=json,
    )
    cli.carry_out(plans.LAUNCH, words)
