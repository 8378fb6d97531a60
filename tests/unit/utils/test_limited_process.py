"""A process with limits answers the next question, whatever ended it before."""

import os
import signal

import pytest

from megatron_hybrid.utils.limited_process import LimitedProcess, TooMuchWorkError

MODULE = "megatron_hybrid.text.request_template"
QUESTION = ["{{ a }}", "", None, {"a": "b"}]
ANSWER = {"text": "b"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_from_outside_costs_no_question(number):
    process = LimitedProcess(MODULE)
    assert process.ask(QUESTION) == ANSWER
    os.kill(process._process.pid, number)
    assert process.ask(QUESTION) == ANSWER


def test_a_question_that_ends_it_is_refused(monkeypatch):
    process = LimitedProcess(MODULE)
    assert process.ask(QUESTION) == ANSWER
    running = process._process
    running.send_signal(signal.SIGSTOP)
    running.send_signal(signal.SIGXCPU)
    running.send_signal(signal.SIGCONT)
    with pytest.raises(TooMuchWorkError, match="more than 3 s of a CPU or 512 MiB"):
        process.ask(QUESTION)
    assert process.ask(QUESTION) == ANSWER


def test_a_fork_has_a_process_of_its_own():
    process = LimitedProcess(MODULE)
    assert process.ask(QUESTION) == ANSWER
    child = os.fork()
    if child == 0:
        os._exit(0 if process.ask(QUESTION) == ANSWER else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.ask(QUESTION) == ANSWER
