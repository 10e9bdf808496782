"""Chat templates: of a file, and of the model's folder."""

from tests.bridge.bad_inputs.case import SFT, Case, changed
from tests.bridge.bad_inputs.data import CHAT, text, together
from tests.bridge.bad_inputs.inputs import TEMPLATE, write_rows

KIND = "chat templates"
# Name, text, what has to be said besides the template's name; None: it is right.
TEXTS = [
    ("empty", "", ("empty|none",)),
    ("blank", " \n ", ("empty|nothing",)),
    ("an open loop", "{% for m in messages %}{{ m }}", ("line 1",)),
    ("an open brace", "a\n{{ messages", ("line 2",)),
    ("an unknown tag", "\n\n{% fro m in messages %}", ("line 3", "fro")),
    ("an unknown filter", "{{ messages | shout }}", ("shout",)),
    ("an unknown function", "{{ shout(messages) }}", ("shout",)),
    ("no field of a message", "{% for m in messages %}{{ m.role.name.first }}{% endfor %}", ()),
    ("divides by zero", "{{ 1 / 0 }}", ("zero",)),
    ("adds text and number", "{{ 'a' + 1 }}", ()),
    ("refuses", "{{ raise_exception('only on Sundays') }}", ("only on Sundays",)),
    ("refuses users", "{% for m in messages %}{% if m.role == 'user' %}{{ raise_exception('no users') }}{% endif %}{% endfor %}", ("no users",)),
    ("a huge range", "{% for i in range(999999999) %}a{% endfor %}", ()),
    ("nested ranges", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", ()),
    ("a long text", "{{ 'a' * 3000000000 }}", ()),
    ("a power", "{{ 9 ** (9 ** 9) }}", ("power",)),
    ("an endless macro", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ()),
    ("imports a file", "{% include 'sums.jsonl' %}", ()),
    ("reaches for Python", "{{ ''.__class__.__mro__[1].__subclasses__() }}", ()),
    ("reads the environment", "{{ cycler.__init__.__globals__.os.environ }}", ()),
    ("says nothing of the assistant", "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", ()),
    ("says nothing of the messages", "hello", ()),
    ("changes earlier text", "{{ messages | length }}" + TEMPLATE, ("changes earlier",)),
    ("the last message alone", "{{ messages[-1].content }}", ("changes earlier",)),
    ("right: a character that the tokenizer always drops", "\u20ac" + TEMPLATE, None),
    ("not UTF-8", "é{{ messages }}".encode("latin-1"), ("UTF-8",)),
    ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), ("UTF-8",)),
    ("right: another", TEMPLATE.replace("A:", "B:"), None),
    ("right: with a comment", "{# ours #}" + TEMPLATE, None),
]  # fmt: skip


def chats(folder) -> None:
    write_rows(folder / "chats.jsonl", CHAT)


def cases() -> list[Case]:
    command = changed(SFT, "--data chats.jsonl")
    found = []
    for name, content, says in TEXTS:
        right = says is None
        found.append(
            Case(
                kind=KIND,
                name=f"a file: {name}",
                command=changed(command, "--chat-template mine.jinja"),
                says=() if right else ("mine.jinja", *says),
                works=right,
                damage=together(chats, text("mine.jinja", content)),
            )
        )
        found.append(
            Case(
                kind=KIND,
                name=f"of the model: {name}",
                command=command,
                says=() if right else ("tinyq", "chat template|template", *says),
                works=right,
                damage=together(chats, text("tinyq/chat_template.jinja", content)),
            )
        )
    absent = [
        ("absent", "gone.jinja", None, ("gone.jinja", "no such chat template")),
        ("a folder", "tinyq", None, ("tinyq", "chat template")),
        ("empty name", "''", None, ("chat template|chat-template",)),
    ]
    for name, file, damage, says in absent:
        told = changed(command, f"--chat-template {file}")
        found.append(Case(kind=KIND, name=f"path: {name}", command=told, says=says, damage=damage or chats))
    gone = together(chats, lambda folder: (folder / "tinyq" / "chat_template.jinja").unlink())
    found.append(
        Case(
            kind=KIND,
            name="the model has none",
            command=command,
            says=("chat template", "--chat-template"),
            damage=gone,
        )
    )
    return found
