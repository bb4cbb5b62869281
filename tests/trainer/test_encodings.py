"""Every encoding that Arrow has for lists of integers gives the rows that pyarrow itself says."""

import json

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from tests.trainer import made
from trainer.data import arrow
from trainer.data.arrow.encodings import WrongColumnError, spans

INTEGERS = [
    pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
    pa.uint64(),
]  # fmt: skip
LISTS = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "list_view": pa.list_view,
    "large_list_view": pa.large_list_view,
}
ROWS = made.rows(20)


def read(column, *, bools=False):
    """What `spans` says, as lists; a null row is an empty one."""
    found = spans(column, bools=bools)
    rows = []
    for start, length in zip(found.starts_R.tolist(), found.lengths_R.tolist(), strict=True):
        if found.bits:
            bits = np.unpackbits(found.values, bitorder="little")
            rows.append(bits[start : start + length].astype(bool).tolist())
        else:
            rows.append(found.values[start : start + length].tolist())
    return rows


def wanted(column):
    return [row or [] for row in column.to_pylist()]


rows_of_small_numbers = st.lists(
    st.none() | st.lists(st.integers(0, 127), max_size=6), min_size=0, max_size=12
)
cuts = st.tuples(st.integers(0, 5), st.integers(0, 12))


@settings(max_examples=150, deadline=None)
@given(rows_of_small_numbers, st.sampled_from(INTEGERS), st.sampled_from(sorted(LISTS)), cuts)
def test_any_list_of_any_integers_sliced_anywhere(rows, inner, kind, cut):
    column = pa.array(rows, LISTS[kind](inner)).slice(*cut)
    assert read(column) == wanted(column)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.lists(st.booleans(), max_size=20), max_size=8), cuts)
def test_bools_are_bits_that_may_begin_anywhere(rows, cut):
    column = pa.array(rows, pa.list_(pa.bool_())).slice(*cut)
    assert read(column, bools=True) == wanted(column)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=9), cuts)
def test_rows_of_one_fixed_size(rows, cut):
    column = pa.array(rows, pa.list_(pa.int16(), 3)).slice(*cut)
    assert read(column) == wanted(column)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_views_may_overlap_and_be_out_of_order(data):
    values = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
    starts = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=8))
    sizes = [data.draw(st.integers(0, len(values) - start)) for start in starts]
    column = pa.ListViewArray.from_arrays(starts, sizes, pa.array(values, pa.int32()))
    assert read(column) == wanted(column)


@settings(max_examples=60, deadline=None)
@given(rows_of_small_numbers, st.lists(st.none() | st.integers(0, 11), max_size=10))
def test_dictionaries_of_rows_and_rows_of_dictionaries(rows, chosen):
    chosen = [place for place in chosen if place is None or place < len(rows)]
    held = pa.array(rows, pa.list_(pa.int32()))
    column = pa.DictionaryArray.from_arrays(pa.array(chosen, pa.int8()), held)
    assert read(column) == wanted(column)
    values = pa.array([7, 8, 9, 7, 9], pa.int32()).dictionary_encode()
    column = pa.ListArray.from_arrays(pa.array([0, 2, 5], pa.int32()), values)
    assert read(column) == [[7, 8], [9, 7, 9]]


def test_a_child_that_was_sliced_itself():
    values = pa.array(range(20), pa.int64()).slice(5)
    column = pa.ListArray.from_arrays(pa.array([1, 4, 4, 9], pa.int32()), values).slice(1)
    assert read(column) == wanted(column) == [[], [9, 10, 11, 12, 13]]


def test_a_null_row_may_stand_over_garbage():
    values = pa.array([1, None, 3, 4, 5, 6], pa.int32())
    mask = pa.array([False, True, False])
    column = pa.ListArray.from_arrays(pa.array([0, 1, 3, 6], pa.int32()), values, mask=mask)
    assert read(column) == [[1], [], [4, 5, 6]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 12), min_size=2, max_size=8), st.sampled_from("iq"))
def test_offsets_that_lie_are_refused_and_others_read(offsets, width):
    kind = pa.list_(pa.int8()) if width == "i" else pa.large_list(pa.int8())
    held = np.zeros(len(offsets), width)
    values = pa.array(range(10), pa.int8())
    buffers = [None, pa.py_buffer(held)]
    column = pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=[values])
    held[:] = offsets  # now, because pyarrow looks only when it makes one
    if offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= 10:
        assert read(column) == column.to_pylist()
    else:
        with pytest.raises(WrongColumnError, match="is damaged"):
            read(column)


def as_rows(store):
    rows = [store.row(row) for row in range(len(store.lengths))]
    return [(ids.tolist(), trainable.astype(int).tolist()) for ids, trainable in rows]


