"""Tokens per second of preprocess, against the `tokenizers` library alone on the same texts."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import tokenizers

from benchmarks.common import Row, median_ratio, paired, seconds
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.text.document_encoder import DocumentEncoder
from megatron_hybrid.text.document_files import read_chunks
from megatron_hybrid.training.data.preprocess import preprocess

TEXT = Path(__file__).parents[1] / "tests/functional/data/alice_chapter_5.txt"
DOCUMENTS, WORDS_EACH, ROUNDS = 20_000, 200, 3


def run() -> Iterator[Row]:
    """Medians of 3 rounds, in turn. The start of the workers counts."""
    with TemporaryDirectory() as folder:
        yield from _rows(Path(folder))


def _rows(folder: Path) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    words = np.array(TEXT.read_text(encoding="utf-8").split())
    texts = [" ".join(row) for row in rng.choice(words, (DOCUMENTS, WORDS_EACH))]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    num_tokens = sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch_fast(texts))

    def plain() -> float:
        with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"):  # one thread
            return seconds(lambda: tokenizer.encode_batch_fast(texts))

    def ours(workers: int) -> float:
        made = preprocess([path], "demo", folder / "data", workers=workers)
        assert made.tokens == num_tokens
        for suffix in ("bin", "idx", "json"):
            (folder / f"data.{suffix}").unlink()
        return made.seconds

    one, library = paired(lambda: ours(1), plain, ROUNDS)
    two, again = paired(lambda: ours(2), lambda: ours(1), ROUNDS)

    # Apart from the machine's other work, and from the start of the workers.
    encoder = DocumentEncoder(DEMO_FOLDER, "text", chat=False, append_eod=True)
    chunks = list(read_chunks(path))
    with mock.patch.dict(os.environ, TOKENIZERS_PARALLELISM="false"):
        encoding, alone = paired(
            lambda: cpu_seconds(lambda: [encoder.encode(chunk) for chunk in chunks]),
            lambda: cpu_seconds(lambda: tokenizer.encode_batch_fast(texts)),
            ROUNDS,
        )

    def speed(timings: list[float]) -> str:
        return f"{num_tokens / statistics.median(timings) / 1e6:.2f} million tokens/s"

    yield Row("encode_batch_fast of tokenizers, one thread", speed(library))
    yield Row("preprocess, 1 worker", speed(one))
    yield Row("  of the library's speed", f"{median_ratio(library, one):.2f}")
    yield Row("preprocess, 2 workers", speed(two))
    yield Row("  of the speed of 1 worker", f"{median_ratio(again, two):.2f}")
    yield Row(
        "processor time of a worker, of the library's", f"{median_ratio(encoding, alone):.2f}"
    )


def cpu_seconds(action: Callable[[], object]) -> float:
    """Processor time of this process in one call."""
    began = time.process_time()
    action()
    return time.process_time() - began
