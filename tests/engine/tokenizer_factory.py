"""Small tokenizers for tests: byte-level, SentencePiece-like with byte fallback, and WordPiece."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 and 678,90!",
    "def main():\n    return [x for x in range(10)]\n\n\n",
    "Grüße aus Köln, naïve café, señor, Ångström — “quotes” … don't we'll I'm",
    "日本語のテキスト 中文字符测试 한국어 문장 🎉🎊 👩‍👩‍👧 русский текст",
    "    four spaces\tand tabs\r\nand lines   \n",
] * 3
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>"]


@lru_cache
def byte_level(extra: int = 120) -> Tokenizer:
    """All 256 bytes and `extra` merges; ids 0 to 3 are `SPECIALS`, id 4 is the added token <tool>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIALS) + extra,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁ß", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


@lru_cache
def sentencepiece_vocabulary(size: int = 460) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as a GGUF file of a Llama tokenizer has them (best merges have the best scores)."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    ids = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    single = [text for text, _ in ids if len(text) == 1]
    merged = [text for text, _ in ids if len(text) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(single))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(single))]
    return tokens, scores, types


@lru_cache
def word_piece() -> Tokenizer:
    """Words and pieces with `##`, decoded with clean-up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
