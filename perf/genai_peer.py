"""OpenVINO GenAI's continuous batching as a peer: run by the Python of an environment that has it.

Reads lines `BATCH STEPS` and answers each with one JSON list: milliseconds of each decode step.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    folder, precision, prompt_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    number = 0
    print("ready", flush=True)
    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        config = genai.GenerationConfig()
        config.ignore_eos, config.max_new_tokens = True, num_steps + 3
        handles = []
        for i in range(batch):
            ids = np.arange(5 + i, 5 + i + prompt_tokens, dtype=np.int64)[None]
            handles.append(pipeline.add_request(number, ov.Tensor(ids), config))
            number += 1
        times = []
        while pipeline.has_non_finished_requests():
            started = time.perf_counter()
            pipeline.step()
            times.append(1000 * (time.perf_counter() - started))
            for handle in handles:
                if handle.can_read():
                    handle.read()
        print(json.dumps(times[2 : 2 + num_steps]), flush=True)


if __name__ == "__main__":
    main()
