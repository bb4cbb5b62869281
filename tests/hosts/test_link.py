"""The door to a host, against real sshd: every way in which a call can end, told apart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib

import pytest

from tasks import errors
from tasks.link import dial, exchange
from tasks.link.exchange import Exchange, Question
from tasks.link.route import route
from tests.hosts.lab import Relay, needs, until

NONCE = "0f" * 16
HEALTH = ("health", {"root": "~/fab", "run_id": None})


def is_absent(reply) -> bool:
    return reply["state"] == "absent"


@pytest.fixture
def say():
    """`say(host, source)`: what the desk makes of a host whose program is `source`."""
    calls = []

    def put(host, source, *, seconds=30.0, python="python3", on_progress=None, **options):
        call = dial.call(host.name, route(host), host.if_down, left=lambda: 10.0)
        calls.append(call)
        began = time.monotonic()
        question = Question(
            host=host.name,
            verb="sync",
            command=f"exec {python} -I -S -B -c 'import sys,zlib;i=sys.stdin.buffer;"
            "exec(zlib.decompress(i.read(int(i.readline()))))'",
            program=zlib.compress(source.encode()),
            request={"nonce": NONCE},
            python=python,
        )
        stopped = options.pop("stopped", lambda: False)
        put.call = call
        return Exchange(
            question,
            call.transport,
            until=began + seconds,
            clock=time.monotonic,
            sleep=time.sleep,
            stopped=stopped,
        ).run(options.pop("blobs", None), on_progress)

    yield put
    for call in calls:
        call.close()


def frame(kind: str, payload: str, nonce: str = NONCE) -> str:
    """Give source text that sends one frame."""
    return (
        f"import os;b={payload!r}.encode('utf-8','surrogatepass')\n"
        f"os.write(1,b'\\x02{nonce} {kind} %d\\n%s\\x03\\n'%(len(b),b))\n"
    )


# -- connecting --------------------------------------------------------------------------------


def test_one_connection_serves_all_questions(machine, door):
    before = machine.log().count("Accepted publickey")
    link = door(machine.host())
    for _ in range(3):
        assert is_absent(link.ask(*HEALTH, deadline=20))
    assert machine.log().count("Accepted publickey") == before + 1


def test_an_unknown_host_key_is_refused_with_its_fingerprint(machine, door, tmp_path, notes):
    host = machine.host(known_hosts=str(tmp_path / "none"))
    with pytest.raises(errors.HostKeyWrong) as caught:
        door(host).ask(*HEALTH, deadline=20)
    text = str(caught.value)
    assert "is unknown and shows ssh-ed25519 SHA256:" in text
    assert f"host_key: {machine.host_key}" in text
    assert f"ssh -p {machine.port}" in text
    assert notes == []


def test_a_changed_host_key_is_refused_with_the_line_that_forgets_it(lab, machine, door, tmp_path):
    other = lab.start("other-key", known=False)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{machine.port} {other.host_key}\n")
    with pytest.raises(errors.HostKeyWrong) as caught:
        door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20)
    assert f"ssh-keygen -R '[127.0.0.1]:{machine.port}'" in str(caught.value)
    assert caught.value.exit_code == 3
    assert "Accepted" not in other.log()


def test_a_pin_alone_decides(lab, machine, door, tmp_path):
    nobody = str(tmp_path / "none")
    right = machine.host(host_key=machine.host_key, known_hosts=nobody)
    assert is_absent(door(right).ask(*HEALTH, deadline=20))
    other = lab.start("pinned-other", known=False)
    with pytest.raises(errors.HostKeyWrong, match=r"hosts\.yaml pins"):
        door(machine.host(host_key=other.host_key)).ask(*HEALTH, deadline=20)


def test_a_revoked_key_is_refused_although_it_is_known(machine, door, tmp_path):
    known = tmp_path / "known_hosts"
    name = f"[127.0.0.1]:{machine.port}"
    known.write_text(f"{name} {machine.host_key}\n@revoked {name} {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong, match="@revoked"):
        door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20)


def test_hashed_names_in_known_hosts_are_understood(machine, door, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
    words = ["ssh-keygen", "-q", "-H", "-f", str(known)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    assert known.read_text().startswith("|1|")
    assert is_absent(door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20))


def test_a_refused_login_is_told_at_once_and_not_tried_again(lab, machine, door, notes):
    stranger = lab.new_key("stranger")
    with pytest.raises(errors.LoginRefused, match="stranger") as caught:
        door(machine.host(identity_file=str(stranger))).ask(*HEALTH, deadline=20)
    assert caught.value.exit_code == 3
    assert notes == []


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An ssh-agent of this test alone."""
    socket_path = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL
    )
    until(socket_path.exists, what="the agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
    yield
    process.terminate()
    process.wait(10)


def test_an_agent_unlocks_what_has_a_passphrase(lab, machine, door, tmp_path, agent):
    del agent
    locked = tmp_path / "locked"
    shutil.copy(lab.key, locked)
    shutil.copy(f"{lab.key}.pub", f"{locked}.pub")
    subprocess.run(["ssh-add", "-q", str(locked)], check=True, timeout=20)
    words = ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    (tmp_path / "config").write_text("")
    host = machine.host(identity_file=str(locked), ssh_config=str(tmp_path / "config"))
    assert is_absent(door(host).ask(*HEALTH, deadline=20))


def test_a_locked_key_says_ssh_add(lab, machine, door):
    locked = lab.new_key("locked")
    words = ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    with pytest.raises(errors.LoginRefused, match=r"has a passphrase.*ssh-add"):
        door(machine.host(identity_file=str(locked))).ask(*HEALTH, deadline=20)


def test_a_closed_port_is_tried_again_and_says_what_starts_the_host(machine, door, notes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(errors.Unreachable, match=r"nothing listens.*start the lab") as caught:
        door(machine.host(port=port)).ask(*HEALTH, deadline=20)
    assert caught.value.exit_code == 3
    assert len(notes) == 3
    assert notes[0].startswith("gpu1: connect attempt 2 in ")


def test_a_host_that_comes_back_is_found_by_the_next_attempt(machine, door, notes):
    with Relay(machine.port) as gone:
        port = gone.port
    with contextlib.ExitStack() as stack:
        link = door(
            machine.host(port=port, host_key=machine.host_key),
            sleep=lambda _: stack.enter_context(Relay(machine.port, at=port)),
        )
        assert is_absent(link.ask(*HEALTH, deadline=20))
        assert len(notes) == 1
        link.close()


def test_a_listener_that_says_nothing_is_given_up(machine, door, monkeypatch):
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match="did not speak SSH"):
            door(machine.host(port=mute.getsockname()[1])).ask(*HEALTH, deadline=20)
        assert time.monotonic() - began < 6


def test_what_is_no_ssh_server_is_named(machine, door, monkeypatch):
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 1.0)

    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(errors.Unreachable):
            door(machine.host(port=server.getsockname()[1])).ask(*HEALTH, deadline=20)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_missing_ssh_config_says_what_makes_it(machine, door):
    host = machine.host(ssh_config="/nowhere/ssh_config", if_down="./scripts/demo --keep starts it")
    with pytest.raises(errors.Unreachable, match=r"nowhere.*demo --keep starts it"):
        door(host).ask(*HEALTH, deadline=20)


