"""Signals end a run between two steps, once."""

import signal

import pytest

from expertmesh.train.stop import StopRequest

pytestmark = pytest.mark.default_jax


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.reached(1)
        signal.raise_signal(number)
        assert stop.reached(2) and stop.signal_number == number
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second Ctrl-C ends it at once
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
