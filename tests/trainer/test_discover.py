"""Which files of a folder are the data set: splits, shards that are listed, an indices file."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer import made
from trainer.data import arrow
from trainer.errors import InputError

ROWS = made.rows(6)


def told(path, **more):
    with pytest.raises(InputError) as caught:
        arrow.load(path, **{"budget": 64} | more)
    return str(caught.value)


def test_splits(tmp_path):
    for name in ("train", "test"):
        made.save_to_disk(
            tmp_path / "both" / name, [made.table(ROWS[: 3 if name == "test" else 6])]
        )
    names = tmp_path / "both/dataset_dict.json"
    names.write_text('{"splits": ["train", "test", "dev"]}')
    assert len(arrow.load(names.parent, budget=64).lengths) == 6
    assert len(arrow.load(names.parent, budget=64, split="test").lengths) == 3
    assert told(names.parent, split="tset") == (
        f"--data-dir: {names.parent} has the splits train, test, dev, and no tset;"
        " give one as --data-split"
    )
    assert told(names.parent, split="dev") == (
        f"{names.parent / 'dev'}: is listed in dataset_dict.json and is not there; copy it again"
    )
    assert told(names.parent / "train", split="test") == (
        f"--data-split: is test, but {names.parent / 'train'} has no splits; leave it out"
    )
    names.unlink()
    assert told(names.parent) == (
        f"--data-dir: {names.parent} holds no state.json, and no .arrow, .feather, .ipc or"
        " .parquet file; give one of its folders test, train"
    )


def test_splits_by_the_names_of_files(tmp_path):
    for name, rows in (("train-00000-of-00001", ROWS), ("test-00000-of-00001", ROWS[:2])):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(made.table(rows), tmp_path / f"data/{name}.parquet")
    assert len(arrow.load(tmp_path, budget=64).lengths) == 6
    assert len(arrow.load(tmp_path, budget=64, split="test").lengths) == 2
    assert "has the splits test, train, and no dev" in told(tmp_path, split="dev")


def test_stale_shards_are_left_out_and_told(tmp_path):
    folder = made.save_to_disk(tmp_path / "data", [made.table(ROWS)])
    made.write_stream(folder / "stale.arrow", made.table(ROWS))
    store = arrow.load(folder, budget=64)
    assert len(store.lengths) == len(ROWS)
    assert store.notes == (
        f"{folder}: stale.arrow is not listed in state.json and is left out; remove it",
    )
    made.write_stream(folder / "older.arrow", made.table(ROWS))
    assert arrow.load(folder, budget=64).notes == (
        (
            f"{folder}: 2 files are not listed in state.json and are left out (older.arrow ...);"
            " remove them"
        ),
    )


def test_an_indices_file_that_does_not_fit(tmp_path):
    folder = made.save_to_disk(tmp_path / "data", [made.table(ROWS)])
    state = json.loads((folder / "state.json").read_text())
    state["_indices_files"] = [{"filename": "i.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    path = folder / "i.arrow"
    assert told(folder) == f"{path}: is listed in state.json and is not there; copy it again"
    made.write_stream(path, pa.table({"indices": [0, 6]}))
    assert told(folder) == (
        f"{path}: row 1: chooses row 6, but there are 6;"
        " save the data set again after flatten_indices()"
    )
    made.write_stream(path, pa.table({"indices": ["a"]}))
    assert "is no indices file (['indices'])" in told(folder)
