"""A Hugging Face Trainer: its model is put within the budget before the Trainer sees it."""

import tempfile

import torch

import outcore

try:
    import accelerate  # noqa: F401 - the Trainer does
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
except ImportError as error:
    said = f"this example needs transformers and accelerate ({error})"
    raise SystemExit(f"{said}; type: pip install transformers accelerate") from None

torch.manual_seed(0)
config = BertConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, num_labels=2
)
net = BertForSequenceClassification(config)
tokens = torch.randint(500, (64, 64))
data = [{"input_ids": row, "labels": int(row[0]) % 2} for row in tokens]
first = {"input_ids": tokens[:16], "labels": torch.zeros(16, dtype=torch.long)}

outcore.within(net, (), first, memory="24MiB")  # the only new line

arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=16,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
Trainer(net, arguments, train_dataset=data).train()
