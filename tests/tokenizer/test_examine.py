"""Unknown tokenizers and chat templates are tried in a process with limits; the hostile ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.data.template import chat_format, template_from_file
from graftune.errors import GraftuneError
from graftune.exporting.write import export
from graftune.settings.sections import DataConfig
from graftune.tokenizer import ChatTemplate, examine, from_folder, from_gguf
from tests.support import tiny
from tests.support.thorough import THOROUGH

SHIPPED = sorted((Path(__file__).parents[1] / "fixtures" / "chat_templates").glob("*.jinja"))
LOOP = "{% for a in range(99999) %}"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def doubling(start: str, then: str) -> str:
    return DOUBLING.replace("START", start).replace("NEXT", then)


LARGE = {
    "joined": doubling("'ab'", "ns.x ~ ns.x"),
    "kept in a block": "{% set x %}" + LOOP + "{{ 'a' * (16000000 + a % 7) }}{% endfor %}{% endset %}",
    "kept in a macro": "{% macro f() %}" + LOOP + "{{ 'a' * (16000000 + a % 7) }}{% endfor %}{% endmacro %}{{ f() }}",
    "kept in a list": "{{ range(99999) | map('string') | map('center', 16000000) | list | length }}",
    "kept to be sorted": "{{ range(99999) | map('string') | map('center', 16000000) | sort | length }}",
    "added": doubling("'ab'", "ns.x + ns.x"),
    "many terms": "{% set x = 'a' * 15000000 %}{{ X }}".replace("X", " + ".join("x" * 100)),
    "many pieces": "{% set x = 'a' * 15000000 %}{{ X }}".replace("X", " ~ ".join("x" * 100)),
    "multiplied": "{{ 'ab' * 10**9 }}",
    "multiplied from the left": "{{ 1000000000 * [1] }}",
    "lists": doubling("[1]", "ns.x + ns.x"),
    "padded": "{{ 'a' | center(10000000000) }}",
    "padded by a method": "{{ 'a'.ljust(10000000000) }}",
    "zeros": "{{ 'a'.zfill(10000000000) }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list }}",
    "indented": "{{ 'a\\nb' | indent(1000000000) }}",
    "indented json": "{{ [[1]] | tojson(indent=1000000000) }}",
    "tabs": "{{ 'a\\tb'.expandtabs(1000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format with a width": "{{ '%*d' % (1000000000, 1) }}",
    "a format filter": "{{ '%1000000000d' | format(1) }}",
    "a format method": "{{ '{:1000000000}'.format(1) }}",
    "a format in a format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "joins": doubling("'ab'", "ns.x | join(ns.x)"),
    "joins by a method": doubling("'ab'", "ns.x.join(ns.x)"),
    "replaced": doubling("'ab'", "ns.x.replace('', ns.x)"),
    "replaced by a filter": doubling("'ab'", "ns.x | replace('a', ns.x)"),
    "many widths": "{{ ('{:16000000}' * 200).format(*range(200)) }}",
    "many widths of numbers": "{{ ('%16000000d' * 200) % ((1,) * 200) }}",
    "a precision": "{{ '%.1000000000f' % 1.5 }}",
    "a precision among values": "{{ '%.*f' % (1000000000, 1.5) }}",
    "a width that is a text": "{{ '{:{w}}'.format(1, w='>1000000000') }}",
    "a width from a list": "{{ '{:{w[0]}}'.format(1, w=[1000000000]) }}",
    "a width behind a key": "{{ '%(((a)))1000000000d' % {'((a))': 1} }}",
    "a value in many fields": "{{ ('{0}' * 5000).format('a' * 60000) }}",
    "a value in many fields by its name": "{{ ('%(a)s' * 3000) % {'a': 'a' * 60000} }}",
    "a list that becomes a text": "{{ ([1] * 900) | replace('', 'a' * 60000) }}",
    "replaced by names": "{{ ('a' * 60000) | replace(new='b' * 60000, old='a') }}",
    "parted json": "{{ ([1] * 900) | tojson(separators=('a' * 60000, ':')) }}",
    "nested and indented json": doubling("1", "[ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson(indent=16000) }}"),
    "dates": "{{ strftime_now('%c' * 9999) }}",
    "output": "{% set x = 'a' * 15000000 %}{{ x }}{{ x }}",
    "a macro's output": "{% macro f() %}{% set x = 'a' * 15000000 %}{{ x }}{{ x }}{% endmacro %}{{ f() }}",
}
SLOW = {
    "nested loops": LOOP * 2 + "{% endfor %}{% endfor %}",
    "loops with output": LOOP * 2 + "x{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) if a is odd %}{% for b in range(99999) if b == a %}{% endfor %}"
    "{% endfor %}",
    "loops that ask for their length": LOOP * 2 + "{% if loop.length == loop.revindex %}{% endif %}"
    "{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro f() %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endmacro %}{{ f() }}",
    "a macro that calls itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for x in [3] recursive %}{{ loop([3, 3]) if loop.depth < 60 }}{% endfor %}",
    "loops in a set block": "{% set x %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endset %}",
    "tests by a filter": "{{ range(99999) | reject('in', range(-998, 1) | list) | list | length }}",
    "tests that choose": "{{ range(99999) | select('in', range(-998, 1) | list) | list | length }}",
    "filters in a loop": LOOP + "{{ range(1000) | map('string') | sort | first }}{% endfor %}",
    "loops in a generation tag": "{% generation %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endgeneration %}",
    "lists of lists": doubling("[1]", "[ns.x, ns.x]"),
    "tuples of tuples": doubling("(1,)", "(ns.x, ns.x)"),
    "tables of tables": doubling("'a'", "{'a': ns.x, 'b': ns.x}"),
    "tables by call": doubling("'a'", "dict(a=ns.x, b=ns.x)"),
    "powers": "{{ 10**(10**10) }}",
    "powers of powers": doubling("7", "ns.x ** 60"),
    "squares": doubling("7", "ns.x * ns.x"),
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "paths of attributes": "{{ ('a' * 9999) | map(attribute='0' ~ '.0' * 9999) | list | length }}",
    "searched backwards": "{{ ('a' * 60000).rfind('ab' ~ 'a' * 30000) }}",
    "digits": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "lorem ipsum": "{{ lipsum(n=1000000000) }}",
}
# Each takes one or two seconds of CPU time, and all of them meet the same limits.
QUICK = ("nested loops", "powers")
QUICK_LARGE = list(LARGE)[::5]


def untrusted(source: str) -> examine.Untrusted:
    return examine.Untrusted("template", source, "my.jinja")


@pytest.mark.parametrize("kind", SLOW if THOROUGH else QUICK)
def test_a_template_that_hangs_is_refused(kind: str) -> None:
    with pytest.raises(GraftuneError, match=r"my\.jinja: the chat template is refused: it takes") as error:
        examine.check(untrusted(SLOW[kind]))
    assert "\n" not in str(error.value)


def test_a_template_that_exhausts_memory_is_refused() -> None:
    """One process tries all of them, each with limits of its own, until one takes too long."""
    kinds = list(LARGE) if THOROUGH else QUICK_LARGE
    files, faults = [untrusted(LARGE[kind]) for kind in kinds], list[str]()
    while len(faults) < len(files):
        faults += examine.faults_of(files[len(faults) :])
    reasons = ("exhausts the memory", "characters for a conversation", "takes too long")
    passed = {kind: fault for kind, fault in zip(kinds, faults, strict=True) if not any(r in fault for r in reasons)}
    assert not passed and sum("takes too long" in fault for fault in faults) < 5


def test_a_crash_is_a_refusal_of_the_text_that_caused_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library in place of the real one aborts the process; texts before it were examined."""
    (tmp_path / "tokenizers.py").write_text(
        "import os\nclass Tokenizer:\n    def from_str(text):\n        os.abort()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    faults = examine.faults_of([untrusted("a"), examine.Untrusted("tokenizer", "{}", "t"), untrusted("b")])
    assert faults == ["", "it ends the process that tries it (signal 6)"]


def test_wall_clock_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "WALL_SECONDS", 0.01)
    assert examine.faults_of([untrusted("a")]) == ["it takes too long to use it once"]


