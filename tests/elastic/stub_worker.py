"""A worker that follows the protocol and trains nothing: stub_worker.py SPEC NUMBER.

It counts updates, 20 a second. The file `does_NUMBER` beside the spec tells it to misbehave: exit N, crash_early, mute,
stuck, no_answer.
"""

import os
import signal
import sys
import time
from pathlib import Path

from maxtext.elastic.membership import Beat, Control
from maxtext.elastic.worker import Spec

spec, number = Spec.read(sys.argv[1]), int(sys.argv[2])
control, order = Control(f"{spec.root}/control"), Path(spec.root) / f"does_{number}"
stopping, step, generation, joined, since, began = False, 0, -1, False, time.monotonic(), time.monotonic()
there = control.generation()
born = -1 if there is None else there.number


def stop(*_):
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
while True:
    what = order.read_text() if order.exists() else ""
    if what == "crash_early":
        sys.exit(1)
    now = time.monotonic()
    newest = control.generation()
    if newest is not None and newest.number > max(born, generation) and what != "no_answer":
        generation, joined = newest.number, False
        control.answer(number, generation)
    if newest is not None and newest.open and number in newest.members and newest.number == generation:
        if not joined:
            since, joined = now, True
        if what.startswith("exit"):
            control.say_outcome(number, {"error": f"worker {number} was told to"})
            sys.exit(int(what.split()[1]))
        if what != "stuck":
            step, since = step + 1, now
    if stopping:
        sys.exit(0)
    if what != "mute":
        phase = "step" if joined else "ready"
        control.beat(number, Beat(os.getpid(), generation, phase, step, since, 0.05 if step > 2 else 0.0, now))
    time.sleep(0.05)
