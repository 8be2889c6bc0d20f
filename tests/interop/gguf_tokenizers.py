"""The two kinds of tokenizers that GGUF files can have, and texts that tell tokenizers apart."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from megabit.data.tokenizer import train_tokenizer
from megabit.interop.gguf_tokenizer import LLAMA_3_PATTERN

CORPUS = [
    "It's the cat's hat, and they'll say we've 1234 hats.\n\n\tDon't 你好 naïve café 🙂🙂!!\n" * 3,
    "  indented   code:\r\n    x = y[0] + 42;  // ÄÖÜ ﬁ\n",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a  b   c    \n\n\n  d",
    "\t\ttabs and\u00a0no-break\u2003spaces \u200d",
    "I'M WE'LL they're 12345678 3.14 ...---...",
    "日本語のテキスト и кириллица العربية हिन्दी ไทย",
    "🚀 👩‍👩‍👧‍👦 \U0001f3f4 e\u0301",
    "trailing space \nand newline\n",
    "\x00\x01\x7f",
]


def own_tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 400)


def llama_3_tokenizer() -> Tokenizer:
    """As Llama 3's file describes one, with a small vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return tokenizer
