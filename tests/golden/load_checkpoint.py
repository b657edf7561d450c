"""Loads a checkpoint folder in Hugging Face transformers and prints what the test beside it compares, as JSON.

    python load_checkpoint.py FOLDER TEXT

Prints {"ids": token ids of TEXT, "logits": of the last position, "missing", "unexpected" and "mismatched": weights, "warnings": what was
said on the way}; exits with 3 when transformers is not installed.
"""

import json
import logging
import sys
import warnings

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    sys.exit(3)

folder, text = sys.argv[1:]
said = []


class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


# transformers' own logger does not hand its records on to the root's.
logging.getLogger("transformers").addHandler(Listener(logging.WARNING))
warnings.showwarning = lambda message, *_: said.append(str(message))
warnings.simplefilter("always")
tokenizer = AutoTokenizer.from_pretrained(folder)
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
ids = tokenizer(text, return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(ids).logits[0, -1]
keys = {name: sorted(info[f"{name}_keys"]) for name in ("missing", "unexpected")}
mismatched = sorted(str(key) for key in info["mismatched_keys"])
print(json.dumps({"ids": ids[0].tolist(), "logits": logits.tolist(), "mismatched": mismatched, "warnings": said, **keys}))
