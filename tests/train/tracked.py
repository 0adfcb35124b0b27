"""Writes metrics of steps as a run does, and is killed: tracked.py RUN_DIR FIRST LAST RESUME [key=value ...]."""

import os
import signal
import sys
import time

from tests.train.test_trackers import config, writer, wrote

folder, first, last, resume, *options = sys.argv[1:]
sink = writer(folder, config(folder, *options), int(resume))
wrote(sink, range(int(first), int(last) + 1))
while any(not tracker._queue.empty() for tracker in sink._trackers):  # until they have begun to take what they get
    time.sleep(0.05)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
