"""Data files -> packed micro-batches: source -> record -> chat (template, mask) -> fit -> dataset -> pack -> loader."""
