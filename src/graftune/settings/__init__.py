"""The settings of a run: one tree of dataclasses, from which flags, YAML keys, checks and help are derived."""
