"""Arrow files become flat arrays, and what is wrong with one is told with file and row."""

import json

import numpy as np
import pyarrow as pa
import pytest

from tests.trainer import made
from trainer.data import arrow
from trainer.errors import InputError

ROWS = made.rows(20)


def written(folder, tables):
    return made.save_to_disk(folder / "data", tables)


def single(folder, made_table):
    (folder / "data").mkdir()
    made.write_stream(folder / "data/rows.arrow", made_table)
    return folder / "data"


def load(folder, **more):
    return arrow.load(folder, **{"budget": 64} | more)


def told(folder, **more):
    with pytest.raises(InputError) as caught:
        load(folder, **more)
    return str(caught.value)


def as_rows(store):
    """Ids and mask of each row, as lists."""
    rows = [store.row(row) for row in range(len(store.lengths))]
    return [(ids.tolist(), trainable.astype(int).tolist()) for ids, trainable in rows]


def test_save_to_disk_is_read_shard_after_shard(tmp_path):
    store = load(written(tmp_path, [made.table(ROWS[:9]), made.table(ROWS[9:])]))
    assert as_rows(store) == ROWS
    assert [each.dtype for each in store.row(0)] == [np.int64, np.bool_]
    assert (store.dropped, store.truncated, store.notes) == ({}, 0, ())
    assert store.tokens == sum(len(ids) for ids, _ in ROWS)


@pytest.mark.parametrize("ids", [pa.int32(), pa.int64(), pa.uint16(), pa.int8()], ids=str)
@pytest.mark.parametrize("mask", [pa.int64(), pa.int8(), pa.bool_(), pa.uint8()], ids=str)
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_any_width_and_both_lists_are_read(tmp_path, ids, mask, kind):
    store = load(written(tmp_path, [made.table(ROWS, ids=kind(ids), mask=kind(mask))]))
    assert as_rows(store) == ROWS


def test_shards_may_differ_in_type(tmp_path):
    tables = [made.table(ROWS[:5]), made.table(ROWS[5:], ids=pa.large_list(pa.int64()))]
    assert as_rows(load(written(tmp_path, tables))) == ROWS


def test_a_file_with_a_footer_is_read_too(tmp_path):
    path = tmp_path / "rows.arrow"
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, made.table(ROWS).schema) as writer,
    ):
        writer.write_table(made.table(ROWS), max_chunksize=3)
    assert as_rows(load(tmp_path)) == ROWS


def test_sliced_and_null_rows_are_read_as_they_are_meant(tmp_path):
    whole = made.table([*ROWS, (None, None)])
    store = load(written(tmp_path, [whole.slice(4)]))
    assert as_rows(store) == ROWS[4:]
    assert store.dropped == {"empty": 1}


@pytest.mark.parametrize(
    ("mask", "values"), [(pa.int16(), [0, 256, -1, 1, 0]), (pa.int8(), [0, 2, -1, -128, 0])]
)
def test_any_value_but_zero_is_trained_on(tmp_path, mask, values):
    table = made.table([(list(range(1, 6)), values)], mask=pa.list_(mask))
    trainable = load(single(tmp_path, table)).row(0)[1]
    assert trainable.tolist() == [False, True, True, True, False]
    assert trainable.view(np.uint8).tolist() == [0, 1, 1, 1, 0]


def test_rows_that_cannot_teach_are_left_out_and_counted(tmp_path):
    useless = [([], []), ([5], [1]), ([5, 6, 7], [1, 0, 1]), ([5, 6], [0, 0])]
    store = load(single(tmp_path, made.table([*useless, ([5, 6], [1, 1])])))
    assert as_rows(store) == [([5, 6], [1, 1])]
    assert store.dropped == {"empty": 1, "without two trained tokens in a row": 3}


def test_overlong_rows_are_an_error_or_cut_or_dropped(tmp_path):
    ids = list(range(1, 13))
    folder = single(
        tmp_path, made.table([([1, 2, 3], [1, 1, 1]), (ids, [1] * 12), ([4, 5], [1, 1])])
    )
    assert "rows.arrow: row 1: 12 tokens; raise --token-budget above 8" in told(folder, budget=8)
    cut = load(folder, budget=8, overlong="truncate")
    assert [len(row[0]) for row in as_rows(cut)] == [3, 8, 2]
    assert as_rows(cut)[1][0] == ids[:8]
    assert cut.truncated == 1
    dropped = load(folder, budget=8, overlong="drop")
    assert [len(row[0]) for row in as_rows(dropped)] == [3, 2]
    assert dropped.dropped == {"longer than the token budget": 1}


