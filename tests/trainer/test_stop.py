"""A stop is heard wherever the signal lands."""

import signal

import pytest

from trainer.stop import SIGNALS, Stop, Stopped


def test_a_stop_inside_a_finaliser_is_heard_at_the_next_check():
    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = Stop()
    try:
        stop.listen()
        del_me = Dying()
        # Raised in there, it would be printed and lost; pytest fails on that.
        del del_me
        with pytest.raises(Stopped):
            stop.check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
