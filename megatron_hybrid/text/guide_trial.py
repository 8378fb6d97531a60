"""The process that reads each guide first.

llguidance bounds most of what a guide may cost, but not all: some small schemas take it minutes,
and deep ones end its process. Here that ends a process which has no other work, and the guide is
refused.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

MAX_SECONDS = 3
"""Seconds of a CPU for one guide."""
MAX_BYTES = 512 << 20
"""Bytes of memory for one guide."""
_STACK = 1 << 20
"""Bytes of stack: fewer than those of any thread that later does the same work."""
_FATAL = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGKILL}
"""Signals by which a guide ends the process; others come from outside."""


def library() -> Any:
    """Return llguidance.

    Raises:
        ImportError: it is missing.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("guides need llguidance: pip install -e '.[serve]'") from error
    return llguidance


def limits() -> Any:
    """Return llguidance's own limits of the work of a compilation, and that of one token."""
    return library().LLParserLimits(
        max_items_in_row=2100,  # four for each of `guide_schema.MAX_OPTIONAL` properties
        initial_lexer_fuel=1_000_000,
        max_lexer_states=10_000,  # of one answer
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


class Trial:
    """A trial of grammars in another process; any thread may use it. A grammar that takes too much
    ends the process, and the next grammar gets a new one. The process starts with the first
    grammar, and ends with its owner, which closes the pipe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0

    def error_of(self, grammar: str) -> str:
        """Return why llguidance cannot use a grammar; an empty text if it can."""
        library()
        with self._lock:
            for _ in range(3):  # a signal to the group of processes may have ended this one
                process = self._running()
                try:
                    process.stdin.write(json.dumps(grammar) + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    answer = ""
                if answer:
                    return json.loads(answer)
                self._process = None
                if -(status := process.wait()) in _FATAL:
                    return (
                        f"it takes more than {MAX_SECONDS} s of a CPU or {MAX_BYTES >> 20} MiB to "
                        "compile, or is too deep: use fewer patterns, properties and references"
                    )
        return f"the process that tries guides, of {sys.executable}, ends with status {status}"

    def _running(self) -> subprocess.Popen:
        """Return the process: a new one if it has ended, or in a fork, whose pipe would be that of
        its parent."""
        process, is_own = self._process, self._owner == os.getpid()
        if process is None or not is_own or process.poll() is not None:
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._owner = os.getpid()
        return self._process


error_of = Trial().error_of


# In the process ----------------------------------------------------------------------------------


def _answer_all() -> None:
    """Try the grammars of this process's owner, within the limits, until it ends."""
    llguidance = library()
    tokenizer = llguidance.LLTokenizer("byte")
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = int(used.ru_utime + used.ru_stime) + MAX_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        grammar = json.loads(line)
        _, said = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, None, limits=limits()
        )
        if not said:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
            said = [matcher.get_error() or ""]
        print(json.dumps(said[0]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the owner's
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()
