from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.link.frames import MOST_BYTES, NOISE_KEPT, Frame, Frames, Unreadable

NONCE = "5e" * 16

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text('ab"\\\u00fc ', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz"), inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(
    Frame, st.sampled_from("PNRET"), st.dictionaries(st.text("abc", min_size=1), values, max_size=4)
)
# Noise holds everything a host may say, short of our own mark.
noise = st.binary(max_size=60) | st.sampled_from(
    [b"\x02", b"\x02" + NONCE.encode()[:-1], b"\x02" + b"aa" * 16 + b" R 2\n{}\x03\n", b"\x03\n"]
)


def wire(frame: Frame, nonce: str = NONCE) -> bytes:
    payload = json.dumps(frame.payload).encode()
    return b"\x02%s %s %d\n%s\x03\n" % (
        nonce.encode(),
        frame.kind.encode(),
        len(payload),
        payload,
    )


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


@settings(max_examples=300)
@given(st.lists(st.tuples(noise, frames), max_size=5), noise, st.lists(st.integers(0), max_size=12))
def test_frames_come_whole_however_the_bytes_are_split(said, last, places):
    data = b"".join(before + wire(frame) for before, frame in said) + last
    decoder = Frames(NONCE)
    seen = [frame for piece in cut(data, places) for frame in decoder.feed(piece)]
    assert seen == [frame for _, frame in said]
    assert len(decoder.noise) <= 4 * NOISE_KEPT


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200) | noise, max_size=8))
def test_bytes_of_a_stranger_are_noise_or_unreadable_and_never_a_result(pieces):
    decoder = Frames(NONCE)
    try:
        assert [frame for piece in pieces for frame in decoder.feed(piece)] == []
    except Unreadable:
        assert NONCE.encode() in b"".join(pieces)
    assert decoder.noise.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize(
    "after_the_nonce",
    [
        b"R 99999999999\n",
        b"R %d\n" % (MOST_BYTES + 1),
        b"R -1\n{}\x03\n",
        b"R 1e3\n",
        b"r 2\n{}\x03\n",
        b"Q 2\n{}\x03\n",
        b"R 2 \n{}\x03\n",
        b"R\n2\n{}\x03\n",
        b"R 2\n{}\x03\r",
        b"R 3\n{}\x03\n\n",
        b"R 2\n[]\x03\n",
        b"R 4\nnull\x03\n",
        b"R 2\n\xff\xff\x03\n",
        b"R 2\n{'\x03\n",
        b"R 0\n\x03\n",
        b"R 6000\n" + b"[" * 6000 + b"\x03\n",
        b'R 9005\n{"a":' + b"9" * 8999 + b"}\x03\n",
    ],
)
def test_a_frame_that_is_none_is_unreadable_and_not_a_crash(after_the_nonce):
    with pytest.raises(Unreadable):
        Frames(NONCE).feed(b"\x02" + NONCE.encode() + b" " + after_the_nonce)


def test_a_head_that_is_not_over_is_waited_for():
    decoder = Frames(NONCE)
    for byte in wire(Frame("R", {"a": 1}))[:-1]:
        assert decoder.feed(bytes([byte])) == []
    assert decoder.feed(b"\n") == [Frame("R", {"a": 1})]


def test_only_the_end_of_the_noise_is_kept_and_it_is_harmless():
    decoder = Frames(NONCE)
    for number in range(2000):
        assert decoder.feed(b"\x1b[31m noise %d\r\n" % number) == []
    assert "noise 1999" in decoder.noise
    assert "noise 1\n" not in decoder.noise
    assert "\x1b" not in decoder.noise
    assert len(decoder._buffer) < 64


def test_texts_in_a_payload_are_escaped_whatever_their_depth():
    data = wire(Frame("R", {"a\x07": ["\x1b]0;x\x07", {"k": "two\nlines\tand \u202e"}]}))
    (frame,) = Frames(NONCE).feed(data)
    assert frame.payload == {r"a\x07": [r"\x1b]0;x\x07", {"k": "two\nlines\tand " + r"\u202e"}]}