def test_honest_templates_pass_and_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Including those that refuse conversations, fail on them, or do not parse (ChatTemplate reports that)."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path))
    others = ("{{ raise_exception('no') }}", "{{ messages[99].content.strip() }}", "{% for", "{{ ''.__class__ }}")
    files = [untrusted(source) for source in (*(path.read_text() for path in SHIPPED), *others)]
    examine.check(*files)
    monkeypatch.setattr(examine, "faults_of", pytest.fail)
    examine.check(*files)


def test_every_way_to_load_a_template_examines_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_metadata: dict[str, Any]
) -> None:
    tiny.make_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("hostile")
    monkeypatch.setattr(examine, "faults_of", lambda files: ["bad" if one.text == "hostile" else "" for one in files])
    ways = (
        lambda: chat_format(from_folder(tmp_path), DataConfig()),
        lambda: chat_format(from_gguf(small_metadata | {"tokenizer.chat_template": "hostile"}), DataConfig()),
        lambda: template_from_file(str(tmp_path / "chat_template.jinja"), tiny.make_tokenizer()),
    )
    for load in ways:
        with pytest.raises(GraftuneError, match="the chat template is refused: bad"):
            load()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "fault"),
    [("{{ 'a' * 999999999 }}", "is refused: it exhausts the memory"), ("{% broken", "the template does not parse")],
)
@pytest.mark.thorough
def test_a_base_whose_template_cannot_be_used_opens_without_it(
    source: str, fault: str, tiny_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its template is refused where it would be used only, and does not reach adapters and exports."""
    base = shutil.copytree(tiny_folder("llama"), tmp_path / "base")
    (base / "chat_template.jinja").write_text(source)
    (tmp_path / "mine.jinja").write_text(tiny.TEMPLATE)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "data.jsonl").write_text((json.dumps(row) + "\n") * 8)
    for template, saved in (("auto", None), ("none", None), (str(tmp_path / "mine.jinja"), tiny.TEMPLATE)):
        out = tmp_path / f"run {Path(template).stem}"
        line = ["train", str(base), f"{tmp_path}/data.jsonl", "--template", template, "--out", str(out)]
        code = main([*line, "--max-steps", "1", "--rank", "2", "--max-seq-len", "64", "--device", "cpu"])
        shown = capsys.readouterr().err
        assert fault in shown and "\n\n" not in shown
        if template == "auto":
            assert code == 2
            continue
        assert code == 0 and shown.count(fault) == 1 and "is not saved with adapters and exports" in shown
        found = from_folder(out / "adapter")
        assert (found.template.source if found.template else None) == saved and found.template_fault is None
        for to in ("peft", "merged"):
            done = export(str(out), to, out=f"{out}/{to}")
            assert any(fault in note for note in done.notes)
            assert not any(source.encode() in file.read_bytes() for file in done.files)


@pytest.mark.parametrize("command", ["data", "train"])
def test_ctrl_c_names_the_row(
    command: str,
    tiny_folder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A template that hangs on one row only passes the probe; Ctrl-C ends it and says which row it was."""
    base = shutil.copytree(tiny_folder("llama"), tmp_path / "base")
    hangs = "{% if messages[0].content == 'go' %}" + SLOW["nested loops"] + "{% endif %}"
    (base / "chat_template.jinja").write_text(tiny.TEMPLATE + hangs)
    rows = [{"prompt": text, "response": "b"} for text in ("a", "b", "go", "c")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    real, reached = ChatTemplate.render, threading.Event()

    def render(self: ChatTemplate, messages: Any, **more: Any) -> str:
        if messages[0]["content"] == "go":
            reached.set()
        return real(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", render)
    threading.Thread(target=lambda: (reached.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start()
    line = [str(data), "--base", str(base)] if command == "data" else [str(base), str(data), "--out", f"{tmp_path}/run"]
    assert main([command, *line]) == 130
    assert f"interrupted while encoding {data}, row 3" in capsys.readouterr().err
