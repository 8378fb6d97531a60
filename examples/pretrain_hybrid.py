"""Pretrain a hybrid model in a script of your own, on one rank or many, on GPUs or a CPU.

    torchrun --nproc-per-node 2 examples/pretrain_hybrid.py
    torchrun --nproc-per-node 2 examples/pretrain_hybrid.py optimizer.distributed=true run.steps=200
    torchrun --nproc-per-node 2 examples/pretrain_hybrid.py model.tensor_model_parallel_size=2

It reads this repository's documents, and goes on from its newest checkpoint when it is run again.
`megatron-hybrid train` is such a loop, with logs, evaluations and saves at a signal.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from megatron_hybrid.training.data.preprocess import preprocess
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.training.trainer import Trainer, training_device

FOLDER = Path("runs/pretrain_hybrid")
TEXT = FOLDER / "text"
DOCUMENTS = sorted(Path(__file__).parents[1].glob("docs/**/*.md"))
RECIPE = {
    "model": {
        "layer_pattern": "M-G-*E",  # Mamba-2, Gated DeltaNet, attention; MLPs, experts
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "mamba_head_dim": 32,
        "mamba_state_dim": 32,
        "mamba_num_groups": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 128,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "tokenizer": "demo",
    "data": {"sequence_length": 256, "blend": [str(TEXT)], "split": "9,1"},
    "run": {"steps": 60, "global_batch_size": 8, "eval_every_steps": 20, "eval_batches": 2},
    "optimizer": {"learning_rate": 3.0e-3, "warmup_steps": 5},
}


def main(overrides: list[str]) -> None:
    recipe = Recipe.of(RECIPE, overrides)
    with training_device() as device:
        is_first = dist.get_rank() == 0
        if is_first and not TEXT.with_suffix(".idx").exists():
            preprocess(DOCUMENTS, "demo", TEXT)
        dist.barrier()
        trainer = Trainer(recipe, FOLDER, device)
        batches = trainer.batches()
        while trainer.progress.step < recipe.run.steps:
            step = trainer.step(batches)
            if trainer.progress.step % recipe.run.eval_every_steps == 0:
                trainer.save()
                held_out = trainer.evaluate()
                if is_first:
                    print(f"step {trainer.progress.step}: loss {step.loss:.3f}, {held_out=:.3f}")
        trainer.checkpoints.finish()
        trainer.export(FOLDER / "exported")
    if is_first:
        print(f"megatron-hybrid generate --model {FOLDER / 'exported'} --prompt 'The cache'")


if __name__ == "__main__":
    main(sys.argv[1:])
