"""Exports: `export` writes a run, an adapter or a base in a format that other programs read.

target    what is exported, and with which base
merge     a base and its adapters as one model, row by row
gguf_*    files for llama.cpp: header keys, vocabulary, whole models, adapters
modelfile the same for Ollama
write     each format: written beside the target, read back, renamed
"""

from graftune.exporting.write import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
