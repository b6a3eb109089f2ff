"""What surrounds the lesson's own functions in `offload.py`: imports, its `Trainer`, and the run."""

from __future__ import annotations

__all__ = ["IMPORTS", "PACKED", "TRAINER", "run_text"]

IMPORTS = """# pip install torch transformers accelerate "deepspeed>=0.19"      texts.txt: one text a line
# torchrun --nproc-per-node 1 offload.py [model]
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

if Version(version("deepspeed")) < Version("0.19.0"):
    sys.exit("DeepSpeed before 0.19 can drop gradients of micro-batches with offload: pip install 'deepspeed>=0.19'")
if torch.cuda.is_available():  # compiled at its first start by a C++ compiler; 0.19.0 needs CUDA_HOME as well, 0.19.8 does not
    from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam
else:
    from torch.optim import AdamW as Adam
"""

TRAINER = """class ByBlock(Trainer):
    def create_optimizer(self, model=None):
        groups = [{"params": group} for group in by_block(self.model)]
        self.optimizer = Adam(groups, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
        return self.optimizer
"""

PACKED = """def packed(tokenizer, texts, length):
    # Texts one after the other, cut into pieces of one length: no padding.
    eos = tokenizer.eos_token_id
    ids = [token for text in texts for token in [*tokenizer(text).input_ids, eos]]
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]
"""

RUN = """if __name__ == "__main__":
    base, on_gpu = (sys.argv[1:] or ["meta-llama/Llama-2-7b-hf"])[0], torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(base)
    pieces = packed(tokenizer, Path("texts.txt").read_text().splitlines(), LENGTH)
    arguments = TrainingArguments(  # first: what is loaded after it knows of DeepSpeed
        "tuned", deepspeed=zero_offload(on_gpu), bf16=True, use_cpu=not on_gpu, learning_rate=1e-5, num_train_epochs=1,
        per_device_train_batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing=True, logging_steps=1,
        save_strategy="epoch", save_only_model=True,  # False: to resume, 12 bytes a parameter more on disk
        report_to="none")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    ByBlock(model, arguments, default_data_collator, pieces, processing_class=tokenizer).train()
    print(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB (allocated); simulated for Llama-2-7B: PEAK GB, buffers apart")
"""


def run_text(length: int, peak_gb: float) -> str:
    """The script's last part, for texts of `length` tokens; it prints its peak beside `peak_gb`."""
    return RUN.replace("LENGTH", str(length)).replace("PEAK", f"{peak_gb:.1f}")
