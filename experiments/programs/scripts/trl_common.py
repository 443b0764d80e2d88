"""A small model and tokenizer for the trainers of TRL."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(97))]


def tokenizer():
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model():
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


QUIET = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "bf16": False,
}
