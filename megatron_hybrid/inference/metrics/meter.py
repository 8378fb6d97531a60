"""Times of requests and steps as histograms, and a line in the log while there is work."""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_hybrid.inference.requests.request import Request

logger = logging.getLogger(__name__)
BOUNDS = tuple(
    float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 2, 5)
)  # 1 ms to 500 s
LOG_SECONDS = 10.0


class Histogram:
    """Counts of times, in seconds, up to each of `BOUNDS` and beyond, and the longest of each."""

    def __init__(self):
        self.counts = [0] * (len(BOUNDS) + 1)
        self.longest = [0.0] * len(self.counts)
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        place = bisect_left(BOUNDS, seconds)
        self.counts[place] += times
        self.longest[place] = max(self.longest[place], seconds)
        self.sum += seconds * times


class Meter:
    """Measures an engine; `histograms` has the names of `prometheus.HISTOGRAMS`. Of n samples of a
    prompt the first one counts as the request. Times between tokens are those of all samples."""

    def __init__(self):
        self.queue, self.prefill, self.first_token = Histogram(), Histogram(), Histogram()
        self.between_tokens, self.step, self.whole = Histogram(), Histogram(), Histogram()
        self.histograms = {
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.between_tokens,
            "request_queue_time_seconds": self.queue,
            "request_prefill_time_seconds": self.prefill,
            "e2e_request_latency_seconds": self.whole,
            "step_time_seconds": self.step,
        }
        self.num_generated = 0
        self.num_ended: Counter[str] = Counter()
        """Requests that have ended, each sample by itself, by `finish_reason`."""

    def note_tokens(self, requests: Sequence[Request], now: float) -> None:
        """Note that each of the requests got a token; one that got several is listed as often."""
        self.num_generated += len(requests)
        num_since: dict[float, int] = {}  # most got their last one in the same step
        for request in requests:
            last, request.last_token_at = request.last_token_at, now
            if last is not None:
                num_since[last] = num_since.get(last, 0) + 1
            elif request.sample_index == 0:
                self.queue.observe(request.started_at - request.added_at)
                self.prefill.observe(now - request.started_at)
                self.first_token.observe(now - request.added_at)
        for last, count in num_since.items():
            self.between_tokens.observe(now - last, count)

    def note_end(self, request: Request) -> None:
        self.num_ended[request.finish_reason] += 1
        if request.sample_index == 0:
            self.whole.observe(request.finished_at - request.added_at)


class ActivityLog:
    """Writes a line every `LOG_SECONDS` while steps run, about the steps since the last line. If no
    step runs for longer, it writes the line when the next step begins."""

    def __init__(self):
        self.until = 0.0
        """Time when the last step ended."""
        self._since = 0.0
        self._before: Mapping[str, int] | None = None

    def is_due(self, now: float) -> bool:
        """Return whether `write` is due. Call it before each step."""
        if not logger.isEnabledFor(logging.INFO):
            return False
        return self._before is None or now - self._since >= LOG_SECONDS

    def write(self, stats: Mapping[str, int], now: float) -> None:
        """Write the line, unless there was no step before. stats: of the engine."""
        before, seconds = self._before, self.until - self._since
        self._before, self._since = dict(stats), now
        if before is None or seconds <= 0:
            return
        new = {key: value - before[key] for key, value in stats.items()}
        prompt = new["prompt_tokens"]
        skipped = f"{new['skipped_tokens'] / prompt:.1%}" if prompt else "none"
        logger.info(
            "%d requests run, %d wait; prefill %.1f tokens/s, decode %.1f tokens/s; %s of %d new "
            "prompt tokens skipped; %.1f%% of the pages in use",
            stats["requests_running"],
            stats["requests_waiting"],
            new["prefill_tokens"] / seconds,
            new["generation_tokens"] / seconds,
            skipped,
            prompt,
            100 * stats["pages_in_use"] / stats["pages"],
        )
