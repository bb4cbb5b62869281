"""A trainer without a model, for tests of deployment.

It keeps the contract that hosts and desks rely on: status.json and metrics.jsonl, checkpoints
renamed into place, SIGTERM honoured, exit codes, `features --json`; and it has faults on request.
It needs only Python.

    python -m trainer train --output-dir D [--steps N] [--step-seconds S] [--save-seconds S]
        [--save-interval STEPS] [faults]
    python -m trainer features --json

Unknown flags of `train` are accepted, with or without a value, so that a launch specification
made for the real trainer starts this one. Faults of `train`:

    --ignore-term               SIGTERM does nothing
    --children K                K forked children that ignore SIGTERM
    --new-session-child         a child in a session of its own
    --orphan-child              a child whose parent has died
    --bare-child                a child of a new session, re-parented, with an empty environment
    --crash-at K                raise at step K: traceback, exit 1
    --die-at K                  SIGKILL itself at step K
    --nan-at K                  loss is nan at step K: one line, exit 3
    --hang-at K                 step K never ends
    --exit-before-first-step    one line on stderr, exit 2
    --hang-before-first-step    stays in phase `loading`
    --load-seconds S            time spent in phase `loading`
    --chatter BYTES             as much text in the log at each step
    --burn                      steps are computed, not slept, and every other CPU is kept busy

Children end by themselves after 120 s, whatever a test forgets. Environment of `features`:
STUB_MISSING and STUB_FAILING name one feature each; STUB_HANG=1 never answers; STUB_BURN=S computes
on every CPU for S seconds first.
"""
