from __future__ import annotations

from kvloop.cluster.failure import NUM_LAST_LINES, failure, is_fatal

# Shortened from the log of vLLM 0.32 with `--block-size 16`.
THREE_PROCESSES = """\
(APIServer pid=10) INFO 12-01 10:42:30 [api_utils.py:347] version 0.32.0
(APIServer pid=10) WARNING 12-01 10:42:30 [cpu.py:296] CPU backend prefers multiples of 32
(Worker pid=12) ERROR 12-01 10:43:12 [multiproc_executor.py:1063] WorkerProc hit an exception.
(Worker pid=12) ERROR 12-01 10:43:12 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=12) ERROR 12-01 10:43:12 [multiproc_executor.py:1063]   File "utils.py", line 554, in f
(Worker pid=12) ERROR 12-01 10:43:12 [multiproc_executor.py:1063]     raise ValueError(
(Worker pid=12) ERROR 12-01 10:43:12 [multiproc_executor.py:1063] ValueError: No common block size
(EngineCore pid=11) ERROR 12-01 10:43:12 [core.py:1510] EngineCore failed to start.
(EngineCore pid=11) ERROR 12-01 10:43:12 [core.py:1510] RuntimeError: Worker failed with error
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_reason_is_the_exception_that_came_first_not_its_consequences() -> None:
    assert failure(THREE_PROCESSES).reason == "ValueError: No common block size"


def test_a_consequence_is_better_than_no_reason() -> None:
    log = "RuntimeError: Engine core initialization failed. See root cause above."
    assert failure(log).reason == log


def test_a_plain_traceback_tells_its_exception() -> None:
    log = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nKeyError: 1\n'
    assert failure(log).reason == "KeyError: 1"


def test_an_exception_of_a_module_is_recognised() -> None:
    assert failure("zmq.error.ZMQError: Address in use").reason is not None


def test_an_unknown_option_is_a_reason() -> None:
    log = "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --no-such\n"
    assert failure(log).reason == "api_server.py: error: unrecognized arguments: --no-such"


def test_an_error_merely_mentioned_in_a_message_is_no_reason() -> None:
    log = "(APIServer pid=1) WARNING 12-01 10:01:55 [a.py:1] errors like `OSError: [Errno 24]`\n"
    assert failure(log).reason is None


def test_the_last_lines_are_the_logs_end() -> None:
    lines = [f"line {number}" for number in range(NUM_LAST_LINES + 5)]
    assert failure("\n".join(lines)).last_lines == tuple(lines[5:])


def test_an_empty_log_tells_nothing() -> None:
    assert failure("").reason is None
    assert failure("").last_lines == ()


def test_only_a_failed_engine_is_fatal() -> None:
    assert [is_fatal(line) for line in THREE_PROCESSES.splitlines()].index(True) == 7
    assert not is_fatal("(EngineCore pid=1) INFO 12-01 [core.py:1] EngineCore started")
