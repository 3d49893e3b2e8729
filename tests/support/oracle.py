"""Our engine and the judges', brought to the same weights. Judges: transformers for logits, PEFT for adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.model.arena import Arena
from graftune.model.decoder import Decoder, PackedDocuments
from graftune.model.lora import build_arena, initialise, targets_of
from graftune.model.spec import ModelSpec
from graftune.runtime import DTYPES, resolve
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights import names, rows
from graftune.weights.base import Base, open_base
from graftune.weights.load import build_decoder
from graftune.weights.model import hf_config
from graftune.weights.placement import Placement


@dataclass
class Ours:
    base: Base
    decoder: Decoder
    arena: Arena
    lora: LoraConfig

    def logits(self, documents: list[list[int]], adapted: bool = True) -> torch.Tensor:
        """[T, V] over the documents laid end to end."""
        tokens = torch.tensor([t for d in documents for t in d])
        positions = torch.cat([torch.arange(len(d)) for d in documents])
        run = self.decoder.begin(positions, PackedDocuments.of(tuple(map(len, documents))), adapted=adapted)
        with torch.no_grad():
            return self.decoder.logits(self.decoder.hidden(tokens, run), adapted=adapted).float()

    def gradients(self, examples: list[Example]) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss sum and the gradient of each trainable tensor of one packed micro-batch."""
        self.arena.grads.zero_()
        step = Step(self.decoder, self.arena)
        step.micro_step(pack(examples))
        return float(step.loss_sum), {n: self.arena.view(n, self.arena.grads).clone() for n in self.arena.slots}


def ours(
    path: Path,
    lora: LoraConfig | None = None,
    *,
    base_dtype: str = "fp32",
    random_b: bool = True,
    std_b: float = 0.1,
    device: str = "cpu",
    compute: torch.dtype = torch.float32,
) -> Ours:
    found = place(open_base(str(path)), lora or LoraConfig(rank=4, alpha=10.0), base_dtype, device, compute)
    arena = found.arena
    # Wide: adapters that hardly matter would prove little.
    initialise(arena, replace(found.lora, init="gaussian"), seed=7)
    if random_b:
        for name in arena.slots:
            if name.endswith("lora_B.weight"):
                arena.view(name, arena.weights).normal_(0, std_b)
        arena.publish()
    return found


def whole(path: Path, device: str = "cpu") -> Ours:
    """Every weight of a base in the arena, in fp32."""
    base, runtime = open_base(str(path)), resolve(device, "fp32")
    arena = build_arena(base.spec, LoraConfig(), runtime.device, runtime.compute, full=True)
    decoder = build_decoder(base, arena, LoraConfig(), runtime, Placement("fp32", "test"))
    arena.publish()
    return Ours(base, decoder, arena, LoraConfig())


def place(
    base: Base,
    lora: LoraConfig,
    base_dtype: str = "fp32",
    device: str = "cpu",
    compute: torch.dtype = torch.float32,
) -> Ours:
    """The decoder of an opened base, as a rule in fp32, its adapters still zero."""
    name = next(name for name, dtype in DTYPES.items() if dtype == compute)
    runtime = resolve(device, name)
    base_dtype = base_dtype if compute == torch.float32 else name
    arena = build_arena(base.spec, lora, runtime.device, runtime.compute)
    decoder = build_decoder(base, arena, lora, runtime, Placement(base_dtype, "test"))
    return Ours(base, decoder, arena, lora)


def loss_sum(model: Any, batch: list[Example]) -> torch.Tensor:
    """Their loss over the supervised tokens, unpacked: one document a forward."""
    total = torch.zeros(())
    for example in batch:
        logits = model(torch.tensor([example.tokens])).logits[0, :-1]
        labels = torch.tensor([t if s else -100 for t, s in zip(example.tokens, example.supervised, strict=True)])[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    return total


def peft_model(model: Any, ours_: Ours) -> Any:
    """PEFT around a transformers model, with our adapter's values."""
    import peft

    lora, spec = ours_.lora, ours_.base.spec
    norms = sorted({name.rpartition(".")[2] for kind in spec.kinds for name in kind.norm_widths})
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets_of(ours_.base.spec, lora)),
        use_rslora=lora.rslora,
        modules_to_save=norms if lora.train_norms else None,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    ours_name = {peft_name(n): n for n in ours_.arena.slots}
    values = as_stored({n: ours_.arena.view(n, ours_.arena.weights) for n in ours_.arena.slots}, spec)
    state = {name: values[n] for name, n in ours_name.items()}
    own = plain_names(wrapped.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            if name in own:  # Gemma's norms are the weight less one there
                own[name].copy_(value - spec.norm_offset(ours_name[name]))
    return wrapped


def plain_names(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Parameters of a PEFT model as those of a text model, also where it is inside a text-and-vision model."""
    return {names.to_peft(names.from_peft(name)): value for name, value in named}


def as_stored(tensors: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights or gradients by our names, in the order that the family's folders have."""
    return {name: rows.adapter_to_file(value, "folder", spec, name) for name, value in tensors.items()}


def peft_name(ours_name: str) -> str:
    stem, _, _ = names.to_peft(ours_name).rpartition(".")
    return f"{stem}.default.weight" if "lora_" in ours_name else f"{stem}.modules_to_save.default.weight"


def dequantised(base: Base) -> dict[str, torch.Tensor]:
    """Every tensor of the base in fp32, under Hugging Face's names."""
    return {names.TEXT.of(n): t.values().float() for n, t in base.tensors.items()}


def smollm2_in_transformers(base: Base) -> Any:
    """SmolLM2 in transformers over the values that our loader reads from the GGUF."""
    import transformers

    config = transformers.LlamaConfig(**hf_config(base))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing = model.load_state_dict(dequantised(base), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys, missing
    model.tie_weights()
    return model.float().eval()


def nf4_by_bitsandbytes(
    codes: torch.Tensor, scales: torch.Tensor, blocksize: int, kind: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """bitsandbytes' portable dequantisation, by which its CPU backend reads rows of an odd length on every machine."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    table = _get_4bit_code(kind, codes.device)
    return _dequantize_4bit_compute(codes.view(torch.uint8).reshape(-1), scales, table, blocksize, shape, dtype)


@contextmanager
def portable_bitsandbytes() -> Iterator[None]:
    """All of bitsandbytes on a CPU, its layers included, dequantises as above and not by the kernel for this CPU, which
    with AVX512 takes wrong scales for rows of 16, 32 or 48 more values than whole blocks (test_bitsandbytes.py)."""
    import bitsandbytes  # noqa: F401 - it registers what is replaced

    library = torch.library.Library("bitsandbytes", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there was a kernel before
            library.impl("dequantize_4bit", nf4_by_bitsandbytes, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()
