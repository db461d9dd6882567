"""Which tokens of a conversation are supervised. Rows are written as text, what counts in capitals, a counted `;` as `END`."""

import pytest
import transformers
from chatting import END, MARKED, PLAIN, THINKING, chat, spoken, template, word_tokenizer
from packaging.version import Version
from rig import VOCAB
from transformers import AutoTokenizer
from xpress_drafter.cli import TINY
from xpress_drafter.trainer import tokenize_chat
from xpress_drafter.trainer.chat_rows import answer_turn, join_turns, prompt_ids


TWO_TURNS = chat("w8 w9", "w10 w11", "w12", "w13", system="w14")


def rows_of(chat_template: str, messages=TWO_TURNS, **template_args) -> list[str]:
    """The rows as text; the end-of-turn tokens are shown as `END` where they count."""
    tokenizer = word_tokenizer(chat_template)
    rows = tokenize_chat(tokenizer, messages, **template_args)
    for row in rows:
        row["input_ids"] = [VOCAB if counts and i == END else i for i, counts in zip(*row.values())]
    tokenizer.add_tokens(["END"])
    return [spoken(tokenizer, row) for row in rows]


SUPERVISED = "sys: w14 ; user: w8 w9 ; bot: W10 W11 END user: w12 ; bot: W13 END"


OLD = Version(transformers.__version__) < Version("5.24")
spans = pytest.mark.skipif(OLD, reason="Transformers lost marked spans that begin with a space; such a row is refused")


@pytest.mark.parametrize("chat_template", [PLAIN, pytest.param(MARKED, marks=spans)])
def test_answers_and_their_ends_are_supervised(chat_template):
    """In both turns; the system prompt, the headers and the user are not."""
    assert rows_of(chat_template) == [SUPERVISED]


def test_positions_by_hand():
    """(position, token, supervised) of a two-turn conversation of 15 tokens."""
    (row,) = tokenize_chat(word_tokenizer(), chat("w8 w9", "w10 w11", "w12", "w13 w14"))
    table = [
        (0, "user:", 0), (1, "w8", 0), (2, "w9", 0), (3, ";", 0), (4, "bot:", 0), (5, "w10", 1), (6, "w11", 1), (7, ";", 1),
        (8, "user:", 0), (9, "w12", 0), (10, ";", 0), (11, "bot:", 0), (12, "w13", 1), (13, "w14", 1), (14, ";", 1),
    ]  # fmt: skip
    words = word_tokenizer().convert_ids_to_tokens(row["input_ids"])
    assert list(zip(range(15), words, row["loss_mask"])) == table


MARKERS = {
    "around the header too": "{% generation %} bot: {{ message.content }} ;{% endgeneration %}",
    "without the end": " bot:{% generation %} {{ message.content }}{% endgeneration %} ;",
    "and what comes behind the end": " bot:{% generation %} {{ message.content }} ; |{% endgeneration %}",
    "around an empty think block": " bot:{% generation %} <think> </think> {{ message.content }} ;{% endgeneration %}",
}


@spans
@pytest.mark.parametrize("answer", MARKERS.values(), ids=MARKERS)
def test_markers_that_mark_too_much_or_too_little(answer):
    """Are trimmed to what the target would have said."""
    chat_template = template("").replace(" bot:{% else %} bot:", answer + "{% else %}" + answer)
    expected = SUPERVISED.replace("END", "END |") if "|" in answer else SUPERVISED
    expected = expected.replace("bot:", "bot: <think> </think>") if "think" in answer else expected
    assert rows_of(chat_template) == [expected]


def test_history_that_a_template_rewrites_starts_another_row():
    """As with Qwen3, which shows the model no think blocks of earlier turns: each row is what generation would see."""
    assert rows_of(THINKING, chat("w8", "w9", "w10", "w11")) == [
        "user: w8 ; bot: <think> </think> W9 END",
        "user: w8 ; bot: w9 ; | user: w10 ; bot: <think> </think> W11 END",
    ]


