"""Ranks that end or wait for ever say where, and a test with such ranks does not hang."""

import os
import signal
import threading

import pytest

from tests.support import ranks

pytestmark = pytest.mark.long


def dies(number, address, queue):
    if number == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    queue.put((number, "answered"))


def forgets_to_answer(number, address, queue):
    pass


def answers_and_never_comes(number, address, queue):
    if number == 0:
        queue.put((number, "answered"))
    else:
        threading.Event().wait()


def test_a_rank_that_ends_says_where_it_was(tmp_path):
    with pytest.raises(AssertionError, match=r"ranks \[1\] ended without an answer(.|\n)*in dies"):
        ranks.results(dies, 2, tmp_path)


def test_a_rank_that_ends_without_an_answer_is_named(tmp_path):
    with pytest.raises(AssertionError, match=r"ranks \[0\] ended without an answer(.|\n)*exit status 0"):
        ranks.results(forgets_to_answer, 1, tmp_path)


def test_a_rank_that_does_not_answer_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "LIMIT", 3.0)
    with pytest.raises(
        AssertionError, match=r"no answer within 3 s(.|\n)*0, 'answered'(.|\n)*in answers_and_never_comes"
    ):
        ranks.results(answers_and_never_comes, 2, tmp_path)
