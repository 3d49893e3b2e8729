"""An environment of the `verifiers` package as prompts and reward of `graftune rl`: sums, with weighted rewards.

    pip install verifiers
    python examples/verifiers_sums.py prompts.jsonl
    graftune rl BASE prompts.jsonl --reward examples/verifiers_sums.py --answer-tokens 8

`Sums` is a taskset as verifiers 0.4 defines one; put another one in its place. Each answer becomes a trace that the
task scores itself, so several weighted rewards work as they do there. It works for tasks of one turn: tools, several
turns and rewards that need a sandbox do not, because graftune samples the answers and not verifiers. It was run with
verifiers 0.4.0: six steps of SmolLM2-135M on a CPU. Environments of the Hub and judges were not tried.
"""

import asyncio
import json
import sys
from functools import cache

import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.rstrip(".") == task.answer)

    @vf.reward(weight=0.1)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply.split()) == 1)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a, b in ((a, b) for a in range(2, 12) for b in range(2, 12)):
            yield SumTask(Sum(prompt=f"{a} + {b} = ? Write only the number.", answer=str(a + b)))


@cache
def tasks() -> list[vf.Task]:
    return list(Sums(vf.TasksetConfig()))


async def score(task: vf.Task, text: str) -> float:
    """The task's weighted reward for one answer."""
    asked = vf.MessageNode(message={"role": "user", "content": task.data.prompt_text})
    answered = vf.MessageNode(parent=0, sampled=True, message={"role": "assistant", "content": text})
    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=[asked, answered])
    await task.score(trace)
    return trace.reward


async def reward(completions, task, **columns):
    return await asyncio.gather(*(score(tasks()[i], text) for i, text in zip(task, completions, strict=True)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with open(sys.argv[1], "w") as file:
        for index, one in enumerate(tasks()):
            file.write(json.dumps({"prompt": one.data.prompt_text, "task": index}) + "\n")
