"""Rollouts of Megatron-LM's `megatron.rl`, unchanged, over our engine on a CPU: its agent, its
inference server in front of core's coordinator, suspend, resume and new weights. The environment is
a toy: the reward counts a letter. Run by `python -m megatron_hybrid.megatron`; prints JSON."""

import asyncio
import json
import sys
import tempfile
from types import SimpleNamespace

import torch.distributed as dist
from megatron.core.inference.config import InferenceConfig
from megatron.core.tokenizers import MegatronTokenizer
from megatron.inference import utils as inference_utils
from megatron.rl.agent.api import RolloutRequest
from megatron.rl.agent.reward_only_agent import RewardOnlyAgent
from megatron.rl.inference import megatron as rl
from megatron.rl.inference.api import LLMChatMessage
from megatron.training import global_vars

import megatron_hybrid as mh

PROMPT = "Once upon a time"
COUNT = 4


class LetterE(RewardOnlyAgent):
    """The more an answer has of the letter e, the better it is."""

    env_id: str = "letter e"

    async def get_prompt(self, validation: bool):
        return [LLMChatMessage(role="user", content=PROMPT)], "e"

    async def get_reward(self, response: str, golden: str, finish_reason: str) -> float:
        return response.count(golden) / max(1, len(response))


async def main(port: int) -> dict:
    model, ours = mh.load_pretrained("demo", device="cpu")
    folder = tempfile.mkdtemp()
    ours.save(folder)
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=folder, metadata_path={"library": "huggingface"}
    )
    arguments = SimpleNamespace(
        rl_skip_bos_token=True,
        rl_partial_rollouts=True,
        rl_generation_lag=None,
        grpo_group_size=2,
        grpo_prompts_per_step=2,
        rl_inference_parsers=[],
        rl_kv_cache_management_mode="recompute",
        return_log_probs=False,
        skip_prompt_log_probs=False,
    )
    global_vars._GLOBAL_ARGS, global_vars._GLOBAL_TOKENIZER = arguments, tokenizer
    # What these two make of hundreds of arguments of the command line.
    inference_utils.build_tokenizer = lambda _: tokenizer
    inference_utils.get_inference_config_from_model_and_args = lambda *_: InferenceConfig(
        buffer_size_gb=0.25,
        max_requests=16,
        max_sequence_length=64,
        enable_prefix_caching=True,
        prefix_caching_mamba_gb=0.25,
        kv_cache_management_mode="recompute",
    )
    server = await rl.MegatronLocal.launch(model, host="127.0.0.1", port=port)
    request = {"inference_interface": server, "generation_args": {"temperature": 1.0}}
    found, epochs = {}, []
    for epoch in (1, 2):
        server.set_generation_epoch(epoch)
        rollouts = await LetterE().get_reward_rollouts(
            RolloutRequest(num_rollouts=COUNT, **request)
        )
        ledger = server.merge_global_request_ledgers()
        epochs.append(sorted({record.policy_epoch[0][1] for record in ledger.values()}))
        found[f"rollouts {epoch}"] = [
            [len(rollout.trajectory), rollout.reward, len(ledger)] for rollout in rollouts
        ]
        await server.suspend()
        await server.resume()
        await server.resume()  # it runs: no effect
    await server.kill()
    return found | {"epochs": epochs, "lag": arguments.rl_generation_lag}


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(asyncio.run(main(int(sys.argv[1])))), flush=True)
    dist.destroy_process_group()
