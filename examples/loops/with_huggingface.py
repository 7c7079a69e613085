"""A Hugging Face model: the memory of its activations within a budget, the training loop theirs or yours."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import outcore

config = BertConfig(
    vocab_size=500, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, num_labels=2
)
net = BertForSequenceClassification(config)
tokens, labels = torch.randint(500, (16, 64)), torch.randint(2, (16,))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

outcore.within(net, (), {"input_ids": tokens, "labels": labels}, memory="24MiB")  # the only new line

for step in range(3):
    optimizer.zero_grad()
    loss = net(input_ids=tokens, labels=labels).loss
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
