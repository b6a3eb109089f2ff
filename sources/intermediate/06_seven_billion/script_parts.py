"""What `finetune.py` has before and after the lesson's own functions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_IMPORTS = """# pip install VERSIONS
# one card: python finetune.py [model]
# two, and 32 texts an update: torchrun --nproc-per-node 2 finetune.py [model]
import json
import os
import random
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForSeq2Seq,
                          Trainer, TrainingArguments, set_seed)
"""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
MAIN = """if __name__ == "__main__":
    base, first = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], int(os.environ.get("RANK", 0)) == 0
    with open("pairs.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    pairs = [(row["prompt"], row["answer"]) for row in rows]
    random.Random(0).shuffle(pairs)  # the first fifth is held out
    trainer = finetune(base, pairs, "adapter", 1024, num_train_epochs=3, learning_rate=2e-4,
                       per_device_train_batch_size=4, gradient_accumulation_steps=4, save_strategy="epoch",
                       per_device_eval_batch_size=1,  # by default 8 texts are evaluated at once
                       ddp_find_unused_parameters=False, use_cpu=not torch.cuda.is_available())
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B and",
          "4 texts of 1,024 tokens, as this file stands: PEAK_GB GB")
    if first:
        model, tokenizer = trainer.model.eval(), AutoTokenizer.from_pretrained(base)
        asked = tokenizer(pairs[0][0], return_tensors="pt").input_ids.to(model.device)
        print("an answer:", tokenizer.decode(model.generate(input_ids=asked, max_new_tokens=60)[0]))
        merge(base, "adapter", "merged")  # in the host's memory: 2 bytes a parameter
"""


def imports() -> str:
    """The script's first lines, with the versions that are installed here."""
    return _IMPORTS.replace("VERSIONS", pinned())


def pinned() -> str:
    """The libraries with the versions that are installed here, as pip takes them."""
    return " ".join(map(_pinned, LIBRARIES))


def _pinned(library: str) -> str:
    try:
        return f"{library}=={version(library).partition('+')[0]}"
    except PackageNotFoundError:
        return library
