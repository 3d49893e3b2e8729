"""graftune: LoRA and QLoRA fine-tuning that never leaves the device."""

__version__ = "0.1.0"
