"""Makes the golden files in `tests/golden/logits/` that `model/tests/golden.rs` and the model crate's unit tests compare with.

Run from the project's root, once `make setup` has fetched the sample model:

    python3 -m venv golden-venv && golden-venv/bin/pip install torch==2.11.0 transformers==5.17.0 accelerate gguf safetensors
    golden-venv/bin/python tests/golden/make_logits.py

Everything is seeded: the same versions give the same files. What is made:

- `NAME/` for tiny models of every family and branch: `config.json`, weights (safetensors, one of them sharded), `golden.safetensors`
  with `ids` [T] and `logits` [T, V] of one sequence, and `layers.safetensors` with `hidden` [L, T, D], what each layer puts out, and
  `bf16_deviation` [2], the root mean square and the largest of what transformers' own logits in bf16 differ by;
- `NAME.gguf` for some of them, in llama.cpp's names and its order of query and key rows;
- `rope.json`: frequencies and attention factors of published configurations;
- `dequantise.safetensors`: random blocks of every quantised ggml kind (`KIND.bytes`) and their values (`KIND.values`);
- `quantise.safetensors`: values and the bytes that the gguf package makes of them, in the kinds that can be written;
- `smollm2.safetensors`: logits of a rendered chat prompt on 64 columns, argmax and logsumexp over all columns;
- `smollm2_greedy.json`: five chat prompts with the 64 tokens that greedy decoding gives.
"""

import copy
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "golden" / "logits"
SAMPLE = "SmolLM2-135M-Instruct.Q4_1.gguf"

TINY = dict(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
BIASES = dict(attention_bias=True, mlp_bias=True)
# Seeded by their place: add new ones at the end.
MODELS = {
    "llama_tied": LlamaConfig(**TINY, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama_untied_scaled": LlamaConfig(**TINY, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters=LLAMA3),
    "qwen3_tied": Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3_untied_sharded": Qwen3Config(
        **{**TINY, "num_hidden_layers": 3}, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-6
    ),
    "qwen2_tied": Qwen2Config(**TINY, tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen2_untied_yarn": Qwen2Config(**TINY, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_parameters=YARN),
    "qwen3_tied_yarn": Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=YARN),
    "qwen3_untied_biased": Qwen3Config(**TINY, head_dim=12, tie_word_embeddings=False, rms_norm_eps=1e-6, attention_bias=True),
    "llama_tied_scaled_biased": LlamaConfig(
        **TINY,
        **BIASES,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 32},
    ),
    "llama_untied_linear_biased": LlamaConfig(
        **TINY, **BIASES, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters=LINEAR
    ),
}
# Longer than the positions before RoPE was scaled.
LENGTHS = {"qwen2_untied_yarn": 100, "qwen3_tied_yarn": 100, "llama_tied_scaled_biased": 100, "llama_untied_linear_biased": 100}
IN_GGUF = ["llama_tied", "qwen3_tied", "qwen2_tied", "qwen3_tied_yarn", "llama_untied_linear_biased"]

