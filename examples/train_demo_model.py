"""Train the demo model that ships in the package, from the text to the exported files.

    pip install -e ".[dev]"
    torchrun --nproc-per-node 2 examples/train_demo_model.py --export

Two workers of one thread each: they share each step's micro-batches and sum their gradients, which
on a busy machine is several times faster than two threads that wait for each other in each
operation. (`python examples/train_demo_model.py` runs one worker.) A run that was stopped goes on
where it stopped. The order of the text depends on the seed and the step alone, so neither a stop
nor the number of workers changes what the model reads. Weights, gradients and activations are
bf16; the optimiser's own copy of the weights is fp32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import torch
import torch.distributed as dist
from demo_corpus import fetch_documents
from megatron.core.packed_seq_params import PackedSeqParams
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_hybrid.text.tokenizer import Tokenizer as PackagedTokenizer

END_OF_TEXT = "<|endoftext|>"
SHIPPED = Path(mh.__file__).parent / "demo_model"


@dataclass(frozen=True)
class Recipe:
    """Everything that the result depends on."""

    seed: int = 1
    layer_pattern: str = "M-G-W-M-*-"
    hidden_size: int = 256
    ffn_hidden_size: int = 640
    vocab_size: int = 3072
    sliding_window: int = 128

    steps: int = 2900
    micro_batches: int = 2
    micro_batch_tokens: int = 2048
    sequence_length: int = 512
    """Up to `decay_start`; the model learns the language here, where a step is cheapest."""
    long_sequence_length: int = 2048
    """From `decay_start` on, so that prompts of some 2,000 tokens are nothing new to it."""
    warmup_steps: int = 60
    decay_fraction: float = 0.35
    """Share of the steps over which the learning rate falls to zero (warm-up, stable, decay): what
    comes before does not depend on `steps`, so a run may be lengthened or cut short until then."""
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    clip_gradient: float = 1.0

    @property
    def batch_tokens(self) -> int:
        return self.micro_batches * self.micro_batch_tokens

    @property
    def decay_start(self) -> int:
        return round(self.steps * (1 - self.decay_fraction))

    def learning_rate_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, (self.steps - step) / max(1, self.steps - self.decay_start))
        return self.learning_rate * min(warm, fall)

    def sequence_length_at(self, step: int) -> int:
        return self.sequence_length if step < self.decay_start else self.long_sequence_length


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text has tokens, and `END_OF_TEXT` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class PackedText:
    """Endless batches of packed sequences, each a piece of one document.

    `state` is all that has to be kept to go on from the same place.
    """

    def __init__(self, documents: list[torch.Tensor], seed: int):
        self.documents, self.seed = documents, seed
        self.state = {"epoch": 0, "place": 0, "offset": 0}

    def next_batch(self, tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """(input ids [tokens], labels [tokens], lengths of the sequences that lie in them)."""
        inputs, labels, lengths = [], [], []
        room = tokens
        while room:
            document = self._current()
            start = self.state["offset"]
            # The first piece of a document is of random length: each epoch cuts it elsewhere.
            piece = self._first_piece(length) if start == 0 else length
            piece = min(piece, room, len(document) - 1 - start)
            inputs.append(document[start : start + piece])
            labels.append(document[start + 1 : start + piece + 1])
            lengths.append(piece)
            room -= piece
            self.state["offset"] += piece
            if self.state["offset"] == len(document) - 1:
                self.state = {**self.state, "place": self.state["place"] + 1, "offset": 0}
        return torch.cat(inputs), torch.cat(labels), lengths

    def _current(self) -> torch.Tensor:
        if self.state["place"] == len(self.documents):
            self.state = {"epoch": self.state["epoch"] + 1, "place": 0, "offset": 0}
        order = torch.randperm(len(self.documents), generator=self._generator(0))
        return self.documents[order[self.state["place"]]]

    def _first_piece(self, length: int) -> int:
        generator = self._generator(1 + self.state["place"])
        return int(torch.randint(length // 4, length + 1, (1,), generator=generator))

    def _generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(
            (self.seed * 1000 + self.state["epoch"]) * 100_000 + purpose
        )


class MasterWeights:
    """AdamW and Muon over an fp32 copy of the model's bf16 parameters.

    Muon (Jordan et al. 2024) updates the weight matrices of the layers; AdamW the embedding and all
    vectors, of which only the embedding decays.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe):
        self.names = [name for name, _ in model.named_parameters()]
        self.pairs = [(p, p.detach().float().clone()) for p in model.parameters()]
        matrices, embedding, vectors = [], [], []
        for name, (_, master) in zip(self.names, self.pairs):
            master.requires_grad_()
            if "embedding" in name:
                embedding.append(master)
            else:
                (matrices if master.dim() == 2 else vectors).append(master)
        self.optimizers = [
            torch.optim.Muon(
                matrices,
                lr=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [
                    {"params": embedding, "weight_decay": recipe.weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=recipe.learning_rate,
                betas=(0.9, 0.95),
            ),
        ]

    def add_gradients(self, scale: float) -> None:
        """Move the model's gradients of one micro-batch into the fp32 sums."""
        for weight, master in self.pairs:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad.add_(weight.grad, alpha=scale)
            weight.grad = None

    def sum_over_workers(self, *numbers: float) -> list[float]:
        """Sum the gradients, and `numbers` beside them, over all workers."""
        tensors = [*[master.grad for _, master in self.pairs], torch.tensor(numbers)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(piece.view_as(tensor))
        return tensors[-1].tolist()

    def step(self, learning_rate: float, clip: float) -> float:
        """Update the model from the summed gradients, clear them, return their norm."""
        norm = torch.nn.utils.clip_grad_norm_([master for _, master in self.pairs], clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in self.pairs:
                weight.copy_(master)
        return float(norm)

    def state_dict(self) -> dict:
        return {
            "masters": {name: m.detach() for name, (_, m) in zip(self.names, self.pairs)},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: dict) -> None:
        with torch.no_grad():
            for name, (weight, master) in zip(self.names, self.pairs):
                master.copy_(state["masters"][name])
                weight.copy_(master)
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)


def token_losses(model, inputs: torch.Tensor, labels: torch.Tensor, lengths: list[int]):
    """Cross entropy of each token, fp32 [T]; packed sequences do not see each other."""
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return model(inputs[None], labels=labels[None], packed_seq_params=packed)[0]


def shape_model(recipe: Recipe):
    """The untrained model, its weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    config = mh.HybridConfig(
        layer_pattern=recipe.layer_pattern,
        hidden_size=recipe.hidden_size,
        ffn_hidden_size=recipe.ffn_hidden_size,
        vocab_size=recipe.vocab_size,
        sliding_window=recipe.sliding_window,
        num_attention_heads=4,
        num_query_groups=2,
        mamba_state_dim=64,
        mamba_head_dim=64,
        mamba_num_groups=1,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        qk_layernorm=True,
        share_embeddings_and_output_weights=True,
        layer_spec="local",
        params_dtype=torch.bfloat16,
    )
    return mh.build_hybrid_model(config)


@torch.no_grad()
def held_out_loss(model, documents: list[torch.Tensor], num_bytes: int) -> dict:
    """Loss on whole documents, each read from its first token to its last in one sequence."""
    edges = [0, 512, 1024, 2048, 1 << 30]
    sums = torch.zeros(len(edges) - 1, 2, dtype=torch.float64)
    model.eval()
    for document in documents[dist.get_rank() :: dist.get_world_size()]:
        losses = token_losses(model, document[:-1], document[1:], [len(document) - 1])
        for bucket, (first, last) in enumerate(itertools.pairwise(edges)):
            sums[bucket] += torch.tensor([losses[first:last].sum(), len(losses[first:last])])
    model.train()
    dist.all_reduce(sums)
    total, count = sums.sum(0).tolist()
    return {
        "held_out_loss": total / count,
        "bits_per_byte": total / math.log(2) / num_bytes,
        "loss_by_position": [round(s / n, 4) if n else None for s, n in sums.tolist()],
    }


@torch.no_grad()
def sample(model, tokenizer, prompt: str, tokens: int, seed: int, temperature=0.8, top_k=40) -> str:
    """Continue `prompt`, the whole text read again for each token: slow, and free of any cache."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(tokenizer.encode(prompt).ids)
    model.eval()
    for _ in range(tokens):
        logits = model(ids[None])[0, -1].float()
        values, indices = (logits / temperature).topk(top_k)
        choice = torch.multinomial(values.softmax(-1), 1, generator=generator)
        if indices[choice] == tokenizer.token_to_id(END_OF_TEXT):
            break
        ids = torch.cat([ids, indices[choice]])
    model.train()
    return tokenizer.decode(ids.tolist())


class Run:
    """The folder of one run: log.jsonl, tokenizer.json, and latest.pt to go on from."""

    def __init__(self, folder: Path, recipe: Recipe):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.recipe = folder, recipe

    def log(self, **values) -> None:
        if dist.get_rank():
            return
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")

    def save(self, **state) -> None:
        """Written beside and then renamed: a stop in the middle leaves the one before."""
        if dist.get_rank():
            return
        torch.save({"recipe": asdict(self.recipe), **state}, self.folder / "latest.tmp")
        os.replace(self.folder / "latest.tmp", self.folder / "latest.pt")

    def load(self) -> dict | None:
        """The last saved state; None where there is none.

        Raises SystemExit when it belongs to another recipe. `steps` alone may differ, as long as
        neither recipe has begun to let the learning rate fall.
        """
        if not (self.folder / "latest.pt").exists():
            return None
        state = torch.load(self.folder / "latest.pt", weights_only=True)
        before, now = state["recipe"], asdict(self.recipe)
        differing = [key for key in now if before.get(key) != now[key]]
        begun = state["step"] > min(Recipe(**before).decay_start, self.recipe.decay_start)
        if set(differing) - {"steps"} or (differing and begun):
            raise SystemExit(
                f"{self.folder} holds step {state['step']} of a run with other "
                f"{', '.join(differing)}: pass --fresh to begin again, or another --folder"
            )
        return state

    def cut_log(self, step: int) -> None:
        """Drop what was logged after `step`: it was not saved, and will be logged again."""
        path = self.folder / "log.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() and step else []
        path.write_text("".join(x for x in lines if json.loads(x).get("step", 0) <= step))

    def forget(self) -> None:
        for name in ("latest.pt", "log.jsonl", "tokenizer.json"):
            (self.folder / name).unlink(missing_ok=True)


def train(run: Run, text_folder: Path, save_minutes: float, eval_every: int):
    """Train to the recipe's last step. Returns (model, tokenizer), the model in eval mode."""
    recipe, rank, workers = run.recipe, dist.get_rank(), dist.get_world_size()
    if recipe.micro_batches % workers:
        raise SystemExit(
            f"{workers} workers cannot share {recipe.micro_batches} micro-batches a step evenly: "
            f"use a number of workers that divides {recipe.micro_batches}"
        )
    if rank:
        dist.barrier()  # the first worker fetches the text and makes the tokenizer
    documents = fetch_documents(text_folder)
    training = [document.text for document in documents if not document.held_out]
    held_out = [document.text for document in documents if document.held_out]
    if not (run.folder / "tokenizer.json").exists():
        train_tokenizer(training, recipe.vocab_size).save(str(run.folder / "tokenizer.json"))
    if not rank:
        dist.barrier()
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))

    def encode(texts: list[str]) -> list[torch.Tensor]:
        return [
            torch.tensor(e.ids) for e in tokenizer.encode_batch([t + END_OF_TEXT for t in texts])
        ]

    data, evaluation = PackedText(encode(training), recipe.seed), encode(held_out)
    num_bytes = sum(map(len, held_out))
    model = shape_model(recipe)
    weights = MasterWeights(model, recipe)
    step, seconds = 0, 0.0
    losses: list[float] = []  # of the steps since the last line of the log
    if state := run.load():
        weights.load_state_dict(state["weights"])
        data.state = state["data"]
        step, seconds, losses = state["step"], state["seconds"], state["losses"]
    if not rank:
        run.cut_log(step)
    run.log(
        begins_after=step,
        parameters=sum(p.numel() for p in model.parameters()),
        training_tokens=sum(map(len, data.documents)),
        held_out_tokens=sum(map(len, evaluation)),
        **asdict(recipe),
    )

    with _progress(visible=rank == 0) as bar:
        task = bar.add_task("training", total=recipe.steps, completed=step, note="")
        stop_signals = _stop_signals()
        last_save = last_log = time.monotonic()
        timed_from = step
        while step < recipe.steps:
            length, step_loss = recipe.sequence_length_at(step), 0.0
            for index in range(recipe.micro_batches):
                batch = data.next_batch(recipe.micro_batch_tokens, length)
                if index % workers == rank:
                    loss = token_losses(model, *batch).mean()
                    loss.backward()
                    weights.add_gradients(1 / recipe.micro_batches)
                    step_loss += loss.item() / recipe.micro_batches
            step_loss, stop = weights.sum_over_workers(step_loss, len(stop_signals))
            norm = weights.step(recipe.learning_rate_at(step), recipe.clip_gradient)
            if not math.isfinite(norm):
                raise SystemExit(f"step {step}: the gradient's norm is {norm}")
            step += 1
            losses.append(step_loss)
            bar.update(task, completed=step, note=f"loss {losses[-1]:.3f}")
            if step % 10 == 0 or step == recipe.steps:
                now = time.monotonic()
                tokens = (step - timed_from) * recipe.batch_tokens
                seconds += now - last_log
                run.log(
                    step=step,
                    loss=round(sum(losses) / len(losses), 4),
                    gradient_norm=round(norm, 3),
                    learning_rate=recipe.learning_rate_at(step - 1),
                    tokens_per_second=round(tokens / (now - last_log)),
                    seconds=round(seconds, 1),
                )
                losses, last_log, timed_from = [], now, step
            if step % eval_every == 0 or step == recipe.steps:
                run.log(step=step, **held_out_loss(model, evaluation, num_bytes))
            due = time.monotonic() - last_save > 60 * save_minutes
            if due or stop or step == recipe.steps:
                run.save(
                    step=step,
                    seconds=seconds,
                    losses=losses,
                    data=data.state,
                    weights=weights.state_dict(),
                )
                last_save = time.monotonic()
            if stop:
                raise SystemExit(f"stopped and saved after step {step}; run again to go on")
    return model.eval(), tokenizer


def _stop_signals() -> list[int]:
    """A list that fills when the process is asked to end, so that it can end after its step."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    return received


def _progress(visible: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  {task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        disable=not visible,
    )


def plot_curve(log: Path, picture: Path) -> None:
    """Training and held-out loss against the tokens read."""
    import matplotlib  # an extra of the project: needed for the picture alone

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text().splitlines()]
    last_start = [record for record in records if "begins_after" in record][-1]
    recipe = Recipe(**{key: last_start[key] for key in asdict(Recipe())})
    millions = recipe.batch_tokens / 1e6
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, name, style in (
        ("loss", "training text", {"lw": 1, "color": "#7aa6c2"}),
        (
            "held_out_loss",
            "held-out chapters",
            {"lw": 1.6, "marker": "o", "ms": 3, "color": "#c0504d"},
        ),
    ):
        points = [(r["step"] * millions, r[key]) for r in records if key in r]
        axes.plot(*zip(*points), label=name, **style)
    axes.axvline(recipe.decay_start * millions, color="grey", ls=":", lw=1)
    axes.text(
        recipe.decay_start * millions,
        0.97,
        " decay begins",
        transform=axes.get_xaxis_transform(),
        va="top",
        color="grey",
    )
    last = [r for r in records if "held_out_loss" in r][-1]
    axes.annotate(
        f"{last['held_out_loss']:.3f} nats/token\n{last['bits_per_byte']:.3f} bits/byte",
        (last["step"] * millions, last["held_out_loss"]),
        xytext=(-10, 40),
        textcoords="offset points",
        ha="right",
        arrowprops={"arrowstyle": "-", "color": "grey"},
    )
    axes.set(xlabel="tokens read (millions)", ylabel="loss (nats per token)", ylim=(None, 6.5))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


SAMPLE_PROMPTS = (
    "Once upon a time",
    "The old man looked at the sea and",
    '"My dear Watson," said Holmes,',
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo_model"), help="of the run")
    parser.add_argument(
        "--text", type=Path, default=Path("runs/text"), help="cache of the packages"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin again; the default is to resume"
    )
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--save-minutes", type=float, default=3)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument(
        "--export", action="store_true", help=f"replace {SHIPPED.name}/ in the package"
    )
    parser.add_argument(
        "--plot", type=Path, help="write the curve here (default: into the run folder)"
    )
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(options.threads)
    run = Run(options.folder, Recipe(steps=options.steps, seed=options.seed))
    if options.fresh and not dist.get_rank():
        run.forget()
    dist.barrier()
    model, tokenizer = train(run, options.text, options.save_minutes, options.eval_every)

    if dist.get_rank():
        return
    exported = options.folder / "exported"
    mh.save_checkpoint(model, exported)
    PackagedTokenizer(tokenizer, eod=tokenizer.token_to_id(END_OF_TEXT)).save(exported)
    if options.export:
        shutil.copytree(exported, SHIPPED, dirs_exist_ok=True)
    plot_curve(options.folder / "log.jsonl", options.plot or options.folder / "curve.png")
    print((options.folder / "log.jsonl").read_text().splitlines()[-1])
    for prompt in SAMPLE_PROMPTS:
        print("-" * 80, sample(model, tokenizer, prompt, tokens=120, seed=0), sep="\n")


if __name__ == "__main__":
    main()
