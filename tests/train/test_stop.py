"""When a run stops: a first signal or a spent budget is remembered; a second signal acts at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from maxtext.train.stop import SIGNALS, Stopper


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_is_remembered_and_a_second_one_acts(number: signal.Signals):
    before = {one: signal.getsignal(one) for one in SIGNALS}
    with Stopper(time.monotonic(), None) as stopper:
        assert stopper.reason() is None
        os.kill(os.getpid(), number)
        assert stopper.reason() == number.name
        assert stopper.reason() == number.name
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        else:
            assert signal.getsignal(number) == signal.SIG_DFL
    assert {one: signal.getsignal(one) for one in SIGNALS} == before


def test_handlers_come_back_after_an_error():
    before = {one: signal.getsignal(one) for one in SIGNALS}
    stopper = Stopper(time.monotonic(), None)
    with pytest.raises(FileNotFoundError), stopper:
        os.stat("missing" if signal.getsignal(signal.SIGTERM) == stopper._receive else ".")
    assert {one: signal.getsignal(one) for one in SIGNALS} == before


def test_a_budget_counts_from_the_start_that_is_given():
    now = time.monotonic()
    assert Stopper(now, 1000.0).reason() is None
    assert Stopper(now, None).reason() is None
    assert Stopper(now - 1000.5, 1000.0).reason() == "time budget of 1000 s (train.max_seconds)"
    assert Stopper(now - 1.0, 0.5).reason() == "time budget of 0.5 s (train.max_seconds)"


def test_outside_the_main_thread_only_the_budget_counts():
    """Python delivers signals to the main thread only, and refuses handlers elsewhere."""
    before, reasons = signal.getsignal(signal.SIGTERM), []

    def run() -> None:
        with Stopper(time.monotonic() - 2, 1.0) as stopper:
            reasons.append((stopper.reason(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert reasons == [("time budget of 1 s (train.max_seconds)", before)]
