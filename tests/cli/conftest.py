"""A stand-in for the engine: records what the command line asks of it, and answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graftune
from graftune.batch import Example
from graftune.data.summary import Summary
from graftune.losses import CrossEntropy
from graftune.settings.config import Config
from graftune.step.evaluate import EvalResult


@dataclass
class Prepared:
    """Data of seven examples."""

    summary: Summary
    examples: tuple[Example, ...] = (Example([1, 2], [False, True]),) * 7

    def __len__(self) -> int:
        return len(self.examples)


@dataclass
class Engine:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    adapter: str | None = "runs/a/adapter"
    result: dict[str, Any] = field(default_factory=dict)
    raises: BaseException | None = None
    context: int = 100_000
    summary: Summary = field(default_factory=Summary)
    stops_after: int | None = None  # pieces of an answer, then Ctrl-C

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, args, kwargs))
        if self.raises is not None:
            raise self.raises

    def train(self, config: Any, *, console: Any, resume: str | None = None, overrides: Any = None, **_: Any) -> Any:
        self._note("train", config, console=console, resume=resume, overrides=overrides)
        console.note("a note from the engine")
        known: dict[str, Any] = {
            "folder": Path("runs/my run"), "steps": 60, "stopped": "finished", "first_eval": 2.0, "best_eval": 0.5,
            "summary": {"best": float("nan")}, "signal": None, "started": True,
        }  # fmt: skip
        return SimpleNamespace(**{**known, **self.result})

    def open(self, base: str = "", *, adapter: str = "", console: Any = None, **settings: Any) -> Any:
        self._note("open", base, adapter=adapter, **settings)
        return self

    @property
    def runtime(self) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type="none"))

    @property
    def tokenizer(self) -> Any:
        return None

    @property
    def base(self) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(max_positions=512))

    @property
    def loss(self) -> Any:
        return CrossEntropy()

    @property
    def config(self) -> Any:
        return Config.of({"adapter": self.adapter or ""})

    def describe(self) -> dict[str, Any]:
        return {"adapter": self.adapter}

    def prepare(self, data: str, console: Any = None) -> Any:
        self._note("prepare", data)
        return Prepared(self.summary)

    def evaluate(self, data: Any, *, adapted: bool = True, on_progress: Any = None) -> Any:
        self._note("evaluate", adapted=adapted)
        on_progress(7)
        return EvalResult(loss=0.5 if adapted else 2.0, perplexity=1.6, response_tokens=12345, examples=7)

    def chat(self, messages: Any, *, adapted: bool = True, on_text: Any = None, **how: Any) -> str:
        self._note("chat", [dict(m) for m in messages], adapted=adapted, **how)
        answer = f"{'tuned' if adapted else 'base'} {len(messages)} \x1b[2J"
        if on_text is not None:
            for count, piece in enumerate(answer.split(" ")):
                if count == self.stops_after:
                    raise KeyboardInterrupt
                on_text(piece + " ")
        return answer

    def prompt_tokens(self, messages: Any) -> int:
        return sum(1 + len(m["content"].split()) for m in messages)

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """In a folder of its own, with the files that the command lines of these tests name."""
    fake, here = Engine(), tmp_path_factory.mktemp("here")
    for name in ("b.gguf", "m.gguf", "d.jsonl", "adapters/x/adapter_config.json", "runs/a/config.yaml"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(graftune, "api", fake, raising=False)
    return fake
