"""Two reward functions whose numbers are in the answers: null means that a function does not apply to an answer."""

import json


def first(completions, **columns):
    return [json.loads(one)[0] for one in completions]


async def second(completions, **columns):
    return [json.loads(one)[1] for one in completions]
