"""Data files -> packed micro-batches: source -> record -> chat (template, mask) -> fit -> dataset -> pack -> loader."""

from graftune.data.dataset import Dataset, Summary, prepare, split
from graftune.data.loader import Loader
from graftune.data.pack import pack, plan_epoch
from graftune.data.preview import preview, preview_text, summary_json

__all__ = [
    "Dataset",
    "Loader",
    "Summary",
    "pack",
    "plan_epoch",
    "prepare",
    "preview",
    "preview_text",
    "split",
    "summary_json",
]
