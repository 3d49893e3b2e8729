"""How many bytes a run will take, by owner, before anything of it is loaded.

tally.py     live bytes by owner, and their peak
counting.py  what operations on tensors without memory would allocate
shapes.py    the shapes that operations make
unread_sources.py  a base's tensors without their contents
transfer.py  whether fetched weights arrive in time
libraries.py what libraries allocate by themselves
rehearse.py  the real step, run on them
job.py       a run's settings as such a step, and the plan that comes of it
choose.py    what `auto` comes to; the refusal, with the nearest setting that fits
"""

from __future__ import annotations

from graftune.plan.cards import Card
from graftune.plan.cards import Model as CardModel
from graftune.plan.choose import best, furthest, largest, nearest, policies_of, refusal, resolve_auto
from graftune.plan.job import Job, Plan, any_data, card_here, is_absent, runtime_for
from graftune.plan.rehearse import Bytes, Setup, rehearse

__all__ = [
    "Bytes",
    "Card",
    "CardModel",
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
    "runtime_for",
]