# As in the `config.json` of the models named, but for the size of their layers, and for what their cards say to add for YaRN.
SMALL = dict(vocab_size=64, intermediate_size=64, num_hidden_layers=1)
OF_QWEN3_8B = dict(
    SMALL, model_type="qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    max_position_embeddings=40960, rope_theta=1000000,
)
OF_QWEN2_5_7B = dict(
    SMALL, model_type="qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
    rope_theta=1000000.0,
)
OF_LLAMA_3 = dict(
    SMALL, model_type="llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
    rope_theta=500000.0,
)
OF_LLAMA_3_1 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
)
OF_YARN = dict(rope_type="yarn", factor=4.0)
ROPES = {
    "Qwen/Qwen3-8B": OF_QWEN3_8B,
    "Qwen/Qwen3-8B by YaRN": dict(OF_QWEN3_8B, rope_scaling=dict(OF_YARN, original_max_position_embeddings=32768)),
    "Qwen/Qwen3-8B by YaRN without the original length": dict(OF_QWEN3_8B, rope_scaling=OF_YARN),
    "Qwen/Qwen2.5-7B-Instruct": OF_QWEN2_5_7B,
    "Qwen/Qwen2.5-7B-Instruct by YaRN": dict(
        OF_QWEN2_5_7B, rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)
    ),
    "meta-llama/Meta-Llama-3-8B": dict(OF_LLAMA_3, max_position_embeddings=8192),
    "meta-llama/Llama-3.1-8B": dict(OF_LLAMA_3, rope_scaling=OF_LLAMA_3_1),
    "meta-llama/Llama-3.2-1B": dict(OF_LLAMA_3, hidden_size=2048, head_dim=64, rope_scaling=dict(OF_LLAMA_3_1, factor=32.0)),
    "deepseek-ai/deepseek-coder-6.7b-base": dict(
        OF_LLAMA_3, num_key_value_heads=32, max_position_embeddings=16384, rope_theta=100000, rope_scaling=dict(type="linear", factor=4.0)
    ),
    "YaRN, the rest of its fields": dict(
        OF_QWEN3_8B,
        rope_scaling=dict(
            OF_YARN, original_max_position_embeddings=16384, beta_fast=16, beta_slow=2, attention_factor=1.25, truncate=False
        ),
    ),
    "YaRN, both mscales": dict(
        OF_QWEN3_8B, rope_scaling=dict(OF_YARN, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707)
    ),
    "YaRN, one mscale": dict(OF_QWEN3_8B, rope_scaling=dict(OF_YARN, original_max_position_embeddings=4096, mscale=0.707)),
    "YaRN, the factor from the lengths": dict(
        OF_QWEN3_8B, rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=8192)
    ),
    "the newer spelling": dict(
        {**OF_LLAMA_3, "rope_theta": None}, rope_parameters=dict(OF_LLAMA_3_1, rope_theta=500000.0)
    ),
}
GREEDY_PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a cat who learns to swim.",
    "A baker makes 12 loaves an hour for 6 hours and sells 50 of them. How many are left? Explain step by step.",
    "Write a Python function that returns the largest number of a list, with a comment on every line.",
    "Give me five tips for learning to play the piano.",
]


def tiny_model(name, config, seed):
    """Random weights large enough that attention and the norms matter, and logits that differ clearly."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="60KB" if "sharded" in name else "5GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(0, config.vocab_size, (LENGTHS.get(name, 48),))
    logits = logits_of(model, ids)
    save_file({"ids": ids, "logits": logits}, folder / "golden.safetensors")
    difference = logits_of(copy.deepcopy(model).to(torch.bfloat16), ids) - logits
    deviation = torch.stack([difference.square().mean().sqrt(), difference.abs().max()])
    save_file({"hidden": layers_of(model, ids), "bf16_deviation": deviation}, folder / "layers.safetensors")
    return model, ids, logits


@torch.no_grad()
def layers_of(model, ids):
    """What each layer puts out, [L, T, D]. (The last of `output_hidden_states` has gone through the final norm.)"""
    outputs = []
    hooks = [layer.register_forward_hook(lambda _, __, output: outputs.append(output[0])) for layer in model.model.layers]
    states = model(ids[None], output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(outputs) == model.config.num_hidden_layers and outputs[0].shape == states[0][0].shape
    assert all(torch.equal(output, state[0]) for output, state in zip(outputs[:-1], states[1:]))
    assert torch.equal(model.model.norm(outputs[-1]), states[-1][0])
    return torch.stack(outputs).contiguous()


@torch.no_grad()
def logits_of(model, ids):
    return model(ids[None]).logits[0].float().contiguous()


def write_gguf(model, name, architecture):
    """Stores a model as llama.cpp's converter does: its names, and for Llama query and key rows in pairs."""
    config = model.config
    path = OUT / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    scaling = config.rope_parameters
    if scaling["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = {
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
    }
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for parameter_name, parameter in model.named_parameters():
        stem, suffix = parameter_name.rsplit(".", 1)
        values = parameter.detach().numpy()
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.weight", values)
            continue
        _, _, layer, inner = stem.split(".", 3)
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(inner)
        if architecture == "llama" and heads:
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{names[inner]}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks():
    """Random bits everywhere, but scales of ordinary size where a float is stored."""
    random = np.random.default_rng(7)
    scale_offsets = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
                     "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    tensors = {}
    for name, offsets in scale_offsets.items():
        kind = gguf.GGMLQuantizationType[name]
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (3, block_bytes), dtype=np.uint8)
        for offset in offsets:
            blocks[:, offset : offset + 2] = random.normal(0, 0.1, (3, 1)).astype(np.float16).view(np.uint8)
        tensors[f"{name}.bytes"] = torch.from_numpy(blocks.reshape(-1))
        tensors[f"{name}.values"] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).reshape(-1).copy())
    floats = random.normal(0, 3, 17).astype(np.float32)
    halves = floats.astype(np.float16)
    brain = torch.from_numpy(floats).to(torch.bfloat16)
    for name, stored, values in [
        ("F32", torch.from_numpy(floats), torch.from_numpy(floats)),
        ("F16", torch.from_numpy(halves), torch.from_numpy(halves.astype(np.float32))),
        ("BF16", brain, brain.float()),
    ]:
        tensors[f"{name}.bytes"] = stored.view(torch.uint8).clone()
        tensors[f"{name}.values"] = values.clone()
    save_file(tensors, OUT / "dequantise.safetensors")