def test_an_alias_of_the_ssh_configuration_is_enough(lab, machine, door, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path}/more\nHost *\n  UserKnownHostsFile {lab.known_hosts}\n"
        "  IdentityAgent none\n"
    )
    (tmp_path / "more").write_text(
        f"Host trainer\n  HostName 127.0.0.1\n  Port {machine.port}\n"
        f"  IdentityFile {lab.key}\n  IdentitiesOnly yes\n"
    )
    host = machine.host(
        address="trainer", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
    )
    assert is_absent(door(host).ask(*HEALTH, deadline=20))


@pytest.fixture
def jump(lab, machine, tmp_path):
    """`jump(lines)`: a way to the machine through another host, and that host."""
    bastion = next((m for m in lab.machines if m.name == "bastion"), None)
    bastion = bastion or lab.start("bastion")

    def make(known=None):
        config = tmp_path / "config"
        config.write_text(
            f"Host inner\n  HostName 127.0.0.1\n  Port {machine.port}\n  ProxyJump outer\n"
            f"Host outer\n  HostName 127.0.0.1\n  Port {bastion.port}\n"
            f"Host *\n  IdentityFile {lab.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {known or lab.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        return machine.host(
            address="inner", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
        )

    make.bastion = bastion
    return make


def test_a_jump_host_is_gone_through(jump, door):
    before = jump.bastion.log().count("Accepted publickey")
    assert is_absent(door(jump()).ask(*HEALTH, deadline=20))
    assert jump.bastion.log().count("Accepted publickey") == before + 1


