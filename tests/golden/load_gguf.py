"""Loads an exported GGUF file by programs that are not ours, and prints what the test beside it compares, as JSON.

    python load_gguf.py FILE FOLDER TEXT

FOLDER is the same drafter exported for `transformers`. Printed are "different": names of tensors whose bytes are not what the gguf package
makes of FOLDER's weights in llama.cpp's order; "ids" of TEXT and "logits" of its last position by `transformers` from FILE; "llama_cpp":
the same by llama.cpp ("ids", "logprobs" of all tokens), or null when xllamacpp is not installed. Exits with 3 when torch, transformers
or gguf are not installed.
"""

import json
import sys
import urllib.request

try:
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError:
    sys.exit(3)

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def different(reader, folder, config):
    """Names of the tensors that one has and the other has not, or whose bytes differ."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(f"{folder}/model.safetensors")
    rope_factors = {"rope_freqs.weight"} & stored.keys()
    names = {gguf_name(name): name for name in weights}
    wrong = (stored.keys() ^ names.keys()) - rope_factors
    for name in stored.keys() & names.keys():
        values = weights[names[name]].float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
        if config.model_type == "llama" and heads:
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        expected = gguf.quants.quantize(np.ascontiguousarray(values), stored[name].tensor_type)
        if stored[name].data.tobytes() != expected.tobytes():
            wrong.add(name)
    return sorted(wrong)


def by_llama_cpp(file, text, vocabulary):
    try:
        import xllamacpp
    except ImportError:
        return None
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.warmup = False
    server = xllamacpp.Server(parameters)

    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    ids = json.loads(urllib.request.urlopen(request).read())["tokens"]
    answer = server.handle_completions({"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0})
    logprobs = [None] * vocabulary
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        logprobs[entry["id"]] = entry["logprob"]
    return {"ids": ids, "logprobs": logprobs}


def main():
    file, folder, text = sys.argv[1:]
    config = AutoConfig.from_pretrained(folder)
    reader = gguf.GGUFReader(file)
    parent, _, name = file.rpartition("/")
    tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name)
    # transformers by itself overlooks Qwen3's head size in a GGUF file, so it is told the configuration.
    model = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name, config=config, dtype=torch.float32).eval()
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    print(
        json.dumps(
            {
                "different": different(reader, folder, config),
                "ids": ids[0].tolist(),
                "logits": logits.tolist(),
                "llama_cpp": by_llama_cpp(file, text, config.vocab_size),
            }
        )
    )


if __name__ == "__main__":
    main()
