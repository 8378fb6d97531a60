"""Finds products of matrices that a compiled kernel for Hopper may corrupt: see `ops/hopper.py`.

It reads what Triton's passes over GPU layouts leave ("ttgir"). There an asynchronous product is a
`warp_group_dot`, and a `warp_group_dot_wait` waits until so many are pending.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """A loop that is no part of another one's header."""

    carried: frozenset[str]
    """Values that an iteration leaves to the next one."""
    body: list[str]


def races(ttgir: str) -> list[str]:
    """What may be overwritten while a product reads it; a line for each."""
    num_warps = int(re.search(r'"ttg.num-warps" = (\d+)', ttgir)[1])
    return [race for loop in _loops(ttgir) for race in _races(loop, num_warps)]


def _races(loop: Loop, num_warps: int) -> Iterator[str]:
    products, waits, made = [], [], {}
    for place, line in enumerate(loop.body):
        if " = " in line:
            made.update(dict.fromkeys(re.findall(r"%\w+", line.split(" = ")[0]), place))
        if match := re.search(r"warp_group_dot (%\w+), .*isAsync = true.*?: (\S)", line):
            products.append((place, match[1], match[2] == "t"))  # a tensor: in registers
        elif match := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            waits.append((place, int(match[1])))
    for place, first_factor, in_registers in products:
        behind = [one for one, *_ in products if one > place]
        if any(
            wait > place and pending <= sum(one < wait for one in behind) for wait, pending in waits
        ):
            continue  # it is waited for in its own iteration
        if num_warps > 4:
            yield f"{num_warps} warps wait for {loop.body[place].strip()} in the next iteration"
        if not in_registers:
            continue
        # In the next iteration: products that are queued before the wait may be pending behind it.
        until = min(
            (
                wait
                for wait, pending in waits
                if pending <= len(behind) + sum(one < wait for one, *_ in products)
            ),
            default=len(loop.body),
        )
        if first_factor in loop.carried or made.get(first_factor, until) < until:
            yield f"{first_factor} is overwritten before {loop.body[place].strip()} has ended"


def _loops(ttgir: str) -> Iterator[Loop]:
    """Inner ones come before outer ones, which have their lines, too."""
    open_loops: list[tuple[int, str, list[str]]] = []
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        for *_, body in open_loops:
            body.append(line)
        if re.search(r"\bscf\.for ", line):
            open_loops.append((indentation, line, []))
        elif "scf.yield" in line and open_loops and indentation == open_loops[-1][0] + 2:
            _, header, body = open_loops.pop()
            arguments = re.search(r"iter_args\((.*)\) -> ", header)
            names = re.findall(r"(%\w+) = ", arguments[1]) if arguments else []
            yield Loop(frozenset(names), body)
