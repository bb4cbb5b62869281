from __future__ import annotations

from pathlib import Path

import pytest

from tasks.errors import ConfigError, MissingHostError
from tasks.inventory import launch_spec, parse, read, spec_digest

GOOD = """
run:
  trainer: {target-model: ~/models/small, lr: 6e-4, epochs: 6, output-dir: ~/out}
  env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True", OMP_NUM_THREADS: 2}
  features: [flat-gradients, exact-resume]
groups:
  default: [demo]
  big: [gpu1, gpu2]
hosts:
  demo: {ssh_config: .demo/ssh_config, root: ~/fab, python: ~/venv/bin/python, if_down: "run it"}
  gpu1:
    address: 203.0.113.7
    port: 10638
    user: root
    python: /root/venv/bin/python
    devices: [0, 1]
    env: {HF_HOME: /dev/shm/hf}
    run: {trainer: {lr: 1e-3, dp-pairs: 2}, grace_seconds: 300}
  gpu2: {enabled: false}
  gpu10: {}
"""


def inventory(text=GOOD):
    return parse(text, source="hosts.yaml", folder=Path("/project"))


def named(*words, text=GOOD):
    return [host.name for host in inventory(text).select(words)]


def test_the_whole_file_becomes_values():
    demo, gpu1, gpu2, _ = inventory().hosts
    assert demo.address == "demo"
    assert demo.ssh_config == "/project/.demo/ssh_config"
    assert demo.root == "~/fab"
    assert demo.agent_python == "python3"
    assert (gpu1.port, gpu1.user, gpu1.devices) == (10638, "root", (0, 1))
    assert gpu1.run.grace_seconds == 300
    assert gpu1.run.first_step_seconds == 300
    assert not gpu2.enabled


def test_a_hosts_own_run_is_laid_over_the_shared_one():
    demo, gpu1, *_ = inventory().hosts
    assert list(gpu1.run.trainer) == ["target-model", "lr", "epochs", "output-dir", "dp-pairs"]
    assert gpu1.run.trainer["lr"] == "1e-3"
    assert demo.run.trainer["lr"] == "6e-4"
    assert gpu1.run.env["HF_HOME"] == "/dev/shm/hf"
    assert gpu1.run.env["OMP_NUM_THREADS"] == "2"
    assert "HF_HOME" not in demo.run.env


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), ["demo"]),
        (("gpu1",), ["gpu1"]),
        (("gpu10,demo",), ["gpu10", "demo"]),
        (("gpu1", " gpu1 , gpu10"), ["gpu1", "gpu10"]),
        (("big",), ["gpu1"]),
        (("gpu*",), ["gpu1", "gpu10"]),
        (("all",), ["demo", "gpu1", "gpu10"]),
    ],
)
def test_words_find_hosts(words, found):
    assert named(*words) == found


@pytest.mark.parametrize("words", ["", ",", " ", " , ,"])
def test_a_list_of_nothing_is_not_the_default_group(words):
    with pytest.raises(MissingHostError, match="--host: names no host"):
        named(words)


def test_without_a_default_group_all_enabled_hosts_are_meant():
    assert named(text=GOOD.replace("default: [demo]", "small: [demo]")) == ["demo", "gpu1", "gpu10"]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(MissingHostError) as caught:
        named("gpu9")
    assert str(caught.value) == (
        "--host: no host named gpu9; hosts.yaml has demo, gpu1, gpu2, gpu10, default, big;"
        " did you mean 'gpu2'?"
    )
    with pytest.raises(MissingHostError, match="no host named nothing\\*"):
        named("nothing*")


def test_a_disabled_host_is_said_to_be_disabled():
    with pytest.raises(ConfigError, match=r"gpu2 is disabled; set hosts\.gpu2\.enabled"):
        named("gpu2")


