"""Greedy generation by `transformers`, as a peer for Drafthorse's built-in engine: same weights, prompts, dtype and threads.

    python plain_generate.py FOLDER --dtype f32|bf16 --threads T --batch 32

Needs torch and transformers. It does what their documentation shows: prompts in the order of the file, in batches padded on the left,
each given to `model.generate`. FOLDER holds a model as `from_pretrained` reads it and `prompts.json`: {"prompts": [[id, ...], ...],
"max_new_tokens"}. A JSON object goes to stdout: "tokens" generated (up to and with the one that ends a response), "seconds" they took,
"ids" of every response, "torch", "transformers".
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["f32", "bf16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype).eval()
    work = json.loads((arguments.folder / "prompts.json").read_text())
    prompts, max_new_tokens = work["prompts"], work["max_new_tokens"]
    ends = model.config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    padding = min(ends)

    responses = []
    begun = time.perf_counter()
    for start in range(0, len(prompts), arguments.batch):
        batch = prompts[start : start + arguments.batch]
        longest = max(map(len, batch))
        ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=padding,
            )
        for row in out[:, longest:].tolist():
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            responses.append(row[:end])
    seconds = time.perf_counter() - begun
    figures = {"tokens": sum(map(len, responses)), "seconds": seconds, "ids": responses}
    print(json.dumps({**figures, "torch": torch.__version__, "transformers": transformers.__version__}))


main()