def load(path, **more):
    return arrow.load(path, **{"budget": 64} | more)


def write_file(path, table, *, compression=None, stream=False):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_files_and_streams_mapped_or_decoded(tmp_path, stream, compression):
    write_file(tmp_path / "rows.arrow", made.table(ROWS), compression=compression, stream=stream)
    store = load(tmp_path)
    assert as_rows(store) == ROWS
    mapped = [chunk.mapped is not None for chunk in store.chunks]
    assert mapped == [compression is None] * len(mapped)
    assert [note.endswith("GiB in each process") for note in store.notes] == [True] * (
        compression is not None
    )


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
@pytest.mark.parametrize("mask", [pa.int8(), pa.bool_(), pa.int64()])
def test_parquet_of_several_row_groups(tmp_path, kind, mask):
    table = made.table(ROWS, ids=kind(pa.int64()), mask=kind(mask))
    table = table.append_column("text", pa.array(["..."] * len(ROWS)))
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=6)
    assert as_rows(load(tmp_path)) == ROWS


def test_bools_in_files_are_read_in_place(tmp_path):
    write_file(tmp_path / "rows.arrow", made.table(ROWS, mask=pa.list_(pa.bool_())))
    store = load(tmp_path)
    assert as_rows(store) == ROWS
    assert store.chunks[0].rule == "bits"
    assert store.chunks[0].mapped is not None


@pytest.mark.parametrize("name", ["tokens", "token_ids"])
@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_other_names_of_the_columns(tmp_path, name, mask):
    write_file(tmp_path / "rows.arrow", made.table(ROWS).rename_columns([name, mask]))
    assert as_rows(load(tmp_path)) == ROWS


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_labels_train_what_is_not_ignored(tmp_path, compression):
    labels = [[i if m else -100 for i, m in zip(*row, strict=True)] for row in ROWS]
    table = pa.table({"input_ids": [row[0] for row in ROWS], "labels": labels})
    write_file(tmp_path / "rows.arrow", table, compression=compression)
    assert as_rows(load(tmp_path)) == ROWS


@pytest.mark.parametrize("name", ["prompt_length", "prompt_len"])
@pytest.mark.parametrize("kind", [pa.int32(), pa.uint16()])
def test_a_prompts_length_serves_as_mask(tmp_path, name, kind):
    prompts = pa.array([3] * len(ROWS), kind)
    table = made.table(ROWS).select(["input_ids"]).append_column(name, prompts)
    write_file(tmp_path / "rows.arrow", table)
    assert as_rows(load(tmp_path)) == ROWS


def test_one_file_is_a_data_set_too(tmp_path):
    write_file(tmp_path / "rows.arrow", made.table(ROWS))
    assert as_rows(load(tmp_path / "rows.arrow")) == ROWS


def test_a_folder_may_hold_files_of_different_kinds(tmp_path):
    write_file(tmp_path / "a.arrow", made.table(ROWS[:5]), stream=True)
    write_file(tmp_path / "b.feather", made.table(ROWS[5:9]), compression="lz4")
    pq.write_table(made.table(ROWS[9:]), tmp_path / "c.parquet")
    write_file(tmp_path / "cache-1.arrow", made.table(ROWS))
    assert as_rows(load(tmp_path)) == ROWS


@pytest.mark.parametrize("key", ["_indices_files", "_indices_data_files"])
def test_an_indices_file_chooses_and_orders_the_rows(tmp_path, key):
    folder = made.save_to_disk(tmp_path / "data", [made.table(ROWS[:9]), made.table(ROWS[9:])])
    order = [15, 3, 3, 0]
    made.write_stream(folder / "indices.arrow", pa.table({"indices": pa.array(order, pa.uint64())}))
    state = json.loads((folder / "state.json").read_text())
    state[key] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    store = load(folder)
    assert as_rows(store) == [ROWS[row] for row in order]
    assert store.notes == ()
    assert store.place_of(0).endswith("00001-of-00002.arrow: row 6")


def test_ids_wider_than_32_bits_are_told_by_their_value(tmp_path):
    table = pa.table({"input_ids": [[1, 2**40]], "loss_mask": [[1, 1]]})
    for suffix, write in (("arrow", write_file), ("parquet", pq.write_table)):
        (tmp_path / suffix).mkdir()
        source = [table, tmp_path / suffix / f"rows.{suffix}"]
        write(*(source if suffix == "parquet" else reversed(source)))
        with pytest.raises(Exception, match=f"row 0: id {2**40} at position 1"):
            load(tmp_path / suffix, vocab_size=60)