def ropes():
    kinds = {
        "llama": (LlamaConfig, LlamaRotaryEmbedding),
        "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
        "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    }
    rows = []
    for name, fields in ROPES.items():
        fields = {key: value for key, value in fields.items() if value is not None}
        config_class, rotary_class = kinds[fields["model_type"]]
        rotary = rotary_class(config_class(**copy.deepcopy(fields)))
        rows.append(
            dict(name=name, config=fields, attention_factor=rotary.attention_scaling, inverse_frequencies=rotary.inv_freq.tolist())
        )
    lines = ",\n".join(json.dumps(row) for row in rows)
    (OUT / "rope.json").write_text(f"[\n{lines}\n]\n")


def quantised():
    """Blocks of ordinary weights, of zeros, of tiny and of large ones, and one whose quanta lie half-way between two numbers."""
    random = np.random.default_rng(11)
    blocks = random.normal(0, 1, (12, 32)).astype(np.float32) * np.float32([[0.02]] * 6 + [[1e-3], [40.0], [1e-6], [1.0], [0.3], [7.0]])
    blocks[9] = 0
    blocks[10] = (np.arange(32) - 15.5) * 2
    blocks[10, 0] = 127
    tensors = {"values": torch.from_numpy(blocks.reshape(-1))}
    for name in ("F32", "F16", "BF16", "Q8_0"):
        stored = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType[name])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(stored).view(np.uint8).reshape(-1).copy())
    save_file(tensors, OUT / "quantise.safetensors")


@torch.no_grad()
def sample_model():
    models = ROOT / ".models"
    tokenizer = AutoTokenizer.from_pretrained(models, gguf_file=SAMPLE)
    model = AutoModelForCausalLM.from_pretrained(models, gguf_file=SAMPLE, dtype=torch.float32, attn_implementation="eager").eval()

    def render(text):
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    ids = torch.tensor(render("What is the capital of France, and which river flows through it?"))
    logits = logits_of(model, ids)
    columns = torch.from_numpy(np.random.default_rng(3).choice(logits.shape[1], 64, replace=False)).sort().values
    save_file(
        {
            "ids": ids,
            "columns": columns,
            "logits": logits[:, columns].contiguous(),
            "argmax": logits.argmax(1),
            "logsumexp": logits.logsumexp(1),
        },
        OUT / "smollm2.safetensors",
    )

    prompts = []
    for text in GREEDY_PROMPTS:
        prompt = torch.tensor(render(text))
        output = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, max_new_tokens=64)[0]
        assert len(output) == len(prompt) + 64, f"the answer to `{text}` ends early"
        # Another order of additions may change a logit by about 1e-4: a nearer tie would make the comparison a matter of luck.
        top = logits_of(model, output)[len(prompt) - 1 : -1].topk(2).values
        margin = (top[:, 0] - top[:, 1]).min().item()
        assert margin > 1e-3, f"the answer to `{text}` has a near-tie of {margin}"
        response = output[len(prompt) :]
        print(f"--- {text} (smallest margin {margin:.4f})\n{tokenizer.decode(response)}")
        prompts.append({"text": text, "prompt_ids": prompt.tolist(), "response_ids": response.tolist()})
    lines = ",\n".join(json.dumps(prompt) for prompt in prompts)
    (OUT / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for seed, (name, config) in enumerate(MODELS.items()):
        model, ids, logits = tiny_model(name, config, seed)
        if name in IN_GGUF:
            write_gguf(model, name, config.model_type)
            # transformers reads the file back to the same logits, so the order of rows is llama.cpp's. (It has to be told the
            # configuration: by itself it overlooks Qwen3's head size.)
            back = AutoModelForCausalLM.from_pretrained(OUT, gguf_file=f"{name}.gguf", config=config, dtype=torch.float32).eval()
            assert torch.allclose(logits_of(back, ids), logits, atol=1e-4), name
    ropes()
    random_blocks()
    quantised()
    sample_model()


if __name__ == "__main__":
    main()
