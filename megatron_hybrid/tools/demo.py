"""`megatron-hybrid demo`: the same requests in the three prefix-caching modes, side by side."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.utils.progress import progress

SYSTEM_PROMPT = (
    "You are the teller of stories at a long winter fire. The company has come a great way through "
    "the snow, and they are tired and cold, and they wish to hear of other places. Speak plainly "
    "and kindly, as an old friend of the house would speak. Let there be a wood in the story, and "
    "a house at the edge of the wood, and somebody who has lost something and goes to look for it. "
    "Do not hurry; the night is long and the fire is good. When a child of the company asks a "
    "question, answer it, and then go on with the story as if it had been a part of it from the "
    "beginning. Never frighten the little ones more than they like to be frightened, and always "
    "let the lost thing be found at last, though it may not be the same thing that was lost. And "
    "now the company is seated, the door is shut against the wind, and one of them begins to speak."
)
USERS = (
    '\n\n"Tell us," said the miller, "of the girl who lost her shadow."',
    '\n\n"I should like," said the old lady, "to hear about the grey horse."',
    '\n\n"Is it true," asked the little boy, "that the fox can talk?"',
)
SECOND_TURN = '\n\n"And what," asked the old lady, "did she say to that?"'
ANSWER_TOKENS = 24


@dataclass
class Run:
    """All requests in one mode."""

    mode: str
    results: dict[str, GenerationResult] = field(default_factory=dict)
    """The results by the names of the requests."""
    peak_kv_blocks: int = 0  # of running requests at a time
    seconds: float = 0.0
    stats: dict = field(default_factory=dict)

    @property
    def outputs(self) -> list[list[list[int]]]:
        return [[s.token_ids for s in result.samples] for result in self.results.values()]

    @property
    def first_token_seconds(self) -> float:
        return sum(result.time_to_first_token for result in self.results.values())

    def prefix_sum(self, attribute: str) -> int:
        """Sum a number that each request's `PrefixReport` has."""
        return sum(getattr(result.prefix, attribute) for result in self.results.values())


def run_mode(model, tokenizer, mode: str, advance: Callable[[int], None]) -> Run:
    """Run the demo's requests in a new engine, one after the other."""
    engine = DynamicInferenceEngine(
        model,
        tokenizer,
        InferenceConfig(
            prefix_caching=mode, cache_bytes=128 << 20, max_requests=8, max_sequence_length=2048
        ),
    )
    run = Run(mode)
    greedy = SamplingParams(top_k=1, num_tokens_to_generate=ANSWER_TOKENS, ignore_termination=True)

    def ask(
        *names: str,
        prompts: list,
        params: SamplingParams = greedy,
        options: RequestOptions | None = None,
    ) -> list:
        """Answer prompts that run at the same time; each arrives a step after the one before."""
        requests = []
        for prompt in prompts:
            requests.append(engine.add_request(prompt, params, options))
            engine.step()
        while not all(sample.closed for request in requests for sample in request.samples):
            run.peak_kv_blocks = max(run.peak_kv_blocks, engine.stats()["kv_blocks_in_use"])
            engine.step()
        results = [request.result() for request in requests]
        run.results |= zip(names, results)
        advance(1)
        return results

    # The first forward pass of a process includes one-time set-up; so it is not measured.
    engine.generate(
        ["\n"], SamplingParams(top_k=1, num_tokens_to_generate=2), RequestOptions(salt="warm-up")
    )
    began = time.perf_counter()
    first, *_ = ask(
        *(f"user {number}" for number in range(1, len(USERS) + 1)),
        prompts=[SYSTEM_PROMPT + user for user in USERS],
        options=RequestOptions(cache_breakpoints=[len(tokenizer.tokenize(SYSTEM_PROMPT))]),
    )
    ask("user 1 again", prompts=[SYSTEM_PROMPT + USERS[0]])
    history = [*first.prompt_tokens, *first.token_ids]
    ask(
        "second turn", prompts=[history + tokenizer.tokenize(SECOND_TURN, add_special_tokens=False)]
    )
    ask(
        "4 samples",
        prompts=[SYSTEM_PROMPT + USERS[1] + SECOND_TURN],
        params=SamplingParams(
            temperature=0.8, top_p=0.95, seed=7, num_tokens_to_generate=ANSWER_TOKENS
        ),
        options=RequestOptions(n=4),
    )
    long_text = list(islice(cycle(tokenizer.tokenize(SYSTEM_PROMPT)), 600))  # any content
    for length in (479, 552):
        for attempt in ("tokens", "again"):
            # Each length starts at another token, so that it shares nothing with others.
            prompt = long_text[length % 7 + 1 :][:length]
            ask(f"{length} {attempt}", prompts=[prompt])
    run.seconds = time.perf_counter() - began
    run.stats = engine.stats()
    engine.check_integrity()
    return run


