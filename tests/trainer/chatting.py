"""Chat templates and a tokenizer of whole words, so that a test can write rows as text."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


# Ids of the template's own words first; a model of `rig` has 96 tokens, the last of them the mask.
WORDS = ["<pad>", ";", "sys:", "user:", "bot:", "<think>", "</think>", "|", *(f"w{i}" for i in range(8, 96))]
END = WORDS.index(";")


def template(answer: str, header: str = " bot:", after: str = "", history: str | None = None) -> str:
    """A template: `answer` is how the last message is written if it is the assistant's, `history` how the ones before."""
    return (
        "{% for message in messages %}"
        "{% if message.role != 'assistant' %} {{ 'sys:' if message.role == 'system' else 'user:' }} {{ message.content }} ;"
        "{% elif loop.last %} bot:" + answer + after + "{% else %} bot:" + (history or answer) + after + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}"
    )  # fmt: skip


PLAIN = template(" {{ message.content }} ;")
MARKED = template("{% generation %} {{ message.content }} ;{% endgeneration %}")
# As Qwen3: an empty think block before the last answer, none in the history, and a mark behind every answer.
THINKING = template(
    " <think> </think> {{ message.content }} ;",
    header=" bot:{% if enable_thinking is defined and not enable_thinking %} <think> </think>{% endif %}",
    after=" |",
    history=" {{ message.content }} ;",
)


def word_tokenizer(chat_template: str = PLAIN) -> PreTrainedTokenizerFast:
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token=";")
    fast.chat_template = chat_template
    return fast


def chat(*contents: str, system: str | None = None) -> list[dict]:
    """Turns of user and assistant in turn, behind a system prompt where there is one."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def spoken(tokenizer, row: dict) -> str:
    """A row as text, its supervised tokens in capitals: every position and whether it counts."""
    words = tokenizer.convert_ids_to_tokens(row["input_ids"])
    return " ".join(word.upper() if counts else word for word, counts in zip(words, row["loss_mask"], strict=True))
