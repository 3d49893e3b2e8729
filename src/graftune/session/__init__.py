"""A base with adapters, ready to step, evaluate and sample: the one place where these parts are wired.

opening.py     a Session from a configuration
parts.py       what it is made of: decoder, step, pipeline, loader
data_verbs.py  data, batches and the loss they are packed for
session.py     the verbs of a training loop, evaluation and saving
stepping.py    what they take and give: batches and figures
state.py       a session on disk, to go on from
text.py        samples and log-probabilities; text_verbs.py the verbs that give them
arguments.py   what the verbs are given, checked
"""

from graftune.session.opening import (
    attention_for,
    check_base,
    check_method,
    check_recompute,
    open_session,
    with_template,
)
from graftune.session.parts import Parts, loader_of
from graftune.session.session import Session
from graftune.session.stepping import Batch, StepStats
from graftune.session.text import Sample

__all__ = [
    "Batch",
    "Parts",
    "Sample",
    "Session",
    "StepStats",
    "attention_for",
    "check_base",
    "check_method",
    "check_recompute",
    "loader_of",
    "open_session",
    "with_template",
]
