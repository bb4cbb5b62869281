"""Python imports this by its name, at its start, from PYTHONPATH: it plants FAULT into a run.

FAULT is `kind:argument`, and for what happens to one rank in one step `kind:rank:step`.
"""

import os
import signal
import threading
import time
from pathlib import Path

_kind, *_numbers = os.environ.get("FAULT", "none").split(":")
_rank = int(os.environ.get("RANK", "-1"))

if _kind == "slow-save" and _rank == 0:
    from trainer.record import checkpoint

    _save = checkpoint.save

    def _slowly(*words, **more):
        time.sleep(float(_numbers[0]))  # a large checkpoint on a slow disk
        return _save(*words, **more)

    checkpoint.save = _slowly

if _kind == "kill-in-save" and _rank <= 0:
    from trainer.record import checkpoint

    _write = checkpoint._sha256

    def _cut(file):
        # One file of the checkpoint is on the disk, the others are not.
        if file.parent.name == f".step-{int(_numbers[0]):08}.partial":
            os.kill(os.getpid(), signal.SIGKILL)
        return _write(file)

    checkpoint._sha256 = _cut

if _kind == "digests":
    import hashlib

    from trainer.update.optimizer import AdamW

    _step = AdamW.step_

    def _noted(self, rate):
        _step(self, rate)
        digest = hashlib.sha256(self.masters_G.numpy().tobytes()).hexdigest()
        with Path(f"{_numbers[0]}-{_rank}").open("a") as file:
            file.write(digest + "\n")

    AdamW.step_ = _noted

if _kind in ("raise", "kill", "kill-settled", "nan") and _rank == int(_numbers[0]):
    from trainer.build.run import Run

    _learn = Run.learn

    def _faulty(self, micro):
        if micro.position.step + 1 == int(_numbers[1]):
            if _kind == "raise":
                raise RuntimeError("planted in one rank")
            if _kind == "kill-settled":
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
            if _kind.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            self.gradients.flat_G.fill_(float("nan"))
        _learn(self, micro)

    Run.learn = _faulty
