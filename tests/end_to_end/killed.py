"""`train.py`, killed like by a power cut at a chosen moment: killed.py MOMENT NUMBER CONFIG [key=value ...].

written N: when the metrics of update N are written and the next update is dispatched.
evaluation N: at the start of the N-th evaluation of this process.
Both wait until the last save is on disk, so that it is known where the run goes on; kills amid a save are tested with
the checkpoints.
"""

import glob
import os
import signal
import sys
import time

from maxtext.cli import train
from maxtext.config.load import load
from maxtext.train.loop import Run
from maxtext.train.metrics import MetricsWriter

moment, number, *arguments = sys.argv[1:]
checkpoints = os.path.join(load(arguments[0], arguments[1:]).run_dir, "checkpoints")
write, evaluate, evaluations = MetricsWriter.write, Run._evaluate, 0


def die():
    while glob.glob(f"{checkpoints}/*/manifest.json.tmp"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def write_then_die(self, step, scalars):
    write(self, step, scalars)
    if step == int(number):
        die()


def die_evaluating(self):
    global evaluations
    evaluations += 1
    if evaluations == int(number):
        die()
    return evaluate(self)


if moment == "written":
    MetricsWriter.write = write_then_die
else:
    Run._evaluate = die_evaluating
sys.exit(train(arguments))
