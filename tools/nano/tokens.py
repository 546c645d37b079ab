"""The tokenizer: byte-level BPE with single digits, and how a conversation becomes tokens."""

from collections.abc import Iterable, Sequence

import attrs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [PAD, SYSTEM, USER, ASSISTANT, END]
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "text": ""}
# A digit stands alone, so that numbers are read digit by digit; ", " between two numbers is one token.
_PIECES = r", (?=\p{N})|\p{N}|'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\n+| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set role = 'system' if message['role'] == 'developer' else message['role'] %}"
    "{%- if role not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('triolet-nano knows the roles system, user and assistant; got ' + role) }}"
    "{%- endif %}"
    "{{- '<|' + role + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


@attrs.frozen(kw_only=True)
class Message:
    """One turn; the role "text" stands for text without turns."""

    role: str
    content: str


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE; all 256 bytes are in it, so there is no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(
    tokenizer: Tokenizer, batch: Sequence[Sequence[Message]], user_weight: float
) -> list[tuple[list[int], list[float]]]:
    """Convert conversations to tokens, with the weight of each token in the loss.

    Args:
        user_weight: weight of what users and system turns say; the assistant's words and its end token weigh 1.
    """
    flat = [message for conversation in batch for message in conversation]
    encoded = iter(tokenizer.encode_batch([f"{ROLES[m.role]}{m.content}{END}" for m in flat]))
    rows = []
    for conversation in batch:
        tokens: list[int] = []
        weights: list[float] = []
        for message in conversation:
            ids = next(encoded).ids
            own = message.role in ("assistant", "text")
            tokens += ids
            weights += [0.0 if message.role == "assistant" else user_weight] + [
                1.0 if own else user_weight
            ] * (len(ids) - 1)
        rows.append((tokens, weights))
    return rows
