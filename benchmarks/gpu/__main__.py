"""Ops, whole models and megatron-core's engine on this GPU, in ratios."""

import argparse
import json
import re
import warnings
from dataclasses import asdict
from pathlib import Path

warnings.filterwarnings("ignore", module="megatron")

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str] | None = None) -> None:
    """Run all parts, or those that are named."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.gpu import core_engine, ops, serving
    from benchmarks.gpu.bench import Bench

    parts = {"ops": ops, "serving": serving, "core_engine": core_engine}
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", choices=[*parts, []], metavar="|".join(parts), help="default: all"
    )
    parser.add_argument(
        "--toy", action="store_true", help="on the CPU at toy size, as where there is no GPU"
    )
    parser.add_argument("--json", help="file of the numbers (default: in benchmarks/results)")
    options = parser.parse_args(arguments)

    bench = Bench.start(options.toy)
    console = Console()
    console.print(f"{bench.name}, torch {torch.__version__}")
    if bench.limits is None:
        console.print("times are of the CPU at toy size: they show that the code runs, no more")
    else:
        console.print(
            f"measured: {bench.limits.bandwidth / 1e12:.2f} TB/s by a copy, "
            f"{bench.limits.flops / 1e12:.0f} TFLOP/s by a bf16 product"
        )
    numbers = {}
    for name in options.parts or parts:
        columns = ("measured", "time", "of the roofline", "others", "goal")
        table = Table(*columns, title=name, title_justify="left")
        numbers[name] = []
        for result in parts[name].run(bench):
            table.add_row(*result.cells())
            numbers[name].append({**asdict(result), "share": result.share})
        console.print(table)
    target = options.json
    if target is None and not bench.toy:
        target = RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '-', bench.name.lower())}.json"
    if target is not None:
        about = {
            "device": bench.name,
            "torch": torch.__version__,
            "limits": bench.limits and asdict(bench.limits),
        }
        Path(target).write_text(json.dumps({**about, **numbers}, indent=1), encoding="utf-8")
        console.print(f"wrote {target}")


if __name__ == "__main__":
    main()