def host(lines: str) -> str:
    return f"run: {{trainer: {{output-dir: ~/out}}}}\nhosts:\n  gpu1:\n    {lines}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (host("adress: x"), "hosts.gpu1.adress: unknown key; did you mean 'address'?"),
        (host("gpu: 1"), "hosts.gpu1.gpu: unknown key"),
        ("host: {}\n", "hosts.yaml: host: unknown key; did you mean 'hosts'?"),
        (host("port: yes"), "hosts.gpu1.port: is the yes/no value True; must be a whole number"),
        (host('port: "22"'), "hosts.gpu1.port: is the text 22; must be a whole number"),
        (host("port: 22.0"), "hosts.gpu1.port: is the number 22.0"),
        (host("port: 0"), "hosts.gpu1.port: is 0; give 1 to 65535"),
        (host("port: 65536"), "give 1 to 65535"),
        (host("port:"), "hosts.gpu1.port: is empty"),
        (host("user: 12"), "hosts.gpu1.user: is the whole number 12; must be text"),
        (host("user: -oProxyCommand=x"), "hosts.gpu1.user"),
        (host("address: -oProxyCommand=x"), "hosts.gpu1.address"),
        (host('address: "a b"'), "hosts.gpu1.address"),
        (host("root: fab"), "hosts.gpu1.root: is 'fab'; give an absolute path"),
        (host("root: ~"), "hosts.gpu1.root: is empty"),
        (host("root: /"), "name a folder of its own"),
        (host("root: ~/../x"), "name a folder of its own"),
        (host("python: venv/bin/python"), "hosts.gpu1.python"),
        (host("agent_python: python3 -x"), "hosts.gpu1.agent_python"),
        (host('agent_python: "python3\';reboot"'), "hosts.gpu1.agent_python"),
        (host("agent_python: -c"), "hosts.gpu1.agent_python"),
        (host("devices: 0"), "hosts.gpu1.devices: is the whole number 0; must be a list"),
        (host("devices: [0, 0]"), "hosts.gpu1.devices[1]: 0 stands there twice"),
        (host("devices: [true]"), "hosts.gpu1.devices[0]: is the yes/no value True"),
        (host("devices: [-1]"), "hosts.gpu1.devices[0]: is -1; give 0 or more"),
        (host("enabled: 1"), "hosts.gpu1.enabled: is the whole number 1; must be a yes/no value"),
        (host("host_key: ssh-ed25519 AAAA"), "hosts.gpu1.host_key: is"),
        (host("host_keys: ask"), "hosts.gpu1.host_keys: is 'ask'; write `strict`"),
        ("host_keys: no", "host_keys: is the yes/no value False"),
        (host("host_key: blah"), "hosts.gpu1.host_key: is 'blah'"),
        (host('if_down: "a\\x1bb"'), "hosts.gpu1.if_down: has a control character"),
        (host("env: {A: true}"), "hosts.gpu1.env.A: is the yes/no value True"),
        (host("env: {1A: x}"), "hosts.gpu1.env.1A: is no name"),
        (host("env: {CUDA_VISIBLE_DEVICES: '0'}"), "set by the tool itself; use `devices`"),
        (host("run: {trainer: {Lr: 1}}"), "hosts.gpu1.run.trainer.Lr: is no flag"),
        (host("run: {trainer: {--lr: 1}}"), "hosts.gpu1.run.trainer.--lr: is no flag"),
        (host("run: {trainer: {lr: }}"), "hosts.gpu1.run.trainer.lr: is empty"),
        (host("run: {trainer: {lr: {a: 1}}}"), "hosts.gpu1.run.trainer.lr: is a mapping"),
        (host("run: {trainer: {d: 2026-01-01}}"), "hosts.gpu1.run.trainer.d: is the date"),
        (host("run: {trainer: {on: 1}}"), "the key is the yes/no value True"),
        (host("run: {grace_seconds: 0}"), "hosts.gpu1.run.grace_seconds: is 0; give 1 to 3600"),
        (host("run: {graze_seconds: 9}"), "did you mean 'grace_seconds'?"),
        (host("run: {features: [a b]}"), "hosts.gpu1.run.features[0]: is 'a b'"),
        (host("address: a\n    address: b"), "hosts.yaml:5: address stands there twice"),
        ("hosts: {}\nhosts: {}\n", "hosts.yaml:2: hosts stands there twice, first in line 1"),
        ("hosts: {a: {enabled: false}, a: {enabled: false}}", "a stands there twice"),
        ("hosts:\n  1: {}\n", "hosts.yaml: hosts.1: the key is the whole number 1; put it in"),
        ("hosts: {a b: {}}", "hosts.a b: is no name for a host"),
        ("hosts: {all: {}}", "hosts.all: is no name for a host"),
        ("hosts: {a: {}}", "hosts.a.run.trainer.output-dir: is missing"),
        ("hosts: [a]", "hosts: is a list; must be a mapping"),
        ("- a", "hosts.yaml: is a list; must be a mapping"),
        ("", "hosts.yaml: is empty"),
        ("hosts: {a: b", "hosts.yaml:1: "),
        ("hosts:\n\t a: 1", "hosts.yaml:2: "),
        ("hosts: !!python/object:os.system {}", "hosts.yaml:1: "),
        (f"{host('port: 1')}groups: {{g: [gpu2]}}", "groups.g[0]: no host named gpu2; did you"),
        (f"{host('port: 1')}groups: {{gpu1: []}}", "groups.gpu1: is also the name of a host"),
        (f"{host('port: 1')}groups: {{g: gpu1}}", "groups.g: is the text gpu1; must be a list"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, said):
    with pytest.raises(ConfigError) as caught:
        inventory(text)
    assert said in str(caught.value)
    assert str(caught.value).startswith("hosts.yaml")
    assert caught.value.exit_code == 2