def test_a_row_whose_trained_part_is_cut_off_is_left_out(tmp_path):
    folder = single(
        tmp_path, made.table([(list(range(1, 9)), [0] * 6 + [1] * 2), ([4, 5], [1, 1])])
    )
    assert len(load(folder, budget=7, overlong="truncate").lengths) == 1


def test_the_fingerprint_follows_the_lengths(tmp_path):
    one = load(single(tmp_path, made.table(ROWS)))
    (tmp_path / "other").mkdir()
    two = load(single(tmp_path / "other", made.table(ROWS[::-1])))
    assert one.fingerprint != two.fingerprint


def test_a_missing_column_lists_the_columns(tmp_path):
    table = made.table(ROWS).rename_columns(["words", "loss_mask"])
    text = told(single(tmp_path, table))
    assert text.endswith(
        "rows.arrow: has no column input_ids; it has words, loss_mask;"
        " name it input_ids, tokens or token_ids"
    )


@pytest.mark.parametrize("wrong", [60, -1, 2**40])
def test_an_id_the_target_lacks_is_named_with_its_row(tmp_path, wrong):
    bad = [*ROWS[:9], ([3, 4, wrong], [1, 1, 1]), *ROWS[9:]]
    table = made.table(bad, ids=pa.list_(pa.int64()))
    text = told(written(tmp_path, [made.table(ROWS), table]), vocab_size=60)
    assert (
        f"00001-of-00002.arrow: row 9: id {wrong} at position 2; the target has ids 0 to 59" in text
    )


def test_lengths_that_differ_are_named_with_their_row(tmp_path):
    text = told(written(tmp_path, [made.table([*ROWS, ([1, 2, 3], [1, 1])])]))
    assert "row 20: 3 input_ids but 2 loss_mask" in text


def test_a_null_inside_a_row_is_never_read_as_zero(tmp_path):
    assert "row 3: column input_ids holds a null; write it again" in told(
        single(tmp_path, made.table([*ROWS[:3], ([1, None], [1, 1])]))
    )


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.int32(), pa.list_(pa.list_(pa.int8()))]
)
def test_a_column_of_another_kind_is_refused(tmp_path, kind):
    column = pa.array([None], kind)
    table = pa.table({"input_ids": column, "loss_mask": pa.array([[1]])})
    assert f"column input_ids is {kind}; lists of integers are needed" in told(
        single(tmp_path, table)
    )


def test_a_stream_cut_between_two_messages_is_noticed(tmp_path):
    folder = single(tmp_path, made.table(ROWS))
    path = folder / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    text = told(folder)
    assert "rows.arrow: has no end-of-stream mark" in text
    assert "rows may be missing" in text


def test_a_stream_cut_inside_a_message_is_noticed(tmp_path):
    folder = single(tmp_path, made.table(ROWS))
    path = folder / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    assert "rows.arrow: is not whole Arrow data" in told(folder)


def test_damaged_offsets_are_noticed(tmp_path):
    folder = single(tmp_path, made.table([([1] * 5, [1] * 5)] * 4, mask=pa.list_(pa.int8())))
    path = folder / "rows.arrow"
    held = path.read_bytes()
    offsets = np.array([0, 5, 10, 15, 20], np.int32).tobytes()
    broken = np.array([0, 5, 99, 15, 20], np.int32).tobytes()
    assert offsets in held
    path.write_bytes(held.replace(offsets, broken, 1))
    assert "column input_ids is damaged" in told(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1....", "is a Parquet file, not Arrow data"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"", "is empty"),
        (b"x" * 50, "is not whole Arrow data"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, words):
    (tmp_path / "rows.arrow").write_bytes(content)
    assert words in told(tmp_path)


def test_a_folder_without_data_is_told(tmp_path):
    assert "holds no state.json, and no .arrow, .feather, .ipc or .parquet file" in told(tmp_path)
    assert "is not a folder" in told(tmp_path / "missing")
    assert "has no row to train on (no rows at all)" in told(written(tmp_path, [made.table([])]))


def test_state_json_is_followed(tmp_path):
    folder = written(tmp_path, [made.table(ROWS)])
    made.write_stream(folder / "stale.arrow", made.table(ROWS))
    assert len(load(folder).lengths) == len(ROWS)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].append({"filename": "gone.arrow"})
    (folder / "state.json").write_text(json.dumps(state))
    assert "gone.arrow: is listed in state.json and is not there" in told(folder)
    (folder / "state.json").write_text("{}")
    assert "state.json: is not HuggingFace's" in told(folder)


def test_of_several_splits_train_is_taken(tmp_path):
    made.save_to_disk(tmp_path / "both/train", [made.table(ROWS)])
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(load(tmp_path / "both").lengths) == len(ROWS)
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["dev", "test"]}')
    assert "has the splits dev, test, and no train; give one as --data-split" in told(
        tmp_path / "both"
    )
