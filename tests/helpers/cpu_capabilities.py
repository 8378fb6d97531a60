"""Prints the values of ATEN_CPU_CAPABILITY below the one that torch takes by itself here."""

import torch

WIDTHS = ("default", "avx2", "avx512")

best = torch.backends.cpu.get_cpu_capability().lower()
print(*WIDTHS[: WIDTHS.index(best) if best in WIDTHS else 1])
