"""A process that looks alive from outside, as a trainer does: alive.py RUN_DIR WAY [BOOT_ID of another machine].

going: updates follow each other. stuck: after five updates nothing follows, but the heartbeat goes on.
"""

import json
import sys
import time

from maxtext.checkpoint import lease
from maxtext.train.clock import Phases
from maxtext.train.ledger import Ledger

folder, way, *elsewhere = sys.argv[1:]
ledger = Ledger(folder)
phases = Phases(ledger)
held = lease.acquire(folder, dict, machine=elsewhere[0] if elsewhere else None)
held.doing = phases.doing
ledger.begin(1000, 1)
with open(f"{folder}/metrics.jsonl", "ab", buffering=0) as file:
    for step in range(1, 1000):
        phases.progress(step)
        file.write(json.dumps({"step": step, "train/CE loss": 2.0, "time/step (s)": 0.2}).encode() + b"\n")
        print(step, flush=True)
        time.sleep(0.2 if step < 5 or way == "going" else 300)
