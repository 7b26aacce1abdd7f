"""Supervised fine-tuning with LoRA (or DoRA) in TRL's SFTTrainer: Encke is one callback."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from encke.integrations.transformers import EnckeCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dora", action="store_true")
parser.add_argument("--out", default="runs/sft_lora")
options = parser.parse_args()

set_seed(0)
# A tokenizer and random weights of our own; else AutoTokenizer and AutoModelForCausalLM.from_pretrained(...).
words = ["<pad>", "<eos>", *(str(number) for number in range(100)), "count", "from", "by", ":"]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<eos>",
)
tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=options.width,
    intermediate_size=2 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=4,
    pad_token_id=0,
    eos_token_id=1,
)
model = LlamaForCausalLM(config)
rows = []
for start in range(64):
    step = start % 3 + 1
    numbers = " ".join(str((start + step * i) % 100) for i in range(60))
    rows.append({"text": f"count from {start} by {step} : {numbers}"})

callback = EnckeCallback()  # <-- Encke
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-2,
        logging_steps=max(1, options.steps // 10),
        gradient_checkpointing=False,  # Encke is there instead
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear", use_dora=options.dora),
    callbacks=[callback],
)
trainer.train()

logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {logged[0]:.3f} -> {logged[-1]:.3f}, ratio {callback.handle.report().ratio:.1f}")
