"""The whole engine with random weights of a real shape, on both backends: the last part of `gpu_check.py`."""

from __future__ import annotations

import torch

from cbserve.core.batching import ContinuousBatching
from cbserve.core.blocks import BlockPool
from cbserve.core.kv_cache import KVCacheManager
from cbserve.core.request import Request, SamplingParams
from cbserve.core.scheduler import Scheduler
from cbserve.core.summary import summarize
from cbserve.engine import Engine
from cbserve.executors.torch_executor import TorchExecutor
from cbserve.models.config import ModelConfig
from cbserve.models.llama import LlamaModel

SMOLLM2 = ModelConfig("smollm2-135m, random", 30, 576, 9, 3, 64, 1536, 49_152, tie_word_embeddings=True)
TINY = ModelConfig("tiny, random", 2, 64, 4, 2, 16, 128, 320)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> LlamaModel:
    """Weights of the right shapes, normal with deviation 0.05; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.05
        for name, shape in config.tensor_shapes().items()
    }
    return LlamaModel(config, weights, device, dtype)


def serve(
    model: LlamaModel, backend: str, num_requests: int, prompt: int, output: int
) -> tuple[float, list[list[int]]]:
    """Output tokens a second of a warm engine, and the tokens."""
    block_size, slots = 16, min(num_requests, 32)
    num_blocks = slots * -(-(prompt + output) // block_size)
    scheduler = Scheduler(KVCacheManager(BlockPool(num_blocks, block_size)), ContinuousBatching(max_num_seqs=slots))
    engine = Engine(scheduler, TorchExecutor(model, num_blocks, block_size, backend=backend))
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    vocab = model.config.vocab_size
    requests = [
        Request(str(i), [(7 * i + 13 * j) % (vocab - 10) + 5 for j in range(prompt)], params)
        for i in range(num_requests)
    ]
    engine.run(requests)  # compiles the kernels
    engine.new_trace()
    outputs = {out.request_id: out.outputs[0].token_ids for out in engine.run(requests)}
    return summarize(engine.trace).tokens_per_s, [outputs[request.request_id] for request in requests]
