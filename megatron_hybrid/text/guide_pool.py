"""GuidePool: compiles guides in processes of their own, which have a low priority.

A guide may come from anyone, and its compilation may take any time and memory. So it is first done
where it can be stopped, when it takes too long, or when nobody waits for it any more. What comes
back is the guide with its grammar, whose cost is known then.
"""

from __future__ import annotations

import heapq
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from megatron_hybrid.text.guide import Guide, GuideCompiler, grammar_of

MAX_GUIDE_CHARS = 256 << 10
"""Of a guide's source: the JSON of a schema, a pattern, all choices together."""
MAX_GRAMMAR_CHARS = 8 << 20
"""Of the grammar that it becomes. Compiling takes about 2 s of a CPU for a million."""
CACHE_CHARS = 32 << 20
"""Of guides and grammars that are kept."""
MEMORY_BYTES = 2 << 30
"""That the compilation of one guide may take."""
NICENESS = 10


@dataclass(eq=False)
class _Job:
    guide: Guide
    number: int
    waiters: set[Future[Guide]] = field(default_factory=set)
    worker: _Worker | None = None  # that compiles it now

    def __lt__(self, other: _Job) -> bool:
        """Small guides come first: many large ones delay them by one compilation."""
        return (_num_chars(self.guide), self.number) < (_num_chars(other.guide), other.number)


class GuidePool:
    """Compiles guides for one tokenizer and model. Any thread may use it.

    The processes start with the first guide, and end with this process, however that ends.

    Args:
        token_bytes, vocab_size, first_token_bytes: as for `GuideCompiler`.
        seconds: most time of one compilation.
        num_processes: number of guides that are compiled at a time.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        first_token_bytes: Sequence[bytes] | None = None,
        *,
        seconds: float = 30.0,
        num_processes: int = 1,
    ):
        self.seconds = seconds
        self._vocabulary = (token_bytes, vocab_size, first_token_bytes)
        self._num_processes = num_processes
        self._workers: list[_Worker] = []
        self._changed = threading.Condition()
        self._jobs: dict[Guide, _Job] = {}
        self._heap: list[_Job] = []
        self._num_jobs = 0
        self._num_compiled = 0
        self._done: OrderedDict[Guide, Guide] = OrderedDict()  # the least recently used first
        self._num_chars = 0  # of these
        self._is_closed = False

    @property
    def num_compiled(self) -> int:
        """Guides that were compiled, of the cached ones each once."""
        return self._num_compiled

    @property
    def num_unfinished(self) -> int:
        """Guides that somebody waits for."""
        return len(self._jobs)

    def compile(self, guide: Guide) -> Future[Guide]:
        """The guide with its grammar. Cancelling the future stops the compilation, unless others
        wait for it, too.

        Raises (the future, too):
            ValueError: the guide is too large, cannot be kept to, or takes too long.
            RuntimeError: the pool is closed.
        """
        size = _num_chars(guide)
        if size > MAX_GUIDE_CHARS:
            raise ValueError(
                f"the guide has {size} characters, and may have {MAX_GUIDE_CHARS}: make it smaller"
            )
        future: Future[Guide] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the guides' pool is closed")
            if guide in self._done:
                self._done.move_to_end(guide)
                future.set_result(self._done[guide])
                return future
            job = self._jobs.get(guide)
            if job is None:
                self._num_jobs += 1
                job = self._jobs[guide] = _Job(guide, self._num_jobs)
                heapq.heappush(self._heap, job)
                if len(self._workers) < min(self._num_processes, len(self._jobs)):
                    self._workers.append(_Worker(self))
                self._changed.notify()
            job.waiters.add(future)
        future.add_done_callback(partial(self._left, job))
        return future

    def close(self) -> None:
        """End the processes. Unfinished guides are cancelled."""
        with self._changed:
            self._is_closed = True
            jobs = list(self._jobs.values())
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        for job in jobs:
            for future in list(job.waiters):
                future.cancel()

    def _left(self, job: _Job, future: Future[Guide]) -> None:
        """A future of a job is done."""
        with self._changed:
            job.waiters.discard(future)
            if job.waiters or self._jobs.get(job.guide) is not job:
                return
            del self._jobs[job.guide]  # cancelled by all
            if job.worker is not None:
                job.worker.stop()
            else:
                self._heap.remove(job)
                heapq.heapify(self._heap)

    # In the threads of workers -----------------------------------------------------------------

    def take(self, worker: _Worker) -> _Job | None:
        """Wait for a job; None: the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._is_closed)
            if self._is_closed:
                return None
            job = heapq.heappop(self._heap)
            job.worker = worker
            return job

    def send(self, job: _Job, connection: Connection) -> bool:
        """Send a job's guide, unless nobody waits for it. Returns whether it was sent."""
        with self._changed:  # so that what stops it comes behind it
            if self._jobs.get(job.guide) is not job:
                return False
            connection.send(job.guide)
            return True

    def finish(self, job: _Job, found: Guide | Exception) -> None:
        """Give a job's result to those who wait."""
        with self._changed:
            job.worker = None
            if self._jobs.get(job.guide) is not job:
                return  # cancelled by all
            del self._jobs[job.guide]
            waiters = list(job.waiters)
            if isinstance(found, Guide):
                self._num_compiled += 1
                self._keep(found)
        for future in waiters:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(found, Guide):
                future.set_result(found)
            else:
                future.set_exception(found)

    def _keep(self, guide: Guide) -> None:
        self._done[guide] = guide
        self._num_chars += _num_chars(guide) + len(guide.ebnf or "")
        while self._num_chars > CACHE_CHARS:
            _, old = self._done.popitem(last=False)
            self._num_chars -= _num_chars(old) + len(old.ebnf or "")

    @property
    def vocabulary(self) -> tuple:
        """Arguments of the compilers."""
        return self._vocabulary


