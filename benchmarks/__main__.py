"""What the parts of the library cost, ratios measured side by side in one run."""

import argparse
import json
import platform
import warnings

warnings.filterwarnings("ignore", module="megatron")


def main() -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks import (
        batch_bits,
        bookkeeping,
        decode,
        door,
        encodings,
        host_cost,
        latency,
        memory,
        preprocess,
        ranks,
        server,
        speculation,
        tiers,
        training_step,
    )

    suites = {
        "latency": latency,
        "decode": decode,
        "bookkeeping": bookkeeping,
        "host_cost": host_cost,
        "door": door,
        "memory": memory,
        "encodings": encodings,
        "tiers": tiers,
        "ranks": ranks,
        "server": server,
        "speculation": speculation,
        "batch_bits": batch_bits,
        "training_step": training_step,
        "preprocess": preprocess,
    }
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suites",
        nargs="*",
        choices=[*suites, []],
        metavar="|".join(suites),
        help="Measure these parts. The default is all.",
    )
    parser.add_argument("--json", metavar="FILE", help="Also write the numbers to this file.")
    options = parser.parse_args()

    console = Console()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    console.print(
        f"{device or platform.machine()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    numbers = {}
    for name in options.suites or suites:
        table = Table("measured", "value", "goal", title=name, title_justify="left")
        numbers[name] = []
        for row in suites[name].run():
            table.add_row(row.what, row.value, row.goal)
            numbers[name].append({"what": row.what, "value": row.value, "goal": row.goal})
        console.print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": torch.__version__, **numbers}, file, indent=1)


if __name__ == "__main__":
    main()
