"""A language model in the Trainer of transformers: Encke is one callback."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from encke.integrations.transformers import EnckeCallback

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--policy", default="default")
parser.add_argument("--out", default="runs/transformers_trainer")
options = parser.parse_args()

set_seed(0)
# Random weights; for a model of your own: AutoModelForCausalLM.from_pretrained(...).
config = LlamaConfig(
    vocab_size=256,
    hidden_size=options.width,
    intermediate_size=2 * options.width,
    num_hidden_layers=options.layers,
    num_attention_heads=4,
    max_position_embeddings=128,
)
model = LlamaForCausalLM(config)
# Synthetic text: sequences that count upwards in steps of 1 to 4. Put your data set here.
starts, strides = torch.arange(512)[:, None], torch.arange(512)[:, None] % 4 + 1
texts = (starts + strides * torch.arange(128)) % 256
data = [{"input_ids": text, "labels": text} for text in texts]

arguments = TrainingArguments(
    options.out,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    learning_rate=1e-3,
    logging_steps=max(1, options.steps // 10),
    save_steps=max(1, options.steps // 2),
    bf16=torch.cuda.is_available(),
    report_to="none",  # "tensorboard", "mlflow" or "wandb" get Encke's figures too
)
callback = EnckeCallback(options.policy)  # <-- Encke
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback])
trainer.train()  # resume_from_checkpoint=True continues, with the policy's state

logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"loss {logged[0]:.3f} -> {logged[-1]:.3f}, ratio {callback.handle.report().ratio:.1f}")
