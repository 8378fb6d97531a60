"""What the parts of the library cost, ratios measured side by side in one run."""

import argparse
import json
import platform
import warnings
from importlib import import_module

SUITES = (
    *("latency", "decode", "host_cost", "door", "memory", "encodings", "tiers"),
    *("ranks", "server", "speculation", "bits", "training_step"),
)

warnings.filterwarnings("ignore", module="megatron")


def main() -> None:
    import torch
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suites",
        nargs="*",
        choices=[*SUITES, []],
        metavar="|".join(SUITES),
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
    for name in options.suites or SUITES:
        table = Table("measured", "value", "goal", title=name, title_justify="left")
        numbers[name] = []
        for row in import_module(f"benchmarks.{name}").run():
            table.add_row(row.what, row.value, row.goal)
            numbers[name].append({"what": row.what, "value": row.value, "goal": row.goal})
        console.print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": torch.__version__, **numbers}, file, indent=1)


if __name__ == "__main__":
    main()