def test_the_policy_for_host_keys_is_strict_unless_the_file_or_a_host_says_otherwise():
    assert not any(host.accept_new for host in inventory().hosts)
    text = f"host_keys: accept-new\n{GOOD}".replace("gpu10: {}", "gpu10: {host_keys: strict}")
    assert [host.accept_new for host in inventory(text).hosts] == [True, True, True, False]


def test_merge_keys_of_yaml_work():
    text = (
        "run: {trainer: {output-dir: ~/o}}\n"
        "hosts:\n  a: &a {port: 2200, user: me}\n  b: {<<: *a, user: you}\n"
    )
    _, b = inventory(text).hosts
    assert (b.port, b.user) == (2200, "you")


def test_files_that_are_not_there_or_no_text(tmp_path):
    with pytest.raises(ConfigError, match=r"hosts\.yaml: no such file"):
        read(tmp_path / "hosts.yaml")
    (tmp_path / "hosts.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "hosts.yaml")


def test_the_launch_spec_has_the_flags_in_their_order():
    text = host("run: {trainer: {resume: true, quiet: false, taps: [1, 7], name: a b, rate: -1}}")
    spec = launch_spec(inventory(text).hosts[0])
    assert spec["argv"] == [
        *("python3", "-m", "trainer", "train", "--output-dir", "~/out", "--resume"),
        *("--taps", "1,7", "--name", "a b", "--rate=-1"),
    ]
    assert spec["output_dir"] == "~/out"
    assert spec["grace_s"] == 120


def test_the_original_command_line_can_be_said():
    text = """
run:
  trainer:
    target-model: /dev/shm/Qwen3.6-27B
    data-dir: /workspace/tokenized_completions
    output-dir: /workspace/checkpoints
    epochs: 6
    lr: 6e-4
    max-anchors: 512
    token-budget: 8192
    block-size: 16
    dp-pairs: 2
    log-interval: 10
    save-interval: 5000
  env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}
hosts: {gpu1: {python: /root/venv/bin/python}}
"""
    spec = launch_spec(inventory(text).hosts[0])
    assert " ".join(spec["argv"][1:]) == (
        "-m trainer train --target-model /dev/shm/Qwen3.6-27B"
        " --data-dir /workspace/tokenized_completions --output-dir /workspace/checkpoints"
        " --epochs 6 --lr 6e-4 --max-anchors 512 --token-budget 8192 --block-size 16"
        " --dp-pairs 2 --log-interval 10 --save-interval 5000"
    )
    assert spec["env"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_a_specs_digest_depends_on_what_it_says_alone():
    spec = launch_spec(inventory().hosts[1])
    turned = dict(reversed(spec.items()))
    assert spec_digest(spec) == spec_digest(turned)
    assert spec_digest({**spec, "grace_s": 1}) != spec_digest(spec)
    assert len(spec_digest(spec)) == 64