def run_demo(model, tokenizer, console: Console) -> bool:
    """Run and print the demo. Return whether all modes gave identical outputs."""
    if next(model.parameters()).device.type == "cpu":
        # So small a model gains nothing from more threads, and its timings get steadier.
        torch.set_num_threads(1)
    pattern, symbols = model.config.layer_pattern, model.config.symbols
    kinds = ", ".join(f"{LAYER_KINDS[symbol].meaning} ({symbol})" for symbol in symbols)
    console.print(
        f"[bold]{pattern}[/bold]: {kinds}; "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters\n"
    )
    with progress("requests", 8 * len(PREFIX_CACHING_MODES), in_bytes=False) as advance:
        runs = [run_mode(model, tokenizer, mode, advance) for mode in PREFIX_CACHING_MODES]
    console.print(_requests_table(runs))
    console.print()
    console.print(_totals_table(runs))
    console.print()
    identical = all(run.outputs == runs[0].outputs for run in runs)
    if identical:
        console.print("[green]identical outputs[/green] in all three modes, token by token")
    else:
        console.print("[red]the outputs of the three modes differ[/red]")
    answer = next(iter(runs[-1].results.values()))
    console.print(f"\n[dim]{USERS[0].strip()}[/dim] {answer.text.strip()} ...")
    console.print(f"\n{_in_short(runs)}")
    return identical


def _in_short(runs: list[Run]) -> str:
    """Return one sentence with the main result of the tables."""
    off, restore = runs[0], runs[-1]
    prompts, computed = map(restore.prefix_sum, ("prompt_tokens", "computed_tokens"))
    wait = restore.first_token_seconds / off.first_token_seconds
    return (
        f"In short: restore computed {computed:,} of {prompts:,} prompt tokens and "
        f"skipped {1 - computed / prompts:.0%}; first tokens took {wait:.0%} of the time "
        "without a cache."
    )


def _table(title: str) -> Table:
    style = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    return Table(title=title, title_justify="left", **style)


def _requests_table(runs: list[Run]) -> Table:
    table = _table(
        "off: no cache. memory: keys and values (KV) are shared, all tokens computed.\n"
        "restore: states are kept, too, so the prefill starts where the match ends.\n"
        "Users 1 to 3 share a system prompt. Tokens of each prompt: shared (KV reused),\n"
        "skipped (not computed), run (prefilled); ms: time to first token"
    )
    table.add_column("\nrequest", no_wrap=True)
    table.add_column("\nprompt", justify="right")
    columns = {
        "off": ("run", "ms"),
        "memory_only": ("shared", "run", "ms"),
        "restore": ("shared", "skipped", "run", "ms"),
    }
    for run in runs:
        for index, name in enumerate(columns[run.mode]):
            header = f"[bold]{run.mode.replace('_only', '')}[/bold]" if index == 0 else ""
            table.add_column(f"{header}\n{name}", justify="right", no_wrap=True)
    for name, first in runs[0].results.items():
        cells = [name, str(first.prefix.prompt_tokens)]
        for run in runs:
            result = run.results[name]
            prefix, ms = result.prefix, result.time_to_first_token * 1e3
            values = {
                "shared": str(prefix.shared_tokens),
                "skipped": f"[bold green]{prefix.skipped_tokens}[/bold green]",
                "run": str(prefix.computed_tokens),
                "ms": f"{ms:.1f}" if ms < 100 else f"{ms:.0f}",
            }
            cells += [values[name] for name in columns[run.mode]]
        table.add_row(*cells)
    return table


def _totals_table(runs: list[Run]) -> Table:
    table = _table("Totals. In use: by requests that run; kept: by the cache, for later prompts")
    table.add_column("")
    for run in runs:
        table.add_column(run.mode, justify="right")

    def line(name: str, value: Callable[[Run], str]) -> None:
        table.add_row(name, *(value(run) for run in runs))

    for name, attribute in (
        ("prompt tokens", "prompt_tokens"),
        ("shared tokens", "shared_tokens"),
        ("skipped tokens", "skipped_tokens"),
        ("prefill tokens run", "computed_tokens"),
    ):
        line(name, lambda run, attribute=attribute: str(run.prefix_sum(attribute)))
    line("most KV blocks in use", lambda run: str(run.peak_kv_blocks))
    for name, key in (("most MiB in use", "peak_pages_in_use"), ("MiB kept", "pages_cached")):
        line(name, lambda run, key=key: f"{run.stats[key] * run.stats['page_bytes'] / 2**20:.2f}")
    line("sum of first-token times", lambda run: f"{run.first_token_seconds:.2f} s")
    line("all requests", lambda run: f"{run.seconds:.2f} s")
    return table
