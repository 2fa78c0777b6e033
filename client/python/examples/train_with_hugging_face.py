"""Trains a tiny BERT with Hugging Face's Trainer.

python -m gradsync.run --nproc-per-node 2 train_with_hugging_face.py gradsync FILE
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

backend, file = sys.argv[1:]  # "gradsync" or "gloo"; the parameters are saved in the file
torch.distributed.init_process_group(backend)  # before TrainingArguments: see ddp_backend
torch.manual_seed(1)

# Does a sentence of 12 words contain the word 7?
words = torch.randint(32, (256, 12))
data = [{"input_ids": row, "labels": int(7 in row)} for row in words]
size = dict(vocab_size=32, hidden_size=32, intermediate_size=64, max_position_embeddings=12)
config = AutoConfig.for_model("bert", num_hidden_layers=2, num_attention_heads=2, **size)
model = AutoModelForSequenceClassification.from_config(config)
arguments = TrainingArguments(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-3,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:64])
trainer.train()
print(trainer.evaluate())
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), file)
torch.distributed.destroy_process_group()
