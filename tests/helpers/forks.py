"""A check in a forked process."""

import os
import signal
import traceback


def in_fork(check) -> int:
    """Exit status of a fork that runs this, for 20 seconds at most."""
    process = os.fork()
    if not process:
        try:
            signal.alarm(20)
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(process, 0)[1]


def forked(work) -> int:
    """The pid of a fork that runs this, and ends."""
    if (process := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    return process
