from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tasks.errors import ConfigError
from tasks.release import LARGEST_MB, read_tree


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / "trainer"
    (top / "model").mkdir(parents=True)
    (top / "__main__.py").write_text("print('hi')\n")
    (top / "model" / "loss.py").write_text("x = 1\n")
    (top / "requirements.txt").write_text("torch\n")
    return top


def test_a_release_holds_what_ships_and_nothing_else(tree):
    for left_out in (".hidden", "__pycache__/a.pyc", "b.pyc", ".git/config", "model/.DS_Store"):
        (tree / left_out).parent.mkdir(exist_ok=True)
        (tree / left_out).write_text("no")
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o700)
    release = read_tree(tree)
    assert [(file.path, file.mode) for file in release.files] == [
        ("trainer/__main__.py", "0444"),
        ("trainer/model/loss.py", "0444"),
        ("trainer/requirements.txt", "0444"),
        ("trainer/run.sh", "0555"),
    ]


def test_the_digest_is_that_of_the_manifests_lines(tree):
    release = read_tree(tree)
    text = "".join(f"{f.mode} {f.sha256} {f.path}\n" for f in release.files)
    assert release.digest == hashlib.sha256(text.encode()).hexdigest()
    assert release.manifest()[1] == {
        "path": "trainer/model/loss.py",
        "mode": "0444",
        "sha256": hashlib.sha256(b"x = 1\n").hexdigest(),
        "size": 6,
    }


def test_paths_are_sorted_as_texts_not_as_folders(tree):
    (tree / "model-x.py").write_text("")
    paths = [file.path for file in read_tree(tree).files]
    assert paths == sorted(paths)
    assert paths.index("trainer/model-x.py") < paths.index("trainer/model/loss.py")


def test_the_digest_depends_on_content_name_and_exec_bit_alone(tree, tmp_path):
    before = read_tree(tree).digest
    os.utime(tree / "model/loss.py", (1, 1))
    (tree / "model/loss.py").chmod(0o600)
    assert read_tree(tree).digest == before
    (tree / "model/loss.py").chmod(0o755)
    executable = read_tree(tree).digest
    assert executable != before
    (tree / "model/loss.py").rename(tree / "model/lost.py")
    assert read_tree(tree).digest not in {before, executable}
    assert tmp_path


def test_contents_are_those_that_were_hashed(tree):
    release = read_tree(tree)
    (tree / "model/loss.py").write_text("x = 2\n")
    wanted = [file.sha256 for file in release.files if file.path.endswith("loss.py")]
    assert list(release.stream(wanted)) == [b"x = 1\n"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"x = 1\ny = = 2\n", "trainer/model/loss.py:2: "),
        (b"\n\nreturn 1\n", "trainer/model/loss.py:3: "),
        (b"if x:\npass\n", "trainer/model/loss.py:2: "),
        (b"x = '\xff'\n", "trainer/model/loss.py:"),
        (b"x = 1\0\n", "trainer/model/loss.py:"),
        (b"(" * 5000, "trainer/model/loss.py:"),
    ],
)
def test_python_that_does_not_parse_is_refused_with_its_line(tree, text, said):
    (tree / "model/loss.py").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_tree(tree)
    assert str(caught.value).startswith(said)
    assert caught.value.exit_code == 2


def test_a_link_inside_ships_as_its_file(tree):
    (tree / "again.py").symlink_to("model/loss.py")
    by_path = {file.path: file for file in read_tree(tree).files}
    assert by_path["trainer/again.py"].sha256 == by_path["trainer/model/loss.py"].sha256


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("out.py", "/etc/hostname", "a link that leaves the folder"),
        ("out.py", "../elsewhere.py", "a link that leaves the folder"),
        ("gone.py", "nothing.py", "a link to nothing"),
        ("round.py", "round.py", "trainer/round.py: "),
        ("folder", "model", "a link to a folder"),
        ("up", "..", "a link to a folder"),
    ],
)
def test_other_links_are_refused_by_name(tree, name, target, said):
    (tree.parent / "elsewhere.py").write_text("")
    (tree / name).symlink_to(target)
    with pytest.raises(ConfigError) as caught:
        read_tree(tree)
    assert said in str(caught.value)
    assert f"trainer/{name}" in str(caught.value)


def test_what_is_no_file_is_refused(tree):
    os.mkfifo(tree / "pipe")
    with pytest.raises(ConfigError, match="trainer/pipe: is neither a file nor a folder"):
        read_tree(tree)


def test_a_name_with_control_characters_is_refused(tree):
    (tree / "a\nb.py").write_text("")
    with pytest.raises(ConfigError, match=r"trainer/a\\x0ab.py: has a name"):
        read_tree(tree)


def test_data_that_lies_in_the_wrong_place_is_refused(tree):
    with (tree / "weights.bin").open("wb") as file:
        file.truncate((LARGEST_MB << 20) + 1)
    with pytest.raises(ConfigError, match=r"trainer/weights\.bin: has 64 MB"):
        read_tree(tree)


def test_an_unreadable_file_is_named(tree, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root, who runs tests, may read everything
    with pytest.raises(ConfigError, match=r"trainer/__main__\.py: cannot be read: Permission"):
        read_tree(tree)


def test_a_folder_without_a_trainer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"__main__\.py is missing"):
        read_tree(tmp_path)
    with pytest.raises(ConfigError, match=r"__main__\.py is missing"):
        read_tree(tmp_path / "nowhere")
