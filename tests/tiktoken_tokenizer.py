"""A small tokenizer of Kimi-K2's kind: tiktoken ranks, Python code beside the model, no fast
tokenizer, Kimi's special ids."""

import base64
import json
from pathlib import Path

from tests.templates import KIMI_K2

SPECIAL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
}
MERGES = "th the he in an and er on el ll lo llo ello Hello re ed Red Gr ee een Green ue Bl Blue"
CODE = '''"""Tiktoken ranks as a transformers tokenizer."""

import base64

import tiktoken
from transformers import PreTrainedTokenizer


class TinyTikToken(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        with open(vocab_file, "rb") as f:
            pairs = [line.split() for line in f.read().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        special = {str(token): int(i) for i, token in (added_tokens_decoder or {}).items()}
        self.model = tiktoken.Encoding(
            "tiny",
            pat_str=r"\\s*[\\r\\n]+|\\s?\\w+|\\s?[^\\s\\w]+|\\s+",
            mergeable_ranks=ranks,
            special_tokens=special,
        )
        self.ranks, self.special = ranks, special
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks)

    def get_vocab(self):
        vocab = {t.decode("latin-1"): i for t, i in self.ranks.items()}
        return vocab | self.special

    def encode(self, text, allow_special_tokens=True, add_special_tokens=False, **_):
        allowed = "all" if allow_special_tokens else set()
        return self.model.encode(text, allowed_special=allowed, disallowed_special=())

    def decode(self, token_ids, skip_special_tokens=False, **_):
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special.values()]
        return self.model.decode(ids)

    def _tokenize(self, text, **_):
        return [self._convert_id_to_token(i) for i in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token)

    def _convert_id_to_token(self, index):
        return self.model.decode_single_token_bytes(index).decode("latin-1")

    def convert_tokens_to_string(self, tokens):
        return b"".join(t.encode("latin-1") for t in tokens).decode("utf-8", "replace")

    def save_vocabulary(self, folder, filename_prefix=None):
        return ()
'''


def make_tiktoken(folder: Path) -> Path:
    """Write the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [bytes([n]) for n in range(256)] + [word.encode() for word in MERGES.split()]
    lines = [f"{base64.b64encode(token).decode()} {n}" for n, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_tiny.py").write_text(CODE)
    (folder / "chat_template.jinja").write_text(KIMI_K2.source)
    config = {
        "tokenizer_class": "TinyTikToken",
        "auto_map": {"AutoTokenizer": ["tokenization_tiny.TinyTikToken", None]},
        "added_tokens_decoder": {
            str(i): {"content": token, "special": not token.endswith("think>")}
            for token, i in SPECIAL.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