@spans
@pytest.mark.parametrize("end", ["{% endgeneration %} ;", " ;{% endgeneration %}"], ids=["end outside", "end inside"])
def test_marked_history_that_a_template_rewrites_starts_another_row(end):
    """The markers of a turn count where it is the last one, with its thought, and in no history; joined where they can be."""
    marked = template(
        "{% generation %} {{ message.content }}" + end,
        history="{% generation %} {{ message.content.split('</think> ')[-1] }}" + end,
        after=" |",
    )
    assert rows_of(marked, chat("w8", "<think> w9 </think> w10", "w11", "w12", "w13", "w14")) == [
        "user: w8 ; bot: <THINK> W9 </THINK> W10 END",
        "user: w8 ; bot: w10 ; | user: w11 ; bot: W12 END | user: w13 ; bot: W14 END",
    ]
    assert rows_of(marked, chat("w8", "w10", "w11", "w12")) == ["user: w8 ; bot: W10 END | user: w11 ; bot: W12 END |"]
    assert rows_of(marked, chat("w8", "<think> w9 </think> w10")) == ["user: w8 ; bot: <THINK> W9 </THINK> W10 END |"]


def test_thinking_switched_off_in_the_generation_prompt():
    """Its empty think block is the template's, not the target's."""
    one_turn = rows_of(THINKING, chat("w8", "w9"), enable_thinking=False)
    assert one_turn == ["user: w8 ; bot: <think> </think> W9 END"]


def test_thoughts_are_supervised_and_empty_ones_in_the_data_are_not():
    assert rows_of(PLAIN, chat("w8", "<think> w9 </think> w10")) == ["user: w8 ; bot: <THINK> W9 </THINK> W10 END"]
    assert rows_of(PLAIN, chat("w8", "<think>\n\n</think>\n\nw10")) == ["user: w8 ; bot: <think> </think> W10 END"]


UNCLEAR = {
    "another header than the prompt's": (template(" {{ message.content }} ;", header=" |"), "begins .* where the prompt has"),
    "an answer that the template changes": (template(" {{ message.content | replace('w', 'v') }} ;"), "does not hold the answer's own text 'w9'"),
    "no end of turn": (template(" {{ message.content }}"), r"ends .*, expected one of the end-of-turn tokens \[';'\]"),
    "markers and no end of turn": (template("{% generation %} {{ message.content }}{% endgeneration %} |"), "marks 'w9' as an answer, expected one"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=spans if "markers" in name else ()) for name in UNCLEAR])
def test_templates_that_leave_the_mask_open_stop(name):
    chat_template, message = UNCLEAR[name]
    with pytest.raises(ValueError, match=message):
        tokenize_chat(word_tokenizer(chat_template), chat("w8", "w9"))


def test_a_token_across_header_and_answer_stops():
    """The prompt for generation would end inside it, so no generation would ever see these ids."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match="cannot be told from the template's"):
        tokenize_chat(tokenizer, chat("How many?", "the eggs"))


@spans
def test_masks_that_are_nothing_or_everything_stop():
    silent = template("{% generation %}{% endgeneration %} {{ message.content }} ;")
    with pytest.raises(ValueError, match="has 0 supervised of 6 tokens, expected the answers' tokens and no others"):
        tokenize_chat(word_tokenizer(silent), chat("w8", "w9"))
    all_marked = "{% generation %}{% for m in messages %} {{ m.content }}{% endfor %} ;{% endgeneration %}"
    with pytest.raises(ValueError, match="has 3 supervised of 3 tokens"):
        tokenize_chat(word_tokenizer(all_marked), chat("w8", "w9"))


def test_what_else_is_refused():
    with pytest.raises(ValueError, match=r"the roles are \['user'\], expected an 'assistant'"):
        tokenize_chat(word_tokenizer(), chat("w8"))
    endless = word_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="has no `eos_token`, expected one, or `end_tokens`"):
        tokenize_chat(endless, chat("w8", "w9"))
    assert tokenize_chat(endless, chat("w8", "w9"), end_tokens={END})[0]["loss_mask"] == [0, 0, 0, 0, 1, 1]


def test_the_target_s_own_answers_are_supervised_as_they_came():
    """Unfinished ones too; a think block without a thought is not; the next turn goes on in the same row."""
    tokenizer = word_tokenizer()
    ids = tokenizer("w8 w9 <think> </think> w10", add_special_tokens=False)["input_ids"]
    first = answer_turn(tokenizer, prompt_ids(tokenizer, chat("w11")), ids[:2])
    assert first.mask == [1, 1]
    second = answer_turn(tokenizer, prompt_ids(tokenizer, chat("w11", "w8 w9", "w12")), ids[2:])
    assert second.mask == [0, 0, 1]
    (row,) = join_turns([first, second])
    assert spoken(tokenizer, row) == "user: w11 ; bot: W8 W9 ; user: w12 ; bot: <think> </think> W10"
    assert len(join_turns([first, second._replace(prompt=second.prompt[1:])])) == 2
