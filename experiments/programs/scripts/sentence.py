"""Fit a model of sentence-transformers."""

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, BertTokenizerFast

Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
BertTokenizerFast("vocab.txt").save_pretrained("bert")
BertModel(
    BertConfig(
        vocab_size=13,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
).save_pretrained("bert")
words = models.Transformer("bert", max_seq_length=16)
pooling = models.Pooling(32)
model = SentenceTransformer(modules=[words, pooling], device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    features = model.tokenize(["a b c", "d e"])
    inputs = {name: features[name].cuda() for name in ("input_ids", "attention_mask")}
    model(inputs)["sentence_embedding"].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.encode(["a b", "c d"], show_progress_bar=False)
print("true steps", 5)
