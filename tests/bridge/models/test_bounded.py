"""USR-8: a chat template without an end, or with too much of it, is refused by name."""

import pytest

from rl_bridge.models import template_limits as limits
from rl_bridge.models.chat_templates import rendered, use_template
from rl_bridge.models.small import character_tokenizer
from rl_bridge.models.template_limits import bounded

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% generation %}{{ 'a' * 3000000000 }}{% endgeneration %}"
ASKED = [{"role": "user", "content": "1"}]


@pytest.fixture
def tokenizer():
    return character_tokenizer("0123456789")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, r"did not end within 0\.1 s"),
        ("{{ 9 ** (9 ** 9) }}", "computes a power: an exponent in a template is a number up to 64"),
        (HUGE, "computes with 3000000000; a number in a template is at most 10000000"),
        ("{{ 'a' * 90 }}", "wrote 90 characters of one conversation; 80 is the most"),
    ],
)
def test_a_template_is_bounded_in_a_folder_and_in_a_file(tokenizer, tmp_path, monkeypatch, template, message):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    monkeypatch.setattr(limits, "CHARACTERS", 80)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"the chat template of .* {message}"):
        rendered(tokenizer, ASKED, generation_prompt=False)
    (tmp_path / "template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        use_template(tokenizer, tmp_path / "template.jinja")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(tokenizer, ASKED, generation_prompt=False) == "1"


def test_an_endless_template_is_waited_for_once_not_for_every_row(tokenizer, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    tokenizer.chat_template = ENDLESS + "{# rows #}"
    for _ in range(2):
        with pytest.raises(ValueError, match="did not end within"):
            rendered(tokenizer, ASKED, generation_prompt=False)
        monkeypatch.setattr(limits, "_begin", None)  # nothing is rendered again


def test_a_deadline_that_passes_at_the_very_end_is_raised_there_and_nowhere_else(monkeypatch):
    """However the clock and the rendering meet: an answer or the refusal, and no exception later."""
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    monkeypatch.setattr(limits, "_LOOK", 0.0)
    seen = set()
    for number in range(300):
        try:
            seen.add(bounded(lambda n=number: str(sum(range(n * 100)))[:0], "", "x"))
        except ValueError:
            seen.add("refused")
    assert seen <= {"", "refused"} and sum(range(100_000)) == 4999950000