def test_a_jump_hosts_key_is_checked_too(jump, machine, door, tmp_path):
    known = tmp_path / "only-inner"
    known.write_text(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong, match=f":{jump.bastion.port} is unknown"):
        door(jump(known)).ask(*HEALTH, deadline=20)


def test_a_proxy_command_is_used_and_its_words_are_told(lab, machine, door, tmp_path):
    proxy = tmp_path / "proxy.py"
    proxy.write_text(
        "import socket,sys,threading,os\n"
        "s=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n"
        "def up():\n"
        "    while (d:=os.read(0,65536)): s.sendall(d)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while (d:=s.recv(65536)): os.write(1,d)\n"
    )
    config = tmp_path / "config"

    def host(command):
        config.write_text(
            f"Host inner\n  HostName 127.0.0.1\n  Port {machine.port}\n  ProxyCommand {command}\n"
            f"  IdentityFile {lab.key}\n  IdentityAgent none\n"
        )
        return machine.host(address="inner", port=None, ssh_config=str(config))

    link = door(host(f"{sys.executable} {proxy} %h %p"))
    assert is_absent(link.ask(*HEALTH, deadline=20))
    link.close()
    with pytest.raises(errors.Unreachable, match="proxy says: no way"):
        door(host("sh -c 'echo no way >&2'"), sleep=lambda _: None).ask(*HEALTH, deadline=20)


# -- silence, cuts and deaths ------------------------------------------------------------------


SLOW = "import time\ntime.sleep(60)\n"


