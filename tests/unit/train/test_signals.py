"""Stop signals where nothing reads a flag: they raise, once everything that was set up is given back."""

import os
import signal
import threading

import pytest

from llmtrain.config.errors import ExitCode, StoppedError
from llmtrain.train.signals import stop_signals_raise

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_b55_a_signal_while_text_is_prepared_is_an_error_that_asks_for_another_start(number):
    before = [signal.getsignal(one) for one in signal.valid_signals()]
    with pytest.raises(StoppedError, match=f"stopped by {number.name}") as caught, stop_signals_raise():
        os.kill(os.getpid(), number)
        threading.Event().wait(30)
        pytest.fail("it went on")
    assert caught.value.exit_code is ExitCode.REQUEUE
    assert [signal.getsignal(one) for one in signal.valid_signals()] == before


def test_b55_what_nohup_ignores_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_outside_the_main_thread_nothing_is_caught_and_nothing_fails():
    found = []

    def work():
        with stop_signals_raise():
            found.extend(signal.getsignal(number) for number in NUMBERS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(number) for number in NUMBERS]