class _Worker:
    """A thread that has a process."""

    def __init__(self, pool: GuidePool):
        self._pool = pool
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        threading.Thread(target=self._run, name="guide-pool", daemon=True).start()

    @property
    def process_id(self) -> int | None:
        """Of its process; None: it is not started."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the job. The pool's lock is held, so that it is surely this job that runs."""
        if self._connection is not None:
            with suppress(OSError):  # the process has ended
                self._connection.send(None)

    def kill(self) -> None:
        """End the process, and with it the job."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _run(self) -> None:
        while (job := self._pool.take(self)) is not None:
            try:
                found = self._compile(job)
            except Exception as error:  # such as no memory for a process
                found = RuntimeError(f"the process that compiles guides has failed: {error!r}")
                self._end()
            self._pool.finish(job, found)
        self._end()

    def _compile(self, job: _Job) -> Guide | Exception:
        if self._process is None:
            self._start()
        if not self._pool.send(job, self._connection):
            return CancelledError()
        if self._connection.poll(self._pool.seconds):
            return self._connection.recv()
        self._connection.send(None)
        self._connection.recv()
        return ValueError(
            f"the guide takes more than {self._pool.seconds:g} s to compile, the most it may: make "
            "it smaller"
        )

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            paths = [path or os.getcwd() for path in sys.path]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is not for it
            )
        ours.send((self._pool.vocabulary, NICENESS))
        error = ours.recv()  # None: it is ready
        if error is not None:
            raise error
        self._connection = ours

    def _end(self) -> None:
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            process.wait()
        self._connection = None


def _num_chars(guide: Guide) -> int:
    return sum(map(len, (guide.source,) if isinstance(guide.source, str) else guide.source))


# In the process ----------------------------------------------------------------------------------

_MAIN = "import sys; from megatron_hybrid.text.guide_pool import main; main(int(sys.argv[1]))"


def main(handle: int) -> None:
    """Compile what comes through a connection, until its other end is closed. Each guide has a fork
    of this process, which has no threads: to stop it costs nothing, and its memory is given back.
    """
    connection = Connection(handle)
    vocabulary, niceness = connection.recv()
    os.nice(niceness)
    try:
        compiler = GuideCompiler(*vocabulary, num_threads=1, keeps=False)
    except ImportError as error:
        connection.send(error)
        return
    connection.send(None)
    with suppress(EOFError, OSError):  # the parent has ended
        while True:
            guide = connection.recv()
            if guide is not None:  # else it was to stop a guide that was ready
                connection.send(_compiled_in_fork(compiler, guide, connection))


def _compiled_in_fork(
    compiler: GuideCompiler, guide: Guide, connection: Connection
) -> Guide | Exception:
    ours, theirs = Pipe(duplex=False)
    fork = os.fork()
    if not fork:
        _limit_memory()
        theirs.send(_compiled(compiler, guide))
        os._exit(0)
    theirs.close()
    try:
        if ours not in wait([connection, ours]) and connection.recv() is None:
            return CancelledError()
        return ours.recv()
    except EOFError:  # also that of the parent, whom no answer reaches
        return ValueError(
            f"the guide takes more than {MEMORY_BYTES >> 20} MiB of memory to compile: make it "
            "smaller"
        )
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        ours.close()


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))


def _compiled(compiler: GuideCompiler, guide: Guide) -> Guide | Exception:
    try:
        guide = Guide(guide.kind, guide.source, grammar_of(guide))
        size = len(guide.ebnf)
        if size > MAX_GRAMMAR_CHARS:
            return ValueError(
                f"the guide's grammar has {size} characters, and may have {MAX_GRAMMAR_CHARS}: "
                "make the guide smaller"
            )
        compiler.compile(guide)
    except MemoryError:
        os._exit(1)  # the parent names the limit
    except ValueError as error:
        return error
    except RuntimeError as error:  # of xgrammar
        return ValueError(f"the guide cannot be used: {error}")
    return guide