def test_a_killed_interpreter_is_told_as_killed_and_not_asked_again(machine, say):
    def kill_it():
        def target():
            return [p for p in machine.processes() if "zlib.decompress" in p.words]

        os.kill(until(target)[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    with pytest.raises(errors.RemoteKilled, match="SIGKILL on the host") as caught:
        say(machine.host(), SLOW)
    killer.join()
    assert say.call.alive
    assert caught.value.exit_code == 8


def test_a_program_that_a_shell_reports_as_killed_is_told_as_killed(machine, say):
    with pytest.raises(errors.RemoteKilled, match="signal 9"):
        say(machine.host(), "import os;os._exit(137)")


def test_killed_sessions_are_told_as_a_lost_connection(machine, say):
    def end():
        until(lambda: [p for p in machine.processes() if "zlib.decompress" in p.words])
        machine.kill_sessions()

    killer = threading.Thread(target=end)
    killer.start()
    with pytest.raises(errors.ConnectionLost, match="ended before the answer"):
        say(machine.host(), SLOW)
    killer.join()
    assert not say.call.alive


def test_a_cut_connection_is_told_apart_from_a_killed_program(machine, say):
    with Relay(machine.port) as relay:

        def cut():
            until(lambda: [p for p in machine.processes() if "zlib.decompress" in p.words])
            relay.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        host = machine.host(port=relay.port, host_key=machine.host_key)
        with pytest.raises(errors.ConnectionLost, match="ended before the answer"):
            say(host, SLOW)
        cutter.join()


def ask_while_cut(relay, link, *, before=lambda: None):
    """Ask while nothing comes back from the server any more, and cut when the question left."""
    at = relay.sent
    relay.mute = True

    def cut():
        until(lambda: relay.sent > at)
        before()
        relay.cut()
        relay.mute = False

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        return link.ask(*HEALTH, deadline=15)
    finally:
        cutter.join()


def test_after_a_cut_the_question_is_put_again(machine, door, notes):
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        assert is_absent(link.ask(*HEALTH, deadline=20))
        assert is_absent(ask_while_cut(relay, link))
        assert relay.accepted == 2
        assert [note for note in notes if "health asked again attempt 2" in note]


def test_a_host_that_cannot_be_reached_again_is_told_as_lost(machine, door):
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        link.ask(*HEALTH, deadline=20)
        with pytest.raises(
            errors.ConnectionLost, match="since then not reachable: nothing listens"
        ):
            ask_while_cut(relay, link, before=relay.refuse)


def test_a_frozen_sshd_is_noticed_within_15_seconds(machine, say):
    def freeze():
        until(lambda: [p for p in machine.processes() if "zlib.decompress" in p.words])
        machine.signal_sessions(signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    began = time.monotonic()
    try:
        with pytest.raises(errors.ConnectionLost, match="nothing heard for 15 s"):
            say(machine.host(), "import time\nfor _ in range(600): print('x'); time.sleep(.1)\n")
    finally:
        freezer.join()
        machine.signal_sessions(signal.SIGCONT)
    assert 14 < time.monotonic() - began < 17


def test_a_sshd_frozen_between_questions_is_noticed_and_gone_round(machine, door, monkeypatch):
    monkeypatch.setattr(exchange, "CHANNEL_SECONDS", 1.0)
    link = door(machine.host())
    link.ask(*HEALTH, deadline=20)
    with machine.frozen():
        assert is_absent(link.ask(*HEALTH, deadline=20))


def test_a_stalled_path_is_noticed(machine, door, monkeypatch):
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(exchange, "CHANNEL_SECONDS", 1.0)
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 1.0)
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        link.ask(*HEALTH, deadline=20)
        relay.stalled = True
        with pytest.raises(errors.ConnectionLost):
            link.ask(*HEALTH, deadline=6)
        relay.stalled = False


# -- answers that are none ---------------------------------------------------------------------


def test_the_deadline_ends_both_sides_and_says_so(machine, say):
    alive = frame("P", '{"alive": true}')
    source = "import sys,select\nwhile not select.select([0],[],[],.2)[0] or sys.stdin.read():\n "
    source += alive.replace("\n", "\n ") + "\n"
    with pytest.raises(errors.RemoteTimeout, match="the host stopped its side"):
        say(machine.host(), source, seconds=1.0)


def test_a_deadline_that_the_host_ignores_says_that_too(machine, say, monkeypatch):
    monkeypatch.setattr(exchange, "ENDING_SECONDS", 0.3)
    with pytest.raises(errors.RemoteTimeout, match="whether the host stopped is not known"):
        say(machine.host(), SLOW, seconds=1.0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "exit 0 and gave no result"),
        ("print('hello')", "it said: hello"),
        (frame("R", "{}", nonce="aa" * 16), "exit 0 and gave no result"),
        (frame("R", "[]"), "no JSON object"),
        (frame("R", '{"a":'), "not JSON"),
        (frame("R", "[" * 100_000), "not JSON"),
        (f"import os;os.write(1,b'\\x02{NONCE} R 99999999\\n')", "99,999,999 bytes"),
        (f"import os;os.write(1,b'\\x02{NONCE} X 2\\n')", "unknown kind"),
        (f"import os;os.write(1,b'\\x02{NONCE} R 2\\n{{}}zz')", "without its end"),
        (f"import os;os.write(1,b'\\x02{NONCE} nonsense here\\n')", "no head"),
        (frame("N", '{"blobs": ["00"]}'), "files that were not offered"),
        ("import os,time;[os.close(n) for n in (0, 1, 2)];time.sleep(60)", "closed its output"),
    ],
)
def test_an_answer_that_is_none_is_unreadable(machine, say, source, said, monkeypatch):
    monkeypatch.setattr(exchange, "ENDING_SECONDS", 0.5)
    with pytest.raises(errors.UnreadableReply) as caught:
        say(machine.host(), source)
    assert said in str(caught.value)
    assert caught.value.exit_code == 8


def test_texts_of_a_host_cannot_steer_the_terminal(machine, say):
    with pytest.raises(errors.UnreadableReply) as caught:
        say(machine.host(), r"print('\x1b[2J\x1b]0;owned\x07 \u202egnp.exe')")
    assert r"\x1b[2J\x1b]0;owned\x07" in str(caught.value)
    assert str(caught.value).isprintable()
    reply = say(machine.host(), frame("R", '{"a": ["\\u001b[31m\\nred", {"k\\u0007": 1}]}'))
    assert reply == {"a": ["\\x1b[31m\nred", {"k\\x07": 1}]}
    with pytest.raises(errors.RemoteRefusal) as caught:
        say(machine.host(), frame("E", '{"code": "refused", "text": "\\u001b[31mno\\nyes"}'))
    assert str(caught.value).isprintable()


