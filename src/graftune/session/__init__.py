"""A base with adapters, ready to step, evaluate and sample: the one place where these parts are wired.

opening.py     a Session from a configuration
parts.py       the parts: decoder, step, pipeline, loader; and how they are saved
session.py     the verbs of the Python API
batches.py     the batches of a session and the figures of its steps
text.py        samples and log-probabilities
arguments.py   checks of what the verbs are given
"""

from graftune.session.batches import Batch, StepStats
from graftune.session.opening import (
    attention_for,
    check_base,
    check_method,
    check_recompute,
    open_session,
    reader_of,
    with_template,
)
from graftune.session.parts import SessionParts, loader_of
from graftune.session.session import Session
from graftune.session.text import Sample

__all__ = [
    "Batch",
    "Sample",
    "Session",
    "SessionParts",
    "StepStats",
    "attention_for",
    "check_base",
    "check_method",
    "check_recompute",
    "loader_of",
    "open_session",
    "reader_of",
    "with_template",
]
