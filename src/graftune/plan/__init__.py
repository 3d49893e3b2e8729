"""Predicts the memory of a run, by owner, before anything is loaded.

choose.py          resolves `auto`; refuses a run that does not fit, with the nearest setting that fits
job.py             turns a run's settings into a rehearsal, and its result into a plan
rehearse.py        runs the real step on tensors without memory
counting.py        counts what operations on such tensors would allocate, by owner, and the peak
shapes.py          the shapes of the results of torch's operations
libraries.py       the memory that libraries allocate by themselves
unread_sources.py  a base's tensors without their contents
cards.py           GPUs by name, and whether fetched weights arrive in time
"""

from __future__ import annotations

from graftune.plan.cards import Card
from graftune.plan.choose import best, furthest, largest, nearest, policies_of, refusal, resolve_auto
from graftune.plan.job import Job, Plan, any_data, card_here, is_absent, round_data, runtime_for
from graftune.plan.rehearse import Bytes, Setup, rehearse

__all__ = [
    "Bytes",
    "Card",
    "Job",
    "Plan",
    "Setup",
    "any_data",
    "best",
    "card_here",
    "furthest",
    "is_absent",
    "largest",
    "nearest",
    "policies_of",
    "refusal",
    "rehearse",
    "resolve_auto",
    "round_data",
    "runtime_for",
]