def test_noise_around_the_frames_is_no_answer_and_does_not_hide_one(machine, say):
    source = "import sys;print('motd\\x02'*5000);print('warn'*99999,file=sys.stderr)\n"
    reply = say(machine.host(), source + frame("R", '{"ok": 1}') + "print('bye')")
    assert reply == {"ok": 1}


def test_a_bug_there_keeps_its_traceback(machine, say):
    with pytest.raises(errors.RemoteFailure, match=r"a bug.*ValueError: x") as caught:
        say(machine.host(), frame("T", '{"traceback": "Traceback\\n  line\\nValueError: x\\n"}'))
    assert "  line" in caught.value.facts["traceback"]


@pytest.mark.parametrize(("code", "kind"), exchange.CLASSES.items())
def test_each_expected_failure_has_its_class(machine, say, code, kind):
    text = f'{{"code": "{code}", "text": "~/fab: is so; do that", "data": {{"n": 1}}}}'
    with pytest.raises(kind, match=r"gpu1: .*~/fab: is so; do that") as caught:
        say(machine.host(), frame("E", text))
    assert type(caught.value) is kind
    assert caught.value.facts == {"n": 1}


def test_a_missing_interpreter_names_the_setting(machine, door):
    with pytest.raises(errors.RemoteFailure, match=r"nopython9.*set `agent_python`"):
        door(machine.host(agent_python="nopython9")).ask(*HEALTH, deadline=20)


def test_a_forced_command_is_no_answer(lab, door):
    forced = lab.start("forced", sshd=("ForceCommand echo hello from the jump box",))
    with pytest.raises(errors.UnreadableReply, match="hello from the jump box"):
        door(forced.host()).ask(*HEALTH, deadline=20)


def test_an_account_that_may_run_nothing_is_told(lab, door, monkeypatch):
    monkeypatch.setattr(exchange, "BUSY_SECONDS", 0.3)
    closed = lab.start("no-sessions", sshd=("MaxSessions 0",))
    with pytest.raises(errors.LoginRefused, match="opens no session"):
        door(closed.host()).ask(*HEALTH, deadline=20)


def test_stop_ends_the_question_under_way(machine, say):
    stopped = threading.Event()
    timer = threading.Timer(0.5, stopped.set)
    timer.start()
    with pytest.raises(errors.Interrupted, match="sync was under way"):
        say(machine.host(), SLOW, stopped=stopped.is_set)
    timer.join()


# -- hosts of all kinds ------------------------------------------------------------------------


def test_a_host_that_allows_one_session_is_enough(lab, door):
    narrow = lab.start("narrow", sshd=("MaxSessions 1",))
    link = door(narrow.host())
    for _ in range(8):
        assert is_absent(link.ask(*HEALTH, deadline=20))


RC = {
    "bash": (".bashrc", "echo noise; echo '\x1b[31mred' >&2; PS1=x\n"),
    "dash": (".profile", "echo noise\n"),
    "fish": (".config/fish/config.fish", "echo noise; echo more >&2\n"),
    "tcsh": (".tcshrc", "echo noise\n"),
}


@pytest.mark.parametrize("name", RC)
def test_any_login_shell_and_any_noise_will_do(lab, door, name):
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"not run: no {name} here")
    needs("pidns")
    there = lab.start(f"shell-{name}", mode="pidns", shell=shell)
    file, text = RC[name]
    (there.home / file).parent.mkdir(parents=True, exist_ok=True)
    (there.home / file).write_text(text)
    assert is_absent(door(there.host()).ask(*HEALTH, deadline=20))
    with pytest.raises(errors.RemoteFailure, match="set `agent_python`"):
        door(there.host(agent_python="nopython9")).ask(*HEALTH, deadline=20)


def test_an_account_without_a_shell_is_told_in_its_own_words(lab, door):
    needs("pidns")
    nologin = shutil.which("nologin", path="/usr/sbin:/sbin")
    there = lab.start("nologin", mode="pidns", shell=nologin)
    with pytest.raises(errors.RemoteFailure, match=r"exit 1 before our program ran.*not available"):
        door(there.host()).ask(*HEALTH, deadline=20)
