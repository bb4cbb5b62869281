"""How a run is asked to end: a signal becomes a flag, or ends the loading at once.

Standard library only: the signals are taken over before anything slow is imported.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

# A closed terminal (SIGHUP) and Ctrl-C (SIGINT) want what SIGTERM wants: a checkpoint and the end.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """The run was asked to end while it loaded; nothing is lost, so it ends at once.

    Not an Exception, so that no `except Exception` of a library in the middle of an import
    swallows it.
    """


class Stop:
    """Whether the run was asked to end.

    Until `hold` is called a signal raises `Stopped` in the main thread, because loading can take
    minutes inside one call; from then on it sets `asked`, and the loop ends after its step.
    Only the first signal does anything: a second one is harmless.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = False
        self._forward: Callable[[], None] | None = None

    def listen(self) -> None:
        """Take the signals over, those too that came while they were blocked."""
        for number in SIGNALS:
            # nohup sets SIGHUP to be ignored, and a shell's background job has SIGINT ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def hold(self, forward: Callable[[], None] | None = None) -> None:
        """From now on only note signals, and call `forward` at the first one.

        Raises:
            Stopped: a signal came before.
        """
        self._held, self._forward = True, forward
        self.check()

    def check(self) -> None:
        """End the loading if it was asked to.

        Raises:
            Stopped: a signal came; a library may have swallowed what the handler raised.
        """
        if self.asked:
            raise Stopped

    @staticmethod
    def deafen() -> None:
        """Ignore the signals: the last thing of a run, so that a late one cannot change its code.

        Python puts the default handlers back before the process is gone, except for ignored ones.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number
        if self.asked:
            return
        self.asked = True
        # What a finaliser raises, Python prints and drops: then `check` has to be enough.
        if not self._held and not _in_finaliser(frame):
            raise Stopped
        if self._forward is not None:
            self._forward()


def _in_finaliser(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
