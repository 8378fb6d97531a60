"""Drawings of the engine: a request's life, the layers of the code, ranks and machines."""

from __future__ import annotations

from benchmarks.drawings.svg import Sheet


def request() -> str:
    """A request from its arguments to its answer, with the loop of steps."""
    sheet = Sheet("A request's life, from its arguments to its answer", 606)
    sheet.title("A request's life")
    left, width, height = 76, 360, 66
    stages = (
        (
            *("RequestBuilder", "soft grey"),
            *("Checks all arguments; text becomes tokens.", "What fails changes nothing."),
        ),
        (
            *("WaitingQueue", "soft grey", "Waits for its turn, for a fetch, or for a running"),
            "prefill of the same prefix (single flight).",
        ),
        (
            *("Scheduler.schedule", "soft green"),
            *("Finds p and q, pins and allocates pages,", "or changes nothing."),
        ),
        (
            *("ModelRunner.run", "soft orange", "Moves pages, computes, draws tokens, copies"),
            "states: only what the plan says. One wait.",
        ),
        (
            *("Scheduler.complete", "soft green"),
            *("Commits tokens, publishes states:", "only now can other requests see them."),
        ),
        (
            *("OutputProcessor", "soft grey"),
            *("Appends tokens, looks for the end,", "streams text."),
        ),
    )
    between = ("Request", "its turn", "StepPlan", "StepResult", "tokens")
    for number, (name, fill, one, two) in enumerate(stages):
        y = 44 + number * 88
        sheet.box(left, y, width, height, fill, radius=6)
        sheet.text(left + 14, y + 21, name, 14, bold=True)
        sheet.text(left + 14, y + 40, one)
        sheet.text(left + 14, y + 57, two)
        if number < len(between):
            sheet.arrow([(256, y + height), (256, y + 88)])
            sheet.text(268, y + height + 16, between[number], colour="faint")
    sheet.arrow([(436, 516), (472, 516), (472, 253), (437, 253)], "blue")
    sheet.text(479, 380, "next", colour="faint")
    sheet.text(479, 398, "step", colour="faint")
    sheet.arrow([(76, 253), (40, 253), (40, 165), (75, 165)], "orange", dashed=True)
    sheet.text(10, 272, "parked: no", colour="faint")
    sheet.text(10, 290, "page left", colour="faint")
    sheet.arrow([(256, 550), (256, 574)])
    last = "The state after the last token is saved, the lease released."
    sheet.text(256, 592, last, anchor="middle")
    return sheet.svg()


def layers() -> str:
    """The packages, each above those that it imports."""
    sheet = Sheet("Layers of the code: imports run down", 482)
    sheet.title("Imports run down, and in no circle")

    def layer(
        x: float, y: float, width: float, name: str, what: str, fill: str, height: int = 46
    ) -> None:
        sheet.box(x, y, width, height, fill, radius=5)
        sheet.text(x + 10, y + 19, name, 14, bold=True)
        for number, line in enumerate(what.split("\n")):
            sheet.text(x + 10, y + 37 + 17 * number, line)

    layer(16, 42, 160, "dynamo", "its worker; imports cli", "soft grey")
    layer(184, 42, 200, "cli, commands", "the command line", "soft grey")
    layer(392, 42, 112, "megatron", "its interface", "soft blue")
    layer(16, 96, 110, "tools", "plan, demo", "soft blue")
    layer(134, 96, 150, "training", "recipes, loop", "soft blue")
    layer(292, 96, 212, "serving", "HTTP, events of the cache", "soft blue")
    runs = "which tokens run, where their bytes are, what comes out"
    layer(16, 150, 488, "inference", runs, "soft green")
    layer(
        16, 204, 240, "offload", "memories below the pool:\nhost memory, disk", "soft orange", 100
    )
    knows = "tokens, pages, positions, values;\nnumpy alone: no tensor, no model"
    layer(16, 312, 240, "cache", knows, "soft orange", 100)
    layer(264, 204, 240, "checkpoints", "folders of weights", "soft orange")
    layer(264, 258, 240, "text", "tokenizers, chats, guides", "soft orange")
    layer(264, 312, 240, "models", "layers, parameters, config", "soft orange")
    layer(264, 366, 240, "ops", "ragged batches, kernels", "soft orange")
    rest = "ranks; threads, checks, files; differences of releases: all may import these"
    layer(16, 420, 488, "distributed, utils, compat", rest, "soft grey")
    return sheet.svg()


def ranks() -> str:
    """Two replicas of a model, each split over two ranks, and a router."""
    sheet = Sheet("Two replicas of a model, each over two ranks, behind a router", 452)
    sheet.title("Ranks of one model, replicas of it")
    sheet.box(150, 44, 220, 48, "soft grey", radius=6)
    sheet.text(260, 64, "router (optional)", bold=True, anchor="middle")
    sheet.text(260, 83, "follows KV events", colour="faint", anchor="middle")
    for number, x in enumerate((16, 268)):
        sheet.arrow([(180 + number * 160, 92), (180 + number * 160, 126)])
        sheet.box(x, 128, 236, 248, None, "line", 6, dashed=True)
        sheet.text(x + 12, 149, f"replica {number}", bold=True)
        sheet.text(x + 224, 149, f"machine {'AB'[number]}", colour="faint", anchor="end")
        for rank in range(2):
            y = 160 + rank * 126
            fill = "soft green" if rank == 0 else "soft blue"
            sheet.box(x + 10, y, 216, 82, fill, radius=5)
            role = "leads" if rank == 0 else "follows"
            sheet.text(x + 20, y + 20, f"rank {2 * number + rank}: {role}", bold=True)
            sheet.text(x + 20, y + 38, "scheduler, cache: the same")
            sheet.text(x + 20, y + 55, "half of the weights")
            sheet.text(x + 20, y + 72, "half of every page and slot")
        sheet.arrow([(x + 40, 242), (x + 40, 284)], "green")
        sheet.text(x + 50, 259, "calls, one", colour="faint")
        sheet.text(x + 50, 276, "message a step", colour="faint")
        sheet.arrow([(x + 160, 264), (x + 160, 243)], "orange")
        sheet.arrow([(x + 160, 264), (x + 160, 285)], "orange")
        sheet.text(x + 170, 268, "NCCL", colour="faint")
    sheet.text(16, 402, "Ranks of a replica decide alike from equal numbers: no message is")
    sheet.text(16, 421, "about what to keep or evict. Replicas know nothing of each other.")
    sheet.text(16, 440, "A replica may also span machines.")
    return sheet.svg()
