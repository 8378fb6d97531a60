"""One job on many ranks: a model split by tensor, pipeline and expert parallelism. Ranks that are
left over are data-parallel replicas of it, of which each answers its share of the prompts.

    torchrun --nproc-per-node 4 examples/many_ranks.py --tp 2           # 2 replicas of 2 ranks
    torchrun --nproc-per-node 4 examples/many_ranks.py --tp 2 --pp 2    # 1 model on 4 ranks

It runs on GPUs, or on a CPU (gloo).
"""

import argparse
import os

import megatron_hybrid.compat  # isort: skip  (before megatron.core, which warns if it is first)
import megatron_hybrid as mh  # isort: skip
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        parser.add_argument(
            f"--{name}", type=int, default=1, help=f"Take N {what}-parallel ranks.", metavar="N"
        )
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(__doc__)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")

    # Random weights. For trained ones, a folder:
    # mh.load_pretrained(folder, device=..., tensor_model_parallel_size=options.tp, ...)
    torch.manual_seed(0)
    config = mh.HybridConfig(
        layer_pattern="M*E-" * 2,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=2,
        vocab_size=1024,
        mamba_num_groups=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=128,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    with torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"):
        model = mh.build_hybrid_model(config)

    # All ranks of a replica make the same calls.
    with mh.DynamicInferenceEngine(model) as engine:
        number, size = engine.replica
        prompts = [[*range(100 * i, 100 * i + 90)] for i in range(8)]
        chats = prompts[number::size]
        params = mh.SamplingParams(temperature=0.7, seed=1, num_tokens_to_generate=16)
        for turn in ("first", "second"):
            results = engine.generate(chats, params)
            if engine.ranks.is_first:
                skipped = sum(result.prefix.skipped_tokens for result in results)
                print(
                    f"{turn} turns of replica {number} of {size}, on {engine.ranks.size} ranks: "
                    f"{skipped} of {sum(map(len, chats))} prompt tokens skipped",
                    flush=True,
                )
            chats = [[*chat, *result.token_ids, 7, 8, 9] for chat, result in zip(chats, results)]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
