"""Secrets of hosts.yaml: where the desk has them, and that nothing shows one."""

from __future__ import annotations

import pytest

from tasks.errors import ConfigError
from tasks.inventory import launch_spec, parse, resolve_secrets, secret_values, spec_digest

VALUE = "hunter2-and-more"


def inventory(tmp_path, secrets, host=""):
    text = (
        f"run:\n  trainer: {{output-dir: ~/out}}\n  env: {{A: b}}\n  secrets: {secrets}\n"
        f"hosts:\n  gpu1: {{{host}}}\n"
    )
    return parse(text, source="hosts.yaml", folder=tmp_path).hosts


def test_values_come_from_variables_and_files_of_the_desk(tmp_path):
    (tmp_path / "key").write_text(f"{VALUE}-of-a-file\n")
    hosts = inventory(tmp_path, "{HF_TOKEN: {env: MY_TOKEN}, WANDB_API_KEY: {file: key}}")
    secrets = resolve_secrets(hosts, {"MY_TOKEN": VALUE})
    assert secrets.of("gpu1") == {"HF_TOKEN": VALUE, "WANDB_API_KEY": f"{VALUE}-of-a-file"}
    assert secrets.of("gpu2") == {}
    assert VALUE not in f"{secrets!r} {secrets} {hosts[0]!r}"
    assert "HF_TOKEN" in repr(secrets)


def test_a_hosts_own_secrets_are_laid_over_the_shared_ones(tmp_path):
    (host,) = inventory(tmp_path, "{T: {env: ONE}}", "secrets: {T: {env: TWO}, U: {env: THREE}}")
    assert secret_values(host, ["T"], {"ONE": "1", "TWO": "2"}) == {"T": "2"}
    assert launch_spec(host)["secret_names"] == ["T", "U"]


def test_the_names_of_secrets_are_part_of_the_settings_and_their_values_are_not(tmp_path):
    digests = {
        spec_digest(launch_spec(inventory(tmp_path, secrets)[0]))
        for secrets in ("{}", "{T: {env: ONE}}", "{T: {env: TWO}}", "{T: {file: x}}")
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("secrets", "environment", "said"),
    [
        ("{T: {env: MINE}}", {}, "gpu1: secret T: the variable MINE is not set at this desk"),
        ("{T: {env: MINE}}", {"MINE": ""}, "the variable MINE is empty"),
        ("{T: {env: MINE}}", {"MINE": "x" * 70_000}, "is longer than 65,536 bytes"),
        ("{T: {file: none}}", {}, "/none cannot be read: No such file"),
        ("{T: {file: .}}", {}, "cannot be read: Is a directory"),
        ("{T: {file: empty}}", {}, "/empty is empty"),
        ("{T: {file: bytes}}", {}, "/bytes is not UTF-8 text"),
        ("{T: {file: nul}}", {}, "has a NUL character"),
        ("{T: {file: /dev/zero}}", {}, "has a NUL character"),
    ],
)
def test_what_the_desk_does_not_have_is_named_in_a_line(tmp_path, secrets, environment, said):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(f"{VALUE}\xff".encode("latin-1"))
    (tmp_path / "nul").write_bytes(f"{VALUE}\0".encode())
    with pytest.raises(ConfigError) as caught:
        resolve_secrets(inventory(tmp_path, secrets), environment)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert VALUE not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_secret_of_an_older_run_that_hosts_yaml_no_longer_names_is_asked_for(tmp_path):
    (host,) = inventory(tmp_path, "{}")
    with pytest.raises(
        ConfigError, match=r"secret OLD: hosts\.yaml does not say where.*OLD: \{env"
    ):
        secret_values(host, ["OLD"], {})


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        (f"{{T: {VALUE}}}", "run.secrets.T: is no mapping; write {env: VARIABLE}"),
        ("{T: }", "run.secrets.T: is empty"),
        (f"{{T: {{value: {VALUE}}}}}", "run.secrets.T: must have either `env` or `file`"),
        ("{T: {env: A, file: b}}", "run.secrets.T: must have either"),
        (f"{{T: {{env: '{VALUE}'}}}}", "run.secrets.T.env: is no name of a variable"),
        ("{T: {file: 3}}", "run.secrets.T.file: is the whole number 3"),
        ("{1T: {env: A}}", "run.secrets.1T: is no name of an environment variable"),
        ("{A: {env: A}}", "hosts.gpu1.secrets.A: is in `env` too"),
        ("{TRAINER_RUN_ID: {env: A}}", "hosts.gpu1.secrets.TRAINER_RUN_ID: is set by the tool"),
        (VALUE, "run.secrets: is no mapping"),
    ],
)
def test_a_value_in_hosts_yaml_is_refused_and_not_repeated(tmp_path, secrets, said):
    with pytest.raises(ConfigError) as caught:
        inventory(tmp_path, secrets)
    assert said in str(caught.value)
    assert VALUE not in str(caught.value)
