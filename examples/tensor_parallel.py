"""The same engine on several ranks; every rank runs this script and decides alike.

Run it with `torchrun --nproc-per-node 2 examples/tensor_parallel.py`, on GPUs or on a CPU (gloo).
"""

import os

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import torch
import torch.distributed as dist
from megatron.core import parallel_state


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)

    # Random weights, drawn alike on all ranks. For trained ones, a folder:
    # mh.load_pretrained(folder, device=..., tensor_model_parallel_size=world)
    torch.manual_seed(0)
    config = mh.HybridConfig(
        layer_pattern="M-G-W-M-*-",
        hidden_size=256,
        num_attention_heads=4 * world,
        num_query_groups=2 * world,
        vocab_size=1024,
        sliding_window=128,
        mamba_num_groups=world,
        tensor_model_parallel_size=world,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    with torch.device(f"cuda:{rank}" if on_gpu else "cpu"):
        model = mh.build_hybrid_model(config)
    # verify_ranks compares the ranks' decisions at every step; leave it out in production.
    engine = mh.DynamicInferenceEngine(model, None, mh.InferenceConfig(verify_ranks=True))
    prompt = list(range(100, 400))
    params = mh.SamplingParams(temperature=0.7, seed=1, num_tokens_to_generate=16)
    for _ in range(2):
        result = engine.generate([prompt], params)[0]
        if dist.get_rank() == 0:
            print(
                f"{world} ranks: {result.prefix.skipped_tokens} of {result.prefix.prompt_tokens} "
                f"tokens skipped, answer {result.generated_tokens}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
