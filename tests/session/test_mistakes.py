"""What users of the Python verbs get wrong: each mistake is one sentence, in Python's words, and changes nothing."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest

import graftune
from graftune.errors import GraftuneError
from tests.support.parsed import nodes_of, text_of

ROWS = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]
TURN = [{"role": "user", "content": "Hi"}]

MISTAKES = {
    "batches of a list": (lambda s, d: s.batches(ROWS), "batches was given a list; .*session.prepare"),
    "batches of a path": (lambda s, d: s.batches("data.jsonl"), "batches was given a str; .*session.prepare"),
    "a negative epoch": (lambda s, d: s.batches(d, -1), "epoch is -1; it must be a whole number of at least 0"),
    "half an epoch": (lambda s, d: s.batches(d, 0.5), "epoch is 0.5; it must be a whole number"),
    "no examples": (lambda s, d: next(s.batches(d.subset([]))), "the data set has no examples"),
    "steps of a list": (lambda s, d: s.steps_per_epoch(ROWS), "steps_per_epoch was given a list"),
    "steps of epoch x": (lambda s, d: s.steps_per_epoch(d, "x"), "epoch is 'x'"),
    "schedule of a half": (lambda s, d: s.schedule(0.5), "steps is 0.5"),
    "no batch": (lambda s, d: s.forward_backward(None), "forward_backward: data is None"),
    "a number for a batch": (lambda s, d: s.forward_backward(3), "forward_backward: data is a value of type int"),
    "an empty data set": (lambda s, d: s.forward_backward(d.subset([])), "without examples"),
    "evaluate nothing": (lambda s, d: s.evaluate(None), "evaluate: data is None"),
    "logprobs of one record": (lambda s, d: s.logprobs(ROWS[0]), "logprobs: data is a single mapping"),
    "prepare a number": (lambda s, d: s.prepare(3), "data is a value of type int"),
    "a step without gradients": (lambda s, d: s.optim_step(), "forward_backward first"),
    "sample a number": (lambda s, d: s.sample(3), "the prompt is an int; give a text, or a conversation"),
    "sample numbers": (lambda s, d: s.sample(["a", 3]), "prompt 2 is an int"),
    "no samples": (lambda s, d: s.sample("x", n=0), "n is 0; it must be a whole number of at least 1"),
    "stop at a number": (lambda s, d: s.sample("x", stop=[3]), "stop has an int in it"),
    "stop at nothing": (lambda s, d: s.generate("x", stop=[""]), "stop has an empty text in it"),
    "a hot temperature": (lambda s, d: s.generate("x", temperature="hot"), "temperature is 'hot'; it must be a number"),
    "half a token": (lambda s, d: s.generate("x", max_new_tokens=0.5), "max_new_tokens is 0.5; .*a whole number"),
    "no tokens": (lambda s, d: s.generate("x", max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
    "stream several": (lambda s, d: s.stream(["a", "b"]), "the prompt is a list; give a text"),
    "generate a conversation": (lambda s, d: s.generate(TURN), "generate was given a dict.*use chat or sample"),
    "generate conversations": (lambda s, d: s.generate([TURN]), "generate was given a list.*use chat or sample"),
    "a message without text": (lambda s, d: s.chat([{"role": "user"}]), "the conversation: blank prompt: message 1"),
    "a message without role": (lambda s, d: s.chat([{"content": "x"}]), "message 1 has no 'role'"),
    "a picture": (lambda s, d: s.chat([{**TURN[0], "images": ["x.png"]}]), "message 1 has 'images'"),
    "a misspelt role": (lambda s, d: s.chat([{**TURN[0], "role": "usr"}]), "unknown role.*'usr'; did you mean 'user'"),
    "chat with a number": (lambda s, d: s.chat(3), "the conversation is an int"),
    "chat with nothing": (lambda s, d: s.chat([]), "the conversation is a list"),
    "save to a number": (lambda s, d: s.save_adapter(3), "path is an int; give a path"),
    "load a number": (lambda s, d: s.load_state(3), "path is an int; give a path"),
    "open a number": (lambda s, d: graftune.open(3), "base is an int; give a path or a name"),
    "open with adapter 3": (lambda s, d: graftune.open("x", adapter=3), "adapter is an int"),
    "an unknown setting": (lambda s, d: graftune.open(s.base.path, rnak=2), "unknown key"),
    "open elsewhere": (lambda s, d: graftune.open(s.base.path, device="cuda:9"), "not available here.*set device to"),
    "export a number": (lambda s, d: graftune.export(3, "peft"), "target is an int; give a path"),
    "train a number": (lambda s, d: graftune.train(3), "config is an int"),
    "train from no file": (lambda s, d: graftune.train("no.yaml"), "no.yaml: .*check the path of the settings"),
    "train a misspelt dict": (lambda s, d: graftune.train({"rnak": 2}), "unknown key 'rnak'"),
    "one callback": (lambda s, d: graftune.train(base=s.base.path, callbacks=print), "give a list of functions"),
    "a number to call": (lambda s, d: graftune.train(base=s.base.path, callbacks=[3]), r"callbacks is \[3\]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tiny_folder):
    return graftune.open(tiny_folder("llama"), quiet=True, rank=4, compute_dtype="fp32")


@pytest.fixture(scope="module")
def data(session):
    return session.prepare(ROWS)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name, session, data):
    make, said = MISTAKES[name]
    with pytest.raises(GraftuneError, match=said) as found:
        make(session, data)
    text = str(found.value)
    assert "--" not in text and " -c" not in text and "\n" not in text, "flags are the command line's"


def test_messages_below_the_command_line_name_no_flags():
    """They are read by users of Python too. Flags that are no settings belong to a command, as those of recognise.py
    and tool_files.py do."""
    package = Path(graftune.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        if path.parent.name == "cli" or path.name in ("recognise.py", "tool_files.py"):
            continue
        for call in nodes_of(path) if re.search(r"--[a-z]| -c\b", text_of(path)) else ():
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "GraftuneError":
                words = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
                text = " ".join(word for word in words if isinstance(word, str))
                flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*|(?<= )-c\b", text)) - {"--gpu", "--memory", "--port"}
                found += [f"{path.relative_to(package)}: {flag}" for flag in sorted(flags)]
    assert not found, found


def test_what_looks_like_a_mistake_and_is_none(session, data):
    session.forward_backward(data)
    assert session.optim_step(lr=np.float32(0.0), clip=1).loss == pytest.approx(session.evaluate(ROWS).loss, rel=1e-5)
    ((one,),) = session.sample(TURN, max_new_tokens=2, temperature=0.0)
    assert one.text == session.chat("Hi", max_new_tokens=2) == session.chat(TURN, max_new_tokens=2)
    assert session.prompt_tokens("Hi") == session.prompt_tokens(TURN) > len(session.tokenizer.encode("Hi"))
    assert len(session.sample([TURN, "Hi"], max_new_tokens=1)) == 2
    answered = [*TURN, {"role": "assistant", "content": ""}, *TURN]
    assert isinstance(session.chat(answered, max_new_tokens=1), str), "a model may have had nothing to say"


def test_a_refused_step_is_none(opened):
    session = opened(lr=1e-2)
    session.forward_backward(ROWS)
    for name, value in (
        ("lr", -1), ("lr", math.nan), ("lr", math.inf), ("lr", "fast"), ("lr", True), ("beta1", 1.0), ("eps", 0.0),
        ("weight_decay", -0.1), ("clip", -1.0),
    ):  # fmt: skip
        with pytest.raises(GraftuneError, match=f"optim_step: {name} is"):
            session.optim_step(**{name: value})
    assert session.steps == 0
    straight = opened(lr=1e-2)
    straight.forward_backward(ROWS)
    assert session.optim_step().step == 1 and straight.optim_step().step == 1
    assert session.parts.arena.weights.equal(straight.parts.arena.weights)


def test_every_weight_trained_leaves_no_base(tiny_folder):
    how = {"method": "full", "compute_dtype": "fp32", "quiet": True}
    session = graftune.open(tiny_folder("llama"), **how)
    assert session.evaluate(ROWS).loss > 0
    for verb in (
        lambda: session.evaluate(ROWS, adapted=False),
        lambda: session.logprobs(ROWS, adapted=False),
        lambda: session.chat("Hi", adapted=False),
        lambda: session.sample("Hi", adapted=False),
        lambda: session.stream("Hi", adapted=False),
        lambda: session.generate("Hi", adapted=False),
    ):
        with pytest.raises(GraftuneError, match="adapted is False and method is full"):
            verb()
    with pytest.raises(GraftuneError, match="base_dtype is nf4 and every weight trains"):
        graftune.open(tiny_folder("llama"), base_dtype="nf4", **how)


def test_a_closed_session(opened):
    with opened(recompute="none") as session:
        data = session.prepare(ROWS)
        session.parts.pipeline.finished, real = (
            (lambda wait=False: real(wait) if wait else []),
            session.parts.pipeline.finished,
        )
        session.forward_backward(ROWS)
        stats = session.optim_step()
        assert not stats.ready, "as on a device that has not come so far"
        session.forward_backward(ROWS)
        batches = session.batches(data)
        next(batches)
    assert stats.loss > 0 and "loss=" in repr(stats) and "Session(" in repr(session)
    for verb in (
        lambda: session.generate("x"), lambda: session.sample("x"), lambda: session.stream("x"),
        lambda: session.chat("x"), lambda: session.forward_backward(ROWS), lambda: session.optim_step(),
        lambda: session.evaluate(ROWS), lambda: session.logprobs(ROWS), lambda: session.describe(),
        lambda: session.prepare(ROWS), lambda: session.batches(data), lambda: next(batches),
        lambda: session.steps_per_epoch(data), lambda: session.save("x"), lambda: session.save_state("x"),
        lambda: session.load_state("x"),
    ):  # fmt: skip
        with pytest.raises(GraftuneError, match="this session is closed"):
            verb()
    session.close()
