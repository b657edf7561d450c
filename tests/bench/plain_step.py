"""D3D's training step in plain PyTorch on the CPU, as a peer for Drafthorse's: same weights, same batch, same loss.

    python plain_step.py FOLDER --steps N --dtype bf16|f32 --threads T

Needs torch and safetensors. It is deliberately plain, what a competent person would write first: a decoder of ordinary modules,
one dense boolean mask over all rows of all responses, the logits of all labelled rows at once, autograd over the whole graph,
autocast for bf16 and `torch.optim.AdamW`. Nothing is recomputed, cut into chunks, fused by hand or compiled.

FOLDER holds

- `config.json`: Hugging Face's, of `model_type` `llama` or `qwen3` with plain RoPE;
- `model.safetensors`: the weights under Hugging Face's names, taken as f32 masters;
- `batch.json`: {"block_size", "mask_token", "labels": "in_place" or "next", "anchor_sees_block", "gamma", "ar_weight",
  "learning_rate", "responses": [{"ids", "prompt_length", "anchors"}]}.

One step to warm up and then N timed ones run on that one batch. Each builds the rows and the mask anew, as training does, and
ends with the optimiser's step. A JSON object goes to stdout: "loss" of the first step, "losses" of all N + 1, "seconds_per_step"
(the median of the N), "clean_tokens" of the batch, "tokens_per_second" (clean ones), "peak_memory_bytes" (of the process, by the
kernel's count, so with PyTorch itself), "dtype", "threads", "torch".
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

CONFIG_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
)
BATCH_KEYS = (
    "block_size",
    "mask_token",
    "labels",
    "anchor_sees_block",
    "gamma",
    "ar_weight",
    "learning_rate",
    "responses",
)
RESPONSE_KEYS = ("ids", "prompt_length", "anchors")


class InputError(Exception):
    """What is wrong with the folder, for the person who made it."""


# --- The model: rows [1, T, D], Hugging Face's names for modules, so that the weights load without renaming.


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, size = config["hidden_size"], config["head_dim"]
        heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = size
        self.q_proj = nn.Linear(hidden, heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, key_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, key_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)
        self.has_norms = config["model_type"] == "qwen3"
        if self.has_norms:
            self.q_norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
            self.k_norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])

    def forward(self, hidden, cos, sin, mask):
        def heads(projected):
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query, key, value = heads(self.q_proj(hidden)), heads(self.k_proj(hidden)), heads(self.v_proj(hidden))
        if self.has_norms:
            # Under autocast the projections are bf16; the norm is computed in f32 like every other norm.
            query, key = self.q_norm(query.float()), self.k_norm(key.float())
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, hidden):
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = FeedForward(config)

    def forward(self, hidden, cos, sin, mask):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, layers and final norm; the head is `Drafter`'s."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])


class Drafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config["tie_word_embeddings"]:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, ids, positions, mask, labelled_rows):
        """Logits [R, V] of the labelled rows of one forward over `ids` [T] at `positions` [T].

        `mask` [T, T] is true where a row (first index) sees another.
        """
        cos, sin = rope_tables(positions, self.config)
        hidden = self.model.embed_tokens(ids)[None]
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin, mask)
        hidden = self.model.norm(hidden[0, labelled_rows])
        head = self.model.embed_tokens if self.config["tie_word_embeddings"] else self.lm_head
        return F.linear(hidden, head.weight)


def rope_tables(positions, config):
    """Cosines and sines [T, E] of the angles by which the pairs (i, i + E/2) of a head are turned."""
    exponents = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
    angles = positions.float()[:, None] * (1.0 / config["rope_theta"] ** exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads, cos, sin):
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


# --- The batch: clean rows, then one block per anchor, for each response.


def pack(batch):
    """Rows and labels of one forward: ids, positions, mask [T, T], labelled rows, labels, and the weights of those in blocks.

    The labelled rows of blocks come first, then the clean ones, which have no weight of their own.
    """
    size = batch["block_size"]
    # `in_place`: slot j predicts the token at anchor + j, and slot 0 holds a known one. `next`: slot j predicts the token after.
    first_slot, shift = (1, 0) if batch["labels"] == "in_place" else (0, 1)
    ids, positions = [], []
    block_rows, block_labels, weights, clean_rows, clean_labels = [], [], [], [], []
    total = sum(len(response["ids"]) + size * len(response["anchors"]) for response in batch["responses"])
    mask = torch.zeros(total, total, dtype=torch.bool)
    for response in batch["responses"]:
        tokens, start = response["ids"], len(ids)
        length = len(tokens)
        ids += tokens
        positions += range(length)
        mask[start : start + length, start : start + length] = torch.ones(length, length, dtype=torch.bool).tril()
        for position in range(max(response["prompt_length"], 1) - 1, length - 1):
            clean_rows.append(start + position)
            clean_labels.append(tokens[position + 1])
        for anchor in response["anchors"]:
            block = len(ids)
            ids += [tokens[anchor]] + [batch["mask_token"]] * (size - 1)
            positions += range(anchor, anchor + size)
            mask[block : block + size, start : start + anchor] = True
            mask[block : block + size, block : block + size] = True
            if not batch["anchor_sees_block"]:
                mask[block, block + 1 : block + size] = False
            for slot in range(first_slot, size):
                labelled = anchor + slot + shift
                if labelled < length:
                    block_rows.append(block + slot)
                    block_labels.append(tokens[labelled])
                    weights.append(math.exp(-(slot - first_slot) / batch["gamma"]))
    if batch["ar_weight"] == 0:
        # Without their loss the clean rows need no logits.
        clean_rows, clean_labels = [], []
    rows, labels = torch.tensor(block_rows + clean_rows), torch.tensor(block_labels + clean_labels)
    return torch.tensor(ids), torch.tensor(positions), mask, rows, labels, torch.tensor(weights)


def loss_of(model, batch, dtype):
    """Σ w · CE / Σ w over block slots + λ · mean CE over supervised clean rows."""
    ids, positions, mask, rows, labels, weights = pack(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
        logits = model(ids, positions, mask, rows)
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    diffusion = (losses[: len(weights)] * weights).sum() / weights.sum()
    if batch["ar_weight"] == 0:
        return diffusion
    return diffusion + batch["ar_weight"] * losses[len(weights) :].mean()


def train_step(model, optimizer, batch, dtype):
    optimizer.zero_grad()
    loss = loss_of(model, batch, dtype)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


# --- Reading the folder.


def read_json(path, keys):
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read `{path}`: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"`{path}` is not JSON: {error}") from None
    check_keys(value, keys, f"`{path}`")
    return value


def check_keys(value, keys, where):
    if not isinstance(value, dict):
        raise InputError(f"{where} is not a JSON object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise InputError(f"{where} lacks {', '.join(f'`{key}`' for key in missing)}")


def load_config(folder):
    path = folder / "config.json"
    config = read_json(path, CONFIG_KEYS)
    if config["model_type"] not in ("llama", "qwen3"):
        raise InputError(f"`{path}`: `model_type` is `{config['model_type']}`; supported are `llama` and `qwen3`")
    # transformers 5 gathers the fields of RoPE in `rope_parameters`; earlier files have `rope_scaling`.
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) and config[key].get("rope_type") != "default":
            raise InputError(f"`{path}`: `{key}` is {config[key]}; only plain RoPE is supported")
    return config


def load_batch(folder, config):
    path = folder / "batch.json"
    batch = read_json(path, BATCH_KEYS)
    if batch["labels"] not in ("in_place", "next"):
        raise InputError(f"`{path}`: `labels` is `{batch['labels']}`; it must be `in_place` or `next`")
    if not batch["responses"]:
        raise InputError(f"`{path}`: `responses` is empty")
    if not 0 <= batch["mask_token"] < config["vocab_size"]:
        raise InputError(f"`{path}`: `mask_token` {batch['mask_token']} is outside the vocabulary of {config['vocab_size']}")
    for number, response in enumerate(batch["responses"]):
        where = f"`{path}`: response {number}"
        check_keys(response, RESPONSE_KEYS, where)
        length, prompt, anchors = len(response["ids"]), response["prompt_length"], response["anchors"]
        if not all(0 <= token < config["vocab_size"] for token in response["ids"]):
            raise InputError(f"{where} holds a token outside the vocabulary of {config['vocab_size']}")
        if prompt >= length:
            raise InputError(f"{where} has {length} tokens, which leaves none after its prompt of {prompt}")
        # An anchor needs a token after it, or its block would have no label under either kind of labels.
        if not all(0 <= anchor < length - 1 for anchor in anchors):
            raise InputError(f"{where} has an anchor outside 0..{length - 1}")
    if not any(response["anchors"] for response in batch["responses"]):
        raise InputError(f"`{path}`: no response has an anchor")
    return batch


def load_model(folder, config):
    path = folder / "model.safetensors"
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read `{path}`: {error}") from None
    model = Drafter(config)
    if config["tie_word_embeddings"]:
        # Some files store the tied head a second time.
        weights.pop("lm_head.weight", None)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"`{path}` does not fit `config.json`: {error}") from None
    return model


def peak_memory_bytes():
    """The most memory that the process ever had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise InputError("`/proc/self/status` has no `VmHWM`; peak memory can be read on Linux only")


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def main():
    parser = argparse.ArgumentParser(description="D3D's training step in plain PyTorch.")
    parser.add_argument("folder", type=Path, help="holds config.json, model.safetensors and batch.json")
    parser.add_argument("--steps", type=positive, required=True, help="timed steps, after one to warm up")
    parser.add_argument("--dtype", choices=("bf16", "f32"), required=True, help="what the forward and backward compute in")
    parser.add_argument("--threads", type=positive, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    config = load_config(arguments.folder)
    batch = load_batch(arguments.folder, config)
    model = load_model(arguments.folder, config)
    rate = batch["learning_rate"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses, seconds = [], []
    for _ in range(arguments.steps + 1):
        started = time.perf_counter()
        losses.append(train_step(model, optimizer, batch, arguments.dtype))
        seconds.append(time.perf_counter() - started)
    seconds_per_step = statistics.median(seconds[1:])
    clean_tokens = sum(len(response["ids"]) for response in batch["responses"])
    report = {
        "loss": losses[0],
        "losses": losses,
        "seconds_per_step": seconds_per_step,
        "clean_tokens": clean_tokens,
        "tokens_per_second": clean_tokens / seconds_per_step,
        "peak_memory_bytes": peak_memory_bytes(),
        "dtype": arguments.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"plain_step.py: {error}")
