"""One contestant of bench.py: OpenVINO GenAI, continuous batching, in one process, behind lines of JSON.

Reads {"prompts": [[token, …], …], "tokens": N} a line; answers {"seconds": …, "tokens": …} a line. The first line that
it writes says that it is ready.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


def pipeline(model: Path, precision: str) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    # The other contestant computes every prompt too.
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", EXACT if precision == "exact" else {})


def run(pipe: genai.ContinuousBatchingPipeline, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.min_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    # Without a tokenizer the pipeline knows no end token, and asks for one even where it is ignored.
    config.eos_token_id = 0
    config.stop_token_ids = {0}
    inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    start = time.perf_counter()
    results = pipe.generate(inputs, [config] * len(inputs))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(len(result.m_generation_ids[0]) for result in results)}


def main() -> None:
    pipe = pipeline(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(run(pipe, task["prompts"], task["tokens"])), flush=True)


if __name__ == "__main__":
    main()
