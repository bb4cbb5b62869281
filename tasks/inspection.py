"""Tasks that only look. None takes the lease, so each may run while somebody deploys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from invoke.tasks import Task, task

from tasks import cli, plans

if TYPE_CHECKING:
    from invoke.context import Context

_LOOK = {"host": cli.HOST, "json": cli.JSON}


class _WithShortFlags(Task[Any]):
    """`-f` and `-n` as in `tail`; Invoke's automatic flags would make `-h` mean `--host`."""

    def arg_opts(self, name: str, default: str, taken_names: set[str]) -> dict[str, Any]:
        options: dict[str, Any] = super().arg_opts(name, default, taken_names)
        short = {"follow": "f", "lines": "n"}.get(name)
        if short:
            options["names"].append(short)
        return options


@task(auto_shortflags=False, help=_LOOK)
def status(c: Context, *, host: str | None = None, json: bool = False) -> None:  # noqa: ARG001  # Invoke's
    """Show what each host trains, and the last words of what died.

    `age` is the time since the last step, or since the end of a run that
    ended. Columns that find no room are left out; --json has everything.

    Example: fab status
    """
    cli.show_status(plans.STATUS, cli.Words(task="status", host=host, json=json))


@task(
    klass=_WithShortFlags,
    auto_shortflags=False,
    help={
        **_LOOK,
        "follow": "go on with new lines until the run ends, also over a lost connection",
        "lines": "how many of the last lines to begin with",
        "run": "the run to read; the newest when not given",
    },
)
def logs(
    c: Context,  # noqa: ARG001  # Invoke's
    *,
    host: str | None = None,
    follow: bool = False,
    lines: str = "20",
    run: str = "",
    json: bool = False,
) -> None:
    """Show the end of the run's log; -f follows it.

    Following goes by run, file and byte: a connection that is lost and found
    again neither repeats a line nor loses one. With several hosts each line
    begins with its host.

    Example: fab logs -f --host gpu1
    """
    words = cli.Words(task="logs", host=host, run_id=run, json=json)
    cli.show_logs(words, follow=follow, lines=lines)


@task(auto_shortflags=False, help=_LOOK)
def health(c: Context, *, host: str | None = None, json: bool = False) -> None:  # noqa: ARG001  # Invoke's
    """Say how the run is; exits 11 when it is not well.

    Well is: starting, training, "training, unsupervised" and finished. Not
    well: stalled, crashed, killed, lost and absent. For a run that died, its
    exit code or signal and its last lines follow.

    Example: fab health --host gpu1 || page-somebody
    """
    cli.carry_out(plans.HEALTH, cli.Words(task="health", host=host, json=json))


@task(auto_shortflags=False, help=_LOOK)
def doctor(c: Context, *, host: str | None = None, json: bool = False) -> None:  # noqa: ARG001  # Invoke's
    """Ask a sick host all there is to ask, and say what mends it.

    From the name and the port over login, shell, disks and clock to the
    driver, the lease and the run; as far as the host lets it. Each line is
    ok, warn or broken. Exits 0 when nothing is broken, 3 when it cannot get
    in, else 7.

    Example: fab doctor --host gpu1
    """
    cli.show_checks(plans.DOCTOR, cli.Words(task="doctor", host=host, json=json))


@task(auto_shortflags=False, help={**_LOOK, "trainer": cli.TRAINER})
def verify(c: Context, *, host: str | None = None, trainer: str = "", json: bool = False) -> None:  # noqa: ARG001
    """Compare the hosts with this trainer, and say what runs.

    Says `deployed, not running`, `running other code` or `running this`, after
    every file was hashed, the trainer was imported with the host's Python,
    and the run's paths and devices were tried. Exits 4 on any difference, and
    where this trainer is not deployed.

    Example: fab -H gpu1,gpu2 verify
    """
    cli.carry_out(plans.VERIFY, cli.Words(task="verify", host=host, trainer=trainer, json=json))


@task(auto_shortflags=False, help=_LOOK)
def verify_features(c: Context, *, host: str | None = None, json: bool = False) -> None:  # noqa: ARG001
    """Run the feature checks of the deployed release.

    Every feature that hosts.yaml requires must be there, and its check must
    pass on that machine, while the run there goes on. Exits 4 otherwise,
    naming the feature.

    Example: fab verify-features --host gpu1
    """
    cli.carry_out(plans.VERIFY_FEATURES, cli.Words(task="verify-features", host=host, json=json))
