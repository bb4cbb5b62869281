"""Each promised feature is checked by running it; a fault makes exactly its own check fail."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from tests.trainer import made
from trainer import features, train
from trainer.build.run import Run
from trainer.data import arrow, batching
from trainer.data.arrow import containers
from trainer.model import anchors
from trainer.pipeline import Pipeline
from trainer.update.gradients import FlatGradients
from trainer.update.optimizer import AdamW

NAMES = [
    "flat-gradients",
    "preloaded-dataset",
    "tensor-batches",
    "overlapped-pipeline",
    "anchored-blocks",
    "exact-resume",
]


def failing():
    report = features.report(train.rehearse)
    assert [each["name"] for each in report["features"]] == NAMES
    return {each["name"]: each["detail"] for each in report["features"] if not each["ok"]}


def test_all_hold_and_the_last_line_is_one_json_object():
    code, out, err = made.run(["features", "--json"])
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    assert sorted(report) == ["features", "python", "release", "torch"]
    assert [each["name"] for each in report["features"]] == NAMES
    assert all(sorted(each) == ["detail", "name", "ok", "seconds"] for each in report["features"])


def clip_twice_as_hard(patch):
    clip = FlatGradients.clip_

    def wrong(self, limit, *, step):
        norm = clip(self, limit, step=step)
        self.flat_G.mul_(0.5)
        return norm

    patch.setattr(FlatGradients, "clip_", wrong)


def lose_gradients_of_one_parameter(patch):
    sum_ = FlatGradients.sum_

    def wrong(self):
        sum_(self)
        self.flat_G[:10] = 0

    patch.setattr(FlatGradients, "sum_", wrong)


def read_the_mask_inverted(patch):
    load = arrow.load

    def wrong(*words, **more):
        store = load(*words, **more)
        fill = store.fill

        def inverted(rows, ids_T, trainable_T):
            starts = fill(rows, ids_T, trainable_T)
            np.logical_not(trainable_T, out=trainable_T)
            return starts

        object.__setattr__(store, "fill", inverted)
        return store

    patch.setattr(arrow, "load", wrong)


def read_cut_files(patch):
    batches = arrow.batches

    def wrong(path, names):
        patch.setattr(containers, "STREAM_END", path.read_bytes()[-8:])
        return batches(path, names)

    patch.setattr(arrow, "batches", wrong)


def shift_documents(patch):
    assemble = batching.assemble

    def wrong(*words, **more):
        made_batch = assemble(*words, **more)
        made_batch.position_T[1] += 1
        return made_batch

    patch.setattr(batching, "assemble", wrong)


def leave_a_row_out(patch):
    batches = batching.Plan.batches
    patch.setattr(batching.Plan, "batches", lambda self, epoch: batches(self, epoch)[1:])


def pack_too_few(patch):
    packed = batching._packed
    patch.setattr(batching, "_packed", lambda *words: packed(*words)[:-1])


def work_in_lock_step(patch):
    start = Pipeline.__init__
    patch.setattr(
        Pipeline,
        "__init__",
        lambda self, source, stages, *, depth: start(self, source, stages, depth=0 * depth),
    )


def let_the_reader_see_another_batch_when_overlapped(patch):
    read = Run._read

    def wrong(self, made_batch):
        micro = read(self, made_batch)
        if self.config.overlap and micro.position.step:
            micro.features_TF.mul_(1.001)
        return micro

    patch.setattr(Run, "_read", wrong)


def see_the_anchor_itself(patch):
    visible = anchors.visible

    def wrong(anchors_N, document_T, **more):
        masks = visible(anchors_N, document_T, **more)
        for block, anchor in enumerate(anchors_N.tolist()):
            for mask in masks.values():
                mask[4 * block, anchor] = True
        return masks

    patch.setattr(anchors, "visible", wrong)


def label_the_next_token(patch):
    blocks = anchors.blocks

    def wrong(*words, **more):
        laid = blocks(*words, **more)
        return dataclasses.replace(laid, labels_NB=laid.labels_NB.roll(-1, 1))

    patch.setattr(anchors, "blocks", wrong)


def forget_a_moment(patch):
    load = AdamW.load_state_dict

    def wrong(self, state):
        load(self, dict(state) | {"exp_avg_sq": torch.zeros_like(state["exp_avg_sq"])})

    patch.setattr(AdamW, "load_state_dict", wrong)


def forget_the_place_in_the_data(patch):
    start = batching.Schedule.steps

    def wrong(self, position):
        return start(self, dataclasses.replace(position, index=0, epoch=0))

    patch.setattr(batching.Schedule, "steps", wrong)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (clip_twice_as_hard, "flat-gradients"),
        (lose_gradients_of_one_parameter, "flat-gradients"),
        (read_the_mask_inverted, "preloaded-dataset"),
        (read_cut_files, "preloaded-dataset"),
        (shift_documents, "tensor-batches"),
        (leave_a_row_out, "tensor-batches"),
        (pack_too_few, "tensor-batches"),
        (work_in_lock_step, "overlapped-pipeline"),
        (let_the_reader_see_another_batch_when_overlapped, "overlapped-pipeline"),
        (see_the_anchor_itself, "anchored-blocks"),
        (label_the_next_token, "anchored-blocks"),
        (forget_a_moment, "exact-resume"),
        (forget_the_place_in_the_data, "exact-resume"),
    ],
)
def test_a_fault_makes_exactly_its_feature_fail(monkeypatch, fault, name):
    monkeypatch.setattr(features, "_PATIENCE_S", 0.3)
    with monkeypatch.context() as patch:
        fault(patch)
        assert list(failing()) == [name]


def test_all_hold_in_this_process_too():
    assert failing() == {}


def test_a_failing_feature_exits_4(monkeypatch, capsys):
    from trainer.__main__ import main

    monkeypatch.setitem(features.CHECKS, "exact-resume", lambda *_: 1 / 0)
    assert main(["features"]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert "exact-resume         FAILED" in lines[-1]
    assert "ZeroDivisionError: division by zero" in lines[-1]
