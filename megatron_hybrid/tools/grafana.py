"""A Grafana dashboard over the metrics of an engine (`megatron-hybrid grafana`).

Rates and shares are of counters, weighted by tokens: a mean of shares would count a prompt of ten
tokens like one of a hundred thousand.
"""

from typing import Any

from megatron_hybrid.inference.metrics.prometheus import PREFIX

_RATE = "sum(rate({}[$__rate_interval]))"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def _rate(name: str) -> str:
    return _RATE.format(f"{PREFIX}{name}_total")


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _rate_by(label: str, name: str) -> str:
    return f"sum by ({label}) (rate({PREFIX}{name}_total[$__rate_interval]))"


def _gauge(name: str) -> str:
    return f"sum({PREFIX}{name})"


def _quantiles(name: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({PREFIX}{name}_seconds_bucket[$__rate_interval]))"
    return {
        f"{percent} %": f"histogram_quantile({percent / 100}, {buckets})"
        for percent in (50, 95, 99)
    }


PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "Prompt tokens reused": (
        "percentunit",
        {
            "skipped": _share("skipped_tokens", "prompt_tokens"),
            "KV shared": _share("shared_tokens", "prompt_tokens"),
            "fetched from host or disk": _share("fetched_tokens", "prompt_tokens"),
        },
    ),
    "Known tokens computed again, by reason": (
        "short",
        {"{{reason}}": _rate_by("reason", "lost_tokens")},
    ),
    "Requests": (
        "short",
        {"running": _gauge("requests_running"), "waiting": _gauge("requests_waiting")},
    ),
    "Tokens per second": (
        "short",
        {
            "prompts": _rate("prompt_tokens"),
            "prefill": _rate("prefill_tokens"),
            "answers": _rate("generation_tokens"),
        },
    ),
    "Time to first token": ("s", _quantiles("time_to_first_token")),
    "Between tokens": ("s", _quantiles("inter_token_latency")),
    "Time in the queue": ("s", _quantiles("request_queue_time")),
    "Time of prefills": ("s", _quantiles("request_prefill_time")),
    "Time of steps": ("s", _quantiles("step_time")),
    "Pages of the pool": (
        "percentunit",
        {
            "used by requests": f"{_gauge('pages_in_use')} / {_gauge('pages')}",
            "cached": f"{_gauge('pages_cached')} / {_gauge('pages')}",
            "free": f"{_gauge('pages_free')} / {_gauge('pages')}",
        },
    ),
    "States and KV blocks evicted per second": (
        "short",
        {
            "states evicted": _rate("checkpoints_evicted"),
            "states without room": _rate("checkpoints_no_room"),
            "KV blocks evicted": _rate("kv_blocks_evicted"),
        },
    ),
    "Answers of the server per second, by status": (
        "short",
        {"{{status}}": _rate_by("status", "http_responses")},
    ),
    "Below the pool": (
        "bytes",
        {"host memory": _gauge("host_bytes"), "disk": _gauge("disk_bytes")},
    ),
    "What went wrong, per second": (
        "short",
        {
            "steps that failed": _rate("step_failures"),
            "requests begun again": _rate("request_restarts"),
            "preemptions": _rate("preemptions"),
            "fetches that failed": _rate("fetches_failed"),
        },
    ),
}
"""Panels by title: the unit, and the expressions by legend."""


def dashboard() -> dict[str, Any]:
    """The dashboard, to be imported as JSON. It asks for the Prometheus data source."""
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "megatron-hybrid",
        "uid": "megatron-hybrid",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": [
            _panel(number, title, unit, expressions, source)
            for number, (title, (unit, expressions)) in enumerate(PANELS.items())
        ],
    }


def _panel(
    number: int, title: str, unit: str, expressions: dict[str, str], source: dict[str, str]
) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": expr,
                "legendFormat": name,
            }
            for index, (name, expr) in enumerate(expressions.items())
        ],
    }
