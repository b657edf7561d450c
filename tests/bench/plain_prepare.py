"""Prompt rows into tokenised Parquet by `datasets` and `tokenizers`, as a peer for `drafthorse`'s preparation of work.

    python plain_prepare.py FOLDER PROCESSES

Needs datasets, tokenizers and jinja2. FOLDER holds prompts.jsonl, tokenizer.json and tokenizer_config.json with the chat template. It does
what their documentation shows: a `map` over batches on several processes that brings each row's dialect to one question, renders the chat
template and encodes the batch; then `to_parquet`. Rows differ in their columns, which the JSON loader refuses, so lines are loaded as text.
A JSON object goes to stdout: "rows" written, "tokens" in them, "seconds", "datasets".
"""

import json
import os
import sys
import time
from pathlib import Path

import datasets
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

folder, processes = Path(sys.argv[1]), int(sys.argv[2])
configuration = json.loads((folder / "tokenizer_config.json").read_text())
tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(configuration["chat_template"])


def question(row):
    """The first thing asked, or None."""
    if "messages" in row:
        return row["messages"][0]["content"]
    if "conversations" in row:
        return row["conversations"][0]["value"]
    if "instruction" in row:
        return row["instruction"] + "\n\n" + row["input"]
    if "turns" in row:
        return row["turns"][0]
    return row.get("prompt") or row.get("question") or row.get("text")


def encode(batch):
    asked = [text for text in (question(json.loads(line)) for line in batch["text"]) if text]
    rendered = [template.render(messages=[{"role": "user", "content": text}], add_generation_prompt=True) for text in asked]
    return {"input_ids": [row.ids for row in tokenizer.encode_batch(rendered, add_special_tokens=False)]}


def main():
    # As many processes as cores: each encodes on one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    datasets.disable_progress_bars()
    begun = time.perf_counter()
    lines = datasets.load_dataset(
        "text", data_files=str(folder / "prompts.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    encoded = lines.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
    encoded.to_parquet(str(folder / "plain.parquet"))
    seconds = time.perf_counter() - begun
    tokens = sum(map(len, encoded["input_ids"]))
    print(json.dumps({"rows": len(encoded), "tokens": tokens, "seconds": seconds, "datasets": datasets.__version__}))


if __name__ == "__main__":
    main()
