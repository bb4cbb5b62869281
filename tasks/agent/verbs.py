r"""What a desk can ask of a host, and the wire contract. This page is the contract's only home.

Start: the desk runs `exec python3 -I -S -B -c BOOTSTRAP` (BOOTSTRAP is in tasks/link) and writes
to its stdin: `<decimal length>\n<deflated program>`, then `<decimal length>\n<request>`, then,
for `sync` alone, raw bytes. The program is `SOURCES = {...}` followed by loader.py. Each module
imports its siblings relatively and at top level, so what a verb needs is the closure over
{verbs, module of the verb} of `from . import x` and `from .x import y`.

Request: {"verb": str, "arguments": {...}, "nonce": 32 hex, "deadline": seconds > 0,
"lease": token or null, "by": {"who": str, "host": str, "why": str}}.

Frame, on stdout: \x02 NONCE SPACE KIND SPACE LENGTH \n PAYLOAD \x03 \n, where PAYLOAD is JSON.

    P  progress, any object; {"alive": true} when nothing was said for 2 s
    N  {"blobs": [sha256...]}: the desk streams their raw bytes in this order, nothing between
    R  the result; last
    E  {"code", "text", "data": {}}: an expected failure; last
    T  {"traceback": str}: a bug of ours; last

E codes: not-ours, lease-held, verify, no-first-step, refused, failed, deadline, bad-request.
Exit status: 0 after R or E, 1 after T, 2 for a request that names no nonce (nothing on stdout,
words on stderr), 1 after an E `deadline` of a verb that was stuck. When the desk closes stdin
early the verb stops at its next safe point, with exit status 3 and no last frame.

Every verb takes "root": absolute, or from "~/" (expanded here, as are all paths that a host
reads). Changing verbs (*) take "dry": bool: nothing is changed, `changed` says what would be;
neither lease nor lock is needed then. Otherwise they need the present lease's token in the
request (E lease-held), and each change is one line of history.jsonl (leases are not).
"?" marks what may be null or left out.

    probe            {root, python?, target?, data?, output?, port?: int, new_run?: run id}
      -> {host, machine_id, boot_id, uid, user, python: {path, version, prefix, packages: {}}?,
          gpus: [{index, name, uuid, total_mib, free_mib, holders: [{pid, uid}]}],
          disks: [{what, path, free, inodes, writable?, error?}], port: {number, free, pid?}?,
          linger: {systemd, linger?, kills?}, pid1_reaps?, agent_python, lease?, release?,
          run: {id?, state}, fallback: {release, secret_names: [str]}?, warnings: [str]}
         fallback: what would be put back if new_run, not yet launched, made no step
    doctor           {root, python, target?, data?, output?, port?: int, devices?: [int]}
      -> {checks: [{check, state: "ok" | "warn" | "broken", detail, mend}],
          clock: {utc: seconds since 1970, boot_id}}      asks on, whatever goes wrong
    lease_acquire *  {root, seconds, why?, token?: 32 hex; else the request's lease, renew?: bool}
      -> {changed, token, who, host, why, since, seconds, left_s, boot_id, until_boottime}
         the same token again renews (changed false): give one, and a retry is safe
         renew: only one that is held by this token; else E lease-held
         E lease-held, data {who, host, why, since, left_s}
    lease_release *  {root, token} -> {changed}
    lease_free       {root, of?: who} -> {changed, lease?: {...}}    no token is needed
         of: the name of its holder; null: it is of the one who asks, on the same desk
         E lease-held when it is another's
    lease_show       {root} -> {lease: {who, host, why, since, seconds, left_s}?}
    sync *           {root, manifest: [{path, mode: "0444"|"0555", sha256, size}] by path, digest}
      -> {changed, digest, sent_files, sent_bytes, reused, warnings}
         dry: the sent_ figures are what would be sent, and no N frame is written
    verify           {root, digest?, python?, spec?, back?}
         digest null: what `current` points to; back: what put_back would start, with its spec
      -> {state: "not deployed" | "deployed, not running" | "running other code" | "running this",
          digest, run_id?, files, python_version?, imported_from?, secret_names?, warnings}
         E verify, data {differences: [str]}; also when no digest is given and nothing is deployed
    features         {root, digest?, python, env?: {}, devices?: [int], required?: [str]}
      -> {features: [{name, ok, detail, seconds}], missing: [], warnings}
         E verify, data {features, missing: [name], failing: [name]}
    kill *           {root, grace_s?, keep?: {run_id, pair?: [digest, spec_digest]?, back?,
                      secrets?: {name: value}}}
      -> {changed, kept?: run id, run_id?, pid?, step?, checkpoint?: path, signals: [{pid,
          signal, what}], seconds, state?, warnings}    grace_s null: the run's own
         keep: a run that is starting or training, and that is keep.run_id or the pair with the
         same secrets, or that put_back would find to be there already, is left
    launch *         {root, run_id, digest?, spec_digest, spec, secrets?: {name: value},
                      accept_pair?: bool}
      -> {changed, run_id, pid?, started, state}
         changed false: run_id exists (in whatever state), or accept_pair and the live run is it,
         with the same secrets
         E refused: another run lives in this root, or holds the devices; output_dir is another's
         E failed, data {errno}: the interpreter could not be started
    put_back *       {root, run_id, back: {to?: digest or its beginning, instead_of?: run id},
                      secrets?: those of the old run, others are left}
      -> {changed, run_id, pid?, started, state, release, spec_digest, like, instead_of,
          checkpoint?: path that it begins with, aside: [path]}
         Starts a run with release and settings of an earlier one that made a step: of release
         `to`; else the one before `instead_of`, a run that failed; else the one before the newest.
         What was given up before its first step is chosen by `to` alone. Complete checkpoints
         newer than the pinned one are moved to {output_dir}/aside-RUN. changed false: run_id
         exists, or what would come back runs. E refused: there is none, or a run is alive
    health           {root, run_id?}    null: the latest
      -> {state, run_id?, pid?, phase?, step?, steps?, loss?, detail,
          exit?: {code?, signal?, when, peak_bytes, oom_kills?, error?},
          last_lines: [str] (for crashed, killed, lost), age_s?, release?, running_release?,
          spec_digest?, checkpoint?, started?, left_over: [pid]}
         state: starting, training, "training, unsupervised", stalled, finished, crashed, killed,
         lost, absent; release is what was launched, running_release what the trainer imported
    await_progress   {root, run_id, pair?, back?, seconds?}
      -> {run_id, step, loss, seconds, phase, last_lines}; P frames {phase, step}
         pair, back: when run_id is unknown, the live run of that pair will do, or what put_back
         finds to be there already
         E no-first-step, data {why: "crashed"|"exited"|"deadline"|"stalled", exit?, last_lines,
         state, run_id}; "deadline" after `seconds`, or 1 s before the request's deadline.
         With a lease, the run is marked as given up: {root}/runs/ID/failed.json
    status           {root, run_id?} -> health's, and {current?, releases: n, status: {}?, gpus,
                     lease?, host, boot_id}
    logs             {root, run_id?, file?: "train.log"|"metrics.jsonl", offset?, lines?, follow_s?,
                      max_bytes?}
      -> {run_id, file, offset, text, more, ended, dropped}
         whole lines from byte `offset` on (null: the last `lines`); `offset` is where to go on.
         more: there is text already; dropped: bytes that the log's cap took before `offset`
         (0 in the usual case); ended: the run is over and everything was read. Waits up to
         follow_s for text. bytes that are no UTF-8 become U+FFFD

spec: {"argv": [str], "env"?: {}, "secret_names"?: [], "grace_s"?: 120, "max_log_mb"?: 512,
"output_dir": str, "devices"?: [int]}; spec_digest is the sha256 of
json.dumps(spec, sort_keys=True, separators=(",", ":")). A leading "~/" is expanded in argv,
values of env and output_dir, also after the "=" of a flag.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import sys
from typing import Any, BinaryIO, Dict, Optional

from . import space
from .desk import Desk, DeskGone, Refused

VERBS = {
    "probe": "probe.probe",
    "doctor": "doctor.doctor",
    "lease_acquire": "lease.lease_acquire",
    "lease_release": "lease.lease_release",
    "lease_free": "lease.lease_free",
    "lease_show": "lease.lease_show",
    "sync": "releases.sync",
    "verify": "verify.verify",
    "features": "features.features",
    "kill": "stop.kill",
    "launch": "launch.launch",
    "put_back": "back.put_back",
    "health": "runs.health",
    "await_progress": "progress.await_progress",
    "status": "status.status",
    "logs": "logs.logs",
}
"""Verb -> module.function. A function takes (Desk, arguments) and returns the result."""

OUTSIDE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ESTALE,
)
"""What the operating system refuses for reasons that lie on the host, not in our code."""
LONGEST_REQUEST = 64 * 1024 * 1024


def _request(stdin: BinaryIO) -> Optional[Dict[str, Any]]:
    """The request, or None when there is none that could be answered."""
    try:
        length = int(stdin.readline(32))
        text = stdin.read(length) if 0 < length <= LONGEST_REQUEST else b""
        request = json.loads(text) if len(text) == length else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    nonce = request.get("nonce")
    if not isinstance(nonce, str) or not re.match(r"\A[0-9a-f]{32}\Z", nonce):
        return None
    return {"deadline": 60, "lease": None, "by": {}, **request}


def _root_of(request: Dict[str, Any]) -> str:
    """The root as it was asked for, for words about it."""
    arguments = request.get("arguments")
    return str(arguments.get("root")) if isinstance(arguments, dict) else "host"


def _check(request: Dict[str, Any]) -> None:
    deadline, lease, by = request["deadline"], request["lease"], request["by"]
    if type(deadline) not in (int, float) or not 0 < deadline < 1e6:
        raise Refused("bad-request", f"deadline: is {deadline!r}; give seconds above 0")
    if type(lease) not in (str, type(None)):
        raise Refused("bad-request", f"lease: is {lease!r}; give a token or null")
    if type(by) is not dict or any(type(word) is not str for word in by.values()):
        raise Refused("bad-request", f"by: is {by!r}; give words for who, host and why")


def _answer(desk: Desk, request: Dict[str, Any]) -> Dict[str, Any]:
    _check(request)
    name, arguments = request.get("verb"), request.get("arguments")
    if not isinstance(name, str) or name not in VERBS or not isinstance(arguments, dict):
        raise Refused("bad-request", f"verb: is {name!r}; this agent has {', '.join(VERBS)}")
    module, function = VERBS[name].split(".")
    act = getattr(importlib.import_module(f".{module}", __package__), function)
    result: Dict[str, Any] = act(desk, arguments)
    return result


def main(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer one request, and end the process."""
    os.umask(0o077)
    request = _request(stdin)
    if request is None:
        sys.stderr.write("agent: the request was cut or is no request\n")
        sys.stderr.flush()
        os._exit(2)
    desk = Desk(stdin, stdout, request)
    status = 0
    try:
        desk.end(b"R", _answer(desk, request))
    except Refused as refused:
        data = {"code": refused.code, "text": refused.text, "data": refused.data}
        desk.end(b"E", data)
    except DeskGone:
        status = 3
    except OSError as error:
        where = error.filename or _root_of(request)
        if error.errno in space.FULL:
            full = space.full(where, error.errno)
            desk.end(b"E", {"code": full.code, "text": full.text, "data": full.data})
        elif error.errno in OUTSIDE:
            text = f"{where}: {error.strerror}; put that right on the host, then repeat"
            desk.end(b"E", {"code": "failed", "text": text, "data": {"errno": error.errno}})
        else:
            status = _bug(desk)
    except Exception:  # noqa: BLE001  # a bug: the desk gets its traceback, whatever it is
        status = _bug(desk)
    # Not sys.exit: a thread sits in a read of stdin, and would hold its buffer at shutdown.
    sys.stderr.flush()
    os._exit(status)


def _bug(desk: Desk) -> int:
    import traceback  # noqa: PLC0415  # costs 8 ms, and is hardly ever needed

    desk.end(b"T", {"traceback": traceback.format_exc()})
    return 1
