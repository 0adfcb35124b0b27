"""`train.py` that hangs or dawdles in one phase: stuck.py PHASE SECONDS CONFIG [key=value ...]; from update 3 on."""

import sys
import time

from maxtext.cli import train
from maxtext.train import loop

phase, seconds, *arguments = sys.argv[1:]


def dawdle_here():
    time.sleep(float(seconds))


def slow(owner, name, after):
    original, calls = getattr(owner, name), 0

    def wrapped(*given, **named):
        nonlocal calls
        calls += 1
        if calls > after:
            dawdle_here()
        return original(*given, **named)

    setattr(owner, name, wrapped)


if phase == "init":
    slow(loop, "check_new_run", 0)
elif phase == "compile":
    slow(loop, "compile_train_step", 0)
elif phase == "data":
    make_batches = loop.make_batches

    def slowed(*given):
        batches = make_batches(*given)
        slow(type(batches), "__next__", 2)
        return batches

    loop.make_batches = slowed
elif phase == "step":
    slow(loop.Attendance, "fetch", 2)
elif phase == "save":
    slow(loop.Checkpoints, "save", 1)
elif phase == "restore":
    slow(loop.Checkpoints, "restore", 0)
else:
    slow(loop.Evaluations, "__call__", 1)
sys.exit(train(arguments))
