"""Makes the golden files in `tests/golden/chat/` that `data/tests/golden.rs` compares with.

Run from the project's root, once `make setup` has fetched the sample model:

    pip install torch==2.11.0 transformers==5.17.0 accelerate gguf        # in an environment of its own
    python tests/golden/make_chat.py

The same versions give the same files. What is made:

- `chats.json`: chats rendered by `apply_chat_template` with three templates (SmolLM2's from the sample model's metadata,
  Qwen3's from `qwen3_chat_template.jinja`, and `variants.jinja`), with their token ids;
- `texts.json`: ids of plain texts by five tokenizers, without and with special tokens;
- `small_qwen3.tokenizer.json`: a byte-level BPE of a few hundred tokens with Qwen3's rules and special tokens, as Qwen3's own
  vocabulary cannot be had from a package;
- `small_PRE.gguf`: the same vocabulary as metadata of a GGUF file, for the pre-tokenizers `gpt-2`, `qwen2` and `llama-bpe`.

`transformers` reads a Llama-architecture GGUF file with GPT-2's splitting rules alone and ignores `tokenizer.ggml.pre`. SmolLM2 was
trained with digits split off first, which differs where white space stands before a digit ("  12" is two spaces in one token, then
two digits). The rule the model was trained with is taken here, by setting it on the tokenizer that `transformers` built; on texts
without digits the two must agree, which is asserted.
"""

import copy
import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "golden" / "chat"
SAMPLE = "SmolLM2-135M-Instruct.Q4_1.gguf"

QWEN3_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_USER_DEFINED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

TEXTS = [
    "",
    "Hello, world! It's 2024; they've 12345 apples & I'd take 3.",
    "a  12   7\n\n    42\tend  ",
    "def add(a, b):\n    return a + b  # 10%\r\n",
    "Ünïcödé, e\u0301 and é, 漢字かな, 🙂🙂, \u00a0nbsp, ١٢٣",
    "<|im_start|>user\nliteral <think> markers</think><|im_end|> and <|endoftext|>",
    "DON'T won't \u2019s  multiple   spaces",
    "The cat counted the other cats and then the dogs; nothing was counted twice.",
]

TRAINING = """The user asks the assistant a question, and the assistant answers the user in one line of text. What is the
answer to the question, and why is it the answer? The sum of two numbers is the number that comes from adding them together."""

SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in one line."}
USER = {"role": "user", "content": "What is 12 + 30?  Explain <b>why</b> & how."}
TURNS = [
    USER,
    {"role": "assistant", "content": "<think>\nTwelve and thirty.\n</think>\n\n42"},
    {"role": "user", "content": " \nAnd with 1000 more, é?\n"},
]
CHATS = {
    "user": [USER],
    "system and user": [SYSTEM, USER],
    "several turns": [SYSTEM, *TURNS],
    "several turns without system": TURNS,
    "empty system": [{"role": "system", "content": ""}, USER],
    "ends with the assistant": [*TURNS, {"role": "assistant", "content": "1042"}],
    "thoughts at the end": [USER, {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\n42"}],
    "two user messages": [USER, USER],
    "long": [SYSTEM, *(TURNS[:2] * 4), USER],
}


def smollm2():
    """The sample model's tokenizer, before and after its splitting rule is put right."""
    as_read = AutoTokenizer.from_pretrained(ROOT / ".models", gguf_file=SAMPLE)
    right = copy.deepcopy(as_read)
    right.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return as_read, right


def splitting(pre):
    """How a family splits texts before merging, by the name that GGUF files give it."""
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[pre]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def trained_vocabulary():
    """Tokens and merges of a small BPE, learnt from the texts and chats above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitting("llama-bpe")
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 2 + [SYSTEM["content"], *(turn["content"] for turn in TURNS), TRAINING, "1000 2024 2024 1000 12 12 12  \n    \n    "], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return list(model["vocab"]), [tuple(merge) for merge in model["merges"]]


def small_tokenizer(pre, tokens, merges):
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = splitting(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in QWEN3_CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in QWEN3_USER_DEFINED])
    if pre == "llama-bpe":
        first = QWEN3_CONTROL[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    return tokenizer


def write_gguf(path, pre, tokens, merges):
    """A GGUF file of metadata alone; nothing in it says whether texts begin with the first token, as in older files."""
    added = QWEN3_CONTROL + QWEN3_USER_DEFINED
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds += [gguf.TokenType.CONTROL] * len(QWEN3_CONTROL) + [gguf.TokenType.USER_DEFINED] * len(QWEN3_USER_DEFINED)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + added)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rendered(tokenizer, template_name, template, thinkings):
    for name, messages in CHATS.items():
        for add_generation_prompt in (True, False):
            for thinking in thinkings:
                extra = {} if thinking is None else {"enable_thinking": thinking}
                options = dict(chat_template=template, add_generation_prompt=add_generation_prompt, **extra)
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
                yield dict(
                    template=template_name,
                    name=name,
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    thinking=thinking,
                    text=text,
                    ids=ids,
                )


def write_lines(path, rows):
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n", encoding="utf-8")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    as_read, sample = smollm2()
    for text in TEXTS:
        if not any(character.isnumeric() for character in text):
            assert as_read.encode(text) == sample.encode(text), text

    tokens, merges = trained_vocabulary()
    small = {pre: small_tokenizer(pre, tokens, merges) for pre in ("gpt-2", "qwen2", "llama-bpe")}
    for pre in small:
        write_gguf(OUT / f"small_{pre}.gguf", pre, tokens, merges)
    small["qwen2"].save(str(OUT / "small_qwen3.tokenizer.json"), pretty=False)
    qwen3 = PreTrainedTokenizerFast(tokenizer_object=small["qwen2"], eos_token="<|im_end|>", pad_token="<|endoftext|>")

    chats = list(rendered(sample, "smollm2", sample.chat_template, [None]))
    chats += rendered(qwen3, "qwen3", (OUT / "qwen3_chat_template.jinja").read_text(encoding="utf-8"), [None, True, False])
    chats += rendered(qwen3, "variants", (OUT / "variants.jinja").read_text(encoding="utf-8"), [None])
    write_lines(OUT / "chats.json", chats)

    texts = []
    for name, tokenizer in {"smollm2": sample.backend_tokenizer, **small}.items():
        for text in TEXTS:
            plain, special = (tokenizer.encode(text, add_special_tokens=add).ids for add in (False, True))
            row = dict(tokenizer=name, text=text, ids=plain, ids_with_special=special)
            row["decoded"] = tokenizer.decode(plain, skip_special_tokens=False)
            row["decoded_without_special"] = tokenizer.decode(plain, skip_special_tokens=True)
            texts.append(row)
    write_lines(OUT / "texts.json", texts)


if __name__ == "__main__":
    main()
