"""Counters and sizes in the text format of Prometheus (exposition format 0.0.4).

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from collections.abc import Mapping
from itertools import accumulate
from textwrap import wrap

from megatron_hybrid.inference.metrics.meter import BOUNDS, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of an HTTP response with these metrics."""
PREFIX = "megatron_hybrid_"
_LOST = "lost_tokens_"
_ACCEPTED_AT = "draft_tokens_accepted_at_"

COUNTERS = {
    "requests": "Requests that were admitted to the cache, forked samples included.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "shared_tokens": "Prompt tokens whose KV was reused.",
    "skipped_tokens": "Prompt tokens that were not computed.",
    "refused": "Attempts to find room for a request that failed: the pool was full, or room was "
    "held back.",
    "held_back": "Attempts to start a request that were put off: they would have evicted states "
    "worth more.",
    "checkpoints_saved": "States that were saved.",
    "checkpoints_no_room": "States that were not saved for lack of room.",
    "checkpoints_duplicate": "States that two requests saved at one position; a copy was dropped.",
    "checkpoints_evicted": "States that were evicted from the pool.",
    "kv_blocks_evicted": "KV blocks that were evicted from the pool.",
    "tokens_forgotten": "Tokens that the index no longer knows.",
    "steps": "Steps that had work, with a forward pass or without.",
    "graph_steps": "Steps that replayed a CUDA graph.",
    "steps_ahead": "Steps that were launched before the tokens of the step before were known.",
    "forward_tokens": "Tokens that were computed, of prompts and of answers.",
    "prefill_tokens": "Computed tokens of prefills: of prompts, and of answers that were computed "
    "again.",
    "generation_tokens": "Tokens that were drawn, stop tokens included.",
    "draft_tokens": "Drafts that were computed.",
    "draft_tokens_accepted": "Drafts that were accepted and kept.",
    "preemptions": "Running requests that were preempted: other requests needed their pages.",
    "step_failures": "Steps that raised an error.",
    "request_restarts": "Running requests that started again from the cache, after a failed step "
    "or new weights.",
    "rank_bytes": "Bytes sent to other ranks of the model, without the model's collectives.",
    "weight_changes": "Changes of the weights, each of which emptied the cache.",
    "fetches": "Prefixes that were fetched from host memory or the disk.",
    "fetched_tokens": "Prompt tokens that were fetched, and therefore not computed.",
    "fetches_failed": "Fetches that failed: a record was damaged, or could not be read.",
    "host_records_evicted": "States and KV blocks that were evicted from host memory.",
    "disk_records_evicted": "States and KV blocks that were evicted from the disk.",
    "host_without_memory": "Allocations that failed on the way to host memory.",
    "disk_without_memory": "Allocations that failed on the way to the disk.",
    "disk_records_unwritten": "States and KV blocks that could not be written to the disk.",
}
"""Keys of `engine.stats()` that only grow."""
GAUGES = {
    "hit_rate": "Part of all prompt tokens that was not computed.",
    "page_bytes": "Size of a page of the pool.",
    "pages": "Pages of the pool.",
    "pages_free": "Pages that hold nothing.",
    "pages_cached": "Pages that hold cached prefixes which no running request uses.",
    "pages_in_use": "Pages that running requests use.",
    "checkpoints": "States in the cache.",
    "cached_tokens": "Tokens whose KV is in the cache.",
    "known_tokens": "Tokens that the index knows, their KV in the cache or not.",
    "leases": "Requests that hold a part of the cache.",
    "requests_running": "Requests that have a live slot.",
    "requests_waiting": "Requests in the queue.",
    "peak_pages_in_use": "Most pages that running requests used at a time.",
    "pool_bytes": "Size of the pool.",
    "pool_tokens": "Tokens whose KV fits into the pool, if the pool holds nothing else.",
    "pool_states": "States that fit into the pool, if the pool holds nothing else.",
    "kv_blocks_in_use": "KV blocks of running requests; a shared block counts once.",
    "live_slot_bytes": "Size of the live slots.",
    "graphs": "Captured CUDA graphs: one for each number of decodes, one more for each with "
    "drafts, and those in pieces.",
    "graph_bytes": "Device memory of the CUDA graphs.",
    "draft_break_even_permille": "Acceptance of drafts, in thousandths, above which they save "
    "time at the present load.",
    "warm_up_ms": "Milliseconds of the warm-up before the first request.",
    "parked_bytes": "Host memory of preempted requests that wait.",
    "host_bytes": "Host memory that holds cached prefixes.",
    "host_states": "States in host memory.",
    "host_kv_blocks": "KV blocks in host memory.",
    "disk_bytes": "Disk space that holds cached prefixes.",
    "disk_states": "States on the disk.",
    "disk_kv_blocks": "KV blocks on the disk.",
    "disk_write_bytes": "Host memory of records that are being written to the disk.",
    "disk_read_bytes": "Host memory of records that were read from the disk and are not in the "
    "pool yet.",
}
"""Keys of `engine.stats()` that rise and fall."""
HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Seconds between two tokens of a request.",
    "request_queue_time_seconds": "Seconds from the arrival of a request to its first live slot.",
    "request_prefill_time_seconds": "Seconds from the first live slot of a request to its first "
    "token.",
    "e2e_request_latency_seconds": "Seconds from the arrival of a request to its end.",
    "step_time_seconds": "Seconds of a step that had work.",
}
"""Keys of `Meter.histograms`."""
VLLM_PREFIX = "vllm:"
VLLM_NAMES = {
    "num_requests_running": ("requests_running",),
    "num_requests_waiting": ("requests_waiting",),
    "kv_cache_usage_perc": ("pages_in_use", "pages"),
    "num_preemptions": ("preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "spec_decode_num_draft_tokens": ("draft_tokens",),
    "spec_decode_num_accepted_tokens": ("draft_tokens_accepted",),
    "prefix_cache_queries": ("prompt_tokens",),
    "prefix_cache_hits": ("skipped_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
}
"""vLLM's names of metrics that mean the same -> ours, or two of ours, of which the first is divided
by the second. Schedulers such as llm-d's, and dashboards, read them by name, so that they work with
this engine unchanged. Hits are tokens that were not computed, as there."""
_LOST_HELP = "Prompt tokens that were known, or in the making, and computed again, by reason."
_ACCEPTED_NAMES = (
    f"{PREFIX}draft_tokens_accepted_per_pos_total",
    f"{VLLM_PREFIX}spec_decode_num_accepted_tokens_per_pos_total",
)

_GROUPS = {
    "requests": ("request", "leases", "preemptions", "refused", "held_back", "parked"),
    "tokens": (
        "prompt_",
        "shared_",
        "skipped_",
        "fetched_",
        "forward_",
        "prefill_",
        "generation_",
        "draft_",
        "step",
        "graph",
        "warm_up",
        "rank_",
    ),
    "lost tokens": (_LOST,),
    "cached": ("checkpoints", "kv_blocks", "cached_", "known_", "tokens_forgotten", "weight_"),
    "pool": ("page", "peak_pages", "pool_", "live_slot"),
    "host, disk": ("host_", "disk_", "fetches"),
    "other": ("",),
}
"""Groups of a printed `Stats`, by prefixes of keys; the first match counts."""


class Stats(dict[str, float]):
    """Result of `engine.stats()`. `print` shows keys and values, except those of 0, in groups, in
    80 columns."""

    def __str__(self) -> str:
        lines = [f"hit_rate {self['hit_rate']:.1%}" if self["prompt_tokens"] else "no prompt yet"]
        groups: dict[str, list[str]] = {name: [] for name in _GROUPS}
        for key, value in self.items():
            group = next(name for name, heads in _GROUPS.items() if key.startswith(heads))
            if value and key != "hit_rate":  # a no-break space keeps key and value in one line
                groups[group].append(f"{key}\xa0{value:,}")
        for name, parts in groups.items():
            if parts:
                text = f"{name:13}{', '.join(parts)}"
                lines += wrap(text, 80, subsequent_indent=" " * 13, break_on_hyphens=False)
        return "\n".join(lines).replace("\xa0", " ")


def prometheus_text(
    stats: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None
) -> str:
    """Format `engine.stats()` or `PrefixCache.stats()` as metrics, one for each key, with
    histograms, and also under the names of VLLM_NAMES.

    Names are `megatron_hybrid_` and the key; counters end in `_total`. `lost_tokens_<reason>` is
    one metric with the label `reason`, and `draft_tokens_accepted_at_<place>` one with the label
    `position`, from 0, also under vLLM's name.

    Raises:
        ValueError: a key is neither in COUNTERS nor in GAUGES nor in HISTOGRAMS.
    """
    values: dict[str, float | Histogram] = {**stats, **(histograms or {})}
    lines: list[str] = []
    for key, value in values.items():
        if not key.startswith((_LOST, _ACCEPTED_AT)):
            lines += _metric(PREFIX + key, key, value)
    for head, label, names, text in (
        (_LOST, "reason", (f"{PREFIX}{_LOST}total",), _LOST_HELP),
        (_ACCEPTED_AT, "position", _ACCEPTED_NAMES, "Accepted drafts by their place in a step."),
    ):
        counts = {
            f'{{{label}="{key.removeprefix(head)}"}}': value
            for key, value in stats.items()
            if key.startswith(head)
        }
        for name in names if counts else ():
            lines += _lines(name, "counter", text, counts)
    for name, keys in VLLM_NAMES.items():
        if all(key in values for key in keys):
            value = values[keys[0]]
            if len(keys) == 2:
                value = value / values[keys[1]]
            lines += _metric(VLLM_PREFIX + name, keys[0], value)
    return "".join(f"{line}\n" for line in lines)


FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Reasons why requests end -> their names in vLLM's metric."""


def requests_text(ended: Mapping[str, int], settings: Mapping[str, object]) -> str:
    """Format metrics with labels, under our names and vLLM's: requests that have ended, by reason,
    and the settings of the cache.

    Args:
        ended: requests by `finish_reason`.
        settings: label -> value.
    """
    counts = {
        f'{{finished_reason="{name}"}}': ended.get(reason, 0)
        for reason, name in FINISH_REASONS.items()
    }
    labels = ",".join(f'{label}="{value}"' for label, value in settings.items())
    lines: list[str] = []
    for prefix in (PREFIX, VLLM_PREFIX):
        text = "Requests that have ended, each sample by itself."
        lines += _lines(f"{prefix}request_success_total", "counter", text, counts)
        text = "Settings of the cache, as labels."
        lines += _lines(f"{prefix}cache_config_info", "gauge", text, {f"{{{labels}}}": 1})
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, key: str, value: float | Histogram) -> list[str]:
    """Return the lines of one metric, of the kind that the key is declared as."""
    if key in HISTOGRAMS:
        counts = list(accumulate(value.counts))
        bounds = (*map(str, BOUNDS), "+Inf")
        samples = {
            f'_bucket{{le="{bound}"}}': count for bound, count in zip(bounds, counts, strict=True)
        }
        samples |= {"_sum": value.sum, "_count": counts[-1]}
        return _lines(name, "histogram", HISTOGRAMS[key], samples)
    if key in COUNTERS:
        return _lines(f"{name}_total", "counter", COUNTERS[key], {"": value})
    if key in GAUGES:
        return _lines(name, "gauge", GAUGES[key], {"": value})
    raise ValueError(
        f"no metric is declared for {key!r}: add it to COUNTERS, GAUGES or HISTOGRAMS in {__name__}"
    )


def _lines(name: str, kind: str, text: str, samples: Mapping[str, float]) -> list[str]:
    """Return the lines of one metric. samples: values by what follows the name."""
    values = [f"{name}{suffix} {value}" for suffix, value in samples.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *values]
